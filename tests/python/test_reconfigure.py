"""Changes of the members of a group: torch's reconfigure, from torch 2.15 on."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not hasattr(dist, "_reconfigure"), reason="this release of torch cannot change members"
    ),
]

LAYOUTS = ["3", "1+1+1", "2+1"]


class _Rank:
    """This rank, whose default group has no members yet."""

    def __init__(self) -> None:
        dist.init_process_group("smddp", timeout=timedelta(seconds=30), enable_reconfigure=True)
        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # The store of the job serves the test, too: smddp does not need it.
        self.store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())

    def handles(self, name: str, ranks_: list[int] | None = None) -> list[str]:
        """Returns the handles of some ranks, all by default; each of them calls this."""
        self.store.set(f"{name}/{self.rank}", dist._get_reconfigure_handle())
        wanted = range(self.count) if ranks_ is None else ranks_
        return [self.store.get(f"{name}/{rank}").decode() for rank in wanted]

    def change(self, uuid: int, handles: Any, seconds: float = 30) -> None:
        """Makes the processes of the handles the members."""
        dist._reconfigure(uuid, handles, timeout=timedelta(seconds=seconds)).wait()

    def begin(self) -> list[str]:
        """Makes all ranks the members; returns their handles."""
        self.change(1, self.handles("first"))
        _check_sum()
        return self.handles("begun")

    def barrier(self, name: str) -> None:
        """Waits for all ranks, members or not."""
        self.store.set(f"{name}/{self.rank}", "")
        self.store.wait([f"{name}/{rank}" for rank in range(self.count)])


def _check_sum() -> None:
    """Sums over the members, in a small and in a large vector."""
    size = dist.get_world_size()
    for length in (3, 1 << 18):
        tensor = torch.full((length,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor)
        expected = torch.full((length,), size * (size + 1) / 2)
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def _text_of(call: Any, *arguments: Any) -> tuple[str, str]:
    """Returns the type and the text of the error of a call."""
    try:
        call(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")


def _begins_without_members() -> tuple[str, str]:
    rank = _Rank()
    assert dist._supports_reconfigure()
    early = _text_of(dist.all_reduce, torch.ones(1))
    rank.change(1, set(rank.handles("first")))
    assert (dist.get_rank(), dist.get_world_size()) == (rank.rank, rank.count)
    _check_sum()
    return early


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_begins_without_members(layout: str) -> None:
    for kind, text in ranks.check_ranks(_begins_without_members, layout):
        assert kind == "ValueError"
        assert "call reconfigure() on each of them first" in text


def _leaves_and_comes_back() -> None:
    rank = _Rank()
    handles = rank.begin()
    if rank.rank == 1:
        rank.change(2, handles[1:2])
    else:
        rank.change(3, [handles[2], handles[0]])
        assert dist.get_rank() == (0 if rank.rank == 2 else 1)
    _check_sum()
    # Of a set: members in their order; those who were one alone had rank 0.
    rank.change(4, set(rank.handles("again")))
    _check_sum()
    rank.barrier("end")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_members_leave_and_come_back_in_another_order(layout: str) -> None:
    ranks.check_ranks(_leaves_and_comes_back, layout)


def _newcomer() -> None:
    rank = _Rank()
    if rank.rank < 2:
        rank.change(1, rank.handles("two", [0, 1]))
        _check_sum()
    handles = set(rank.handles("three"))
    rank.change(2, handles)
    assert dist.get_rank() == rank.rank
    _check_sum()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_newcomers_follow_the_members(layout: str) -> None:
    ranks.check_ranks(_newcomer, layout)


def _goes_on_after_a_death() -> tuple[str, float] | None:
    rank = _Rank()
    handles = rank.begin()
    tensor = torch.ones(1 << 20)
    if rank.rank == 1:
        for _ in range(20):
            dist.all_reduce(tensor)
        os.kill(os.getpid(), signal.SIGKILL)
    kind = ""
    while not kind:
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            kind = type(error).__name__
    began = time.monotonic()
    # Its handle is still among them: nobody waits for the time-out, and the next change works.
    said = _text_of(rank.change, 2, handles)
    assert said[0] == "SMDDPPeerLostError", said
    assert "leave its handle out" in said[1]
    rank.change(3, [handles[0], handles[2]])
    _check_sum()
    return kind, time.monotonic() - began


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_others_go_on_after_a_death(layout: str) -> None:
    outcomes = ranks.run_ranks(_goes_on_after_a_death, layout)
    assert outcomes[1].status == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].returned, outcomes[rank]
        assert outcomes[rank].value[0] == "SMDDPPeerLostError"
        assert outcomes[rank].value[1] < 20, "the time-out is 30 s"


def _a_change_fails() -> tuple[str, str] | None:
    rank = _Rank()
    handles = rank.begin()
    said = None
    if rank.rank != 2:
        said = _text_of(rank.change, 2, handles, 1)
    rank.barrier("failed")
    _check_sum()  # the members are as before
    rank.change(3, handles)  # and the same handles can be used again
    _check_sum()
    return said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_members_stay_if_a_change_fails(layout: str) -> None:
    first, second, absent = ranks.check_ranks(_a_change_fails, layout)
    assert absent is None
    for kind, text in (first, second):
        assert kind == "SMDDPCollectiveTimeoutError"
        assert "rank 2 did not come" in text


def _other_members() -> tuple[str, str]:
    rank = _Rank()
    handles = rank.begin()
    said = _text_of(rank.change, 2, handles[::-1] if rank.rank == 0 else handles)
    rank.change(3, handles)
    _check_sum()
    return said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_name_other_members_hear_it(layout: str) -> None:
    for kind, text in ranks.check_ranks(_other_members, layout):
        assert kind == "SMDDPCollectiveMismatchError"
        assert "the same handles" in text


def _other_uuid() -> tuple[str, str]:
    rank = _Rank()
    handles = rank.begin()
    said = _text_of(rank.change, 2 + rank.rank, handles, 1)
    rank.change(9, handles)
    _check_sum()
    return said


def test_ranks_with_other_uuids_hear_it() -> None:
    for kind, text in ranks.check_ranks(_other_uuid, "2"):
        assert kind == "SMDDPCollectiveTimeoutError"
        assert "came with another uuid" in text


def _wrong_arguments() -> list[tuple[str, str]]:
    rank = _Rank()
    mine = dist._get_reconfigure_handle()
    said = [
        _text_of(rank.change, 1, wrong)
        for wrong in (["gloo:0"], [mine[:-7]], [mine, mine], [], [mine[:-2] + "zz"])
    ]
    rank.change(1, [mine])
    said.append(_text_of(rank.change, 1, [mine]))
    dist.destroy_process_group()
    return said


def test_wrong_arguments() -> None:
    (said,) = ranks.check_ranks(_wrong_arguments, "1")
    assert {kind for kind, _ in said} == {"ValueError"}
    parts = ["begin with", "cut", "twice", "none of the 0", "other characters", "already used"]
    for (_, text), part in zip(said, parts, strict=True):
        assert part in text


def _in_flight() -> str:
    rank = _Rank()
    handles = rank.begin()
    tensor = torch.ones(8)
    work = dist.all_reduce(tensor, async_op=True) if rank.rank != 2 else None
    rank.change(2, handles)
    said = "" if work is None else _text_of(work.wait)[0]
    _check_sum()
    return said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_in_flight_ends(layout: str) -> None:
    first, second, idle = ranks.check_ranks(_in_flight, layout)
    assert not idle
    # A rank that had nothing in flight may have left the old members before.
    assert {first, second} <= {"SMDDPAbortedError", "SMDDPPeerLostError"}


def _after_abort() -> None:
    rank = _Rank()
    rank.begin()
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    backend.abort()
    assert str(backend.get_error()) == "ErrorType.COMM_ERROR"
    rank.change(2, rank.handles("aborted"))
    assert str(backend.get_error()) == "ErrorType.SUCCESS"
    _check_sum()


def test_a_change_mends_an_aborted_group() -> None:
    ranks.check_ranks(_after_abort, "3")


def _many_changes(changes: int) -> tuple[int, int]:
    rank = _Rank()
    handles = rank.begin()
    before = 0
    for number in range(changes):
        rank.change(2 + number, handles)
        _check_sum()
        if number == changes // 4:
            before = len(os.listdir("/proc/self/fd"))
            memory = _resident()
    assert len(os.listdir("/proc/self/fd")) == before
    return memory, _resident()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_changes_keep_nothing(layout: str) -> None:
    for before, after in ranks.check_ranks(_many_changes, layout, 60):
        assert after < before * 1.03


def _trains() -> list[float]:
    """Trains on three ranks, loses one, and trains on; returns the weights."""
    rank = _Rank()
    handles = rank.begin()
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 4)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        torch.manual_seed(100 * number + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()

    for number in range(3):
        step(number)
    if rank.rank == 1:
        return []
    rank.change(2, [handles[0], handles[2]])
    model._update_process_group(dist.distributed_c10d._get_default_group())
    for number in range(3, 6):
        step(number)
    return [float(value) for value in net.weight.detach().flatten()]


def test_ddp_goes_on_with_fewer_ranks() -> None:
    first, gone, second = ranks.check_ranks(_trains, "3")
    assert not gone
    assert first == second
    # One process that averages the gradients of all ranks.
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(6):
        count = 3 if number < 3 else 2
        optimizer.zero_grad()
        for rank in range(count):
            torch.manual_seed(100 * number + rank)
            (net(torch.randn(16, 8)).square().mean() / count).backward()
        optimizer.step()
    torch.testing.assert_close(torch.tensor(first), net.weight.detach().flatten())
