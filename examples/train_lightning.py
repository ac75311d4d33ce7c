"""The training of train_digits.py in PyTorch Lightning, on two processes.

python examples/train_lightning.py
"""

from __future__ import annotations

import argparse

import pytorch_lightning as lightning
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader
from train_digits import digits, network

import smddp  # noqa: F401  not needed where smddp is installed


class Digits(lightning.LightningModule):
    """A classifier of handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        """Returns the loss of one batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        """Logs the accuracy, averaged over the ranks."""
        images, labels = batch
        right = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer of train_digits.py."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    """Trains on two processes of this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    learn, held_out = digits()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="smddp"),
        max_epochs=arguments.epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        Digits(),
        DataLoader(learn, batch_size=32, shuffle=True),
        DataLoader(held_out, batch_size=len(held_out)),
    )
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["accuracy"])
        print(f"lightning over smddp: accuracy {accuracy:.3f} on held-out digits")


if __name__ == "__main__":
    main()
