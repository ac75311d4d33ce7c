"""Hugging Face Accelerate on CPUs: DDP, or FSDP2.

torchrun --nproc-per-node 2 accelerate_train.py --backend smddp
SMDDP_INSTEAD_OF=gloo torchrun --nproc-per-node 2 accelerate_train.py
SMDDP_INSTEAD_OF=gloo python accelerate_train.py --start
"""

from __future__ import annotations

import argparse

import outcome
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, debug_launcher
from torch import nn, optim
from torch.utils.data import DataLoader


def train(arguments: argparse.Namespace) -> None:
    """Trains for two epochs."""
    if arguments.backend:
        # Accelerate's own choice on CPUs is fixed, but it takes a group that exists.
        dist.init_process_group(arguments.backend)
    plugin = None
    if arguments.fsdp2:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if accelerator.is_main_process:
        print(accelerator.distributed_type)
    outcome.start()
    model = outcome.network()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(outcome.data(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
    last = accelerator.reduce(loss.detach(), reduction="mean")
    outcome.report(float(last), model.parameters())
    accelerator.end_training()


def main() -> None:
    """Trains in this process, as a rank, or starts two ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="default: what Accelerate chooses, gloo")
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--start", action="store_true", help="as a notebook does")
    arguments = parser.parse_args()
    if arguments.start:
        debug_launcher(train, (arguments,), num_processes=2)
    else:
        train(arguments)


if __name__ == "__main__":
    main()
