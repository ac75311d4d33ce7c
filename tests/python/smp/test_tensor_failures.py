"""Steps of divided modules that fail on some ranks: all ranks end at once, and go on afterwards."""

from __future__ import annotations

import collections
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import check_ranks
from smp.test_tensor import SHARDED, Model, batch_of, loss_of
from smp.zoo import Fault
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.job import meeting
from smddp.modelparallel.torch.tensor.embedding import DistributedEmbedding
from smddp.modelparallel.torch.tensor.linear import DistributedLinear

pytestmark = pytest.mark.multiprocess

# Seconds in which all ranks have to raise; the timeout of the groups is much longer.
_SOON = 15.0


@smp.step
def train(model: Any, ids: Tensor, fault: str) -> Tensor:
    if fault == "body":
        raise ZeroDivisionError("in body")
    loss = loss_of(model(ids), ids)
    model.backward(loss)
    return loss


def model_with_faults() -> tuple[Model, list[Fault]]:
    """Returns a model with a fault before, between and after its blocks."""
    module = Model(DistributedLinear, DistributedEmbedding)
    faults = [Fault() for _ in range(4)]
    blocks = [*module.blocks]
    module.blocks = nn.Sequential(
        *(part for pair in zip(faults, [*blocks, nn.Identity()], strict=True) for part in pair)
    )
    return module, faults


# What fails, and at which of the faults.
PLACES = [
    *(("body", 0), ("arguments", 0)),
    *((when, place) for when in ("forward", "backward") for place in range(4)),
]


def faulty(size: int) -> range:
    """Returns the ranks that fail, one after the other: with 8 ranks, those of one mp group."""
    return range(min(size, 4))


def failing(config: dict[str, Any], backend: str) -> list[str]:
    """Returns the error of each step that was to fail, "" if it has not; by place, then by rank."""
    if backend != "smddp":
        dist.init_process_group(backend)
    smp.init({"ddp": True, "microbatches": 2, **config})
    module, faults = model_with_faults()
    model = smp.DistributedModel(module)
    number = smp.rdp_rank() if config.get("prescaled_batch") else smp.dp_rank()
    ids = batch_of(0, number)

    def right() -> Any:
        output = train(model, ids, "")
        found = {name: p.grad.clone() for name, p in model.local_named_parameters()}
        for parameter in model.local_parameters():
            parameter.grad = None
        return found, [loss.item() for loss in output.outputs]

    expected = right()
    errors = []
    for when, place in PLACES:
        for rank in faulty(smp.size()):
            here = smp.rank() == rank
            faults[place].when = when if here else ""
            begun, error = time.monotonic(), ""
            try:
                train(model, ids[:1] if here and when == "arguments" else ids, when if here else "")
            except smp.SMPError as caught:
                error = f"{type(caught).__name__}: {caught}".partition("\n")[0]
            assert time.monotonic() - begun < _SOON
            errors.append(error)
            faults[place].when = ""
            # Gradients are as before, and the next step is that of the first one, bit by bit.
            assert (
                all(parameter.grad is None for parameter in model.local_parameters()) or not error
            )
            for parameter in model.local_parameters():
                parameter.grad = None
            torch.testing.assert_close(right(), expected, rtol=0, atol=0)
    return errors


CASES = [
    ({"tensor_parallel_degree": 2}, 2, "smddp"),
    ({"tensor_parallel_degree": 2, "partitions": 2}, 4, "smddp"),
    ({"tensor_parallel_degree": 2, "prescaled_batch": True}, 2, "gloo"),
    ({"tensor_parallel_degree": 2, **SHARDED}, 4, "smddp"),
    pytest.param({"tensor_parallel_degree": 4}, 4, "gloo", marks=pytest.mark.exhaustive),
    pytest.param(
        {"tensor_parallel_degree": 2, "partitions": 2, **SHARDED},
        *(8, "smddp"),
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        {"tensor_parallel_degree": 2, "partitions": 2, "deterministic_server": True},
        *(8, "smddp"),
        marks=pytest.mark.exhaustive,
    ),
]


@pytest.mark.parametrize(("config", "size", "backend"), CASES)
@pytest.mark.timeout(250)
@pytest.mark.costly
def test_all_ranks_end_at_once_and_the_next_step_is_right(
    config: dict[str, Any], size: int, backend: str
) -> None:
    partitions = config.get("partitions", 1)
    of_ranks = check_ranks(failing, str(size), config, backend, timeout=240)
    cases = [(*place, rank) for place in PLACES for rank in faulty(size)]
    failed = collections.Counter[Any]()
    for (when, place, rank), errors in zip(cases, zip(*of_ranks, strict=True), strict=True):
        if not any(errors):  # what fails does not run on this rank of the pipeline
            continue
        failed[when, place] += 1
        cause = "SMPUsageError" if when == "arguments" else f"ZeroDivisionError: in {when}"
        for error in errors:
            assert cause in error
            assert f"rank {rank} of the job" in error or "of the pipeline" in error
        peers = [error for error in errors if error.startswith("SMPPeerError")]
        assert len(peers) == size - partitions
    assert failed == dict.fromkeys(PLACES, len(faulty(size)) // partitions)


def asked_alone(partitions: int) -> dict[str, str]:
    """Returns what a rank is told that calls without the others what all of a tp group have to."""
    meeting._LOG_AFTER = timedelta(milliseconds=100)
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "partitions": partitions})
    model = smp.DistributedModel(Model(DistributedLinear, DistributedEmbedding))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    train(model, batch_of(0, smp.dp_rank()), "")
    optimizer.step()
    parts = model.local_state_dict(), optimizer.local_state_dict()
    # Only these have a short timeout: everything else must work on a slow machine, too.
    for kind in ("tp", "mp"):
        own = smp.state.topology.members(kind)
        for ranks in sorted(set(map(tuple, smp.allgather(own, smp.WORLD)))):
            group = dist.new_group(ranks, timeout=timedelta(seconds=2))
            if smp.rank() in ranks:
                smp.state.groups._by_kind[kind] = group
    texts = {}
    if smp.tp_rank() == 0:
        for what, call in {
            "state_dict": model.state_dict,
            "model.load_state_dict with a partial state dict": lambda: model.load_state_dict(
                parts[0]
            ),
            "state_dict of the optimizer": optimizer.state_dict,
            "optimizer.load_state_dict with a partial state dict": (
                lambda: optimizer.load_state_dict(parts[1])
            ),
        }.items():
            begun = time.monotonic()
            with pytest.raises(smp.SMPPeerError) as caught:
                call()
            assert time.monotonic() - begun < _SOON
            texts[what] = str(caught.value)
    smp.barrier()
    return texts


@pytest.mark.parametrize("partitions", [1, 2])
def test_what_one_tensor_parallel_rank_alone_asks_for(partitions: int) -> None:
    by_rank = check_ranks(asked_alone, str(2 * partitions), partitions)
    callers = {rank: texts for rank, texts in enumerate(by_rank) if texts}
    assert len(callers) == partitions
    others = "1" if partitions == 1 else "1, 3"
    for rank, texts in callers.items():
        assert len(texts) == 4
        for what, text in texts.items():
            peers = str(rank + 1) if what == "state_dict" else others
            assert text.startswith(f"{what}: rank {peers} of the job did not answer; ranks "), text


def failing_at_first(rank: int) -> str:
    """The first step fails on one rank before its first call of the model; others wait for that."""
    smp.init({"ddp": True, "microbatches": 2, "partitions": 2, "tensor_parallel_degree": 2})
    module, _ = model_with_faults()
    model, ids = smp.DistributedModel(module), batch_of(0, smp.dp_rank())
    begun, error = time.monotonic(), ""
    try:
        train(model, ids, "body" if smp.rank() == rank else "")
    except smp.SMPError as caught:
        error = str(caught)
    assert time.monotonic() - begun < _SOON
    train(model, ids, "")
    return error


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_first_step_that_fails_before_the_division(rank: int) -> None:
    errors = check_ranks(failing_at_first, "4", rank)
    assert all("ZeroDivisionError: in body" in error for error in errors) or not any(errors)
    assert any(errors) == (rank in (0, 1)), errors
