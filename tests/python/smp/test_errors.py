"""Errors and failures: all ranks raise them, the texts help, and the job can go on."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from ranks import arrive, await_ranks, check_ranks, listen, run_ranks
from smp.test_config import WRONG, WRONG_TOGETHER
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.config import ENVIRONMENT_VARIABLE
from smddp.modelparallel.core.errors import (
    SMPConfigurationError,
    SMPError,
    SMPInitializationError,
    SMPMicrobatchError,
    SMPPartitionError,
    SMPPeerError,
    SMPUsageError,
)
from smddp.modelparallel.torch.job import meeting
from smddp.modelparallel.torch.pipeline import executor as executor_module

pytestmark = pytest.mark.multiprocess

MANUAL = {"auto_partition": False, "default_partition": 0, "ddp": True, "microbatches": 4}


class Faulty(nn.Module):
    """Fails on a given rank in a given step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.where = where
        self.fault = ""
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.fault == f"forward {self.where}" and bool(x[0, 0] == 2):
            raise ZeroDivisionError("in forward")
        y = x * self.weight
        if self.fault == f"backward {self.where}" and bool(x[0, 0] == 2):
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("in backward")


@smp.step
def train(model: Any, x: torch.Tensor, fault: str) -> Any:
    if fault == "body" and bool(x[0, 0] == 2):
        raise KeyError("in the body")
    loss = model(x).sum()
    model.backward(loss)
    return loss


def failing(pp: int, pipeline: str) -> list[str]:
    smp.init({"partitions": pp, "pipeline": pipeline, **MANUAL})
    parts = []
    for index in range(pp):
        with smp.partition(index):
            parts.append(Faulty(str(index)))
    model = smp.DistributedModel(nn.Sequential(*parts))
    x = torch.arange(4.0).repeat_interleave(2).unsqueeze(1).expand(8, 4)
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
    smp.init({"partitions": 2, **MANUAL})
    with smp.partition(1):
        last = Faulty("1")
    model = smp.DistributedModel(nn.Sequential(Faulty("0"), last))
    x = torch.ones(8, 4)
    train(model, x, "")

    def fail(*_: Any) -> None:
        raise IllegibleError

    handle = last.register_forward_hook(fail)
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


@smp.step
def evaluate(model: Any, x: torch.Tensor) -> Any:
    return model(x)


def differing() -> str:
    smp.init({"partitions": 2, **MANUAL})
    with smp.partition(1):
        last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
    executor = model.runtime.executor
    store, take = dist.distributed_c10d._get_default_store(), executor.take
    x = torch.ones(8, 4)
    train(model, x, "")

    def watched(block: bool) -> Any:
        if block and smp.rank() == 0:
            store.set("rank 0 has sent its call graphs", "")
        return take(block)

    executor.take = watched
    if smp.rank() == 1:
        store.wait(["rank 0 has sent its call graphs"])
    with pytest.raises(SMPUsageError) as caught:
        train(model, x, "") if smp.rank() == 0 else evaluate(model, x)
    # The graphs that have come before the failure are known.
    train(model, x, "")
    return str(caught.value)


def test_ranks_in_steps_of_different_names() -> None:
    first, second = check_ranks(differing, "2", timeout=20)
    assert first == second
    for text in (first, second):
        assert "rank 0 of the pipeline is in the step train, rank 1 in evaluate" in text


def other_modules(different: tuple[int, ...]) -> str:
    """Some ranks have another model than the others."""
    smp.init({"partitions": 2, **MANUAL})
    parts = [nn.Linear(4, 4), nn.Linear(4, 4)]
    if smp.rank() in different:
        parts.append(nn.Sequential(*(nn.ReLU() for _ in range(6))))
    model = smp.DistributedModel(nn.Sequential(*parts))
    with pytest.raises((SMPUsageError, SMPMicrobatchError, SMPPeerError)) as caught:
        train(model, torch.ones(8, 4), "")
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "different", "text"),
    [
        (2, (0,), "ranks 0 and 1 of the pipeline differ: only rank 0 has {}. All"),
        (2, (1,), "ranks 0 and 1 of the pipeline differ: only rank 1 has {}. All"),
        (4, (2, 3), "rank 0 and rank 2 of the job differ: only rank 2 has {}. All"),
    ],
)
def test_ranks_with_other_modules(ranks: int, different: tuple[int, ...], text: str) -> None:
    wanted = text.format("'2', '2.0', '2.1', '2.2', '2.3' and 2 more")
    for found in check_ranks(other_modules, str(ranks), different):
        assert wanted in found


def pinning_in_vain() -> None:
    smp.init({"partitions": 2, "ddp": True})
    with pytest.warns(UserWarning, match="no effect while auto_partition is on"), smp.partition(0):
        nn.Linear(1, 1)


def test_partitions_asked_for_in_vain() -> None:
    check_ranks(pinning_in_vain, "2")


def failing_at_first() -> tuple[str, list[int], float]:
    """The first step fails on rank 0 before rank 1 has got the partition."""
    smp.init({"partitions": 2, **MANUAL})
    first = Faulty("0")
    with smp.partition(1):
        last = Faulty("1")
    model = smp.DistributedModel(nn.Sequential(first, last))
    placed: list[int] = []
    model.register_post_partition_hook(lambda m, o: placed.append(len(list(m.local_parameters()))))
    executor, store = model.runtime.executor, dist.distributed_c10d._get_default_store()
    if smp.pp_rank() == 0:
        end = executor.ending._send_end

        def then_tell(header: Any, tensors: Any) -> None:
            end(header, tensors)
            store.set("rank 0 has failed", "")

        executor.ending._send_end = then_tell
    else:
        store.wait(["rank 0 has failed"])
    first.fault = "forward 0"
    x = torch.tensor([2.0, 0, 1, 3]).repeat_interleave(2).unsqueeze(1).expand(8, 4)
    with pytest.raises(SMPMicrobatchError) as caught:
        train(model, x, "")
    first.fault = ""
    return str(caught.value), placed, float(train(model, x, "").reduce_sum())


def test_the_partition_stands_if_the_first_step_fails() -> None:
    for text, placed, loss in check_ranks(failing_at_first, "2"):
        assert text.startswith("rank 0 of the pipeline, microbatch 0: ZeroDivisionError")
        assert placed == [1]
        assert loss == 48


def replica_fails_at_first(where: str, dp: int) -> list[tuple[str, bool]]:
    """The first step fails on one replica only: before, in or after the call that partitions."""
    smp.init({"partitions": 2, **MANUAL, "auto_partition": True})
    parts = [Faulty("0"), Faulty("1")]
    model = smp.DistributedModel(nn.Sequential(*parts))
    smp.set_partition(parts[1], 1)
    x = torch.arange(4.0).repeat_interleave(2).unsqueeze(1).expand(8, 4)
    faulty = smp.dp_rank() == dp
    seen: list[tuple[str, bool]] = []

    def attempt(function: Any, *args: Any) -> None:
        try:
            function(model, *args)
        except (SMPMicrobatchError, SMPPeerError, SMPUsageError) as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            seen.append((text, model.partitioned))

    if where == "arguments":
        attempt(train, torch.ones(6, 4) if faulty else x, "")
    elif where == "body":
        attempt(broken_body, x, faulty)
    elif where == "no call":
        attempt(called_by_some, x, not faulty)
    elif where == "trace":
        model.runtime.placement.from_checkpoint = Unusable() if faulty else None
        attempt(train, x, "")
        model.runtime.placement.from_checkpoint = None
    else:
        parts[1].fault = "forward 1" if faulty else ""
        attempt(train, x, "")
        parts[1].fault = ""
    for parameter in model.local_parameters() if model.partitioned else ():
        assert parameter.grad is None
    assert float(train(model, x, "").reduce_sum()) == 48
    (local,) = model.local_parameters()
    assert local.grad.tolist() == [3] * 4
    return seen


class Unusable:
    """Stands for the decision of a checkpoint; its methods raise."""

    def fits(self, names: list[str], parts: int) -> bool:
        raise ZeroDivisionError("in the decision")


@smp.step
def broken_body(model: Any, x: torch.Tensor, fails: bool) -> Any:
    if fails:
        raise KeyError("in the body")
    model.backward(model(x).sum())


@smp.step
def called_by_some(model: Any, x: torch.Tensor, calls: bool) -> Any:
    if calls:
        model.backward(model(x).sum())


def named(rank: int, replica: int) -> str:
    """Returns how errors name a rank of a pipeline of two."""
    return f"rank {rank} of the pipeline" + (
        f" (rank {2 * replica + rank} of the job)" if replica else ""
    )


@pytest.mark.parametrize(
    ("where", "dp", "cause", "partitioned"),
    [
        ("arguments", 0, "SMPUsageError: {zero}: argument 'x' has a tensor of shape", False),
        ("arguments", 1, "SMPUsageError: {zero}: argument 'x' has a tensor of shape", False),
        ("body", 1, "SMPMicrobatchError: {zero}, microbatch 0: KeyError: 'in the body'", False),
        ("trace", 0, "ZeroDivisionError: in the decision", False),
        ("module", 1, "SMPMicrobatchError: {one}, microbatch 2: ZeroDivisionError: in ", True),
    ],
)
def test_a_first_step_that_fails_on_one_replica(
    where: str, dp: int, cause: str, partitioned: bool
) -> None:
    cause = cause.format(zero=named(0, dp), one=named(1, dp))
    for rank, seen in enumerate(check_ranks(replica_fails_at_first, "4", where, dp)):
        ((text, divided),) = seen
        assert divided == partitioned
        if rank // 2 == dp:
            assert cause in text
            assert "the step failed on" not in text
            continue
        # Before the partition only rank 0 of the pipeline learns of it; later each rank does.
        through = "" if partitioned else f"{named(0, rank // 2)}: "
        by = 2 * dp + (rank % 2 if partitioned else 0)
        assert text.startswith(f"SMPPeerError: {through}the step failed on rank {by} of the job: ")
        assert cause in text


@pytest.mark.parametrize("dp", [0, 1])
def test_replicas_that_do_not_all_call_the_model_in_the_first_step(dp: int) -> None:
    for rank, seen in enumerate(check_ranks(replica_fails_at_first, "4", "no call", dp)):
        ((text, partitioned),) = seen
        assert not partitioned
        assert text.startswith("SMPPeerError: ")
        assert (
            f"the step has called the model on rank {2 - 2 * dp} of the job, and not on rank "
            f"{2 * dp}: all replicas have to make the first call"
        ) in text, rank


def nothing_to_call() -> float:
    """Steps that do not call the model yet, and a failure in one of them."""
    smp.init({"partitions": 2, **MANUAL})
    with smp.partition(1):
        last = Faulty("1")
    model = smp.DistributedModel(nn.Sequential(Faulty("0"), last))
    x = torch.ones(8, 4)
    called_by_some(model, x, False)
    with torch.no_grad():
        called_by_some(model, x, False)
    with pytest.raises((SMPMicrobatchError, SMPPeerError), match="KeyError"):
        broken_body(model, x, smp.dp_rank() == 1)
    called_by_some(model, x, False)
    return float(train(model, x, "").reduce_sum())


def test_first_steps_that_do_not_call_the_model() -> None:
    assert check_ranks(nothing_to_call, "4") == [32] * 4


def swallowed() -> list[str]:
    """A body that goes on after the model could not be partitioned."""
    smp.init({"partitions": 2, **MANUAL})
    parts = [Faulty("0"), Faulty("1")]
    model = smp.DistributedModel(nn.Sequential(*parts))
    smp.set_partition(parts[1], 1)
    if smp.dp_rank() == 0:
        model.runtime.placement.from_checkpoint = Unusable()
    seen: list[str] = []

    @smp.step
    def stubborn(model: Any, x: torch.Tensor) -> Any:
        try:
            loss = model(x).sum()
        except ZeroDivisionError:
            loss = model(x).sum()
        model.backward(loss)

    with pytest.raises((SMPMicrobatchError, SMPPeerError)) as caught:
        stubborn(model, torch.ones(8, 4))
    seen.append(str(caught.value).splitlines()[0])
    model.runtime.placement.from_checkpoint = None
    stubborn(model, torch.ones(8, 4))
    return seen


def test_a_body_that_goes_on_without_a_partition() -> None:
    for rank, (text,) in enumerate(check_ranks(swallowed, "4")):
        wanted = "was called again in a first step" if rank < 2 else "ZeroDivisionError"
        assert wanted in text


def replica_fails() -> list[str]:
    smp.init({"partitions": 1, **MANUAL})
    part = Faulty("0")
    model = smp.DistributedModel(part)
    x = torch.arange(4.0).repeat_interleave(2).unsqueeze(1).expand(8, 4)
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
    smp.init({"partitions": 2, **MANUAL})

    class Deadly(Faulty):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.seen > 4 and smp.pp_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x)

    with smp.partition(1):
        last = Deadly("1")
    model = smp.DistributedModel(nn.Sequential(Faulty("0"), last))
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
    smp.init({"partitions": 2, **MANUAL})
    with smp.partition(1):
        last = Faulty("1")
    model = smp.DistributedModel(nn.Sequential(Faulty("0"), last))
    x = torch.arange(4.0).repeat_interleave(2).unsqueeze(1).expand(8, 4)
    train(model, x, "")
    executor = model.runtime.executor
    if smp.pp_rank() == 0:
        executor_module._END_TIMEOUT = 0.5
        with pytest.raises(SMPPeerError) as caught:
            train(model, x, fault)
        # What comes now from rank 1 is of the step before; the next step must not take it.
        arrive("raised")
        await_ranks("ended", 1)
        earlier = r"left the job in an earlier step: .*rank 1 of the pipeline has not ended"
        with pytest.raises(SMPPeerError, match=earlier):
            train(model, x, "")
        return str(caught.value)
    end = executor.ending._send_end

    def end_late(header: Any, tensors: Any) -> None:
        await_ranks("raised", 1)
        end(header, tensors)

    executor.ending._send_end = end_late
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


def misused() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(SMPInitializationError, match=r"call smp.init\(\)"):
        smp.DistributedModel(layer)
    with pytest.raises(SMPInitializationError, match=r"call smp.init\(\)"):
        smp.DistributedOptimizer(torch.optim.SGD(layer.parameters()))
    with pytest.raises(SMPInitializationError, match=r"call smp.init\(\)"):
        train(layer, torch.ones(4, 4), "")
    # Configurations are refused before anything is started, so the right one may follow.
    for wrong, text in (
        *WRONG,
        *((config, advice) for config, _, advice in WRONG_TOGETHER),
        ({}, "2 ranks make 2 replicas of 1 partition(s); data parallelism needs ddp: True"),
        ({"ddp": True, "tensor_parallel_degree": 3}, "x 3 tensor parallel ranks"),
        ({"ddp": True, "tensor_parallel_degree": 2, "partitions": 2}, "x 2 tensor parallel ranks"),
        ({"sharded_data_parallel_degree": 2, "ddp": True, "partitions": 2}, "does not divide"),
        (
            {"sharded_data_parallel_degree": 2, "ddp": True, "tensor_parallel_degree": 2},
            "does not divide smp.rdp_size(), which is 1 (2 ranks / tensor_parallel_degree 2)",
        ),
        (
            {"sharded_data_parallel_degree": 3, "ddp": True},
            "does not divide smp.rdp_size(), which is 2 (2 ranks)",
        ),
        ({"partitions": 3}, "2 ranks cannot be divided into pipelines of 3"),
    ):
        for environment in (False, True):
            os.environ[ENVIRONMENT_VARIABLE] = json.dumps(wrong) if environment else "{}"
            if environment:
                text = text.replace("smp.init", ENVIRONMENT_VARIABLE)
            with pytest.raises((SMPConfigurationError, SMPInitializationError)) as refused:
                smp.init(None if environment else wrong)
            assert text in str(refused.value), wrong
            assert not smp.is_initialized()
            assert not dist.is_initialized()
    del os.environ[ENVIRONMENT_VARIABLE]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smp.init({"partitions": 2, "task_level_activation_checkpointing": 1, **MANUAL})
    with pytest.raises(SMPUsageError, match=r"create smp.DistributedModel"):
        train(layer, torch.ones(4, 4), "")
    with pytest.raises(SMPPartitionError, match="there are 2 partitions"), smp.partition(2):
        pass
    for wrong_model in (None, layer.parameters(), nn.Linear):
        with pytest.raises(SMPUsageError, match=r"takes a torch\.nn\.Module, not "):
            smp.DistributedModel(wrong_model)
    with pytest.raises(SMPUsageError, match="trace_execution_times must be False"):
        smp.DistributedModel(layer, trace_device="cpu", trace_execution_times=True)
    with pytest.raises(SMPUsageError, match="trace_device must be"):
        smp.DistributedModel(layer, trace_device="tpu")
    with pytest.raises(SMPUsageError, match=r"torch.jit"):
        smp.DistributedModel(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
    first = nn.Linear(4, 4)
    with smp.partition(1):
        second = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(first, second))
    with pytest.raises(SMPUsageError, match=r"there is a smp.DistributedModel already"):
        smp.DistributedModel(layer)
    with pytest.raises(SMPUsageError, match=r"is a smp.DistributedModel already"):
        smp.DistributedModel(model)
    with pytest.raises(SMPUsageError, match="only inside a function"):
        model(torch.ones(4, 4))
    with pytest.raises(SMPUsageError, match="only inside a function"):
        model.backward(torch.ones(()))
    with pytest.raises(SMPUsageError, match="known only when the first step has begun"):
        list(model.local_parameters())
    with pytest.raises(SMPPartitionError, match="not part of the model"):
        smp.set_partition(layer, 1)
    with pytest.raises(SMPPartitionError, match="there are 2 partitions"):
        smp.set_partition(first, 2)
    model.runtime.data_parallel.overlap = False
    with pytest.raises(SMPUsageError, match="needs ddp in the configuration and overlapping"):
        model.register_comm_hook(None, print)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SMPUsageError, match="already"):
        smp.DistributedOptimizer(optimizer)
    for no_optimizer in (None, model.parameters()):
        with pytest.raises(SMPUsageError, match=r"takes an optimizer such as torch\.optim\.AdamW"):
            smp.DistributedOptimizer(no_optimizer)

    # All ranks raise errors that rank 0 meets before the first microbatch, too.
    heard: list[str] = []
    for arguments, text in (
        ((torch.ones(6, 4), ""), "cannot be divided into 4"),
        ((torch.ones(()), ""), "a tensor without dimensions"),
        ((torch.ones(8, 4),), "smp.step: train: missing a required argument: 'fault'"),
    ):
        with pytest.raises(SMPUsageError, match=text) as caught:
            train(model, *arguments)
        heard.append(str(caught.value))
        assert heard[-1].startswith("rank 0 of the pipeline: ")

    @smp.step
    def steps_inside(model: Any, x: torch.Tensor) -> Any:
        model.backward(model(x).sum())
        optimizer.step()

    with pytest.raises(SMPMicrobatchError, match="has to be outside"):
        steps_inside(model, torch.ones(8, 4))

    @smp.step
    def clips_inside(model: Any, x: torch.Tensor) -> Any:
        model.backward(model(x).sum())
        smp.clip_grad_norm(1.0)

    with pytest.raises(SMPMicrobatchError, match="gradients can be clipped only outside"):
        clips_inside(model, torch.ones(8, 4))

    @smp.step
    def nested(model: Any, x: torch.Tensor) -> Any:
        train(model, x, "")

    with pytest.raises(SMPMicrobatchError, match="cannot be called inside another"):
        nested(model, torch.ones(8, 4))

    @smp.step
    def unequal(model: Any, x: torch.Tensor) -> Any:
        return x if bool(x[0, 0] == 0) else None

    with pytest.raises(SMPUsageError, match="different structures") as caught:
        unequal(model, torch.arange(8.0).unsqueeze(1))
    heard.append(str(caught.value))
    assert smp.allgather(heard, smp.PP_GROUP) == [heard, heard]

    class Unsliced:
        def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
            raise ZeroDivisionError("by the user")

    with pytest.raises(SMPMicrobatchError, match="rank 0 of the pipeline: ZeroDivisionError: by"):
        train(model, Unsliced(), "")
    train(model, torch.ones(8, 4), "")
    with pytest.raises(SMPUsageError, match="before the first step"):
        smp.set_partition(first, 1)
    remote = second if smp.pp_rank() == 0 else first
    with pytest.raises(SMPUsageError, match="lives on rank"):
        remote(torch.ones(4))
    with pytest.raises(SMPUsageError, match="lives on rank"):
        remote.forward(torch.ones(4))


def test_misuse_is_refused_on_all_ranks() -> None:
    check_ranks(misused, "2")


def impossible() -> None:
    """A parameter shared across partitions."""
    smp.init({"partitions": 2, **MANUAL})
    with smp.partition(1):
        tied = nn.Linear(4, 4)
    base = nn.Linear(4, 4)
    tied.weight = base.weight
    model = smp.DistributedModel(nn.Sequential(base, tied))
    with pytest.raises(SMPPartitionError, match="modules that share parameters have to be on"):
        train(model, torch.ones(8, 4), "")


def test_what_cannot_be_divided() -> None:
    check_ranks(impossible, "2")


@smp.step
def backward_twice(model: Any, x: torch.Tensor) -> Any:
    loss = model(x).sum()
    loss.backward()
    loss.backward()
    return loss


def second_backward() -> None:
    smp.init({"partitions": 2, **MANUAL})
    with smp.partition(1):
        last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
    with pytest.raises(SMPMicrobatchError, match="a second backward pass"):
        backward_twice(model, torch.ones(8, 4))
    train(model, torch.ones(8, 4), "")


def test_what_a_remote_call_needs_is_there_once() -> None:
    check_ranks(second_backward, "2")


class Kept:
    """A list that is not divided."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []


@smp.step
def keep(model: Any, x: torch.Tensor, kept: Kept) -> None:
    kept.tensors.append(model(x).sum())
    model.backward(torch.stack(kept.tensors).sum())


def kept_for_another() -> str:
    smp.init({"partitions": 2, **MANUAL})
    with smp.partition(1):
        last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
    with pytest.raises(SMPMicrobatchError) as error:
        keep(model, torch.ones(8, 4), Kept())
    return str(error.value)


def test_a_second_backward_pass_for_another_microbatch_is_named() -> None:
    for text in check_ranks(kept_for_another, "2"):
        assert "made in microbatch 0; the first pass was that of microbatch 0" in text
        assert "and this is that of microbatch 1." in text


@smp.step
def call_parts(model: Any, x: torch.Tensor, how: str) -> Any:
    module = model.get_module()
    loss = module[1](module[0](x)).sum()
    if how == "model.backward":
        model.backward(loss)
    elif how == "backward":
        loss.backward()
    elif how == "grad":
        torch.autograd.grad(loss, list(module[0].parameters()))
    return loss


def never_called() -> None:
    smp.init({"partitions": 2, **MANUAL})
    with smp.partition(1):
        last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
    with torch.no_grad():
        call_parts(model, torch.ones(8, 4), "")
    for how in ("model.backward", "backward", "grad"):
        with pytest.raises(SMPMicrobatchError, match="before the first call of the model"):
            call_parts(model, torch.ones(8, 4), how)
        assert all(parameter.grad is None for parameter in model.parameters())
    train(model, torch.ones(8, 4), "")
    call_parts(model, torch.ones(8, 4), "model.backward")  # now it is known where they live


def test_gradients_before_the_first_call_of_the_model_are_refused() -> None:
    check_ranks(never_called, "2")


@smp.step(input_split_axes={"weights": 1})
def compare(model: Any, x: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> Any:
    loss = nn.functional.cross_entropy(model(x), target) * weights.sum()
    model.backward(loss)
    return loss


def of_different_lengths() -> str:
    smp.init({"partitions": 2, **MANUAL})
    with smp.partition(1):
        last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
    with pytest.raises(SMPMicrobatchError, match="batch_size") as caught:
        compare(model, torch.ones(8, 4), torch.ones(12, dtype=torch.int64), torch.ones(3, 8))
    # This may be intended, so it is only a warning, and only once.
    said = listen()
    rows = torch.ones(16, dtype=torch.int64)

    @smp.step
    def pairs(model: Any, x: torch.Tensor, targets: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(model(x).repeat(2, 1), targets)
        model.backward(loss)
        return loss

    for _ in range(2):
        pairs(model, torch.ones(8, 4), rows)
    assert [text for text in said if "pairs" in text] == (
        []
        if smp.pp_rank() > 0
        else [
            "smp: step 'pairs': the arguments that smp.step divides differ in length: 'x' has 8 "
            "(dimension 0), 'targets' has 16 (dimension 0). Each microbatch gets its share of "
            "every one of them"
        ]
    )
    return str(caught.value)


def test_an_error_in_the_body_says_which_argument_has_which_length() -> None:
    for text in check_ranks(of_different_lengths, "2"):
        assert text.splitlines()[1] == (
            "the arguments that smp.step divides differ in length: 'x' has 8 (dimension 0), "
            "'target' has 12 (dimension 0), 'weights' has 8 (dimension 1)"
        )


def out_of_step() -> str:
    smp.init({"partitions": 2, **MANUAL})
    with smp.partition(1):
        last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
    train(model, torch.ones(8, 4), "")
    if smp.pp_rank() == 1:
        model.runtime.steps += 1  # as if this rank alone had run a step
    with pytest.raises(SMPUsageError) as caught:
        train(model, torch.ones(8, 4), "")
    return str(caught.value)


def test_ranks_in_different_steps() -> None:
    for text in check_ranks(out_of_step, "2"):
        assert "every rank has to make the same calls" in text


def different_configurations() -> None:
    microbatches = 2 + int(os.environ["RANK"])
    with pytest.raises(SMPInitializationError, match="microbatches is 2 on rank 0, 3 on rank 1"):
        smp.init({"partitions": 2, "microbatches": microbatches})


def test_ranks_with_different_configurations() -> None:
    check_ranks(different_configurations, "2")


class Stuck(nn.Module):
    """Works until a warning has come, and then for longer than a warning needs."""

    def __init__(self, said: Any, stall_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.said, self.stall_seconds = said, stall_seconds
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        while not self.said:
            time.sleep(0.01)
        if self.calls == 2:
            time.sleep(2 * self.stall_seconds)
        return x * self.weight


def ask_when_noted(executor: Any, count: int) -> None:
    """Lets a rank look for missing ranks only when `count` ranks have noted their step.

    Otherwise one that the machine has delayed would be named, too.
    """
    watch = executor._watch
    note, ask = watch._attendance.note, watch._ask

    def note_and_tell(step: int) -> None:
        note(step)
        arrive(f"noted in step {step}")

    def wait_and_ask(name: str, step: int) -> None:
        await_ranks(f"noted in step {step}", count)
        ask(name, step)

    watch._attendance.note, watch._ask = note_and_tell, wait_and_ask


def stuck(where: int, stall_seconds: float) -> list[str]:
    said = listen()
    smp.init({"partitions": 2, **MANUAL, "stall_warning_seconds": stall_seconds})
    parts: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    parts[where] = Stuck(said if stall_seconds else ["nothing to wait for"], stall_seconds)
    model = smp.DistributedModel(nn.Sequential(*parts))
    smp.set_partition(parts[1], 1)
    executor = model.runtime.executor
    if stall_seconds:
        ask_when_noted(executor, 2)
        # Ignores warnings about other work, which may come on a slow machine.
        age = executor._watch._age
        executor._watch._age = lambda work: age(work) if parts[where].calls else 0.0
    smp.barrier()
    train(model, torch.ones(8, 4), "")
    return said


@pytest.mark.parametrize("where", [0, 1])
def test_a_rank_that_is_stuck_says_where(where: int) -> None:
    said = check_ranks(stuck, "2", where, 1)
    (text,) = said[where]
    assert not said[1 - where], "nobody is missing"
    first, *stack = text.splitlines()
    assert first == (
        f"smp: rank {where} of the pipeline has worked for 1 s on the forward pass of microbatch "
        f"0, in module '{where}'; other ranks wait for it. It is at"
    )
    assert "test_errors.py" in stack[-2]
    assert stack[-2].endswith("in forward")


def stuck_again() -> list[str]:
    """Rank 1 is stuck in each of two steps, until a warning has come."""
    said = listen()
    smp.init({"partitions": 2, **MANUAL, "microbatches": 1, "stall_warning_seconds": 1})
    last = Stuck([], 0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
    smp.set_partition(last, 1)
    executor = model.runtime.executor
    ask_when_noted(executor, 2)
    # Ignores warnings about other work, which may come on a slow machine.
    age = executor._watch._age
    executor._watch._age = lambda work: age(work) if last.calls else 0.0
    for number in (1, 2):
        smp.barrier()
        last.said = Warnings(said, number)
        train(model, torch.ones(8, 4), "")
    return [text for text in said if "has worked" in text]


class Warnings:
    """Is true when at least so many warnings of work that does not end have come."""

    def __init__(self, said: list[str], least: int) -> None:
        self.said, self.least = said, least

    def __bool__(self) -> bool:
        return sum("has worked" in text for text in self.said) >= self.least


def test_a_rank_that_is_stuck_again_says_so_again() -> None:
    said = check_ranks(stuck_again, "2")[1]
    assert len(said) == 2
    assert all("in module '1'" in text for text in said)


def test_nobody_says_so_if_not_asked() -> None:
    assert check_ranks(stuck, "2", 1, 0) == [[], []]


def late(missing: int, size: int) -> list[str]:
    """A rank calls the step only when all others have warned that they wait for it."""
    said = listen()
    smp.init({"partitions": size, **MANUAL, "stall_warning_seconds": 1})
    model = smp.DistributedModel(nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)]))
    for number, part in enumerate(model.get_module()):
        smp.set_partition(part, number)
    told = Told()
    logging.getLogger("smddp.modelparallel").addHandler(told)
    ask_when_noted(model.runtime.executor, size - 1)
    for number in range(2):  # in later steps, too
        smp.barrier()
        told.place = f"said in step {number}"
        if smp.pp_rank() == missing:
            await_ranks(told.place, size - 1)
        train(model, torch.ones(8, 4), "")
    return said


class Told(logging.Handler):
    """Tells the other ranks that this one has warned which ranks are missing."""

    place = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "has waited" in record.getMessage():
            arrive(self.place)


@pytest.mark.parametrize(("missing", "size"), [(0, 2), (1, 2), (2, 3)])
def test_who_waits_names_the_rank_that_has_not_called_the_step(missing: int, size: int) -> None:
    for rank, said in enumerate(check_ranks(late, str(size), missing, size)):
        text = (
            f"smp: rank {rank} of the pipeline has waited for 1 s in the step train, which rank "
            f"{missing} of the pipeline has not called. All of them have to call the same steps"
        )
        assert [one for one in said if "waited" in one] == [text] * (0 if rank == missing else 2)


def asked_by_one_rank(what: str) -> tuple[str, list[str]]:
    meeting._LOG_AFTER = timedelta(milliseconds=100)
    said = listen()
    smp.init({"partitions": 2, **MANUAL})
    with smp.partition(1):
        last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, torch.ones(8, 4), "")
    parts = model.local_state_dict(), optimizer.local_state_dict()
    ask = {
        "state_dict": model.state_dict,
        "state_dict of the optimizer": optimizer.state_dict,
        "model.load_state_dict with a partial state dict": lambda: model.load_state_dict(parts[0]),
        "optimizer.load_state_dict with a partial state dict": lambda: optimizer.load_state_dict(
            parts[1]
        ),
    }[what]
    # Only this group has a short timeout: everything else must work on a slow machine, too.
    alone = dist.new_group(timeout=timedelta(seconds=3))
    smp.state.groups._by_kind.update(pp=alone, mp=alone)
    # The other rank goes on, and waits for a step that rank 0 never begins.
    other = functools.partial(train, model, torch.ones(8, 4), "")
    with pytest.raises(SMPPeerError) as caught:
        (ask if smp.pp_rank() == 0 else other)()
    return str(caught.value), [text for text in said if "state_dict" in text]


@pytest.mark.parametrize(
    "what",
    [
        "state_dict",
        "state_dict of the optimizer",
        "model.load_state_dict with a partial state dict",
        "optimizer.load_state_dict with a partial state dict",
    ],
)
def test_what_one_rank_alone_asks_for(what: str) -> None:
    (asking, warned), (other, silent) = check_ranks(asked_by_one_rank, "2", what)
    assert asking.startswith(f"{what}: rank 1 of the job did not answer; ranks 0-1 have to")
    assert "nothing comes from rank 0 of the pipeline any more" in other
    # Long before the timeout of the group.
    assert len(warned) == 1
    assert f"smp: {what} on rank 0 waits for rank 1 of the job" in warned[0]
    assert not silent


def fails_while_gathering(failing: tuple[int, ...], backend: str) -> str:
    """The model's own code fails in `state_dict`, on some ranks."""
    smp.init({"partitions": 2, **MANUAL, "ddp_dist_backend": backend})
    with smp.partition(1):
        last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
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
