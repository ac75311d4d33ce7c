"""What code of several microbatches or ranks shares: the same numbers, or a sentence."""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch
from ranks import check_ranks
from smp.common import BY_HAND
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPError, SMPUsageError

pytestmark = pytest.mark.multiprocess


class Target(nn.Module):
    """A criterion outside the model, which keeps a moving average in a buffer (as DINO's does)."""

    def __init__(self) -> None:
        super().__init__()
        self.center: Tensor
        self.register_buffer("center", torch.zeros(4))

    def forward(self, y: Tensor) -> Tensor:
        """Returns a number, and changes the buffer."""
        loss = (y - self.center).square().mean()
        self.center.mul_(0.5).add_(y.detach().mean(0), alpha=0.5)
        return loss


class Counts(nn.Module):
    """Counts in a buffer of its own, before it calls other modules, and reads that afterwards."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        self.calls += 1
        y = self.last(self.first(x))
        y.sum().item()  # needs the value: other microbatches run meanwhile
        return y / self.calls  # type: ignore[no-any-return]


def latest(x: Tensor) -> None:
    """Keeps the mean of its argument as an attribute of its own."""
    latest.mean = float(x.mean())  # type: ignore[attr-defined]


class Latest(Counts):
    """Reads the attribute of a function when other microbatches have run."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        latest(x)
        y = self.last(self.first(x))
        y.sum().item()
        return y - latest.mean  # type: ignore[no-any-return,attr-defined]


def shared(pp: int, how: str) -> Any:
    """Returns losses, and the parameters after some steps, of code that keeps something."""
    smp.init({"partitions": pp, "microbatches": 4, "active_microbatches": 3, **BY_HAND})
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    module: nn.Module = nn.Sequential(first, last)
    if how == "buffer":
        module = Counts(first, last)
    elif how == "function":
        module = Latest(first, last)
    elif how == "buffer elsewhere":  # its code waits for rank 0
        module = nn.Sequential(counts := Counts(nn.Linear(4, 4), first), last)
    model = smp.DistributedModel(module)
    smp.set_partition(last, pp - 1)
    if how == "buffer elsewhere":
        smp.set_partition(counts, pp - 1)
        smp.set_partition(first, 0)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    criterion, center, calls = Target(), torch.zeros(4), 0

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        nonlocal center, calls
        y = model(x)
        if how == "criterion":
            loss = criterion(y)
        elif how == "variable":
            loss = (y - center).square().mean()
            center = center * 0.5 + y.detach().mean(0) * 0.5
        elif how == "count":
            calls += 1
            y.sum().item()
            loss = y.square().mean() / calls
        else:
            loss = y.square().mean()
        model.backward(loss)
        return loss.detach()

    found = []
    for number in range(5):
        optimizer.zero_grad()
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        found += step(model, x).outputs
        optimizer.step()
    return torch.stack(found)


@pytest.mark.parametrize(
    "how", ["criterion", "variable", "function", "count", "buffer", "buffer elsewhere"]
)
def test_what_the_next_microbatch_reads_is_as_in_one_process(how: str) -> None:
    (expected,) = check_ranks(shared, "1", 1, how)
    for found in check_ranks(shared, "2", 2, how):
        torch.testing.assert_close(found, expected)


class Reads(nn.Module):
    """Reads its attributes, which other code may set, and may set one of its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state: Any = None
        self.values, self.table = [1.0], {"scale": 1.0}
        self.settings = types.SimpleNamespace(scale=1.0)
        self.parent: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        y = self.linear(x) * self.values[0] * self.table["scale"] * self.settings.scale
        if self.parent:
            self.parent[0].aux = y.detach().mean()  # type: ignore[assignment]
        return y if self.state is None else y * self.state  # type: ignore[no-any-return]


class Root(nn.Module):
    """Sets something of its part on another rank, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.part, self.how = nn.Linear(4, 4), Reads(), how
        self.aux: Any = 0.0
        if how == "parent":
            self.part.parent.append(self)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        number = float(x.abs().mean())
        if self.how == "tensor":
            self.part.state = x.abs().mean(0)
        elif self.how == "list":
            self.part.values[0] = number
        elif self.how == "dict":
            self.part.table["scale"] = number
        elif self.how == "object":
            self.part.settings.scale = number
        return self.part(self.first(x)) + self.aux  # type: ignore[no-any-return]


def said_in_three_steps(model: Any, part: str) -> list[str]:
    """Returns the warnings of three steps that have this text in them."""
    step = smp.step(lambda model, x: model.backward(model(x).sum()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(model, torch.randn(4, 4))
    return [str(one.message) for one in caught if part in str(one.message)]


def set_elsewhere(how: str) -> list[str]:
    """Returns the warnings of a model in which one rank sets what another one reads."""
    smp.init({"partitions": 2, "microbatches": 2, **BY_HAND})
    module = Root(how)
    model = smp.DistributedModel(module)
    smp.set_partition(module.part, 1)
    return said_in_three_steps(model, "does not see the change")


SETS = {
    "tensor": (0, "attribute 'state' of a Reads", "part"),
    "list": (0, "attribute 'values' of a Reads", "part"),
    "dict": (0, "attribute 'table' of a Reads", "part"),
    "object": (0, "attribute 'settings' of a Reads", "part"),
    "parent": (1, "attribute 'aux' of a Root", "model"),
}


@pytest.mark.parametrize("how", SETS)
def test_what_another_rank_does_not_see_is_said_once(how: str) -> None:
    rank, what, reader = SETS[how]
    texts = check_ranks(set_elsewhere, "2", how)
    assert not texts[1 - rank]
    (text,) = texts[rank]
    assert f"code of rank {rank} of the pipeline has changed {what} in a step" in text
    assert f"Module {reader!r} on rank {1 - rank}" in text


def none_elsewhere() -> list[str]:
    return set_elsewhere("nothing")


def test_nothing_is_said_of_code_that_sets_nothing() -> None:
    assert check_ranks(none_elsewhere, "2") == [[], []]


def collected_by_a_hook() -> tuple[list[str], list[float]]:
    """Returns warnings, and how often a hook of the second rank was called in each microbatch."""
    smp.init({"partitions": 2, "microbatches": 2, **BY_HAND})
    model, found = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last := nn.Linear(4, 4))), []
    smp.set_partition(last, 1)
    kept: list[Tensor] = []
    last.register_forward_hook(lambda module, args, result: kept.append(result))

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        kept.clear()
        loss = model(x).square().mean() + kept[0].mean()
        model.backward(loss)
        return float(len(kept))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            found += step(model, torch.randn(4, 4))
            kept.clear()
    texts = [str(one.message) for one in caught if "does not see the change" in str(one.message)]
    return texts, found


def test_what_hooks_collect_for_the_body_is_seen_there() -> None:
    assert check_ranks(collected_by_a_hook, "2") == [([], [1.0] * 6)] * 2


class Marks(nn.Module):
    """Asks autograd for something that concerns its argument."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        if self.how == "hook":
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        elif self.how == "retain_grad":
            x.retain_grad()
        elif self.how == "requires_grad_":
            x.requires_grad_()
        return self.linear(x)  # type: ignore[no-any-return]


def marks(how: str) -> list[str]:
    """Returns the warnings of a model whose second rank does so."""
    smp.init({"partitions": 2, "microbatches": 2, **BY_HAND})
    first, last = nn.Linear(4, 4), Marks(how)
    if how == "requires_grad_":
        first.requires_grad_(False)
    model = smp.DistributedModel(nn.Sequential(first, last))
    smp.set_partition(last, 1)
    return said_in_three_steps(model, "among its arguments")


@pytest.mark.parametrize("how", ["hook", "retain_grad", "requires_grad_", "nothing"])
def test_what_a_module_asks_of_its_callers_tensor_is_said_once(how: str) -> None:
    texts = check_ranks(marks, "2", how)
    assert [len(one) for one in texts] == [0, int(how != "nothing")]
    if how != "nothing":
        assert texts[1][0].startswith("module '1', on rank 1 of the pipeline, has ")
        assert how in texts[1][0]


def after_the_step() -> str:
    model, _ = two()
    step = smp.step(lambda model, x: model(x).sum(), detach_outputs=False)
    loss = step(model, torch.ones(8, 4)).reduce_mean()
    error = ""
    if smp.pp_rank() == 0:
        with pytest.raises(SMPUsageError) as caught:
            loss.backward()
        error = str(caught.value)
    smp.barrier()
    return error


def test_a_backward_pass_after_the_step_is_refused() -> None:
    assert "a backward pass outside the step" in check_ranks(after_the_step, "2")[0]


def two() -> tuple[Any, nn.Module]:
    """Returns a model of two partitions, and the module of the second."""
    smp.init({"partitions": 2, "microbatches": 4, **BY_HAND})
    torch.manual_seed(0)
    last = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
    smp.set_partition(last, 1)
    return model, last


def across(how: str) -> str:
    """Returns the error of a backward pass through another microbatch's calls."""
    model, _ = two()
    kept: list[Tensor] = []

    @smp.step
    def step(model: Any, x: Tensor) -> None:
        y = model(x)
        if how == "batch":  # a loss of the whole batch, in the last microbatch
            kept.append(y)
            if len(kept) == 4:
                model.backward(torch.cat(kept).square().mean())
            return
        loss = y.square().mean() + sum(one.square().mean() for one in kept)
        kept[:] = [y]
        loss.backward(retain_graph=True)

    with pytest.raises(SMPError) as caught:
        step(model, torch.ones(8, 4))
    return str(caught.value)


@pytest.mark.parametrize("how", ["batch", "previous"])
def test_a_backward_pass_through_another_microbatch_is_refused(how: str) -> None:
    for text in check_ranks(across, "2", how):
        assert "another microbatch has found one of its tensors" in text


def inside_is_switched() -> str:
    model, last = two()

    @smp.step
    def step(model: Any, x: Tensor) -> None:
        last[1].eval()
        model.backward(model(x).sum())

    with pytest.raises(SMPError) as caught:
        step(model, torch.ones(8, 4))
    return str(caught.value)


def test_a_part_of_a_module_elsewhere_that_is_set_to_eval_is_refused() -> None:
    for text in check_ranks(inside_is_switched, "2"):
        assert "'1.1' runs on another rank" in text
        assert "has called its eval() in this step" in text


def evaluates_first(pp: int) -> Tensor:
    """Returns what a model gives in inference mode, and then in training."""
    smp.init({"partitions": pp, "microbatches": 2, **BY_HAND})
    torch.manual_seed(0)
    last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
    smp.set_partition(last, pp - 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def evaluate(model: Any, x: Tensor) -> Any:
        return model(x).sum()

    @smp.step
    def train(model: Any, x: Tensor) -> Any:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss.detach()

    with torch.inference_mode():
        found = [*evaluate(model, torch.ones(4, 4)).outputs]
    for _ in range(3):
        optimizer.zero_grad()
        found += train(model, torch.ones(4, 4)).outputs
        optimizer.step()
    return torch.stack([one.clone() for one in found])


def test_training_after_an_evaluation_in_inference_mode() -> None:
    (expected,) = check_ranks(evaluates_first, "1", 1)
    for found in check_ranks(evaluates_first, "2", 2):
        torch.testing.assert_close(found, expected)
