"""torch.distributed.pipelining: a stage on each rank.

torchrun --nproc-per-node 2 pipelining.py --schedule 1f1b --backend smddp
"""

from __future__ import annotations

import argparse

import outcome
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def main() -> None:
    """Trains for 20 steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="smddp")
    parser.add_argument("--schedule", default="1f1b", choices=("gpipe", "1f1b"))
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    outcome.start()
    layers = list(outcome.network())
    cuts = [len(layers) * i // size for i in range(size + 1)]
    part = nn.Sequential(*layers[cuts[rank] : cuts[rank + 1]])
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule_class = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[arguments.schedule]
    schedule = schedule_class(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = outcome.data().tensors
    loss = torch.zeros(())
    for _ in range(20):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=targets, losses=losses)
            loss = torch.stack(losses).detach().mean()
        else:
            schedule.step()
        optimizer.step()
    dist.broadcast(loss, size - 1)
    parts: list[list[torch.Tensor]] = [[] for _ in range(size)]
    dist.all_gather_object(parts, [each.detach() for each in part.parameters()])
    outcome.report(float(loss), [each for one in parts for each in one])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
