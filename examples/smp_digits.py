"""Trains a network on handwritten digits, partitioned over ranks, as in SageMaker's guide.

    SM_HP_MP_PARAMETERS='{"partitions": 2, "microbatches": 4, "ddp": true}' \
        torchrun --nproc-per-node 4 examples/smp_digits.py

Other than in the guide, the data set is small, and the device may be the CPU. With --manual the
script chooses the partition of each module; then the configuration needs "auto_partition": false
and "default_partition": 0.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim

import smdistributed.modelparallel.torch as smp

HELD_OUT = 297  # of 1797 images


class GroupedNet(nn.Module):
    """Two groups of layers."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        last = smp.pp_size() - 1
        with smp.partition(0) if manual else contextlib.nullcontext():
            self.net1 = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1)
            )
        with smp.partition(last) if manual else contextlib.nullcontext():
            self.net2 = nn.Sequential(
                nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2),
                nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
            )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logarithm of each digit's probability."""
        return F.log_softmax(self.net2(self.net1(x)), dim=1)


# smdistributed: Define smp.step. Return any tensors needed outside.
@smp.step
def train_step(model: Any, data: torch.Tensor, target: torch.Tensor) -> Any:
    """The forward and backward pass of a microbatch."""
    output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    model.backward(loss)
    return output, loss


@smp.step
def test_step(model: Any, data: torch.Tensor, target: torch.Tensor) -> Any:
    """Returns the number of digits of a microbatch that are recognised."""
    output = model(data)
    return int((output.argmax(1) == target).sum())


def train(model: Any, device: torch.device, loader: Any, optimizer: Any) -> float:
    """Trains for one epoch; returns the last loss."""
    model.train()
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        # Return value, loss_mb is a StepOutput object
        _, loss_mb = train_step(model, data, target)
        # smdistributed: Average the loss across microbatches.
        loss = loss_mb.reduce_mean()
        optimizer.step()
    return float(loss)


def main() -> None:
    """Trains and tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manual", action="store_true", help="place modules by smp.partition")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--mp_parameters", help="launchers pass it; smp.init() reads the environment"
    )
    options = parser.parse_args()
    # smdistributed: initialize the backend
    smp.init()
    torch.manual_seed(0)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())
        device = torch.device("cuda")
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(images, dtype=torch.float32)[order].reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)[order]
    dataset = torch.utils.data.TensorDataset(x[HELD_OUT:], y[HELD_OUT:])
    # smdistributed: Shard the dataset based on data-parallel ranks
    if smp.dp_size() > 1:
        rows = range(smp.dp_rank(), len(dataset) - len(dataset) % smp.dp_size(), smp.dp_size())
        dataset = torch.utils.data.Subset(dataset, rows)
    # smdistributed: Set drop_last=True to ensure that batch size is always divisible
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, drop_last=True)
    model = GroupedNet(options.manual)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    # smdistributed: Use the DistributedModel container; from here on in place of the model.
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(optimizer)
    for epoch in range(options.epochs):
        loss = train(model, device, loader, optimizer)
        if smp.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    model.eval()
    count = HELD_OUT - HELD_OUT % 8
    with torch.no_grad():
        right = sum(test_step(model, x[:count].to(device), y[:count].to(device)))
    if smp.rank() == 0:
        print(smp.explain())
        print(f"accuracy {right / count:.3f} on held-out digits")


if __name__ == "__main__":
    main()
