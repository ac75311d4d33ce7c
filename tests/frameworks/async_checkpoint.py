"""torch.distributed.checkpoint saves beside the training, in a group of its own.

torchrun --nproc-per-node 2 async_checkpoint.py --backend smddp
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from datetime import timedelta

import outcome
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Trains with sharded weights; saves five times meanwhile; loads the last checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="smddp")
    parser.add_argument("--share", action="store_true", help="save in the group of the training")
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend, timeout=timedelta(seconds=60))
    # The thread that saves makes collective calls, too: their order among those of the training
    # would be another one on each rank.
    group = None if arguments.share else dist.new_group()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)

    outcome.start()
    model = outcome.network()
    fully_shard(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = (each.chunk(2)[dist.get_rank()] for each in outcome.data().tensors)
    saved = None
    for step in range(50):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            if saved is not None:
                saved.result()
            saved = dcp.async_save(
                {"model": model.state_dict()},
                checkpoint_id=f"{folder[0]}/{step}",
                process_group=group,
            )
    assert saved is not None
    saved.result()

    fresh = outcome.network()
    fully_shard(fresh)
    with torch.no_grad():
        for weight in fresh.parameters():
            weight.zero_()
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder[0]}/49")
    fresh.load_state_dict(state["model"])
    for mine, loaded in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine.to_local(), loaded.to_local())
    dist.all_reduce(loss.detach_(), op=dist.ReduceOp.SUM)
    outcome.report(float(loss) / 2, fresh.parameters())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
