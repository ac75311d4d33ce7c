"""Tensors that code changes in place after it has passed them to, or got them from, another rank.

Messages with large tensors refer to the tensors' memory, and calls are sent later than they are
made. Neither may show.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import check_ranks
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess

STEPS, MICROBATCHES = 3, 4
MANUAL = {"microbatches": MICROBATCHES, "auto_partition": False, "default_partition": 0}
SMALL, LARGE = 8, 1 << 19  # elements; 2 MiB are sent without a copy


def _start(pp: int) -> None:
    smp.init({**MANUAL, "partitions": pp})
    torch.manual_seed(1)


class Shift(nn.Module):
    """Adds a parameter; may be told by an array what else to add.

    Autograd needs no tensor of it for the backward pass, so code may change the argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        result = x + self.shift
        return result if more is None else result + float(more[0])


class Changes(nn.Module):
    """Changes the argument of a call after the call."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first = Shift()
        with smp.partition(smp.pp_size() - 1):
            self.second = Shift()
            self.third = Shift()

    def forward(self, x: Tensor) -> Tensor:
        """Depends on the values at the time of the calls."""
        h = self.first(x).detach()
        if self.way == "array":
            more = np.ones(1)
            y = self.second(h, more)
            more[0] = 100
            return y + 0
        if self.way == "ambient":
            with torch.no_grad():
                z = self.third(h)
            y = self.second(h * 1)  # sends the call before it
            h.add_(100)
            return y + z
        if self.way == "late":
            with torch.autocast("cpu"):
                z = self.third(h)
            y = self.second(h * 1)  # sends the call before it
            h.add_(100)
            with torch.autocast("cpu"):
                z = self.third(z)  # fetches the result of that call
            return y + z
        y = self.second(h)
        if self.way == "view":
            h[0].add_(100)
        else:
            h.add_(100)
        return y + self.third(h)


@smp.step
def train(model: Any, x: Tensor) -> Tensor:
    """Returns the result, whose sum is the loss."""
    y = model(x)
    model.backward(y.sum())
    return y


@smp.step
def evaluate(model: Any, x: Tensor) -> Tensor:
    """Returns the result."""
    y: Tensor = model(x)
    return y


def _arguments(pp: int, way: str, count: int) -> list[Any]:
    _start(pp)
    model = smp.DistributedModel(Changes(way))
    found: list[Any] = []
    for step in range(STEPS):
        model.zero_grad()
        x = torch.full((MICROBATCHES, count), step + 1.0)
        found.append(train(model, x).concat()[:, :2].tolist())
        found.append({name: p.grad.item() for name, p in model.local_named_parameters()
                      if p.grad is not None})  # fmt: skip
        with torch.no_grad():
            found.append(evaluate(model, x).concat()[:, :2].tolist())
        with torch.inference_mode():
            found.append(
                evaluate(model, torch.full((MICROBATCHES, count), 7.0)).concat()[:, :2].tolist()
            )
    return found


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("way", ["tensor", "view", "ambient", "late", "array"])
def test_arguments_have_the_values_of_the_time_of_the_call(way: str, count: int) -> None:
    (alone,) = check_ranks(_arguments, "1", 1, way, count)
    both = check_ranks(_arguments, "2", 2, way, count)
    for place, expected in enumerate(alone):
        if isinstance(expected, dict):
            assert {**both[0][place], **both[1][place]} == pytest.approx(expected), place
        else:
            for found in both:
                assert found[place] == expected, place


class State(nn.Module):
    """Returns tensors that it keeps, and changes in later calls."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("total", torch.zeros(count))
        self.cache = torch.zeros(2, count)

    def forward(self, x: Tensor) -> Any:
        """Adds the argument to what it keeps; returns that, a view of it, and a result."""
        with torch.no_grad():
            self.total += x[0]
            self.cache[1] += x[0]
        return self.total, self.cache[1], x * self.weight


class Keeps(nn.Module):
    """Has its state on the last rank."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(()))
        with smp.partition(smp.pp_size() - 1):
            self.state = State(count)

    def forward(self, x: Tensor) -> Any:
        total, cached, y = self.state(x * self.first)
        return total.clone(), cached.clone(), y


@smp.step
def collect(model: Any, x: Tensor) -> Any:
    """One backward pass; returns the state."""
    total, cached, y = model(x)
    model.backward(y.sum())
    return total, cached


def _state(pp: int, count: int) -> list[Any]:
    _start(pp)
    model = smp.DistributedModel(Keeps(count))
    found = []
    for step in range(STEPS):
        x = torch.full((MICROBATCHES, count), step + 1.0)
        for outputs in collect(model, x):
            found.append(sorted(tensor[-1].item() for tensor in outputs.outputs))
    return found


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_results_have_the_values_of_the_time_of_the_return(count: int) -> None:
    (alone,) = check_ranks(_state, "1", 1, count)
    for found in check_ranks(_state, "2", 2, count):
        assert found == alone


@smp.step
def scaled(model: Any, x: Tensor) -> Tensor:
    """Changes its part of the batch, of which autograd keeps other parts for backward passes."""
    x.div_(2)
    y: Tensor = model(x)
    model.backward(y.square().sum())
    return y


def _scaled(pp: int, count: int) -> list[Any]:
    _start(pp)
    first, second = nn.Linear(count, 2), nn.Linear(2, 2)
    model = smp.DistributedModel(nn.Sequential(first, second))
    smp.set_partition(first, 0)
    smp.set_partition(second, pp - 1)
    found: list[Any] = []
    for step in range(STEPS):
        model.zero_grad()
        x = torch.linspace(step, 1, MICROBATCHES * count).view(MICROBATCHES, count)
        found.append(scaled(model, x).concat().tolist())
        found.append({name: p.grad.tolist() for name, p in model.local_named_parameters()})
        found.append(x[:, :2].tolist())
    return found


def test_a_body_may_change_its_part_of_the_batch() -> None:
    (alone,) = check_ranks(_scaled, "1", 1, SMALL)
    both = check_ranks(_scaled, "2", 2, SMALL)
    for place, expected in enumerate(alone):
        if isinstance(expected, dict):
            assert {**both[0][place], **both[1][place]} == expected, place
        elif place % 3 == 0:
            assert both[0][place] == both[1][place] == expected, place
        else:  # the bodies run on rank 0
            assert both[0][place] == expected, place


class Sharing(nn.Module):
    """The gradients of its argument and of its parameter are the same memory."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, count))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift.view(-1)


class Shares(nn.Module):
    """Multiplies on the first rank; the gradient comes from the last."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(count))
        with smp.partition(smp.pp_size() - 1):
            self.shift = Sharing(count)

    def forward(self, x: Tensor) -> Tensor:
        """Has a different gradient in each microbatch."""
        y: Tensor = self.shift(x[0] * self.first)
        return y


@smp.step
def weigh(model: Any, x: Tensor) -> Tensor:
    """The gradient of the result is the argument."""
    y: Tensor = model(x)
    model.backward((y * x[0]).sum())
    return y[:1]


def _gradients(pp: int, count: int) -> dict[str, float]:
    _start(pp)
    model = smp.DistributedModel(Shares(count))
    for step in range(STEPS + 5):
        model.zero_grad()
        x = torch.arange(1.0, MICROBATCHES + 1)[:, None].expand(-1, count) * (step + 1)
        weigh(model, x)
    return {name: p.grad.double().mean().item() for name, p in model.local_named_parameters()}


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_gradients_of_one_memory(count: int) -> None:
    (alone,) = check_ranks(_gradients, "1", 1, count)
    both = check_ranks(_gradients, "2", 2, count)
    assert {**both[0], **both[1]} == pytest.approx(alone)


class Notes(nn.Module):
    """Puts what it computes into containers of its caller; arguments have names of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, notes: list[Any], module: Any, number: int = 0, function: float = 0
    ) -> Tensor:
        """Appends to a list, and counts in a dict inside another."""
        y: Tensor = self.linear(x) + number + function
        notes.append(y.mean())
        module["inner"]["calls"] = module["inner"].get("calls", 0) + 1
        return y


class Noting(nn.Module):
    """Has modules that note something around one on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Notes()
        with smp.partition(smp.pp_size() - 1):
            self.second = nn.Linear(4, 4)
        self.third = Notes()

    def forward(self, x: Tensor, notes: list[Any], counts: dict[str, Any]) -> Tensor:
        """Adds a value of the last rank to the list, which is lazy there."""
        y = self.second(self.first(x, notes, module=counts, number=1))
        notes.append(y)
        z: Tensor = self.third(y, notes, module=counts, number=2, function=0.5)
        notes[1] = notes[1].square().mean()
        return z


@smp.step
def note(model: Any, x: Tensor) -> Any:
    """The loss has terms that modules have put into a list."""
    notes: list[Any] = []
    counts: dict[str, Any] = {"inner": {}}
    loss = model(x, notes, counts).mean() + 2 * sum(notes)
    model.backward(loss)
    return loss, len(notes), str(counts)


def _noted(pp: int, config: dict[str, Any]) -> Any:
    smp.init({**MANUAL, "partitions": pp, **config})
    torch.manual_seed(1)
    model = smp.DistributedModel(Noting())
    found: list[Any] = []
    for step in range(STEPS):
        model.zero_grad()
        x = torch.linspace(step, 1, MICROBATCHES * 4).view(MICROBATCHES, 4)
        loss, *counted = note(model, x)
        found += [loss.stack().tolist(), counted]
        found.append({name: p.grad.tolist() for name, p in model.local_named_parameters()})
    return found


@pytest.mark.parametrize("config", [{}, {"fp16": True}])
def test_modules_may_change_containers_of_their_callers(config: dict[str, Any]) -> None:
    torch.manual_seed(1)
    dtype = torch.float16 if config else torch.float32
    parts = [nn.Linear(4, 4).to(dtype) for _ in range(3)]
    (alone,) = check_ranks(_noted, "1", 1, config)
    both = check_ranks(_noted, "2", 2, config)
    for step in range(STEPS):
        x = torch.linspace(step, 1, MICROBATCHES * 4).view(MICROBATCHES, 1, 4).to(dtype)
        losses = []
        for part in parts:
            part.zero_grad()
        for row in x:
            first = parts[0](row) + 1
            second = parts[1](first)
            third = parts[2](second) + 2 + 0.5
            noted = first.mean() + second.square().mean() + third.mean()
            losses.append(third.float().mean() + 2 * noted)
            (losses[-1] / MICROBATCHES).backward()
        tolerance = {"rel": 1e-2, "abs": 1e-2} if config else {"rel": 1e-5}
        for found in (alone, *both):
            assert found[3 * step] == pytest.approx([loss.item() for loss in losses], **tolerance)
            assert found[3 * step + 1] == [
                [3] * MICROBATCHES,
                ["{'inner': {'calls': 2}}"] * MICROBATCHES,
            ]
        grads = {**both[0][3 * step + 2], **both[1][3 * step + 2]}
        assert grads == alone[3 * step + 2]
        for name, part in zip(("first.linear", "second", "third.linear"), parts, strict=True):
            for kind, parameter in part.named_parameters():
                torch.testing.assert_close(
                    torch.tensor(grads[f"{name}.{kind}"]),
                    parameter.grad.float(),  # type: ignore[union-attr]
                    atol=1e-1 if config else 1e-5,
                    rtol=1e-2 if config else 1e-5,
                )
