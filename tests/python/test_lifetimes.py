"""Tensors live until the call has ended, whoever drops them before, and are freed then.

csrc/process_group/call_memory.h says who holds them. After an error they live until the group is
gone. device_cases.py has the same for tensors of a device.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.multiprocessing.reductions import StorageWeakRef

import smddp

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["2", "1+1"])

COUNT = 100_000
Tensors = list[torch.Tensor]
Works = list[dist.Work]


class Call:
    """A call of both ranks: makes its tensors, and begins it with them."""

    def __init__(self, make: Callable[[], Tensors], begin: Callable[[Tensors], Works]) -> None:
        self.make, self.begin = make, begin

    def begin_and_drop(self) -> list[StorageWeakRef]:
        """Begins the call, and drops its tensors and its Work."""
        tensors = self.make()
        self.begin(tensors)
        return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def _peer() -> int:
    return 1 - dist.get_rank()


def _vectors(number: int, count: int = COUNT) -> Tensors:
    return [torch.ones(count) for _ in range(number)]


def _one(work: dist.Work | None) -> Works:
    assert work is not None
    return [work]


def _coalesced(tensors: Tensors) -> Works:
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    return list(manager.works)


def _both_ways(tensors: Tensors) -> Works:
    operations = [
        dist.P2POp(dist.isend, tensors[0], _peer()),
        dist.P2POp(dist.irecv, tensors[1], _peer()),
    ]
    return dist.batch_isend_irecv(operations)


def _uneven() -> Tensors:
    return [torch.ones(COUNT + 10 * dist.get_rank()), *(torch.ones(COUNT + 10 * r) for r in (0, 1))]


CALLS = {
    "all_reduce": Call(lambda: _vectors(1), lambda t: _one(dist.all_reduce(t[0], async_op=True))),
    "short all_reduce": Call(
        lambda: _vectors(1, 2), lambda t: _one(dist.all_reduce(t[0], async_op=True))
    ),
    "all_reduce of communication memory": Call(
        lambda: [smddp.empty(COUNT)], lambda t: _one(dist.all_reduce(t[0], async_op=True))
    ),
    # Not in row-major order: copied, and copied back.
    "strided all_reduce": Call(
        lambda: [torch.ones(300, 400)], lambda t: _one(dist.all_reduce(t[0].t(), async_op=True))
    ),
    "strided broadcast": Call(
        lambda: [torch.ones(300, 400)], lambda t: _one(dist.broadcast(t[0].t(), 1, async_op=True))
    ),
    "all_gather of several sizes": Call(
        _uneven, lambda t: _one(dist.all_gather(t[1:], t[0], async_op=True))
    ),
    "reduce_scatter": Call(
        lambda: [torch.ones(2 * COUNT), torch.ones(COUNT)],
        lambda t: _one(dist.reduce_scatter_tensor(t[1], t[0], async_op=True)),
    ),
    "all_to_all with splits": Call(
        lambda: _vectors(2),
        lambda t: _one(dist.all_to_all_single(t[1], t[0], *2 * [[COUNT // 2] * 2], async_op=True)),
    ),
    "coalesced": Call(lambda: _vectors(3), _coalesced),
    "send and recv": Call(lambda: _vectors(2), _both_ways),
}


def _until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.001)
    return True


def _meet(where: str) -> None:
    """Returns when both ranks have come; without the group, whose calls are what is tested."""
    ranks.arrive(where)
    ranks.await_ranks(where, 2)


def _are_freed(memory: list[StorageWeakRef]) -> bool:
    return _until(lambda: all(one.expired() for one in memory))


def _drop_early() -> None:
    """Rank 0 drops everything before rank 1 makes the call."""
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    for name, call in CALLS.items():
        if dist.get_rank() == 0:
            memory = call.begin_and_drop()
            gc.collect()
            assert not any(one.expired() for one in memory), name
            _meet(f"begun {name}")
            assert _are_freed(memory), name
        else:
            _meet(f"begun {name}")
            tensors = call.make()
            for work in call.begin(tensors):
                work.wait()
        _meet(f"ended {name}")
    dist.destroy_process_group()


@layouts
def test_tensors_of_calls_live_until_these_have_ended(layout: str) -> None:
    ranks.check_ranks(_drop_early, layout)


def _drop_after_the_call() -> None:
    """The Work holds the tensors until it is dropped; a caller that has waited drops the last."""
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    for name, call in CALLS.items():
        tensors = call.make()
        works = call.begin(tensors)
        for work in works:
            work.wait()
        memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        del tensors
        gc.collect()
        assert not any(one.expired() for one in memory), name
        del works, work
        assert _are_freed(memory), name
    for shape in ((2,), (COUNT,), (300, 400)):
        tensor = torch.ones(shape).t() if len(shape) == 2 else torch.ones(shape)
        memory = [StorageWeakRef(tensor.untyped_storage())]
        dist.all_reduce(tensor)
        del tensor
        assert _are_freed(memory)
    dist.destroy_process_group()


@layouts
def test_tensors_are_freed_with_the_last_reference(layout: str) -> None:
    ranks.check_ranks(_drop_after_the_call, layout)


def _fail_in(call: Call) -> list[StorageWeakRef]:
    tensors = call.make()
    with pytest.raises(dist.DistBackendError, match="called abort"):
        call.begin(tensors)[0].wait()
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def _begin_what_fails(how: str) -> list[StorageWeakRef]:
    if how == "all calls":
        return [one for call in CALLS.values() for one in call.begin_and_drop()]
    if how == "a call that waits":
        wait = lambda t: _one(dist.all_reduce(t[0]))  # noqa: E731
        return _fail_in(Call(lambda: _vectors(1), wait))
    # Destroying a group does not wait for a receive.
    tensor = torch.ones(COUNT)
    dist.irecv(tensor, 1)
    return [StorageWeakRef(tensor.untyped_storage())]


def _fail(how: str) -> None:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1))
    memory = []
    if dist.get_rank() == 0:
        if how == "a call that waits":
            ranks.arrive("begun")
        memory = _begin_what_fails(how)
        if how != "a call that waits":
            ranks.arrive("begun")
        if how != "destroy":
            # The other rank may still use this one's memory.
            memory += _fail_in(CALLS["all_reduce"])
            gc.collect()
            # The places in `memory` tell which call has lost its own.
            assert not [place for place, one in enumerate(memory) if one.expired()]
    else:
        ranks.await_ranks("begun", 1)
        if how == "a call that waits":
            time.sleep(0.1)  # by then the other one is in the call
        if how != "destroy":
            dist.group.WORLD.abort()
    dist.destroy_process_group()
    _meet("left")
    # What is left of groups that were destroyed is freed when another one is made.
    dist.init_process_group("smddp")
    assert _are_freed(memory)
    dist.destroy_process_group()


@layouts
@pytest.mark.parametrize("how", ["all calls", "a call that waits", "destroy"])
def test_tensors_of_a_call_that_failed_live_as_long_as_the_group(layout: str, how: str) -> None:
    ranks.check_ranks(_fail, layout, how)
