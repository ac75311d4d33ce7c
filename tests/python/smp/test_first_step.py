"""First steps that fail, and those in which not every rank does the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from on_ranks import on_ranks
from ranks import check_ranks
from smp.failing_models import MANUAL, Faulty, called_by_some, numbered, pair, train
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError, SMPPeerError, SMPUsageError

pytestmark = pytest.mark.multiprocess


@on_ranks("2")
def test_partitions_asked_for_in_vain() -> None:
    smp.init({"partitions": 2, "ddp": True})
    with pytest.warns(UserWarning, match="no effect while auto_partition is on"), smp.partition(0):
        nn.Linear(1, 1)


def failing_at_first() -> tuple[str, list[int], float]:
    """The first step fails on rank 0 before rank 1 has got the partition."""
    model = pair(Faulty)
    first = model.get_module()[0]
    placed: list[int] = []
    model.register_post_partition_hook(lambda m, o: placed.append(len(list(m.local_parameters()))))
    executor, store = model.runtime.executor, dist.distributed_c10d._get_default_store()
    if smp.pp_rank() == 0:
        end = executor.mail.send_end

        def then_tell(header: Any, tensors: Any) -> None:
            end(header, tensors)
            store.set("rank 0 has failed", "")

        executor.mail.send_end = then_tell
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
    x = numbered()
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
    model = pair(Faulty)
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
