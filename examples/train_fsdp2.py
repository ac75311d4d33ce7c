"""The training of train_digits.py with FSDP2: every rank keeps a shard of the parameters.

torchrun --nproc-per-node 2 examples/train_fsdp2.py
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_digits import accuracy, batches, digits, network, train

import smddp  # not needed where smddp is installed


def main() -> None:
    """Trains with sharded parameters, gradients and optimizer state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    dist.init_process_group(backend="smddp", timeout=timedelta(seconds=60))

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    learn, held_out = digits()
    train(model, batches(learn, 32, shuffle=True), arguments.epochs, rate=0.05)
    share = accuracy(model, held_out)
    used = ", ".join(sorted(smddp.statistics(mesh.get_group())))
    if dist.get_rank() == 0:
        print(f"fsdp2 over smddp: accuracy {share:.3f} on held-out digits (algorithms: {used})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
