"""What cannot be divided or sent is refused by name."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from ranks import check_ranks
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp_smp.errors import SMPMicrobatchError, SMPUsageError

pytestmark = pytest.mark.multiprocess


def models() -> None:
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


def test_models_that_cannot_be_divided() -> None:
    check_ranks(models, "2")


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
        """Returns a matrix of the shape of `x`."""
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

    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    net = model.get_module()
    if "late" in what:
        train(model, torch.ones(2, 2))
    if "module" in what:
        net[1] = nn.Linear(2, 2)
    else:
        net[1].weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wraps = "optimizer" in what
    with pytest.raises(SMPUsageError if wraps else SMPMicrobatchError) as caught:
        smp.DistributedOptimizer(optimizer) if wraps else train(model, torch.ones(2, 2))
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
