"""Lightning's Trainer. It starts the second rank itself.

python lightning_trainer.py --backend smddp
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import outcome
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import smddp.lightning  # noqa: F401  registers strategy="smddp"


class Model(lightning.LightningModule):
    """A regression."""

    def __init__(self, shard: bool) -> None:
        super().__init__()
        self.network = outcome.network()
        self.shard = shard
        self.last = 0.0

    def configure_model(self) -> None:
        """Shards the layers, if the strategy is ModelParallelStrategy."""
        if self.shard:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.network:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.network, mesh=mesh)

    def on_fit_start(self) -> None:
        """Begins to count the seconds."""
        outcome.start()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Returns the loss of one batch."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        self.last = self.log_mean(loss)
        return loss

    def log_mean(self, loss: torch.Tensor) -> float:
        """Returns the mean over the ranks."""
        self.log("loss", loss, sync_dist=True)
        return float(self.all_gather(loss.detach()).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_fit_end(self) -> None:
        """Hands the result to the test, before Lightning ends the group."""
        outcome.report(self.last, self.parameters())


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
        "fsdp2": lambda: ModelParallelStrategy(process_group_backend=backend),
    }[arguments.strategy]()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(arguments.strategy == "fsdp2"), DataLoader(outcome.data(), batch_size=16))


if __name__ == "__main__":
    main()
