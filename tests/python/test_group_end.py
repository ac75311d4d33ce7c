"""Calls that are in flight when a group ends, and time-outs of waits."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

import smddp

pytestmark = pytest.mark.multiprocess


def _sparse(size: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.arange(size)[None], torch.ones(size), (size,)).coalesce()


def _destroyed_at_once(kind: str) -> float:
    """Destroys a group while rank 1 has not come to the call; returns an element of the result."""
    with ranks.job():
        group = dist.new_group()
        if dist.get_rank() == 1:
            time.sleep(0.7)
        half = 1 << 19
        out, result = torch.zeros(2 * half), _sparse(half)
        if kind == "sparse":
            work = dist.all_reduce(result, group=group, async_op=True)
        elif kind == "splits":
            splits = [half, half]
            given = torch.full((2 * half,), 2.0)
            work = dist.all_to_all_single(out, given, splits, splits, group, async_op=True)
        else:
            out += 1
            work = dist.all_reduce(out, group=group, async_op=True)
        dist.destroy_process_group(group)
        assert work is not None
        work.wait()
        return float(result.to_dense()[-1] if kind == "sparse" else out[-1])


@pytest.mark.parametrize("kind", ["dense", "splits", "sparse"])
@pytest.mark.parametrize("layout", ["2", "1+1"])
def test_calls_in_flight_end_before_their_group(kind: str, layout: str) -> None:
    assert ranks.check_ranks(_destroyed_at_once, layout, kind) == [2.0, 2.0]


def _aborted_while_it_is_destroyed() -> float:
    with ranks.job():
        group = dist.new_group(timeout=timedelta(seconds=60))
        assert isinstance(group, dist.ProcessGroup)
        if dist.get_rank() == 0:
            dist.isend(torch.ones(1 << 20), 1, group)  # nobody receives it
        abort = group._get_backend(torch.device("cpu")).abort
        threading.Timer(0.5, abort).start()
        began = time.monotonic()
        dist.destroy_process_group(group)
        return time.monotonic() - began


def test_abort_ends_a_destruction_that_waits() -> None:
    assert max(ranks.check_ranks(_aborted_while_it_is_destroyed, "2")) < 30


def _sparse_without_a_mate() -> str:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(3)
    try:
        work = dist.all_reduce(_sparse(4), async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=1 if dist.get_rank() == 0 else 50))
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_a_wait_for_a_sparse_sum_times_out() -> None:
    for text in ranks.check_ranks(_sparse_without_a_mate, "2"):
        assert "Timed out after 1.0 s, rank 0 waits" in text
        assert "rank 1 (pid" in text


def _slow_parts() -> str:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    dist.barrier()
    try:
        if dist.get_rank() == 1:
            for tag in range(4):
                time.sleep(1.2)
                dist.send(torch.ones(1), 0, tag=tag)
            return "no error"
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as calls:
            for tag in range(4):
                dist.irecv(torch.zeros(1), 1, tag=tag)
        calls.works[0].wait(timedelta(seconds=2))
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_a_wait_for_several_messages_has_one_time_out() -> None:
    assert "Timed out after 2.0 s" in ranks.check_ranks(_slow_parts, "2")[0]


def _ended_works() -> int:
    with ranks.job(), allow_inflight_collective_as_graph_input_ctx():
        for way in ("wait", "synchronize"):
            work = dist.all_reduce(torch.ones(3), async_op=True)
            assert work is not None
            getattr(work, way)()
            work.wait()
        return torch._C._distributed_c10d._get_work_registry_size()


def test_works_that_have_ended_leave_the_registry_of_torch() -> None:
    assert ranks.check_ranks(_ended_works, "2") == [0, 0]


@on_ranks("2")
def test_time_outs_may_be_longer_than_any_job() -> None:
    dist.init_process_group("smddp")
    group = dist.new_group(timeout=timedelta.max)
    ones = torch.ones(3)
    work = dist.all_reduce(ones, group=group, async_op=True)
    assert work is not None
    work.wait(timedelta.max)
    assert ones.tolist() == [2, 2, 2]
    dist.barrier()
    dist.destroy_process_group()


@on_ranks("2")
def test_sparse_bools_are_refused_before_anything_moves() -> None:
    with ranks.job():
        flags = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([True, False]), (4,))
        with pytest.raises(TypeError, match="torch cannot add sparse tensors of bool"):
            dist.all_reduce(flags)
        dist.all_reduce(_sparse(4))


def _after_the_other_has_left(call: str, used: bool) -> str:
    """Calls what rank 0, which has left, will never call. Returns the error of rank 1."""
    with ranks.job():
        group = dist.new_group(timeout=timedelta(seconds=60))
        assert isinstance(group, dist.ProcessGroup)
        vector = torch.ones(4)
        if used:
            dist.all_reduce(vector, group=group)
        dist.barrier()
        if dist.get_rank() == 0:
            # It arrives, although its sender leaves at once.
            dist.send(vector * 3, 1, group, tag=1)
            dist.destroy_process_group(group)
            dist.barrier()
            return ""
        assert dist.recv(vector, 0, group, tag=1) == 0
        assert vector[-1] == (6 if used else 3)
        try:
            if call == "recv":
                dist.recv(vector, 0, group)
            elif call == "send":
                dist.send(vector, 0, group)
            else:
                dist.all_reduce(vector, group=group)
        except smddp.PeerLostError as error:
            return str(error)
        finally:
            dist.barrier()
        return "no error"


@pytest.mark.parametrize("call", ["recv", "send", "all_reduce"])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("layout", ["2", "1+1"])
def test_a_rank_that_has_left_is_named(call: str, used: bool, layout: str) -> None:
    began = time.monotonic()
    _, error = ranks.check_ranks(_after_the_other_has_left, layout, call, used)
    assert "rank 0 (pid" in error, error
    assert "is gone: it left the group" in error, error
    assert time.monotonic() - began < 40
