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
from smp.common import BY_HAND
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPError, SMPMicrobatchError

pytestmark = pytest.mark.multiprocess


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
    smp.init({"partitions": pp, "microbatches": 4, "active_microbatches": 3, **BY_HAND})
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
    smp.init({"partitions": pp, "microbatches": 4, "active_microbatches": 3, **BY_HAND})
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
    smp.init({"partitions": pp, "microbatches": 4, "active_microbatches": 3, **BY_HAND})
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


class Counts(nn.Module):
    """Counts its calls from some time on, and reads that after it has called another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.begun = False
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        self.calls += self.begun
        return self.inner(x).sum(1, keepdim=True).sign() * x * (1 + self.calls)  # type: ignore[no-any-return]


def begun_late(pp: int) -> Any:
    """Returns losses of a model whose code begins in step 4 to change what microbatches share."""
    smp.init({"partitions": pp, "microbatches": 4, "active_microbatches": 3, **BY_HAND})
    torch.manual_seed(0)
    module = Counts()
    model = smp.DistributedModel(module)
    smp.set_partition(module.inner, pp - 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        y = model(x)
        y.sum().item()  # needs the value: other microbatches run meanwhile
        return y.sum()

    found = []
    for number in range(7):
        module.begun = number >= 3  # steps 1, 2, 4, 8 and so on are watched
        found += step(model, torch.ones(16, 4)).outputs
    return torch.stack(found)


def test_code_that_begins_late_to_change_what_microbatches_share() -> None:
    (expected,) = check_ranks(begun_late, "1", 1)
    for found in check_ranks(begun_late, "2", 2):
        torch.testing.assert_close(found, expected)


class Says(nn.Module):
    """Says something about its input by attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.aux: Any = 0.0
        self.calls = 0
        self.total: Any = torch.zeros(4)
        self.texts: dict[str, Any] = {"n": 0}
        self.all: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        y = torch.tanh(self.linear(x))
        self.aux = y.square().mean()
        self.calls += 1
        with torch.no_grad():
            self.total += y.sum(0)
        self.texts["n"] = self.calls
        self.all = [*self.all[-1:], {"mean": y.mean()}]
        self._input = x
        if self.calls % 2:
            self.odd = True
        else:
            del self.odd
        return y


class Holds(nn.Module):
    """Has a part that says something, on one more rank."""

    def __init__(self) -> None:
        super().__init__()
        self.says = Says()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        return self.linear(self.says(x))  # type: ignore[no-any-return]


class Reads(nn.Module):
    """Reads what its parts have set, after a call of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Says(), Holds(), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        first, holds, last = self.layers
        x = first(x)
        x = last(holds(x))
        x.sum().item()  # needs the value: other microbatches run meanwhile
        for one in (first, holds.says):
            x = x + one.aux + one.total + one.texts["n"] + one.calls + one._input.mean()
            x = x + one.all[-1]["mean"] * (2 if hasattr(one, "odd") else 1)
        return x


def read(pp: int, places: tuple[int, int, int, int]) -> Any:
    """Returns losses and gradients, what a body finds in attributes, and the warnings."""
    smp.init({"partitions": pp, "microbatches": 4, "active_microbatches": 3, **BY_HAND})
    torch.manual_seed(0)
    module = Reads()
    first, holds, last = module.layers
    model = smp.DistributedModel(module)
    for part, place in zip((first, holds, holds.says, last), places, strict=True):
        smp.set_partition(part, place)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        y = model(x)
        loss = y.square().mean() + first.aux + holds.says.aux
        model.backward(loss)
        return loss.detach(), torch.tensor([first.calls, holds.says.calls])

    found: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
            losses, calls = step(model, x)
            found += [*losses.outputs, *calls.outputs]
    texts = [str(one.message) for one in caught if "has set" in str(one.message)]
    gradients = {name: one.grad for name, one in model.local_named_parameters()}
    return found, gradients, texts


PLACES = [(1, 1, 1, 0), (1, 0, 1, 1), (0, 1, 0, 1), (1, 2, 1, 0), (1, 1, 2, 0)]


@pytest.mark.parametrize("places", PLACES)
def test_code_reads_what_modules_of_other_ranks_have_set(
    places: tuple[int, int, int, int],
) -> None:
    ((expected, of_all, _),) = check_ranks(read, "1", 1, (0, 0, 0, 0))
    partitions = max(places) + 1
    found, *_ = replies = check_ranks(read, str(partitions), partitions, places)
    torch.testing.assert_close(found[0], expected)
    for _, gradients, texts in replies:
        assert not texts
        for name, one in gradients.items():
            torch.testing.assert_close(one, of_all[name])


class Scale:
    """What a model and its layers have in common."""

    def __init__(self) -> None:
        self.value = 1.0


COMMON: dict[str, Any] = {"scale": 1.0}
FACTOR = 1.0
_SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


class Scaled(nn.Module):
    """Multiplies by what other code has set, in one of several ways."""

    def __init__(self, how: str, scale: Scale, seen: list[Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how, self.scale, self.seen = how, scale, seen

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        y = self.linear(x)
        self.seen.append(y.detach())
        if self.how == "object":
            return y * self.scale.value  # type: ignore[no-any-return]
        if self.how == "dict":
            return y * COMMON["scale"]  # type: ignore[no-any-return]
        if self.how == "variable":
            return y * FACTOR  # type: ignore[no-any-return]
        if self.how == "context":
            return y * _SCALE.get()  # type: ignore[no-any-return]
        return y * torch.full((), 1 / 3).dtype.itemsize  # type: ignore[no-any-return]


class Sets(nn.Module):
    """Sets what its layer reads, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.scale, self.seen = how, Scale(), []
        self.linear = nn.Linear(4, 4)
        self.scaled = Scaled(how, self.scale, self.seen if how == "list" else [])

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        global FACTOR
        value = 1.0 + float(x.abs().mean())
        if self.how == "object":
            self.scale.value = value
        if self.how == "dict":
            COMMON["scale"] = value
        if self.how == "variable":
            FACTOR = value
        if self.how == "context":
            _SCALE.set(value)
        if self.how == "dtype":
            torch.set_default_dtype(torch.float64)
        try:
            y = self.scaled(x)
        finally:
            torch.set_default_dtype(torch.float32)
        return self.linear(y.float())  # type: ignore[no-any-return]


def unseen(how: str) -> list[str]:
    """Returns the warnings of a model whose layer on rank 1 uses what code of rank 0 has set."""
    smp.init({"partitions": 2, "microbatches": 2, **BY_HAND})
    module = Sets(how)
    model = smp.DistributedModel(module)
    smp.set_partition(module.scaled, 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        model.backward(model(x).sum())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            step(model, torch.randn(4, 4, generator=torch.Generator().manual_seed(number)))
    found = [one for one in caught if "does not see the change" in str(one.message)]
    assert all(one.filename == __file__ for one in found)
    return [str(one.message) for one in found]


WAYS = {
    "object": "attribute 'scale' of a Sets",
    "dict": "variable 'COMMON' of 'Sets.forward'",
    "variable": "variable 'FACTOR' of 'Sets.forward'",
    "context": "variable '_SCALE' of 'Sets.forward'",
    "dtype": "torch.get_default_dtype()",
}


@pytest.mark.parametrize("how", WAYS)
def test_what_a_module_elsewhere_does_not_see_is_said(how: str) -> None:
    first, second = check_ranks(unseen, "2", how)
    assert not second
    (text,) = first
    assert f"code of rank 0 of the pipeline has changed {WAYS[how]} in a step" in text
    assert "Module 'scaled' on rank 1, whose code can read that, does not see the change" in text


def test_what_a_caller_does_not_see_is_said() -> None:
    first, second = check_ranks(unseen, "2", "list")
    assert not first
    (text,) = second
    assert "code of rank 1 of the pipeline has changed attribute 'seen' of a Sets" in text
    assert "Module 'model' on rank 0, whose code can read that, does not see" in text
    assert check_ranks(unseen, "2", "nothing") == [[], []]


class Twice(nn.Module):
    """Returns one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, same: Tensor) -> Any:
        """Returns a tensor in two places; it has changed one of two names of its argument."""
        x += 1
        y = self.linear(x) + same
        return y, {"again": y}


class ChangesOne(nn.Module):
    """Changes a tensor in place, and reads it by its other name."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.linear = Twice(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        x = self.linear(x)
        y, other = self.twice(x, x)
        y += x
        return other["again"]  # type: ignore[no-any-return]


def changes_one(pp: int) -> Any:
    smp.init({"partitions": pp, "microbatches": 2, **BY_HAND})
    torch.manual_seed(0)
    module = ChangesOne()
    model = smp.DistributedModel(module)
    smp.set_partition(module.twice, pp - 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        y = model(x)
        model.backward(y.square().mean())
        return y.detach()

    return [torch.cat(step(model, torch.ones(4, 4)).outputs) for _ in range(3)]


def test_two_names_of_one_tensor() -> None:
    (expected,) = check_ranks(changes_one, "1", 1)
    for found in check_ranks(changes_one, "2", 2):
        torch.testing.assert_close(found, expected)


class KeepsLate(nn.Module):
    """Keeps results of its layers in a list that microbatches share, from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: list[Tensor] = []
        self.keeps = False

    def forward(self, x: Tensor) -> Tensor:
        """Returns a number."""
        kept = self.kept if self.keeps else []
        kept.clear()
        kept.append(self.last(self.first(x)))
        y = self.last(x)
        float(y.detach().sum())  # other microbatches run meanwhile
        kept.append(y)
        return torch.stack([one.sum() for one in kept]).square().sum()


def keeps_late(pp: int) -> Any:
    smp.init({"partitions": pp, "microbatches": 4, **BY_HAND})
    torch.manual_seed(0)
    module = KeepsLate()
    model = smp.DistributedModel(module)
    smp.set_partition(module.last, pp - 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        loss = model(x)
        model.backward(loss)
        return loss.detach()

    found = []
    for number in range(4):
        module.keeps = number > 1
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        found += step(model, x).outputs
    return found


def test_a_tensor_of_another_microbatch() -> None:
    """Its values may not have been asked for, and its own microbatch may wait for them."""
    (expected,) = check_ranks(keeps_late, "1", 1)
    for found in check_ranks(keeps_late, "2", 2):
        torch.testing.assert_close(found, expected)


class Other:
    """What no message carries as an attribute."""


class SaysOther(nn.Linear):
    """Sets an object as its attribute."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        self.other = [Other()]
        return super().forward(x)


def says_other() -> list[str]:
    smp.init({"partitions": 2, "microbatches": 2, **BY_HAND})
    module = nn.Sequential(nn.Linear(4, 4), SaysOther(4, 4))
    model = smp.DistributedModel(module)
    smp.set_partition(module[1], 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        model.backward(model(x).sum())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(model, torch.ones(4, 4))
    found = [one for one in caught if "attribute" in str(one.message)]
    assert all(one.filename == __file__ for one in found)
    return [str(one.message) for one in found]


def test_an_attribute_that_its_caller_does_not_get_is_said_once() -> None:
    first, second = check_ranks(says_other, "2")
    assert not first
    (text,) = second
    assert "module '1', on rank 1 of the pipeline, has set its attribute 'other'" in text
    assert "holds a Other. Rank 0, which has called it" in text


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
    smp.init({"partitions": 2, "microbatches": 2, **BY_HAND})
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
    smp.init({"partitions": 2, "microbatches": 2, **BY_HAND})
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
