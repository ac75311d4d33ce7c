"""Errors in a step: all ranks raise them, the texts help, and the job can go on."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from ranks import arrive, await_ranks, check_ranks, run_ranks
from smp.failing_models import MANUAL, Faulty, numbered, pair, train
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPError, SMPMicrobatchError, SMPPeerError
from smddp.modelparallel.torch.pipeline import step as step_module

pytestmark = pytest.mark.multiprocess


def failing(pp: int, pipeline: str) -> list[str]:
    smp.init({"partitions": pp, "pipeline": pipeline, **MANUAL})
    parts = []
    for index in range(pp):
        with smp.partition(index):
            parts.append(Faulty(str(index)))
    model = smp.DistributedModel(nn.Sequential(*parts))
    x = numbered()
    expected = float(train(model, x, "").reduce_sum())
    gradients = [parameter.grad.clone() for parameter in model.local_parameters()]
    texts = []
    places = ["body", *(f"{way} {index}" for way in ("forward", "backward") for index in range(pp))]
    for fault in places:
        for part in parts:
            part.fault = fault
        with pytest.raises(SMPMicrobatchError) as caught:
            train(model, x, fault)
        texts.append(str(caught.value).splitlines()[0])
        assert isinstance(caught.value.__cause__, ZeroDivisionError | KeyError)
        # Nothing of the failed step is left: gradients are as before, and the next step works.
        for parameter, gradient in zip(model.local_parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)
        for part in parts:
            part.fault = ""
        for parameter in model.local_parameters():
            parameter.grad = None
        assert float(train(model, x, "").reduce_sum()) == expected
        for parameter, gradient in zip(model.local_parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)
    return texts


@pytest.mark.parametrize(
    ("pp", "pipeline"), [(1, "interleaved"), (2, "simple"), (3, "interleaved")]
)
def test_an_exception_reaches_all_ranks(pp: int, pipeline: str) -> None:
    ranks = check_ranks(failing, str(pp), pp, pipeline)
    for texts in ranks:
        assert texts == ranks[0]
    begin = f"rank {{}} of the {'pipeline' if pp > 1 else 'job'}, microbatch 2: "
    assert ranks[0][0] == begin.format(0) + "KeyError: 'in the body'"
    for index in range(pp):
        assert ranks[0][1 + index] == begin.format(index) + "ZeroDivisionError: in forward"
        assert ranks[0][1 + pp + index] == begin.format(index) + "ZeroDivisionError: in backward"


class IllegibleError(Exception):
    """Has no text, and notes that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.__notes__ = [5]

    def __str__(self) -> str:
        raise ValueError("no text")

    def __reduce__(self) -> Any:
        raise SystemExit(3)


def failing_illegibly() -> str:
    model = pair(Faulty)
    x = torch.ones(8, 4)
    train(model, x, "")

    def fail(*_: Any) -> None:
        raise IllegibleError

    handle = model.get_module()[1].register_forward_hook(fail)
    with pytest.raises(SMPMicrobatchError) as caught:
        train(model, x, "")
    handle.remove()
    train(model, x, "")
    return str(caught.value)


def test_an_exception_that_cannot_say_why_reaches_all_ranks() -> None:
    for text in check_ranks(failing_illegibly, "2"):
        assert "microbatch 0: IllegibleError: (its text cannot be made: ValueError)\n5" in text


def _refuse_to_load(kind: type[BaseException]) -> None:
    raise kind("not here")


class Unloadable:
    """Can be pickled, but not unpickled."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return _refuse_to_load, (self.kind,)


def sending_what_cannot_be_read(kind: type[BaseException]) -> str:
    smp.init({"partitions": 2, **MANUAL})

    class Last(Faulty):
        def forward(self, x: torch.Tensor, _: Any = None) -> torch.Tensor:
            return super().forward(x)

    with smp.partition(1):
        last = Last("1")

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Faulty("0"), last

        def forward(self, x: torch.Tensor, more: Any) -> Any:
            return self.last(self.first(x), more)

    @smp.step
    def step(model: Any, x: torch.Tensor, more: Any) -> Any:
        loss = model(x, more).sum()
        model.backward(loss)
        return loss

    model = smp.DistributedModel(Whole())
    step(model, torch.ones(8, 4), "text")
    with pytest.raises(SMPMicrobatchError) as caught:
        step(model, torch.ones(8, 4), Unloadable(kind))
    step(model, torch.ones(8, 4), "text")
    return str(caught.value)


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_a_value_that_cannot_be_unpickled_is_an_error(kind: type[BaseException]) -> None:
    for text in check_ranks(sending_what_cannot_be_read, "2", kind):
        assert f"rank 0 of the pipeline has sent cannot be unpickled: {kind.__name__}" in text


def failing_between_reductions() -> list[float]:
    """Fails in no step, in one without a reduction, and in one with it; the steps are repeated."""
    smp.init({"partitions": 1, "ddp": True})
    layer = nn.Linear(1, 1, bias=False)
    model = smp.DistributedModel(layer, backward_passes_per_step=2)

    @smp.step
    def step(model: Any, x: torch.Tensor, fails: bool) -> None:
        model.backward(model(x).sum())
        if fails:
            raise ZeroDivisionError

    fails = smp.rank() == 0
    seen = []
    for fails_in in (None, 0, 1):
        layer.weight.grad = None
        for number in range(2):
            x = torch.full((2, 1), 1.0 + smp.rank() + 10 * number)
            # In a step without a reduction, the other replica does not hear of the failure.
            if number == fails_in and (fails or number == 1):
                with pytest.raises(SMPMicrobatchError if fails else SMPPeerError):
                    step(model, x, fails)
            step(model, x, False)
        seen.append(layer.weight.grad.item())
    return seen


def test_a_failed_step_does_not_count_as_a_pass() -> None:
    for seen in check_ranks(failing_between_reductions, "2"):
        # The mean over two replicas of the sums 2 (1 + 11) and 2 (2 + 12).
        assert seen == [26.0] * 3


def interrupted() -> str:
    """Rank 1 does not come to the second step, and rank 0 gets a signal there."""
    smp.init({"partitions": 3, **MANUAL})
    parts = []
    for index in range(3):
        with smp.partition(index):
            parts.append(nn.Linear(4, 4))
    model = smp.DistributedModel(nn.Sequential(*parts))
    train(model, torch.ones(8, 4), "")
    if smp.rank() == 1:
        await_ranks("out", 2)
        return ""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if smp.rank() == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises((KeyboardInterrupt, SMPPeerError)) as caught:
        train(model, torch.ones(8, 4), "")
    arrive("out")
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_signal_ends_a_step() -> None:
    first, _, last = check_ranks(interrupted, "3")
    assert first.startswith("KeyboardInterrupt")
    assert last.startswith("SMPPeerError")
    assert "rank 0" in last


def replica_fails() -> list[str]:
    smp.init({"partitions": 1, **MANUAL})
    part = Faulty("0")
    model = smp.DistributedModel(part)
    x = numbered()
    seen = []
    for number in range(3):
        part.fault = "forward 0" if number == 1 and smp.rank() == 1 else ""
        part.weight.grad = None
        try:
            train(model, x, "")
            seen.append(str(part.weight.grad.tolist()))
        except (SMPMicrobatchError, SMPPeerError) as error:
            assert part.weight.grad is None
            seen.append(f"{type(error).__name__}: {error}".splitlines()[0])
    return seen


def test_a_failure_of_one_replica_reaches_the_others() -> None:
    zero, one = check_ranks(replica_fails, "2")
    cause = "SMPMicrobatchError: rank 1 of the job, microbatch 2: ZeroDivisionError: in forward"
    elsewhere = "SMPPeerError: the step failed on rank 1 of the job"
    assert zero == [zero[0], f"{elsewhere}: {cause}", zero[0]]
    assert one == [zero[0], cause, zero[0]]


def dying() -> str:
    class Deadly(Faulty):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.seen > 4 and smp.pp_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x)

    model = pair(Deadly)
    train(model, torch.ones(8, 4), "")
    with pytest.raises(SMPPeerError) as caught:
        train(model, torch.ones(8, 4), "")
    # The pipeline stays broken: the next step raises at once.
    earlier = r"left the job in an earlier step: .*nothing comes from rank 1 of the pipeline"
    with pytest.raises(SMPPeerError, match=earlier):
        train(model, torch.ones(8, 4), "")
    return str(caught.value)


def test_a_rank_that_dies_is_named() -> None:
    alive, dead = run_ranks(dying, "2")
    assert dead.status == -signal.SIGKILL
    assert alive.returned, str(alive)
    assert alive.value.startswith("nothing comes from rank 1 of the pipeline any more")


def silent(fault: str) -> str:
    """Rank 1 ends the second step only when rank 0 has stopped waiting for that."""
    model = pair(Faulty)
    x = numbered()
    train(model, x, "")
    executor = model.runtime.executor
    if smp.pp_rank() == 0:
        step_module.END_TIMEOUT = 0.5
        with pytest.raises(SMPPeerError) as caught:
            train(model, x, fault)
        # What comes now from rank 1 is of the step before; the next step must not take it.
        arrive("raised")
        await_ranks("ended", 1)
        earlier = r"left the job in an earlier step: .*rank 1 of the pipeline has not ended"
        with pytest.raises(SMPPeerError, match=earlier):
            train(model, x, "")
        return str(caught.value)
    end = executor.mail.send_end

    def end_late(header: Any, tensors: Any) -> None:
        await_ranks("raised", 1)
        end(header, tensors)

    executor.mail.send_end = end_late
    if fault:
        with pytest.raises(SMPMicrobatchError, match="in the body"):
            train(model, x, fault)
    else:
        train(model, x, fault)
    arrive("ended")
    return ""


@pytest.mark.parametrize("fault", ["", "body"])
def test_a_rank_that_does_not_end_its_step_is_lost(fault: str) -> None:
    text, _ = check_ranks(silent, "2", fault)
    wanted = "rank 1 of the pipeline has not ended its step in time"
    if fault:
        wanted += ", which had failed on rank 0 of the pipeline: KeyError: 'in the body'"
    assert text == wanted


def fails_while_gathering(failing: tuple[int, ...], backend: str) -> str:
    """The model's own code fails in `state_dict`, on some ranks."""
    model = pair(ddp_dist_backend=backend)
    train(model, torch.ones(8, 4), "")

    def fail(*_: Any) -> None:
        raise RuntimeError("by the user")

    if smp.rank() in failing:
        model.get_module().register_state_dict_post_hook(fail)
    alone = dist.new_group(timeout=timedelta(seconds=3))
    smp.state.groups._by_kind.update(pp=alone, mp=alone)
    with pytest.raises(RuntimeError) as caught:
        model.state_dict()
    if smp.rank() in failing:
        arrive("failed")
    await_ranks("failed", len(failing))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_an_error_of_the_script_is_no_missing_rank(backend: str) -> None:
    assert (
        check_ranks(fails_while_gathering, "2", (0, 1), backend)
        == ["RuntimeError: by the user"] * 2
    )


def test_a_call_that_fails_on_another_rank_names_no_missing_rank() -> None:
    failed, waited = check_ranks(fails_while_gathering, "2", (0,), "auto")
    assert failed == "RuntimeError: by the user"
    assert (
        waited
        == "SMPPeerError: state_dict has failed on rank 0 of the job: RuntimeError: by the user"
    )


def fails_outside_a_step() -> float:
    """A backward pass fails when it has given one parameter its gradient; the next one does not."""
    smp.init({"partitions": 1, **MANUAL})
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    for parameter in layers.parameters():
        nn.init.ones_(parameter)
    model = smp.DistributedModel(layers)
    x = torch.full((2, 4), float(1 + smp.rank()))

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    def spoil(_: Any, __: Any, result: torch.Tensor) -> None:
        result.register_hook(fail)  # type: ignore[no-untyped-call]

    inner = layers[0].register_forward_hook(spoil)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    inner.remove()
    assert layers[1].weight.grad is not None
    assert layers[0].weight.grad is None
    model.zero_grad()
    model(x).sum().backward()
    return float(layers[0].weight.grad[0, 0])


def test_gradients_are_reduced_after_a_failed_backward_pass_outside_a_step() -> None:
    # Each row of ones gives 1 on rank 0, 2 on rank 1; there are two.
    assert check_ranks(fails_outside_a_step, "2") == [3.0, 3.0]


def fails_when_gradients_are_there(views: bool) -> list[list[float]]:
    """A step fails on one rank; before and after it, gradients accumulate."""
    smp.init({"partitions": 1, **MANUAL})
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    model = smp.DistributedModel(module, gradient_as_bucket_view=views)
    found = []
    for number in range(3):
        x = torch.full((8, 4), float(1 + smp.rank() + number))
        if number == 1:
            with pytest.raises(SMPError):
                spoilt_at_its_end(model, x, smp.rank() == 1)
        else:
            spoilt_at_its_end(model, x, False)
        found.append([float(p.grad.sum()) for p in module.parameters() if p.grad is not None])
    return found


@smp.step
def spoilt_at_its_end(model: Any, x: torch.Tensor, spoils: bool) -> None:
    model.backward(model(x).square().mean())
    if spoils:
        raise ZeroDivisionError


@pytest.mark.parametrize("views", [False, True])
def test_gradients_from_before_a_failed_step_stay(views: bool) -> None:
    torch.manual_seed(0)
    module, wanted = nn.Linear(4, 4), []
    for number in range(3):
        for rank in range(2) if number != 1 else ():
            x = torch.full((8, 4), float(1 + rank + number))
            (module(x).square().mean() / 2).backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        wanted.append([pytest.approx(float(grad.sum()), rel=1e-5) for grad in grads])
    assert check_ranks(fails_when_gradients_are_there, "2", views) == [wanted] * 2
