"""Sends directly from the memory of a device made of threads."""

from __future__ import annotations

import threading
from typing import Any

import device_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from device_jobs import RAILS, job_with_part
from on_ranks import on_ranks

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(device_cases.find_fake() is None, reason="the C++ tests are not built"),
]

# The provider shm is available everywhere and has FI_HMEM; tcp does not have it.
DIRECT = {"SMDDP_GPU_DIRECT": "1", "SMDDP_PROVIDER": "shm"}


def _with_part(cases: str) -> None:
    from smddp.torch import backend

    part = str(device_cases.find_fake())
    backend._gpu_support = lambda: ("fake", lambda index: "GPU 0", None, part)
    getattr(device_cases, cases)("fake")


@pytest.mark.parametrize("layout", ["1+1", "1+1+1", "2+1"])
@pytest.mark.parametrize("cases", ["moves", "moves_blocks"])
def test_values_from_device_memory(layout: str, cases: str) -> None:
    ranks.check_ranks(_with_part, layout, cases, env=DIRECT, timeout=120)


@pytest.mark.parametrize("cases", [case.__name__ for case in device_cases.ORDER])
def test_order_from_device_memory(cases: str) -> None:
    ranks.check_ranks(_with_part, "1+1", cases, env=DIRECT, timeout=90)


COUNT = 30_000


def _fetched_by_call() -> dict[str, int]:
    """Checks values; returns the number of elements that each call copied to the host."""
    with job_with_part(None) as device:
        size, me = dist.get_world_size(), dist.get_rank()

        def new(count: int, value: float) -> torch.Tensor:
            return torch.full((count,), float(value), device=device.device)

        def all_gather() -> None:
            into = [new(COUNT, 0) for _ in range(size)]
            dist.all_gather(into, new(COUNT, me))
            results.extend((one, r) for r, one in enumerate(into))

        def all_gather_into_tensor() -> None:
            into = new(size * COUNT, 0)
            dist.all_gather_into_tensor(into, new(COUNT, me))
            results.extend((one, r) for r, one in enumerate(into.chunk(size)))

        def all_gather_in_place() -> None:
            whole = new(size * COUNT, me)
            dist.all_gather_into_tensor(whole, whole.chunk(size)[me])
            results.extend((one, r) for r, one in enumerate(whole.chunk(size)))

        def all_to_all_single() -> None:
            into = new(size * COUNT, 0)
            dist.all_to_all_single(into, torch.cat([new(COUNT, me * 10 + r) for r in range(size)]))
            results.extend((one, r * 10 + me) for r, one in enumerate(into.chunk(size)))

        def all_to_all_with_splits() -> None:
            splits = [COUNT] * size
            into = new(size * COUNT, 0)
            given = torch.cat([new(COUNT, me * 10 + r) for r in range(size)])
            dist.all_to_all_single(into, given, splits, splits)
            results.extend((one, r * 10 + me) for r, one in enumerate(into.chunk(size)))

        def broadcast() -> None:
            vector = new(COUNT, me)
            dist.broadcast(vector, 1)
            results.append((vector, 1))

        def gather() -> None:
            into = [new(COUNT, 0) for _ in range(size)] if me == 0 else None
            dist.gather(new(COUNT, me), into, 0)
            results.extend((one, r) for r, one in enumerate(into or []))

        def scatter() -> None:
            into = new(COUNT, 0)
            dist.scatter(into, [new(COUNT, r) for r in range(size)] if me == 0 else None, 0)
            results.append((into, me))

        def messages() -> None:
            into = new(COUNT, 0)
            work = dist.irecv(into, (me - 1) % size)
            dist.send(new(COUNT, me), (me + 1) % size)
            work.wait()
            results.append((into, (me - 1) % size))

        def all_reduce() -> None:
            vector = new(COUNT, me)
            dist.all_reduce(vector)
            results.append((vector, sum(range(size))))

        def every_other() -> None:
            into = new(size * COUNT, 0)
            dist.all_gather_into_tensor(into, new(2 * COUNT, me)[::2])
            results.extend((one, r) for r, one in enumerate(into.chunk(size)))

        fetched = {}
        for call in (
            all_gather,
            all_gather_into_tensor,
            all_gather_in_place,
            all_to_all_single,
            all_to_all_with_splits,
            broadcast,
            gather,
            scatter,
            messages,
            all_reduce,
            every_other,
        ):
            results: list[tuple[torch.Tensor, float]] = []
            before = device.module.fetched()
            call()
            device.synchronize()
            fetched[call.__name__] = (device.module.fetched() - before) // 4
            for tensor, expected in results:
                assert tensor.cpu().eq(expected).all(), call.__name__
        return fetched


def test_what_is_sent_from_device_memory() -> None:
    """Only operands of sums, the root's own block, and strided tensors are copied to the host."""
    said = ranks.check_ranks(_fetched_by_call, "1+1+1", env=DIRECT)
    for rank, fetched in enumerate(said):
        expected = {"gather": COUNT if rank == 0 else 0, "all_reduce": COUNT, "every_other": COUNT}
        assert fetched == {call: expected.get(call, 0) for call in fetched}


@pytest.mark.parametrize(
    ("env", "part", "why"),
    [
        ({"SMDDP_PROVIDER": "tcp"}, None, "does not reach memory of devices"),
        (
            {"SMDDP_FABRIC_RMA": "0"},
            None,
            "there are no remote writes with libfabric's provider shm",
        ),
        ({}, "/nowhere/libsmddp_cuda.so", "the CUDA part cannot be loaded"),
    ],
)
def test_device_memory_that_cannot_be_sent(env: dict[str, str], part: str | None, why: str) -> None:
    """Such memory is sent through the host, and every rank logs once why."""
    outcomes = ranks.run_ranks(_sends_in_vain, "1+1", part, env=DIRECT | env)
    for outcome in outcomes:
        assert outcome.value == COUNT, str(outcome)
        said = [line for line in outcome.stderr.splitlines() if why in line]
        assert len(said) == 1, outcome.stderr
        assert "whatever SMDDP_GPU_DIRECT says" in said[0]


def _sends_in_vain(part: str | None) -> int:
    """Returns the number of elements that were copied to the host."""
    with job_with_part(part) as device:
        for _ in range(2):
            into = torch.zeros(2 * COUNT, device=device.device)
            mine = torch.full((COUNT,), dist.get_rank() + 1.0, device=device.device)
            before = device.module.fetched()
            dist.all_gather_into_tensor(into, mine)
            fetched: int = device.module.fetched() - before
            assert [float(one[0].cpu()) for one in into.chunk(2)] == [1.0, 2.0]
        return fetched // 4


def _sends_from_new_memory() -> int:
    """Returns the number of different addresses of the tensors."""
    with job_with_part(None) as device:
        places = set()
        for number in range(20):
            # Other sizes at the same addresses.
            mine = torch.full((COUNT + 2000 * (number % 3),), float(number), device=device.device)
            into = torch.zeros(2 * mine.numel(), device=device.device)
            places.add(mine.data_ptr())
            dist.all_gather_into_tensor(into, mine)
            assert into.cpu().eq(number).all()
            del mine, into
            device.synchronize()
        return len(places)


def test_device_memory_that_is_freed() -> None:
    """Registrations of freed memory are dropped, and new memory at the address is registered."""
    env = DIRECT | {"SMDDP_LOG": "debug"}
    for outcome in ranks.run_ranks(_sends_from_new_memory, "1+1", env=env):
        assert outcome.value < 20, str(outcome)
        lines = outcome.stderr.splitlines()
        assert sum("bytes of GPU memory are registered" in line for line in lines) == 20
        freed = [line for line in lines if "registered have been freed" in line]
        numbers = [int(line.split(" allocations of GPU")[0].split()[-1]) for line in freed]
        assert sum(numbers) >= 18, freed


def _sends_from_mapped_memory() -> list[int]:
    """Returns the elements copied to the host of a long tensor, and of a short one."""
    with job_with_part(None) as device:
        device.module.tell_of_parts(65536)
        fetched = []
        for count in (COUNT, COUNT // 3):
            mine = torch.full((count,), dist.get_rank() + 1.0, device=device.device)
            into = torch.zeros(2 * count, device=device.device)
            before = device.module.fetched()
            dist.all_gather_into_tensor(into, mine)
            fetched.append((device.module.fetched() - before) // 4)
            assert into.cpu().tolist() == [1.0] * count + [2.0] * count
        return fetched


def test_device_memory_that_is_mapped_in_parts() -> None:
    """A tensor that is not within one allocation known to the driver is sent through the host."""
    for fetched in ranks.check_ranks(_sends_from_mapped_memory, "1+1", env=DIRECT):
        assert fetched == [COUNT, 0]


def _sends_overlapping() -> None:
    """The input is the part of the output where another rank's block arrives."""
    with job_with_part(None) as device:
        me, size = dist.get_rank(), dist.get_world_size()
        for other in range(size):
            into = torch.full((size * COUNT,), -1.0, device=device.device)
            given = into.chunk(size)[other]
            device.fill(given, float(me))
            dist.all_gather_into_tensor(into, given)
            for r, one in enumerate(into.chunk(size)):
                assert one.cpu().eq(r).all(), (other, r)


def test_overlapping_device_memory() -> None:
    """The result is the same as through the host, which reads everything before it writes."""
    for env in ({}, DIRECT):
        ranks.check_ranks(_sends_overlapping, "1+1+1", env=env)


@on_ranks("1+1", env=DIRECT)
def test_calls_from_device_memory_by_those_who_see_others_end() -> None:
    """Continuations make the next call, also while another thread waits to register memory."""
    with job_with_part(None) as device:
        done = threading.Event()
        kept = []

        def call(left: int) -> None:
            mine = torch.full((COUNT,), float(left), device=device.device)
            into = torch.zeros(2 * COUNT, device=device.device)
            work = dist.all_gather_into_tensor(into, mine, async_op=True)
            kept.append((into, left))

            def go_on(_: Any) -> None:
                if left:
                    call(left - 1)
                else:
                    done.set()

            work.get_future().add_done_callback(go_on)

        call(20)
        assert done.wait(30)
        device.synchronize()
        for into, left in kept:
            assert into.cpu().eq(left).all()


def _moves_on_rails() -> tuple[int, list[list[float]]]:
    with job_with_part(None) as device:
        size, me = dist.get_world_size(), dist.get_rank()
        mine = torch.arange(COUNT, device="cpu").float().add(me).to(device.device)
        everything = torch.zeros(size * COUNT, device=device.device)
        dist.all_gather_into_tensor(everything, mine)
        dist.broadcast(mine, 1)
        return device_cases.Fake.module.fetched(), [t.cpu().tolist() for t in (everything, mine)]


def test_rails_send_from_device_memory() -> None:
    """The stand-in for NCCL copies its operands to the host either way."""
    through_host = ranks.check_ranks(_moves_on_rails, "2x2", env=RAILS)
    directly = ranks.check_ranks(_moves_on_rails, "2x2", env=RAILS | DIRECT)
    base = torch.arange(COUNT).float()
    expected = [torch.cat([base + rank for rank in range(4)]).tolist(), (base + 1).tolist()]
    for (more, one), (fewer, other) in zip(through_host, directly, strict=True):
        assert one == other == expected
        assert fewer < more
