"""What several tests of errors in steps run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn

import smdistributed.modelparallel.torch as smp

MANUAL = {"auto_partition": False, "default_partition": 0, "ddp": True, "microbatches": 4}


class Faulty(nn.Module):
    """Fails on a given rank in a given step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.where = where
        self.fault = ""
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.fault == f"forward {self.where}" and bool(x[0, 0] == 2):
            raise ZeroDivisionError("in forward")
        y = x * self.weight
        if self.fault == f"backward {self.where}" and bool(x[0, 0] == 2):
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("in backward")


@smp.step
def train(model: Any, x: torch.Tensor, fault: str) -> Any:
    if fault == "body" and bool(x[0, 0] == 2):
        raise KeyError("in the body")
    loss = model(x).sum()
    model.backward(loss)
    return loss


@smp.step
def called_by_some(model: Any, x: torch.Tensor, calls: bool) -> Any:
    if calls:
        model.backward(model(x).sum())


def pair(make: Callable[[str], nn.Module] = lambda _: nn.Linear(4, 4), **config: Any) -> Any:
    """Begins a job of two partitions; returns a model of one part on each of their ranks."""
    smp.init({"partitions": 2, **MANUAL, **config})
    first = make("0")
    with smp.partition(1):
        last = make("1")
    return smp.DistributedModel(nn.Sequential(first, last))


def numbered() -> torch.Tensor:
    """Returns a batch of which each microbatch holds its number."""
    return torch.arange(4.0).repeat_interleave(2).unsqueeze(1).expand(8, 4).clone()
