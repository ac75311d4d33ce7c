"""Lightning Fabric. It starts the second rank itself.

python lightning_fabric.py --backend smddp
"""

from __future__ import annotations

import argparse
from typing import Any

import outcome
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

import smddp.lightning  # noqa: F401  registers strategy="smddp"


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Shards the layers, for ModelParallelStrategy."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def main() -> None:
    """Trains for two epochs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="smddp")
    parser.add_argument("--strategy", default="ddp", choices=("ddp", "name", "fsdp1", "fsdp2"))
    arguments = parser.parse_args()
    backend = arguments.backend
    strategy: Any = {
        "ddp": lambda: DDPStrategy(process_group_backend=backend),
        "name": lambda: "smddp" if backend == "smddp" else "ddp",
        "fsdp1": lambda: FSDPStrategy(process_group_backend=backend),
        "fsdp2": lambda: ModelParallelStrategy(parallelize_fn=shard, process_group_backend=backend),
    }[arguments.strategy]()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    outcome.start()
    model = fabric.setup_module(outcome.network())
    optimizer = fabric.setup_optimizers(optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(outcome.data(), batch_size=16))
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
    last = float(fabric.all_reduce(loss.detach(), reduce_op="mean"))
    if arguments.strategy == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(model._forward_module):
            outcome.report(last, model.parameters())
    else:
        outcome.report(last, model.parameters())


if __name__ == "__main__":
    main()
