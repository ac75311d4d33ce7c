"""What differs from one process by timing or by where parameters live: the same, or a sentence."""

from __future__ import annotations

import contextvars
import random
import time
import warnings
from typing import Any

import pytest
import torch
from ranks import check_ranks
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPError, SMPMicrobatchError

pytestmark = pytest.mark.multiprocess

MANUAL = {"auto_partition": False, "default_partition": 0}


class Late(nn.Module):
    """Takes a time that differs from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.delays = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        time.sleep(self.delays.random() * 3e-3)
        return self.linear(x)  # type: ignore[no-any-return]


def pairs(pp: int, last: int) -> Any:
    """Trains a model that is called three times, and returns its statistics."""
    smp.init({"partitions": pp, "microbatches": 4, "active_microbatches": 3, **MANUAL})
    torch.manual_seed(0)
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.5))
    module = nn.Sequential(Late(), norm, nn.Linear(4, 2))
    model = smp.DistributedModel(module)
    smp.set_partition(module[0], 1 % pp)
    smp.set_partition(norm, last)

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Any:
        loss = (model(x) - model(y)).square().mean() + model(x + y).mean()
        model.backward(loss)
        return loss.detach()

    for number in range(5):
        x, y = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(number))
        step(model, x, y)
    entries = model.state_dict()
    return {name: entries[name] for name in entries if "running" in name}


@pytest.mark.parametrize("last", [0, 1])
def test_statistics_of_a_norm_that_is_called_several_times(last: int) -> None:
    (expected,) = check_ranks(pairs, "1", 1, 0)
    for found in check_ranks(pairs, "2", 2, last):
        torch.testing.assert_close(found, expected)


class Keeps(nn.Module):
    """Adds what it has returned before, which it keeps in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forget()

    def forget(self) -> None:
        """Lets the next call be the first."""
        self.kept: Tensor | None = None
        if hasattr(self, "calls"):
            del self.calls

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        x = torch.tanh(self.linear(x))
        x = x if self.kept is None else x + 0.5 * self.kept
        self.kept = x.detach()
        self.calls = self.calls + 1 if hasattr(self, "calls") else torch.ones(1)
        return x * self.calls


def recurrent(pp: int, last: int) -> Any:
    """Returns losses of a model that is called three times."""
    smp.init({"partitions": pp, "microbatches": 4, "active_microbatches": 3, **MANUAL})
    torch.manual_seed(0)
    module = nn.Sequential(Late(), Keeps(), nn.Linear(4, 2))
    model = smp.DistributedModel(module)
    smp.set_partition(module[0], 1 % pp)
    smp.set_partition(module[1], last)

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Any:
        loss = (model(x) - model(y)).square().mean() + model(x + y).mean()
        model.backward(loss)
        return loss.detach()

    found = []
    for number in range(5):
        if number in (1, 3):
            module[1].forget()
        x, y = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(number))
        found += step(model, x, y).outputs
    return torch.stack(found)


@pytest.mark.parametrize("last", [0, 1])
def test_what_a_module_keeps_from_one_call_to_the_next(last: int) -> None:
    (expected,) = check_ranks(recurrent, "1", 1, 0)
    for found in check_ranks(recurrent, "2", 2, last):
        torch.testing.assert_close(found, expected)


class Collects(nn.Module):
    """Fills a list by hooks, and reads it when its layers have been called."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(Late(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        self.seen: list[Tensor] = []
        self.how = how
        for layer in self.layers[1:]:
            layer.register_forward_hook(self.hook())

    def hook(self) -> Any:
        """Returns a hook that knows the list in one of several ways."""
        seen = self.seen if self.how != "context" else _SEEN

        def keep(module: nn.Module, args: Any, result: Tensor) -> None:
            (seen.get() if isinstance(seen, contextvars.ContextVar) else seen).append(result)

        return keep

    def forward(self, x: Tensor) -> Tensor:
        """Returns one number per row."""
        seen = _SEEN.get() if self.how == "context" else self.seen
        if self.how != "last":
            seen.clear()
        x = self.layers(x)
        return x.sum(1) + torch.stack(seen[-3:]).square().sum((0, 2))


_SEEN: contextvars.ContextVar[list[Tensor]] = contextvars.ContextVar("seen")


def collected(pp: int, places: tuple[int, int, int], how: str) -> Any:
    """Returns losses and gradients' norms of a model whose hooks fill a list."""
    smp.init({"partitions": pp, "microbatches": 4, "active_microbatches": 3, **MANUAL})
    _SEEN.set([])
    torch.manual_seed(0)
    module = Collects(how)
    model = smp.DistributedModel(module)
    smp.set_partition(module.layers[0], 1 % pp)
    for layer, place in zip(module.layers[1:], places, strict=True):
        smp.set_partition(layer, place)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        loss = torch.tanh(model(x)).mean()
        model.backward(loss)
        return loss.detach()

    found = []
    for number in range(4):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        found += step(model, x).outputs
    return torch.stack(found)


@pytest.mark.parametrize("how", ["clear", "last", "context"])
@pytest.mark.parametrize("places", [(1, 0, 1), (0, 1, 1)])
def test_a_list_that_hooks_of_all_microbatches_fill(how: str, places: tuple[int, int, int]) -> None:
    (expected,) = check_ranks(collected, "1", 1, (0, 0, 0), how)
    for found in check_ranks(collected, "2", 2, places, how):
        torch.testing.assert_close(found, expected)


class Makes(nn.Module):
    """Makes a parameter in its first forward, in one of two ways."""

    def __init__(self, seen: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        if "scale" not in self._parameters:
            scale = nn.Parameter(torch.ones(3))
            if self.seen:
                self.scale = scale
            else:
                self._parameters["scale"] = scale
        return self.linear(x)  # type: ignore[no-any-return]


def made(seen: bool) -> str:
    smp.init({"partitions": 2, "microbatches": 2, **MANUAL})
    module = nn.Sequential(nn.Linear(4, 4), Makes(seen))
    model = smp.DistributedModel(module)
    smp.set_partition(module[1], 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        model.backward(model(x).sum())

    if seen:
        with pytest.raises(SMPMicrobatchError) as caught:
            step(model, torch.ones(4, 4))
        return str(caught.value)
    step(model, torch.ones(4, 4))
    with pytest.raises(SMPError) as other:
        model.state_dict()
    return str(other.value)


def test_a_parameter_that_a_forward_makes_is_named() -> None:
    for text in check_ranks(made, "2", True):
        assert "SMPUsageError: code of the step gives module '1' a new parameter 'scale'" in text
    for text in check_ranks(made, "2", False):
        assert "parameter '1.scale' was put into the model after it was divided" in text


def outside() -> Any:
    smp.init({"partitions": 2, "microbatches": 2, **MANUAL})
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    temperature = nn.Parameter(torch.ones(()))
    model = smp.DistributedModel(module)
    smp.set_partition(module[1], 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        model.backward((model(x) * temperature).sum())

    texts = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model, torch.ones(4, 4))
        texts += [str(one.message) for one in caught if "not of the smp" in str(one.message)]
    return texts


def test_a_parameter_outside_the_model_is_said_once() -> None:
    texts, others = check_ranks(outside, "2")
    assert not others
    (text,) = texts
    assert "a parameter of shape () that is not of the smp.DistributedModel" in text
    assert "sum over the microbatches" in text
