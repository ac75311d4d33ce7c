"""DeepSpeed's ZeRO on CPUs.

torchrun --nproc-per-node 2 deepspeed_zero.py --stage 2 --backend smddp
"""

from __future__ import annotations

import argparse

import deepspeed
import outcome
import torch.distributed as dist
from torch import nn, optim


def main() -> None:
    """Trains for 20 steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="smddp")
    parser.add_argument("--stage", type=int, default=1, choices=(1, 2, 3))
    arguments = parser.parse_args()
    deepspeed.init_distributed(dist_backend=arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    outcome.start()
    model = outcome.network()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        config={
            "train_micro_batch_size_per_gpu": 256 // size,
            "zero_optimization": {"stage": arguments.stage},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        },
    )
    inputs, targets = (each.chunk(size)[rank] for each in outcome.data().tensors)
    for _ in range(20):
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=arguments.stage == 3):
        outcome.report(float(mean) / size, model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
