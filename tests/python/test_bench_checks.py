"""The benchmark's checks of results: right ones pass, and a wrong element is noticed."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

from smddp.bench.contender import PLACES
from smddp.bench.models import Trainee
from smddp.bench.operations import OPERATIONS, Task, contribution, result
from smddp.bench.steps import Amount, _Contender, _right
from smddp.bench.torch_calls import TorchContender


def test_right_results_by_hand() -> None:
    given = [[contribution(Task("all_to_all", 1), s, b, 0)[5] for b in (0, 1)] for s in (0, 1)]
    moved = [result(Task("all_to_all", 1), 2, rank, 0) for rank in (0, 1)]
    assert [[block[5] for block in blocks or []] for blocks in moved] == [
        [given[0][0], given[1][0]],
        [given[0][1], given[1][1]],
    ]
    for op, combine in {"sum": sum, "max": max, "avg": lambda v: sum(v) / 3}.items():
        task = Task("allreduce", 1, op=op)
        values = [contribution(task, rank, 0, shift=1) for rank in range(3)]
        (block,) = result(task, 3, 0, shift=1) or []
        assert block == [combine(column) for column in zip(*values, strict=True)]
    assert result(Task("gather", 1, root=1), 2, 0, 0) is None
    # All ranks, blocks and shifts have different data; otherwise a swap of two would not be
    # noticed.
    task = Task("all_to_all", 1)
    several = {
        tuple(contribution(task, r, b, s)) for r in range(4) for b in range(4) for s in (0, 1)
    }
    assert len(several) == 32


def _damage(collective: str, place: str) -> tuple[int | None, int | None]:
    dist.init_process_group("gloo")
    contender = TorchContender("gloo", "ordinary")
    contender.prepare(Task(collective, 1000, root=0))
    before = contender.wrong(place, shift=0)
    call, (_, out) = contender._calls[place], contender._buffers[place]

    def damaging() -> None:
        call()
        if dist.get_rank() == 0:
            out[17] += 1

    contender._calls[place] = damaging
    after = contender.wrong(place, shift=0)
    dist.destroy_process_group()
    return before, after


@pytest.mark.multiprocess
@pytest.mark.parametrize("collective", [name for name in OPERATIONS if name != "barrier"])
def test_one_wrong_element_is_noticed(collective: str) -> None:
    place = "in_place" if OPERATIONS[collective].in_place else "out_of_place"
    assert ranks.check_ranks(_damage, "2", collective, place) == [(0, 1), (0, 1)]


def _do_nothing(place: str) -> list[int | None]:
    dist.init_process_group("gloo")
    contender = TorchContender("gloo", "ordinary")
    found = []
    for collective in OPERATIONS:
        contender.prepare(Task(collective, 1000))
        if place in contender._calls:
            contender._calls[place] = lambda: None
            found.append(contender.wrong(place, shift=0))
    dist.destroy_process_group()
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("place", PLACES)
def test_a_backend_that_does_nothing_is_noticed(place: str) -> None:
    for found in ranks.check_ranks(_do_nothing, "2", place):
        assert all(wrong is None or wrong > 100 for wrong in found), found
        assert found.count(None) == (1 if place == "out_of_place" else 0)


def _damage_encoded(
    wire: str, task: Task, by: int = 10
) -> tuple[int | None, float | None, int | None]:
    dist.init_process_group("smddp")
    contender = TorchContender("smddp", "ordinary", wire=wire)
    contender.prepare(task)
    before, error = contender.wrong("in_place", shift=0), contender.error
    call, (_, out) = contender._calls["in_place"], contender._buffers["in_place"]

    def damaging() -> None:
        call()
        if dist.get_rank() == 0:
            out[17] += by

    contender._calls["in_place"] = damaging
    after = contender.wrong("in_place", shift=0)
    dist.destroy_process_group()
    return before, error, after


@pytest.mark.multiprocess
@pytest.mark.parametrize("wire", ["int8", "bf16+feedback"])
def test_encoded_results_may_be_rounded_but_not_wrong(wire: str) -> None:
    sum_of_floats = Task("allreduce", 10_000)
    for before, error, after in ranks.check_ranks(_damage_encoded, "1+1", wire, sum_of_floats):
        assert (before, after) == (0, 1)
        assert error is not None
        assert error < 0.01
        assert (error == 0) == wire.startswith("bf16")  # which has the sums of ones and twos


@pytest.mark.multiprocess
def test_without_a_format_sums_are_checked_exactly() -> None:
    sum_of_floats = Task("allreduce", 10_000)
    for before, error, after in ranks.check_ranks(_damage_encoded, "1+1", "fp32", sum_of_floats):
        assert (before, error, after) == (0, None, 1)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("layout", "task"),
    [
        ("2", Task("allreduce", 10_000)),
        ("1+1", Task("allreduce", 2048)),
        ("1+1", Task("broadcast", 10_000)),
        ("1+1", Task("allreduce", 10_000, dtype="int64")),
        ("1+1", Task("allreduce", 10_000, op="max")),
    ],
)
def test_what_is_not_encoded_is_checked_exactly(layout: str, task: Task) -> None:
    for found in ranks.check_ranks(_damage_encoded, layout, "int8", task, 1):
        assert found == (0, None, 1)


def _damage_gradients() -> tuple[bool, bool]:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    trainee = Trainee(nn.Linear(64, 64), torch.randn(4, 64))
    contender = _Contender(trainee, "smddp", "int8", Amount([], "ddp", None, 1, 1))
    contender.step()
    right = contender.gradients()
    magnitudes = [float(gradient.abs().max()) for gradient in right]
    before = _right(contender, right, magnitudes)
    damaged = [gradient + 0.002 * max(magnitudes) for gradient in right]
    after = _right(contender, damaged, magnitudes)
    dist.destroy_process_group()
    return before, after


@pytest.mark.multiprocess
def test_gradients_of_one_node_are_checked_exactly() -> None:
    assert ranks.check_ranks(_damage_gradients, "2") == [(True, False), (True, False)]
