"""Trains a U-Net to remove noise from images of digits; its skip connections cross partitions.

torchrun --nproc-per-node 2 examples/smp_unet.py --partitions 2
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import smdistributed.modelparallel.torch as smp


def _convolutions(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """A U-Net of two levels, with a skip connection at each level."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = _convolutions(1, width), _convolutions(width, 2 * width)
        self.middle = _convolutions(2 * width, 2 * width)
        self.up2, self.up1 = _convolutions(4 * width, width), _convolutions(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns images of the same shape."""
        level1 = self.down1(x)
        level2 = self.down2(F.max_pool2d(level1, 2))
        x = self.middle(F.max_pool2d(level2, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2.0), level2], 1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2.0), level1], 1))
        return self.head(x)


@smp.step
def train_step(model: Any, noisy: torch.Tensor, clean: torch.Tensor) -> Any:
    """The forward and backward pass of a microbatch."""
    loss = F.mse_loss(model(noisy), clean)
    model.backward(loss)
    return loss


def main() -> None:
    """Trains, and prints the share of the noise that remains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    smp.init({"partitions": options.partitions, "microbatches": 4, "ddp": True})
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = torch.tensor(load_digits(return_X_y=True)[0], dtype=torch.float32)
    images = images.reshape(-1, 1, 8, 8) / 16
    model = smp.DistributedModel(UNet())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=3e-3))
    source = torch.Generator().manual_seed(smp.dp_rank())
    noise = 0.5
    for number in range(options.steps):
        clean = images[torch.randint(0, len(images), (32,), generator=source)]
        noisy = clean + noise * torch.randn(clean.shape, generator=source)
        optimizer.zero_grad()
        loss = float(train_step(model, noisy.to(device), clean.to(device)).reduce_mean())
        optimizer.step()
        if smp.rank() == 0 and (number % 20 == 0 or number == options.steps - 1):
            print(f"step {number}: {loss / noise**2:.3f} of the noise is left")


if __name__ == "__main__":
    main()
