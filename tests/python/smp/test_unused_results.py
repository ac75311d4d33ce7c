"""Calls of modules on another rank whose results nobody uses: they run all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import check_ranks
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError

pytestmark = pytest.mark.multiprocess

WIDTH, STEPS = 4, 3
MANUAL = {"microbatches": 4, "auto_partition": False, "default_partition": 0}


class Meter(nn.Module):
    """Keeps statistics of what it sees; raises an error for numbers above a limit."""

    def __init__(self) -> None:
        super().__init__()
        # Averages do not depend on the order of the microbatches, which is not defined here.
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)
        self.register_buffer("noise", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Draws random numbers, too."""
        with torch.no_grad():
            self.noise += torch.rand(WIDTH)
        if bool((x.abs() > 1e6).any()):
            raise ValueError("the meter cannot show this")
        result: Tensor = self.norm(x)
        return result


class Middle(nn.Module):
    """Ignores the result of a module that lives on the rank of its caller."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.others = [meter]

    def forward(self, x: Tensor) -> Tensor:
        """Shows the meter its input and its result."""
        (meter,) = self.others
        meter(x)
        y = self.linear(x)
        meter(y)
        return y


class Model(nn.Module):
    """Shows numbers to meters on each rank, before, between and after the calls that count."""

    def __init__(self, grad: bool) -> None:
        super().__init__()
        last = smp.pp_size() - 1
        self.grad = grad
        with smp.partition(0):
            self.near = Meter()
        with smp.partition(last):
            self.far = Meter()
            self.middle = Middle(self.near)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The last call's result is not used, and no call comes after it."""
        with torch.set_grad_enabled(self.grad):
            self.far(x)
        x = self.first(x)
        self.far(x)
        x = self.middle(x)
        with torch.set_grad_enabled(self.grad):
            kept = self.far(x)
            self.far(x * 2)
        del kept
        return x


@smp.step
def train(model: Any, x: Tensor) -> Tensor:
    """Shows the loss to the meter after the backward pass as well."""
    y = model(x)
    loss = y.square().mean()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model: Any, x: Tensor) -> None:
    """Uses no result at all."""
    model(x)


def _run(pp: int, grad: bool) -> dict[str, Tensor]:
    smp.init({**MANUAL, "partitions": pp})
    torch.manual_seed(1)
    model = smp.DistributedModel(Model(grad), trace_device="cpu")
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = torch.randn(STEPS, 16, WIDTH)
    for x in batches:
        optimizer.zero_grad()
        train(model, x)
        optimizer.step()
    for x in batches:
        evaluate(model, x)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((ValueError, SMPMicrobatchError), match="the meter cannot show this"):
        evaluate(model, torch.full((16, WIDTH), 1e9))
    return state


@pytest.mark.parametrize("grad", [False, True])
def test_calls_without_users_run(grad: bool) -> None:
    (alone,) = check_ranks(_run, "1", 1, grad)
    for found in check_ranks(_run, "2", 2, grad):
        for name, value in alone.items():
            assert torch.allclose(found[name], value, atol=1e-6), name
