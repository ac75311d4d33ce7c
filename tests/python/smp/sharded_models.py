"""Models and small programs that several tests of sharded data parallelism run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from smp.common import shards
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

# Smaller parameters stay whole. Most models of the zoo have some of both kinds.
THRESHOLD = 20


class Fails(nn.Module):
    """Raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor, where: str) -> Tensor:
        for number, layer in enumerate(self.layers):
            if where == "forward" and number == 2:
                raise ValueError("as told")
            x = torch.tanh(layer(x))
            if where == "backward" and number == 1:
                x = Stops.apply(x)
        return x


class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("as told")


@smp.step
def failing(model: Any, x: Tensor, where: str) -> Any:
    loss = model(x, where).square().mean()
    model.backward(loss)
    return loss


def small(module: Callable[[], nn.Module] = Fails, **config: Any) -> tuple[Any, Any]:
    smp.init({"ddp": True, "microbatches": 2, **shards(2, THRESHOLD), **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(module())
    return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
