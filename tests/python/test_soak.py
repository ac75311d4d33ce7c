"""Random calls for a long time: what a process has in use does not grow.

SOAK_SECONDS sets how long test_random_calls_for_long runs; `pytest -s` prints its samples.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import smddp

pytestmark = pytest.mark.multiprocess

LAYOUT = "2+1"
# torch keeps so much of each group that was destroyed, with any backend: 440 bytes with gloo.
BYTES_OF_GROUP_IN_TORCH = 500
LONG = float(os.environ.get("SOAK_SECONDS", "1200"))


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _in_use() -> dict[str, int]:
    """Returns what this process has in use."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    heap = libc.mallinfo2()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(status[name].split()[0]) for name in ("VmRSS", "RssShmem")}
    return {
        "heap": heap.uordblks + heap.hblkhd,
        "resident": kib["VmRSS"] << 10,
        "shared": kib["RssShmem"] << 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
    }


class _Caller:
    """Makes the same random calls on all ranks, and checks what comes out."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.me, self.size = dist.get_rank(), dist.get_world_size()
        # The members of a group, and the group on those.
        self.groups: list[tuple[list[int], Any]] = [(list(range(self.size)), dist.group.WORLD)]
        self.open: list[tuple[Any, torch.Tensor, float]] = []
        self.made = 0  # groups
        self.calls = [
            self.all_reduce,
            self.all_reduce,
            self.asynchronous,
            self.asynchronous,
            self.broadcast,
            self.all_gather,
            self.reduce_scatter,
            self.all_to_all,
            self.gather_and_scatter,
            self.objects,
            self.messages,
            self.new_group,
            self.end_group,
        ]

    def step(self) -> None:
        self.random.choice(self.calls)()

    def settle(self) -> None:
        for work, tensor, expected in self.open:
            work.wait()
            assert tensor.numel() == 0 or (tensor[0] == expected and tensor[-1] == expected)
        self.open.clear()

    def _count(self) -> int:
        return int(2 ** self.random.uniform(0, 18))

    def _tensor(self, count: int, value: float) -> torch.Tensor:
        make = smddp.empty if self.random.random() < 0.3 else torch.empty
        return make(count).fill_(value)

    def _group(self) -> tuple[list[int], Any] | None:
        members, group = self.random.choice(self.groups)
        return (members, group) if self.me in members else None

    def all_reduce(self) -> None:
        chosen, count = self._group(), self._count()
        tensor = self._tensor(count, float(self.me))
        if chosen is None:
            return
        dist.all_reduce(tensor, group=chosen[1])
        assert tensor[0] == sum(chosen[0])

    def asynchronous(self) -> None:
        chosen, count = self._group(), self._count()
        tensor = self._tensor(count, float(self.me))
        follows, settles = self.random.random() < 0.5, self.random.random() < 0.2
        if chosen is not None:
            work = dist.all_reduce(tensor, group=chosen[1], async_op=True)
            if follows:
                work.get_future().then(lambda done: done.value())
            self.open.append((work, tensor, float(sum(chosen[0]))))
        if settles:
            self.settle()

    def broadcast(self) -> None:
        chosen, count = self._group(), self._count()
        tensor = self._tensor(count, float(self.me))
        place = self.random.random()
        if chosen is None:
            return
        root = chosen[0][int(place * len(chosen[0]))]
        dist.broadcast(tensor, root, group=chosen[1])
        assert tensor[-1] == root

    def all_gather(self) -> None:
        chosen, count = self._group(), self._count() // 4 + 1
        if chosen is None:
            return
        whole = torch.empty(len(chosen[0]) * count)
        dist.all_gather_into_tensor(whole, torch.full((count,), float(self.me)), group=chosen[1])
        assert whole[::count].tolist() == chosen[0]

    def reduce_scatter(self) -> None:
        chosen, count = self._group(), self._count() // 4 + 1
        if chosen is None:
            return
        mine = torch.empty(count)
        whole = torch.full((len(chosen[0]) * count,), float(self.me))
        dist.reduce_scatter_tensor(mine, whole, group=chosen[1])
        assert mine[0] == sum(chosen[0])

    def all_to_all(self) -> None:
        chosen = self._group()
        counts = [[self.random.randrange(2000) for _ in range(self.size)] for _ in range(self.size)]
        if chosen is None:
            return
        members, group = chosen
        out = [counts[self.me][rank] for rank in members]
        into = [counts[rank][self.me] for rank in members]
        result = torch.empty(sum(into))
        dist.all_to_all_single(
            result, torch.full((sum(out),), float(self.me)), into, out, group=group
        )
        assert result.sum() == sum(rank * count for rank, count in zip(members, into, strict=True))

    def gather_and_scatter(self) -> None:
        chosen, count = self._group(), self._count() // 4 + 1
        if chosen is None:
            return
        members, group = chosen
        root = members[0]
        mine = torch.full((count,), float(self.me))
        parts = [torch.empty(count) for _ in members] if self.me == root else None
        dist.gather(mine, parts, dst=root, group=group)
        dist.scatter(mine, parts, src=root, group=group)
        assert mine[0] == self.me

    def objects(self) -> None:
        chosen, length = self._group(), self._count()
        if chosen is None:
            return
        found: list[Any] = [None] * len(chosen[0])
        dist.all_gather_object(found, (self.me, "x" * (length % 5000)), group=chosen[1])
        assert [rank for rank, _ in found] == chosen[0]

    def messages(self) -> None:
        count, tag = self._count(), self.random.randrange(4)
        tensor = torch.full((count,), float(self.me))
        received = torch.empty(count)
        to, source = (self.me + 1) % self.size, (self.me - 1) % self.size
        sent = dist.isend(tensor, to, tag=tag)
        dist.recv(received, source if tag else None, tag=tag)
        sent.wait()
        assert received[0] == source

    def new_group(self) -> None:
        members = sorted(self.random.sample(range(self.size), self.random.randint(1, self.size)))
        if len(self.groups) < 8:
            self.groups.append((members, dist.new_group(members)))
            self.made += 1

    def end_group(self) -> None:
        if len(self.groups) == 1:
            return
        self.settle()
        members, group = self.groups.pop(self.random.randrange(1, len(self.groups)))
        if self.me in members:
            dist.destroy_process_group(group)


def _calls(seconds: float, seed: int) -> list[dict[str, int]]:
    """Makes random calls for some seconds; returns 20 samples of what the process has in use."""
    with ranks.job(timeout=120):
        caller = _Caller(seed)
        begin = time.monotonic()
        samples: list[dict[str, int]] = []
        steps = 0
        while len(samples) < 20:
            for _ in range(20):
                caller.step()
            steps += 20
            caller.settle()
            passed = torch.tensor([time.monotonic() - begin])
            dist.broadcast(passed, 0)
            if passed[0] < (len(samples) + 1) * seconds / 20:
                continue
            # Samples compare only if the same groups are alive.
            while len(caller.groups) > 1:
                caller.end_group()
            # What is left of groups that were destroyed is freed when another one is made.
            dist.destroy_process_group(dist.new_group())
            caller.made += 1
            second = round(float(passed[0]))
            samples.append({"second": second, "steps": steps, "groups": caller.made, **_in_use()})
        return samples


def _check(seconds: float, warm_seconds: float, warm_steps: int, growth: float) -> None:
    """Makes random calls; checks that nothing grows by more than `growth` after the warm-up.

    Caches fill with the calls. So on a busy machine the warm-up takes longer than `warm_seconds`.
    """
    for rank, samples in enumerate(
        ranks.check_ranks(_calls, LAYOUT, seconds, 1, timeout=seconds + 60)
    ):
        print(f"rank {rank}", *samples, sep="\n")
        early = next(
            sample
            for sample in samples
            if sample["second"] >= warm_seconds and sample["steps"] >= warm_steps
        )
        late = samples[-1]
        in_torch = (late["groups"] - early["groups"]) * BYTES_OF_GROUP_IN_TORCH
        for name in ("heap", "resident"):
            limit = early[name] * (1 + growth) + in_torch
            assert late[name] <= limit, f"rank {rank}, {name}: {samples}"
        # Callbacks that wait for Python's interpreter at the same time have a thread each.
        for name, spare in {"descriptors": 2, "threads": 8, "maps": 30}.items():
            assert late[name] <= early[name] + spare, f"rank {rank}, {name}: {samples}"


# Calls that bring sizes, each with as many bytes as one asks for.


def _all_reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def _all_to_all(tensor: torch.Tensor) -> None:
    whole = tensor.repeat(dist.get_world_size())
    dist.all_to_all_single(torch.empty_like(whole), whole)


def _split_all_to_all(tensor: torch.Tensor) -> None:
    size = dist.get_world_size()
    counts = [tensor.numel()] * size
    counts[-1] //= 2
    into = [counts[dist.get_rank()]] * size
    out = torch.zeros(sum(counts), dtype=torch.uint8)
    dist.all_to_all_single(torch.empty(sum(into), dtype=torch.uint8), out, into, counts)


def _objects(tensor: torch.Tensor) -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, bytes(tensor.numel()))
    dist.broadcast_object_list(found, 0)


def _messages(tensor: torch.Tensor) -> None:
    tag = tensor.numel()
    me, size = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(tensor, (me + 1) % size, tag=tag)
    dist.recv(torch.empty_like(tensor), (me - 1) % size, tag=tag)
    sent.wait()


def _sizes(call: str, count: int) -> list[dict[str, int]]:
    """Makes a call with each size; returns what is in use after half of them, and after all."""
    make = globals()[call]
    with ranks.job(timeout=120):
        samples = []
        tensor = torch.zeros(count, dtype=torch.uint8)
        for size in range(1, count + 1):
            make(tensor[:size])
            if size in (count // 2, count):
                samples.append(_in_use())
        return samples


def _check_sizes(call: str, layout: str, count: int, timeout: float, **env: str) -> None:
    # A plan takes 1 to 20 KiB.
    for early, late in ranks.check_ranks(_sizes, layout, call, count, timeout=timeout, env=env):
        assert late["heap"] <= early["heap"] + (256 << 10), (early, late)


CALLS = ["_all_reduce", "_all_to_all", "_split_all_to_all", "_objects", "_messages"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layout", ["2", "1+1"])
@pytest.mark.costly
def test_sizes_that_never_repeat(layout: str, call: str) -> None:
    # A small cache is full after half of so few sizes.
    _check_sizes(call, layout, 4000, timeout=110, SMDDP_PLAN_CACHE_BYTES=str(1 << 20))


@pytest.mark.exhaustive
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    ("call", "count"), [(CALLS[0], 1_000_000), *((call, 100_000) for call in CALLS[1:])]
)
def test_many_sizes_that_never_repeat(call: str, count: int) -> None:
    _check_sizes(call, "2", count, timeout=1900)


@pytest.mark.costly
def test_random_calls_for_short() -> None:
    _check(20, warm_seconds=8, warm_steps=0, growth=0.1)


@pytest.mark.exhaustive
@pytest.mark.timeout(LONG + 120)
def test_random_calls_for_long() -> None:
    _check(LONG, warm_seconds=120, warm_steps=100_000, growth=0.03)
