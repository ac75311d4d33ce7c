"""What modules of other ranks put into objects, and hooks into collectors, is as in one process."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import gc
import random
import types
from typing import Any, NamedTuple

import pytest
import torch
from on_ranks import on_ranks
from ranks import check_ranks
from smp.common import squares
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess

WIDTH, LAYERS, STEPS = 4, 4, 3


class Slot:
    """A layer of a cache: made empty, filled by the first call."""

    __slots__ = ("keys", "length")

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.length = 0

    def update(self, new: Tensor) -> Tensor:
        self.keys = new if self.keys is None else torch.cat([self.keys, new])
        self.length += len(new)
        return self.keys


class Cache:
    """Grows by a slot for each layer; has a way back to itself, as some objects have."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.static = torch.zeros(LAYERS, WIDTH)
        self.itself = self
        self.seen: set[str] = set()

    def update(self, number: int, new: Tensor) -> Tensor:
        while len(self.slots) <= number:
            self.slots.append(Slot())
        with torch.no_grad():
            self.static[number] += new.detach().sum(0)
        self.seen.add(f"layer {number}")
        return self.slots[number].update(new)


@dataclasses.dataclass
class Notes:
    """A dataclass that layers write to."""

    total: Tensor
    calls: int = 0


active: contextvars.ContextVar[dict[str, list[Tensor]] | None] = contextvars.ContextVar(
    "active", default=None
)


class Layer(nn.Module):
    """Changes what it gets, in the way of its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any, losses: Any, table: Any, notes: Any) -> Tensor:
        y = torch.tanh(self.linear(x))
        kept = cache.update(self.number, y)
        losses.append(y.pow(2).mean())
        table[f"layer {self.number}"] = y.mean()
        notes.total = notes.total + y.sum()
        notes.calls += 1
        return self.inner(y) + kept.mean(0)


class Net(nn.Module):
    """Calls the layers with objects of its own, and returns what they have left there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))

    def forward(self, x: Tensor) -> Any:
        cache, losses, table = Cache(), collections.deque([x.sum() * 0]), {"first": x.sum() * 0}
        slots, notes = cache.slots, Notes(torch.zeros(()))
        for turn in range(2):
            for layer in self.layers:
                x = layer(x, cache, losses=losses, table=table, notes=notes)
            assert cache.slots is slots
            assert cache.itself is cache
            assert len(cache.seen) == len(cache.slots) == LAYERS
            assert notes.calls == (turn + 1) * LAYERS
            assert all(slot.length == len(slot.keys) for slot in cache.slots)  # type: ignore[arg-type]
        kept = torch.stack([slot.keys.mean() for slot in cache.slots])  # type: ignore[union-attr]
        more = sum(losses) + sum(table.values()) + notes.total + kept.pow(2).sum()
        return x.pow(2).mean() + more + cache.static.sum()


class InPlace(nn.Module):
    """Changes a tensor of its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.ReLU(inplace=True)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.activation(x))
        return out


class Shortcut(nn.Module):
    """Adds what a block has made of its argument to the argument, which the block has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH) if i % 2 else InPlace() for i in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for layer in self.layers:
            x = layer(x) + x
        return x.pow(2).mean()


class Collecting(nn.Module):
    """Its loss uses what hooks have collected, in a list and in a context variable."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(4)
        )
        self.lazily = False

    def collect(self) -> None:
        """Gives hooks, before or in the first call."""
        for layer in self.layers:
            layer.register_forward_hook(note)
            layer[1].register_forward_hook(note, with_kwargs=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.lazily and not self.layers[0]._forward_hooks:
            self.collect()
        found: dict[str, list[Tensor]] = {"outputs": []}
        token = active.set(found)
        for layer in self.layers:
            x = layer(x)
        active.reset(token)
        assert len(found["outputs"]) == 2 * len(self.layers), len(found["outputs"])
        return x.pow(2).mean() + sum(one.pow(2).mean() for one in found["outputs"])


def note(module: nn.Module, args: Any, output: Tensor) -> None:
    """A hook; does nothing where nobody collects."""
    found = active.get()
    if found is not None:
        found["outputs"].append(output + 0 * args[0].sum())


@smp.step
def train(model: Any, x: Tensor) -> Any:
    loss = model(x)
    model.backward(loss)
    return loss.detach()


def trained(kinds: list[tuple[str, str]], partitions: int) -> list[Any]:
    """Returns losses and gradients of models."""
    smp.init({"partitions": partitions, "microbatches": 2})
    results = []
    for kind, hooks in kinds:
        torch.manual_seed(3)
        net = {"net": Net, "shortcut": Shortcut, "collecting": Collecting}[kind]()
        if isinstance(net, Collecting):
            net.lazily = hooks == "lazily"
            if hooks == "before":
                net.collect()
        model = smp.DistributedModel(net)
        for number, layer in enumerate(net.layers):
            place = number % 2 if hooks == "mixed" else number // 2
            smp.set_partition(layer, place % partitions)
        for _ in range(STEPS):
            for parameter in net.parameters():
                parameter.grad = None
            losses = [float(loss) for loss in train(model, torch.ones(4, WIDTH)).outputs]
            grads = {name: one.grad for name, one in model.local_named_parameters()}
            results.append((kind, losses, grads))
        del model, net, layer, parameter
        gc.collect()
    return results


KINDS = [
    *[("net", ""), ("net", "mixed"), ("shortcut", ""), ("shortcut", "mixed")],
    *[("collecting", "before"), ("collecting", "lazily")],
]


def test_callers_see_what_modules_of_other_ranks_have_changed() -> None:
    expected = check_ranks(trained, "1", KINDS, 1)[0]
    for rank in check_ranks(trained, "2", KINDS, 2):
        for (kind, losses, grads), (_, wanted, all_grads) in zip(rank, expected, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-5), kind
            for name, grad in grads.items():
                torch.testing.assert_close(grad, all_grads[name], msg=f"{kind}: {name}")


count = 0
KEPT: list[Tensor] = []


class Counting(nn.Module):
    """Keeps things in many places."""

    calls = 0
    shared: list[Tensor] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(WIDTH, WIDTH), torch.Generator().manual_seed(5)
        self.n, self.list = 0, []  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        global count
        y: Tensor = self.linear(x) + torch.randn(WIDTH, generator=self.generator)
        self.n += 1
        self.list.append(y)
        KEPT.append(y)
        count += 1
        Counting.calls += 1
        Counting.shared.append(y)
        random.random()
        return y


@pytest.mark.parametrize("times", [False, True])
@on_ranks("2")
def test_a_trace_leaves_nothing_behind(times: bool) -> None:
    smp.init({"partitions": 2, "use_times": times})
    torch.manual_seed(3)
    net = nn.Sequential(Counting(), Counting())
    hooked: list[Any] = []
    net[0].register_forward_hook(lambda module, args, result: hooked.append(result))
    random.seed(1)
    state = random.getstate()
    model = smp.DistributedModel(net)
    seen: list[Any] = []

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        model.backward(loss)
        seen.append((len(hooked), net[0].n, len(net[0].list), count, Counting.calls, len(KEPT)))
        return loss.detach()

    step(model, torch.ones(2, WIDTH))
    if smp.rank() == 0:
        # One of the two modules runs here.
        assert seen == [(1, 1, 1, 1, 1, 1)], seen
        assert len(Counting.shared) == 1
        assert not any(type(one) is not Tensor for one in (*KEPT, *hooked, *net[0].list))
        random.random()
        now = random.getstate()
        random.setstate(state)
        random.random(), random.random()
        assert now == random.getstate()


class Routed(NamedTuple):
    """A result, and the module that has made it."""

    value: Tensor
    by: Any


class Router(nn.Module):
    """Returns one of its parts, in an object, with what that has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Routed:
        part = self.parts[1]
        return Routed(part(x), types.SimpleNamespace(module=part))


class Asking(nn.Module):
    """Looks which part of the router has run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, by = self.router(self.first(x))
        assert by.module is self.router.parts[1]
        return value


@on_ranks("2")
def test_a_result_may_hold_a_module_of_the_model() -> None:
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    module = Asking()
    model = smp.DistributedModel(module)
    smp.set_partition(module.router, 1)
    for _ in range(3):
        squares(model, torch.ones(4, WIDTH))
