"""Models and small programs that several tests of sharded data parallelism run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

# Smaller parameters stay whole. Most models of the zoo have some of both kinds.
THRESHOLD = 20


@smp.step
def squares(model: Any, x: Tensor) -> Any:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def check_state(found: Any, expected: Any, exact: bool, first: bool, where: str) -> None:
    assert found.keys() == expected.keys(), where
    for key, value in expected.items():
        if not first and "running" in key:
            continue  # each replica has its own statistics until the next step begins
        tolerance = 0 if exact else 1e-6
        torch.testing.assert_close(
            found[key],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, key=key: f"{where}, {key}: {m}",
        )


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
    smp.init(
        {
            "ddp": True,
            "microbatches": 2,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": THRESHOLD,
            "sdp_gradient_clipping": 1e9,
            **config,
        }
    )
    torch.manual_seed(0)
    model = smp.DistributedModel(module())
    return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
