"""What cannot be divided or sent is refused by name."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from ranks import check_ranks
from smp.common import BY_HAND, squares, sums
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError, SMPPartitionError, SMPUsageError

pytestmark = pytest.mark.multiprocess


@on_ranks("2")
def test_models_that_cannot_be_divided() -> None:
    smp.init({"partitions": 2, "auto_partition": False, "default_partition": 0, "ddp": True})
    plain = nn.Linear(2, 2)
    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(2, 2))
    cases: list[tuple[nn.Module, str]] = [
        (nn.Sequential(plain, nn.LazyLinear(2)), r"module '1' is a LazyLinear.*example"),
        (nn.LazyBatchNorm1d(), r"the model is a LazyBatchNorm1d.*example"),
        (nn.Sequential(plain, bare), r"parameter '1.0.weight'.*meta.*to_empty"),
        (
            nn.Sequential(plain, nn.BatchNorm1d(2, affine=False, device="meta")),
            r"buffer '1.running_mean'.*meta.*to_empty",
        ),
        (
            nn.Sequential(plain, nn.parallel.DistributedDataParallel(nn.Linear(2, 2))),
            r"module '1' is a DistributedDataParallel",
        ),
    ]
    for model, text in cases:
        with pytest.raises(SMPUsageError, match=text):
            smp.DistributedModel(model)
    lazy = nn.LazyLinear(2)
    lazy(torch.ones(1, 2))
    model = smp.DistributedModel(nn.Sequential(plain, lazy))
    with pytest.raises(SMPUsageError, match="do not use DistributedDataParallel"):
        nn.parallel.DistributedDataParallel(model)


class Talkative(nn.Module):
    """Returns an object with its tensor, and takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.bad = False

    def forward(self, x: torch.Tensor, *, options: Any = None) -> Any:
        """The object pickles unless it is bad."""
        return {"y": self.linear(x), "info": [1.5, threading.Lock() if self.bad else "fine"]}


def objects() -> list[str]:
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(()))
            with smp.partition(1):
                self.part = Talkative()

        def forward(self, x: torch.Tensor, options: Any) -> Any:
            return self.part(x, options={"hook": options})

    root = Root()
    model = smp.DistributedModel(root)

    @smp.step
    def train(model: Any, x: torch.Tensor, options: Any, result: Any) -> Any:
        out = model(x, options)
        model.backward(out["y"].sum() * root.own)
        return {"loss": out["y"].sum().detach(), "extra": (2.5, result)}

    x = torch.ones(4, 2)
    texts = []
    for _ in range(2):
        train(model, x, "fine", "fine")
        with pytest.raises(SMPUsageError) as refused:
            train(model, x, "fine", threading.Lock())
        texts.append(str(refused.value))
        with pytest.raises(SMPMicrobatchError) as caught:
            train(model, x, lambda: 0, "fine")
        texts.append(str(caught.value))
        root.part.bad = True
        with pytest.raises(SMPMicrobatchError) as caught:
            train(model, x, "fine", "fine")
        texts.append(str(caught.value))
        root.part.bad = False
    train(model, x, "fine", "fine")
    return texts


def test_objects_that_do_not_pickle() -> None:
    zero, one = check_ranks(objects, "2")
    assert [text.partition("\n")[0] for text in zero] == [text.partition("\n")[0] for text in one]
    for result, argument, output in (zero[:3], zero[3:]):
        assert "the step function returns a lock as ['extra'][1]" in result
        assert "module 'part' gets a function as options['hook']" in argument
        assert "module 'part' returns a lock as ['info'][1]" in output
        for text in (result, argument, output):
            assert "cannot be sent" in text


def nested() -> list[str]:
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    module = nn.TransformerEncoder(layer, 2)
    model = smp.DistributedModel(module)
    smp.set_partition(module.layers[1], 1)

    @smp.step
    def step(model: Any, x: torch.Tensor, mask: Any = None, returns: bool = False) -> Any:
        y = model(x, src_key_padding_mask=mask)
        return torch.nested.nested_tensor([y[0]]) if returns else y

    model.eval()
    x = torch.ones(4, 3, 4)
    mask = torch.tensor([[False, False, True]] * 4)
    texts = []
    with torch.no_grad():
        for more in ({"mask": mask}, {"returns": True}):
            step(model, x)
            with pytest.raises(SMPMicrobatchError) as caught:
                step(model, x, **more)
            texts.append(str(caught.value))
        step(model, x)
    return texts


def test_nested_tensors() -> None:
    for texts in check_ranks(nested, "2"):
        for text in texts:
            assert "TypeError: smp cannot send nested tensors" in text
            assert "enable_nested_tensor=False" in text


class Modes(nn.Module):
    """Sets a batch norm to eval in its forward method, and its neighbour if it is told to."""

    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.inner = Modes(False) if inner else None
        self.sets_inner = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.eval()
        if self.sets_inner and self.inner is not None:
            self.inner.eval()
        y: torch.Tensor = self.norm(x)
        return y if self.inner is None else self.inner(y)  # type: ignore[no-any-return]


def modes(pp: int) -> Any:
    """Returns the results of steps whose body calls eval() somewhere, or their errors."""
    smp.init({"partitions": pp, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    module = Modes(True)
    model = smp.DistributedModel(module)
    smp.set_partition(module.inner, pp - 1)

    @smp.step
    def step(model: Any, x: torch.Tensor, how: str) -> Any:
        if how == "model":
            model.eval()
        y = model(x)
        if how == "around":
            model.eval()
            y = y + model(x)
            model.train()
        if how == "part" and module.inner is not None:
            module.inner.norm.eval()
        return y

    found = []
    for how in ("", "model", "", "around", "part", "forward", ""):
        model.train()
        module.sets_inner = how == "forward"
        try:
            found.append(step(model, torch.arange(8.0).view(4, 2), how).concat())
        except SMPMicrobatchError as error:
            found.append(str(error))
        except SMPUsageError as error:
            found.append(str(error))
    return found


def test_train_and_eval_in_a_step_are_refused_for_other_ranks() -> None:
    (alone,) = check_ranks(modes, "1", 1)
    for found in check_ranks(modes, "2", 2):
        for place, expected in enumerate(alone):
            if place in (1, 3, 4, 5):
                name = "inner.norm" if place == 4 else "inner"
                text = f"module {name!r} runs on another rank of the pipeline than the code that"
                assert text in found[place], (place, found[place])
            else:
                torch.testing.assert_close(found[place], expected)


def changed(parts: int, what: str) -> str:
    """Changes a model that is wrapped already; returns the error."""
    smp.init({"partitions": parts, "microbatches": 2})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    net = model.get_module()
    if "late" in what:
        sums(model, torch.ones(2, 2))
    if "module" in what:
        net[1] = nn.Linear(2, 2)
    else:
        net[1].weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wraps = "optimizer" in what
    with pytest.raises(SMPUsageError if wraps else SMPMicrobatchError) as caught:
        smp.DistributedOptimizer(optimizer) if wraps else sums(model, torch.ones(2, 2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("parts", "what", "text"),
    [
        (1, "module, optimizer", "is no parameter of the smp.DistributedModel, or was put into it"),
        (1, "parameter, optimizer", "or was put into it later"),
        (2, "module, optimizer", "or was put into it later"),
        (2, "parameter, late, optimizer", "or was put into it later"),
        (2, "module", "module '1' was put into the model after smp.DistributedModel"),
    ],
)
def test_models_that_change_after_they_are_wrapped(parts: int, what: str, text: str) -> None:
    for found in check_ranks(changed, str(parts), parts, what):
        assert text in found


# What the body of a step must not call; False: one process may, with nobody to wait for.
IN_A_STEP: dict[str, tuple[bool, Callable[[Any, Any, Any], object]]] = {
    "optimizer.zero_grad()": (True, lambda model, optimizer, scaler: optimizer.zero_grad()),
    "model.zero_grad()": (True, lambda model, optimizer, scaler: model.zero_grad()),
    "scaler.unscale_()": (True, lambda model, optimizer, scaler: scaler.unscale_(optimizer)),
    "scaler.step()": (True, lambda model, optimizer, scaler: scaler.step(optimizer)),
    "scaler.update()": (True, lambda model, optimizer, scaler: scaler.update()),
    "smp.save_checkpoint()": (
        True,
        lambda model, optimizer, scaler: smp.save_checkpoint("nowhere", "tag", model=model),
    ),
    "smp.resume_from_checkpoint()": (
        True,
        lambda model, optimizer, scaler: smp.resume_from_checkpoint("nowhere"),
    ),
    "model.state_dict()": (False, lambda model, optimizer, scaler: model.state_dict()),
    "model.load_state_dict()": (
        False,
        lambda model, optimizer, scaler: model.load_state_dict({}, strict=False),
    ),
    "model.cpu()": (False, lambda model, optimizer, scaler: model.cpu()),
    "optimizer.state_dict()": (False, lambda model, optimizer, scaler: optimizer.state_dict()),
    "optimizer.load_state_dict()": (
        False,
        lambda model, optimizer, scaler: optimizer.load_state_dict(optimizer.orig_state_dict()),
    ),
}
FP16_ONLY = "optimizer.update_master_grads()"


@smp.step
def misusing(model: Any, optimizer: Any, x: torch.Tensor, scaler: Any) -> str:
    """Makes calls that belong outside; returns those that have worked."""
    model.backward(model(x).sum())
    worked = []
    calls = dict(IN_A_STEP)
    if smp.state.cfg.fp16:
        calls[FP16_ONLY] = True, lambda model, optimizer, scaler: optimizer.update_master_grads()
    for name, (_, call) in calls.items():
        text = ""
        try:
            call(model, optimizer, scaler)
        except SMPUsageError as error:
            text = str(error)
        if f"{name} has to be outside the function decorated" not in text:
            worked.append(text or name)
    return "\n".join(worked)


def in_a_step(parts: int, config: dict[str, Any]) -> list[str]:
    smp.init({"partitions": parts, "microbatches": 2, **config})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    found: list[Any] = []
    # Hooks run on all ranks.
    model.register_post_partition_hook(lambda model, _: found.append(model.state_dict()))
    model.register_post_step_hook(lambda model, optimizer: optimizer.zero_grad())
    scaler = smp.amp.GradScaler("cpu")
    first, second = misusing(model, optimizer, torch.ones(2, 2), scaler)
    assert first == second
    assert len(found[0]) == 4
    assert all(parameter.grad is None for parameter in model.local_parameters())
    misusing(model, optimizer, torch.ones(2, 2), scaler)
    assert all(parameter.grad is not None for parameter in model.local_parameters())
    optimizer.zero_grad()
    model.zero_grad()
    return str(first).splitlines()


@pytest.mark.parametrize(
    ("parts", "ranks", "config"),
    [
        *[(1, 1, {}), (2, 2, {}), (2, 2, {"fp16": True})],
        (1, 2, {"ddp": True, "sharded_data_parallel_degree": 2}),
    ],
)
def test_what_is_refused_in_a_step(parts: int, ranks: int, config: dict[str, Any]) -> None:
    allowed = [name for name, (always, _) in IN_A_STEP.items() if not always]
    for worked in check_ranks(in_a_step, str(ranks), parts, config):
        if "sharded_data_parallel_degree" in config:
            worked = [text for text in worked if "model.cpu() does not work" not in text]
        assert worked == (allowed if ranks == 1 else [])


@on_ranks("2")
def test_changes_in_a_step_that_other_ranks_do_not_see_are_refused() -> None:
    smp.init({"partitions": 2, "auto_partition": False, "default_partition": 0})
    first = nn.Linear(2, 2)
    with smp.partition(1):
        second = nn.Sequential(nn.Linear(2, 2))
    model = smp.DistributedModel(nn.Sequential(first, second))
    change: Any = None

    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        loss = model(x).sum()
        if change is not None:
            change()
        model.backward(loss + model(x).sum())

    weight = second[0].weight
    train(model, torch.ones(2, 2))
    changes: list[tuple[Any, str]] = [
        (lambda: weight.requires_grad_(False), "requires_grad = False in a step would not"),
        (lambda: second.requires_grad_(False), "requires_grad = False in a step would not"),
        (lambda: setattr(weight, "requires_grad", False), "requires_grad = False in a step would"),
        (lambda: weight.register_hook(print), r"register_hook\(\) in a step would not"),
        (lambda: second[0].register_forward_pre_hook(print), "in this step to module '1.0', which"),
        (lambda: second[0].register_full_backward_hook(print), "in this step to module '1.0', wh"),
        (
            lambda: second[0].register_forward_hook(lambda *_: torch.ones(2, 2)),
            "in a step to module '1.0', which runs on another rank of the pipeline, returns a val",
        ),
    ]
    for change, text in changes:  # noqa: B007  the step uses it
        with pytest.raises(SMPMicrobatchError, match=text):
            train(model, torch.ones(2, 2))
        for part in (second, second[0]):
            for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
                hooks.clear()
    harmless: list[Any] = [
        lambda: weight.requires_grad_(),
        lambda: first.weight.requires_grad_(False),
        lambda: first.register_forward_hook(lambda *_: None),
        lambda: torch.ones(1, requires_grad=True).register_hook(print),
    ]
    for change in harmless:  # noqa: B007
        train(model, torch.ones(2, 2))
    # Between steps they are as in torch, on all ranks.
    change, called = None, []
    weight.requires_grad_(False)
    second.register_forward_hook(lambda *_: called.append(1))
    model.zero_grad()
    train(model, torch.ones(2, 2))
    if smp.rank() == 1:
        assert weight.grad is None
        assert second[0].bias.grad is not None
        assert len(called) == 2


class OneMemory(nn.Module):
    """Two parameters share their memory, as old scripts tie weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.middle, self.large = nn.Linear(4, 4), nn.Linear(4, 16)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight.data = self.first.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x))
        return self.last(x + self.large(x).view(-1, 4, 4).sum(1))


def tied_by_memory(parts: int, delayed: bool, config: dict[str, Any]) -> Any:
    smp.init({"partitions": parts, "microbatches": 2, **config})
    torch.manual_seed(0)
    with smp.delay_param_initialization(enabled=delayed):
        module = OneMemory()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    for step in range(3):
        optimizer.zero_grad()
        squares(model, torch.linspace(-1, step, 16).view(4, 4))
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("parts", "delayed", "config"),
    [
        *[(1, False, {}), (2, False, {}), (2, True, {}), (2, False, {"skip_tracing": True})],
        (1, False, {"ddp": True, "shard_optimizer_state": True}),
    ],
)
def test_parameters_of_one_memory_stay_together(
    parts: int, delayed: bool, config: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = OneMemory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.linspace(-1, step, 16).view(4, 4)).square().mean().backward()
        optimizer.step()
    ranks = "2" if parts == 2 or config else "1"
    for found in check_ranks(tied_by_memory, ranks, parts, delayed, config):
        torch.testing.assert_close(found, dict(model.state_dict()))


def torn_apart(config: dict[str, Any]) -> str:
    smp.init({"microbatches": 2, **config})
    module = OneMemory()

    def divide() -> None:
        model = smp.DistributedModel(module)
        smp.set_partition(module.last, 1)
        smp.step(lambda model, x: model(x))(model, torch.ones(4, 4))

    with pytest.raises((SMPUsageError, SMPPartitionError)) as caught:
        divide()
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"partitions": 2, **BY_HAND}, "'weight' of 'last' is shared with a module of partition 0"),
        ({"partitions": 2}, "'weight' of 'last' is shared with a module of partition 0"),
        (
            {
                "ddp": True,
                "sharded_data_parallel_degree": 2,
                "sdp_param_persistence_threshold": 1,
            },
            "parameters 'first.weight' and 'last.weight' share memory",
        ),
    ],
)
def test_parameters_of_one_memory_cannot_be_divided(config: dict[str, Any], text: str) -> None:
    for found in check_ranks(torn_apart, "2", config):
        assert text in found


class Switched(nn.Module):
    """Uses a number, and a module that another one may take the place of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = 1.0, 0
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.scale * self.inner(x)  # type: ignore[no-any-return]


class Switches(nn.Module):
    """Changes what another module does."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(2, 2), Switched(), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.change == "scale":
            self.second.scale = 2.0
        elif self.change == "inner":
            self.second.inner = nn.Linear(2, 2)
        else:
            self.second.scale = 1.0
            self.first.extra = 3
        return self.second(self.first(x))  # type: ignore[no-any-return]


def set_elsewhere(change: str) -> list[str]:
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    module = Switches(change)
    model = smp.DistributedModel(module)
    smp.set_partition(module.second, 1)
    step = smp.step(lambda model, x: model(x))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            step(model, torch.ones(4, 2))
    return [str(one.message) for one in found if "does not see" in str(one.message)]


@pytest.mark.parametrize("change", ["scale", "inner", "nothing"])
def test_attributes_that_are_set_on_another_rank_are_said(change: str) -> None:
    texts, others = check_ranks(set_elsewhere, "2", change)
    assert others == []
    if change == "nothing":
        assert texts == []
    else:
        assert len(texts) == 1
        assert f"has changed attribute {change!r} of a Switched in a step" in texts[0]
        assert "Module 'second' on rank 1" in texts[0]
