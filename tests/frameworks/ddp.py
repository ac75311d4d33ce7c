"""DistributedDataParallel: compiled, or with an optimizer that works beside the backward pass.

torchrun --nproc-per-node 2 ddp.py --compile --backend smddp
torchrun --nproc-per-node 2 ddp.py --zero overlap --backend smddp
"""

from __future__ import annotations

import argparse
from typing import Any

import outcome
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

# In its first steps the hook learns what is in which bucket, and changes no weights.
HOOK_WARM_UP = 2


def main() -> None:
    """Trains for 20 steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="smddp")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--zero", choices=("plain", "overlap", "interleaved"))
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    outcome.start()
    plain = outcome.network()
    # torch.compile divides the graph at the buckets, and refuses those smaller than the first.
    cap = None if arguments.compile else 0.01
    model: Any = DistributedDataParallel(plain, bucket_cap_mb=cap)
    optimizer: Any
    if arguments.zero:
        overlap = arguments.zero != "plain"
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optim.SGD, overlap_with_ddp=overlap, lr=0.1
        )
        if overlap:
            hook = {
                "overlap": ddp_zero_hook.hook_with_zero_step,
                "interleaved": ddp_zero_hook.hook_with_zero_step_interleaved,
            }[arguments.zero]
            model.register_comm_hook(None, hook(allreduce_hook, model, optimizer))
    else:
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if arguments.compile:
        model = torch.compile(model)
    inputs, targets = (each.chunk(size)[rank] for each in outcome.data().tensors)
    hooked = arguments.zero in ("overlap", "interleaved")  # the hook makes the optimizer's step
    for _ in range(20 + (HOOK_WARM_UP if hooked else 0)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        if not hooked:
            optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    outcome.report(float(mean) / size, plain.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
