"""Calls on tensors of a device that is made of threads: values, order, lifetimes, errors."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import device_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from device_cases import error_of

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(device_cases.find_fake() is None, reason="the C++ tests are not built"),
]


@pytest.mark.parametrize("layout", ["1", "2", "2x2"])
@pytest.mark.parametrize("cases", device_cases.VALUES)
def test_values(layout: str, cases: Callable[[str], None]) -> None:
    ranks.check_ranks(cases, layout, "fake", timeout=90)


@pytest.mark.parametrize("layout", ["2", "2x2"])
@pytest.mark.parametrize("cases", device_cases.ORDER)
def test_order(layout: str, cases: Callable[[str], None]) -> None:
    ranks.check_ranks(cases, layout, "fake", timeout=90)


# --- errors ---------------------------------------------------------------------------------------


def test_refused_calls() -> None:
    for said in ranks.check_ranks(device_cases.refuses, "2", "fake"):
        mixed, wrong_size, undefined = said
        assert mixed == (
            "ValueError: smddp: all tensors of a call must be on one device, got fake:0 and cpu"
        )
        assert wrong_size.startswith("ValueError: smddp: all_gather_into_tensor: the output must")
        assert undefined.startswith("TypeError: smddp: all_reduce: BAND of float32 is undefined")


def test_absent_rank() -> None:
    first, second, _ = ranks.check_ranks(device_cases.times_out, "3", "fake")
    for said in (first, second):
        assert said.startswith("CollectiveTimeoutError")
        assert "rank 2" in said


def _device_that_never_comes() -> list[str]:
    with device_cases.job("fake") as device:
        ranks.limit(2, device.device)
        tensor = torch.zeros(10, device=device.device)
        device.module.gate()
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(2)]
        said = [error_of(work.wait) for work in works]
        said.append(error_of(lambda: dist.all_reduce(tensor)))
        device.module.open()
        return said


def test_device_that_never_comes() -> None:
    """A call whose stream hangs ends with the timeout, on this rank and on the others."""
    for said in ranks.check_ranks(_device_that_never_comes, "2"):
        assert all(text.startswith("CollectiveTimeoutError: smddp") for text in said), said
        assert "before the device had come to this call" in said[0]


def _device_that_breaks() -> str:
    with device_cases.job("fake") as device:
        tensor = torch.zeros(10, device=device.device)
        device.synchronize()
        device.module.gate()
        work = dist.all_reduce(tensor, async_op=True)
        later = work.get_future()
        device.module.break_copies()
        device.module.open()
        said = error_of(work.wait)
        assert "the device is broken" in error_of(later.wait)
        assert error_of(work.wait) == said
        return said


def test_device_that_breaks() -> None:
    """wait() raises an error of the copies back to the device."""
    for said in ranks.check_ranks(_device_that_breaks, "2"):
        assert said.startswith("TransportError")
        assert "the device is broken" in said


def _leaving(how: str) -> list[str]:
    device = device_cases.Fake()
    dist.init_process_group(device.backend)
    tensor = torch.zeros(10, device=device.device)
    device.synchronize()
    device.slow_down()
    device.module.gate()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    if how == "abort":
        dist.group.WORLD.abort()
    else:
        dist.destroy_process_group()
    said = [error_of(work.wait) for work in works]
    del tensor, works  # the device has not read it yet
    device.module.open()
    device.finish()
    return said


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_leaving_while_the_device_is_busy(how: str) -> None:
    """Calls that have not begun end with the group."""
    for said in ranks.check_ranks(_leaving, "2", how):
        assert all(text.startswith("AbortedError") for text in said), said


# --- a stand-in for NCCL
# ---------------------------------------------------------------------------------------


def _with_peer(cases: str, shared: bool) -> tuple[str, int, int]:
    """Runs cases in a group with smddp's CPU groups in place of NCCL, the peers.

    Returns:
        The path of the collectives, the calls that the peers served, and the number of peers.
    """
    from smddp import _load, backend

    made = []

    def make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(_load.load().ProcessGroup(store, rank, size, timeout, "peer"))
        return made[-1]

    def name_of(index: int) -> str:
        return "one for all" if shared else f"GPU {os.environ['RANK']}"

    backend._gpu_support = lambda: ("fake", name_of, make_nccl)
    paths = []
    destroy = dist.destroy_process_group

    def destroy_and_tell(group: Any = None) -> None:
        paths.append(dist.group.WORLD._get_backend(torch.device("fake")).gpu_path())
        destroy(group)

    dist.destroy_process_group = destroy_and_tell
    getattr(device_cases, cases)("fake")
    served = sum(use["calls"] for group in made for use in group.statistics().values())
    return paths[0], served, len(made)


@pytest.mark.parametrize("cases", ["reduces", "moves", "overlaps", "follows_streams", "trains"])
def test_peer_serves_ranks_with_gpus_of_their_own(cases: str) -> None:
    for path, served, _ in ranks.check_ranks(_with_peer, "2", cases, False, timeout=90):
        assert path == "nccl"
        assert served >= 3


@pytest.mark.parametrize("shared", [False, True])
def test_messages_go_the_way_of_two_ranks(shared: bool) -> None:
    """Messages need no choice of a path for the group."""
    outcomes = ranks.run_ranks(_with_peer, "2", "messages", shared)
    for outcome in outcomes:
        assert outcome.value[::2] == ("", 0 if shared else 1), str(outcome)
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines()]
    assert sum("messages between ranks that share" in line for line in said) == int(shared), said


@pytest.mark.parametrize(("layout", "shared"), [("2", True), ("1+1", False)])
def test_host_serves_shared_gpus_and_several_nodes(layout: str, shared: bool) -> None:
    outcomes = ranks.run_ranks(_with_peer, layout, "moves", shared)
    for outcome in outcomes:
        assert outcome.value == ("host", 0, 0), str(outcome)
    why = "share GPU one for all" if shared else "several nodes"
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if why in line]
    assert len(said) == 1, said


@pytest.mark.parametrize(
    ("setting", "shared", "expected"), [("host", False, "host"), ("nccl", True, "nccl")]
)
def test_setting_decides(setting: str, shared: bool, expected: str) -> None:
    env = {"SMDDP_GPU_PATH": setting}
    for path, served, _ in ranks.check_ranks(_with_peer, "2", "moves", shared, env=env):
        assert path == expected
        assert (served > 0) == (expected == "nccl")


# --- NCCL inside nodes, the host between them ----------------------------------------------------


def _on_rails(cases: str) -> tuple[str, int, int]:
    return _with_peer(cases, False)


RAILS = {"SMDDP_GPU_PATH": "rails", "SMDDP_POOL_BYTES": "262144"}
CONNECTING = 2  # calls of the peers that connect: one of each


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        ("2x2", "reduces"),
        ("2x2", "moves"),
        ("2x2", "moves_chunks"),
        ("2x2", "shards_in_place"),
        ("2x2", "overlaps"),
        ("2x2", "follows_streams"),
        ("2x2", "barrier_covers"),
        ("2x2", "outlives_its_tensors"),
        ("2x2", "futures"),
        ("2x2", "trains"),
        ("3x2", "moves"),
        ("3x2", "moves_chunks"),
        ("3x2", "shards_in_place"),
        ("2x3", "moves_chunks"),
    ],
)
def test_rails(layout: str, cases: str) -> None:
    """Rails use two peers per rank inside the node, and the group's own messages between nodes.

    Unlike NCCL, these peers return only when the device has reached the call. So only test_cuda.py
    tests that calls do not block.
    """
    served = ranks.check_ranks(_on_rails, layout, cases, env=RAILS, timeout=120)
    for path, calls, peers in served:
        assert path == "rails"
        assert peers == 2
        assert calls > CONNECTING


def test_rails_of_several_chunks() -> None:
    """1.2 MB in 3 chunks (two ranks with 256 KiB each), with two calls of a peer per chunk."""
    for path, calls, _ in ranks.check_ranks(_on_rails, "2x2", "averages", env=RAILS):
        assert path == "rails"
        assert calls == CONNECTING + 2 * 3


def test_rails_of_several_chunks_of_blocks() -> None:
    """Chunks of blocks have 128 KiB per node, chunks of a vector 512 KiB; one call per chunk."""
    for path, calls, _ in ranks.check_ranks(_on_rails, "2x2", "moves_chunks", env=RAILS):
        assert path == "rails"
        assert calls == CONNECTING + 4 + 4 + 3


def _numbered(nodes: list[int], cases: str) -> tuple[str, int, int]:
    os.environ["SMDDP_NODE_ID"] = f"node {nodes[int(os.environ['RANK'])]}"
    return _with_peer(cases, False)


@pytest.mark.parametrize("nodes", [[0, 1, 0, 1], [0, 1, 1, 0]])
def test_rails_of_ranks_in_another_order(nodes: list[int]) -> None:
    """Ranks are numbered across the nodes, also in an order that strides cannot describe."""
    for cases in ("moves", "moves_chunks"):
        for path, calls, _ in ranks.check_ranks(_numbered, "2x2", nodes, cases, env=RAILS):
            assert path == "rails"
            assert calls > CONNECTING


def test_calls_that_rails_do_not_serve() -> None:
    """The host serves them, and one rank logs each once."""
    outcomes = ranks.run_ranks(_on_rails, "2x2", "moves", env=RAILS)
    said = [
        line
        for outcome in outcomes
        for line in outcome.stderr.splitlines()
        if "does not serve it" in line
    ]
    calls = sorted(line.split(" of ")[0].split()[-1] for line in said)
    assert calls == ["allreduce", "alltoall", "gather", "reduce", "scatter"], said
    assert all("its group, rails, does not serve it" in line for line in said)


def test_calls_that_nccl_does_not_serve() -> None:
    outcomes = ranks.run_ranks(_with_peer, "2", "reduces", False)
    said = [
        line
        for outcome in outcomes
        for line in outcome.stderr.splitlines()
        if "does not serve it" in line
    ]
    assert sum("allreduce of Int by BAND" in line for line in said) == 1, said
    assert len(said) == len(set(said))


@pytest.mark.parametrize(
    ("layout", "shared", "why"),
    [("2+1", False, "nodes have different numbers of ranks"), ("1+1", False, "one rank each")],
)
def test_rails_that_are_impossible(layout: str, shared: bool, why: str) -> None:
    outcomes = ranks.run_ranks(_with_peer, layout, "moves", shared, env=RAILS)
    for outcome in outcomes:
        assert outcome.value == ("host", 0, 0), str(outcome)
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if why in line]
    assert len(said) == 1, said
    assert "SMDDP_GPU_PATH=rails is not possible" in said[0]


@contextlib.contextmanager
def _rails_job(timeout: float) -> Iterator[Any]:
    from smddp import _load, backend

    def make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return _load.load().ProcessGroup(store, rank, size, timeout, "peer")

    backend._gpu_support = lambda: ("fake", lambda index: os.environ["RANK"], make_nccl)
    with device_cases.job("fake", timeout=timeout) as device:
        dist.all_reduce(torch.zeros(10, device=device.device))
        yield device


def _rail_breaks() -> list[str]:
    with _rails_job(5) as device:
        ranks.arrive("the first call")  # the others may need this rank until its end
        if dist.get_rank() == 3:
            ranks.await_ranks("the first call", 4)
            os.kill(os.getpid(), signal.SIGKILL)
        tensor = torch.zeros(10, device=device.device)
        # The rank on the same node may get the error from the peer, which then rejects the call.
        return [
            error_of(lambda: dist.all_reduce(tensor, async_op=True).wait()),
            error_of(lambda: dist.all_reduce(tensor)),
        ]


def _calls_on_rails(device: Any) -> list[Callable[[], Any]]:
    """Returns asynchronous calls with several chunks each."""
    size = dist.get_world_size()
    block = torch.zeros(100_003, device=device.device)
    blocks = torch.zeros(size * 100_003, device=device.device)
    return [
        lambda: dist.all_reduce(blocks, async_op=True),
        lambda: dist.all_gather_into_tensor(blocks, block, async_op=True),
        lambda: dist.reduce_scatter_tensor(block, blocks, async_op=True),
        lambda: dist.broadcast(blocks, 0, async_op=True),
    ]


def _rail_breaks_within(number: int) -> list[str]:
    """Rank 3 dies while all devices are in the middle of a call."""
    with _rails_job(10) as device:
        call = _calls_on_rails(device)[number]
        device.synchronize()
        device.slow_down()
        works = []
        said = error_of(
            lambda: works.append(call())
        )  # this rank may already know that rank 3 is dead
        if dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if works:
            said = error_of(works[0].wait)
        return [said, error_of(lambda: call().wait())]


@pytest.mark.parametrize("number", range(4))
def test_rank_that_dies_within_a_call_on_a_rail(number: int) -> None:
    outcomes = ranks.run_ranks(_rail_breaks_within, "2x2", number, env=RAILS, timeout=60)
    for outcome in outcomes[:3]:
        assert outcome.returned, str(outcome)
        # A rank may have had its result before. The next call fails on all ranks.
        first, second = outcome.value
        assert "Error: smddp" in first or first == "no error", str(outcome)
        assert "Error: smddp" in second, str(outcome)


def _device_breaks_on_a_rail(number: int) -> list[str]:
    with _rails_job(10) as device:
        call = _calls_on_rails(device)[number]
        device.synchronize()
        if dist.get_rank() == 1:
            device.delay()
            threading.Timer(0.1, device.module.break_copies).start()
        return [error_of(lambda: call().wait()) for _ in range(2)]


@pytest.mark.parametrize("number", range(3))
def test_device_that_breaks_on_a_rail(number: int) -> None:
    """Copies fail on rank 1 during a call; all ranks get an error in this call or in the next."""
    said = ranks.check_ranks(_device_breaks_on_a_rail, "2x2", number, env=RAILS, timeout=60)
    assert "the device is broken" in said[1][0]
    for _, second in said:
        assert "Error: " in second, said


def _leaving_the_rail(how: str) -> list[str]:
    with _rails_job(20) as device:
        if dist.get_rank() >= 2:
            return []
        works, said = [], []
        for _ in range(3):
            try:
                works.append(dist.all_reduce(torch.zeros(10, device=device.device), async_op=True))
            except dist.DistBackendError as error:  # the other rank of its node has already left
                said.append(f"{type(error).__name__}: {error}")
        if how == "abort":
            dist.group.WORLD.abort()
        else:
            dist.group.WORLD._get_backend(device.device).shutdown()
        return said + [error_of(work.wait) for work in works]


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_leaving_while_the_rail_is_busy(how: str) -> None:
    """The other node makes no call; calls that wait for it end with the group."""
    for said in ranks.check_ranks(_leaving_the_rail, "2x2", how, env=RAILS)[:2]:
        assert len(said) == 3
        assert all("Error: smddp" in text for text in said), said


def test_rank_that_dies_on_a_rail() -> None:
    """All other ranks get an error, also those on another rail."""
    outcomes = ranks.run_ranks(_rail_breaks, "2x2", env=RAILS, timeout=60)
    for outcome in outcomes[:3]:
        assert outcome.returned, str(outcome)
        assert all("Error: smddp" in text for text in outcome.value), str(outcome)


# --- the sum between nodes on the GPU ------------------------------------------------------------


@contextlib.contextmanager
def _summing_job(library: str | None) -> Iterator[Any]:
    """Creates a job on rails; `library` replaces the CUDA part. Yields the device."""
    from smddp import _load, backend

    def make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return _load.load().ProcessGroup(store, rank, size, timeout, "peer")

    part = str(device_cases.find_fake()) if library is None else library
    backend._gpu_support = lambda: ("fake", lambda index: os.environ["RANK"], make_nccl, part)
    with device_cases.job("fake") as device:
        yield device


def _place() -> str:
    place: str = dist.group.WORLD._get_backend(torch.device("fake")).gpu_sum()
    return place


# The dtypes that rails reduce, and a count that is not a multiple of the ranks or nodes. It is so
# large that the CPU sums in the order of nodes.
SUMMED = [*device_cases.FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64]
SUMMED_COUNT = 20_011


def _sums(library: str | None = None) -> tuple[str, int, dict[str, bytes]]:
    """Returns where sums were made, the number of kernels, and the bytes of the results by call."""
    with _summing_job(library) as device:
        results = {}
        generator = torch.Generator().manual_seed(dist.get_rank())

        def keep(name: str, tensor: torch.Tensor) -> None:
            results[name] = bytes(tensor.cpu().contiguous().view(torch.uint8).numpy())

        for dtype in SUMMED:
            ops = device_cases.OPS + ([dist.ReduceOp.AVG] if dtype.is_floating_point else [])
            for number, op in enumerate(ops):
                size = dist.get_world_size()
                values = torch.randn(size * SUMMED_COUNT, generator=generator) * 100
                there = values.to(dtype).to(device.device)
                block = torch.zeros(SUMMED_COUNT, dtype=dtype, device=device.device)
                dist.reduce_scatter_tensor(block, there, op)
                keep(f"reduce_scatter {dtype} {number}", block)
                vector = there[:SUMMED_COUNT].clone()
                dist.all_reduce(vector, op)
                keep(f"all_reduce {dtype} {number}", vector)
        return _place(), device.module.jobs(), results


@pytest.mark.parametrize("layout", ["2x2", "3x2"])
def test_sums_on_the_gpu_are_those_of_the_cpu(layout: str) -> None:
    """Sums on GPU and CPU are equal bit by bit, for values whose sums depend on the order."""
    on_cpu = ranks.check_ranks(_sums, layout, env=RAILS | {"SMDDP_GPU_SUM": "cpu"}, timeout=120)
    on_gpu = ranks.check_ranks(_sums, layout, env=RAILS | {"SMDDP_GPU_SUM": "gpu"}, timeout=120)
    for (cpu, no_jobs, expected), (gpu, jobs, got) in zip(on_cpu, on_gpu, strict=True):
        assert (cpu, gpu) == ("cpu", "gpu")
        assert no_jobs == 0
        assert jobs > len(got)  # several kernels for calls with several chunks
        assert got == expected


# --- sends directly from the device's memory
# -----------------------------------------------------------

# The provider shm is available everywhere and has FI_HMEM; tcp does not have it.
DIRECT = {"SMDDP_GPU_DIRECT": "1", "SMDDP_PROVIDER": "shm"}


def _with_part(cases: str) -> None:
    from smddp import backend

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
    with _summing_job(None) as device:
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
    with _summing_job(part) as device:
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
    with _summing_job(None) as device:
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
    with _summing_job(None) as device:
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
    with _summing_job(None) as device:
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


def _sends_when_done() -> None:
    """Continuations make the next call, also while another thread waits to register memory."""
    with _summing_job(None) as device:
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


def test_calls_from_device_memory_by_those_who_see_others_end() -> None:
    ranks.check_ranks(_sends_when_done, "1+1", env=DIRECT)


def _reduces_on_rails() -> tuple[int, dict[str, bytes]]:
    _, _, results = _sums()
    return device_cases.Fake.module.fetched(), results


def test_sums_on_the_gpu_from_device_memory() -> None:
    """Rails send shares directly from the device's memory, before the kernel and after it.

    The stand-in for NCCL copies its operands to the host, which is twice as much.
    """
    env = RAILS | {"SMDDP_GPU_SUM": "gpu"}
    through_host = ranks.check_ranks(_reduces_on_rails, "2x2", env=env, timeout=120)
    directly = ranks.check_ranks(_reduces_on_rails, "2x2", env=env | DIRECT, timeout=120)
    for (more, expected), (fewer, got) in zip(through_host, directly, strict=True):
        assert got == expected
        assert 0.66 * more < fewer < 0.67 * more


def _on_rails_with_kernels(cases: str) -> tuple[str, int]:
    from smddp import _load, backend

    def make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return _load.load().ProcessGroup(store, rank, size, timeout, "peer")

    library = str(device_cases.find_fake())
    backend._gpu_support = lambda: ("fake", lambda index: os.environ["RANK"], make_nccl, library)
    places = []
    destroy = dist.destroy_process_group

    def destroy_and_tell(group: Any = None) -> None:
        places.append(_place())
        destroy(group)

    dist.destroy_process_group = destroy_and_tell
    getattr(device_cases, cases)("fake")
    return places[0], device_cases.Fake.module.jobs()


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        ("2x2", "reduces"),
        ("2x2", "overlaps"),
        ("2x2", "follows_streams"),
        ("2x2", "outlives_its_tensors"),
        ("2x2", "trains"),
        ("3x2", "moves_chunks"),
        ("3x2", "shards_in_place"),
    ],
)
def test_sums_on_the_gpu(layout: str, cases: str) -> None:
    env = RAILS | {"SMDDP_GPU_SUM": "gpu"}
    for place, jobs in ranks.check_ranks(_on_rails_with_kernels, layout, cases, env=env):
        assert place == "gpu"
        assert jobs > 1


def _trial() -> tuple[str, str]:
    with _summing_job(None) as device:
        tensor = torch.ones(10, device=device.device)
        dist.all_reduce(tensor)
        assert tensor.cpu().eq(dist.get_world_size()).all()
        first = _place()
        dist.all_reduce(tensor)
        return first, _place()


def test_sums_where_a_trial_was_quicker() -> None:
    """All ranks make the same choice, and one logs the measured times once."""
    env = RAILS | {"SMDDP_LOG": "info"}
    outcomes = ranks.run_ranks(_trial, "2x2", env=env)
    said = [
        line for one in outcomes for line in one.stderr.splitlines() if "rails sum on the" in line
    ]
    assert len(said) == 1, said
    times = re.search(r"([\d.]+) ms with the sum on the CPU, ([\d.]+) ms with", said[0])
    assert times, said
    cpu, gpu = map(float, times.groups())
    assert min(cpu, gpu) > 0
    expected = "gpu" if gpu < 0.9 * cpu else "cpu"
    for outcome in outcomes:
        assert outcome.value == (expected, expected), str(outcome)


@pytest.mark.parametrize("setting", ["gpu", "auto"])
def test_sums_without_a_cuda_part(setting: str) -> None:
    env = RAILS | {"SMDDP_GPU_SUM": setting}
    outcomes = ranks.run_ranks(_sums, "2x2", "/nowhere/libsmddp_cuda.so", env=env, timeout=120)
    said = [
        line for one in outcomes for line in one.stderr.splitlines() if "rails sum on the" in line
    ]
    assert len(said) == (setting == "gpu"), said
    assert all("rank 0: the CUDA part cannot be loaded" in line for line in said)
    assert all(outcome.value[:2] == ("cpu", 0) for outcome in outcomes)


# --- ranks that are lost while NCCL has enqueued work ---------------------------------------


@contextlib.contextmanager
def _hanging_job() -> Iterator[tuple[Any, list[Any]]]:
    """Yields the device and the peers of the default group, which has served a call.

    On rails there is one peer for the first stage and one for the last. The timeout of the group is
    longer than the test.
    """
    from smddp import backend

    made = []

    def make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(device_cases.Fake.module.HangingNccl(rank, size))
        return made[-1]

    backend._gpu_support = lambda: ("fake", lambda index: f"GPU {os.environ['RANK']}", make_nccl)
    with device_cases.job("fake", timeout=600) as device:
        dist.all_reduce(torch.ones(1000, device=device.device))
        dist.barrier()
        yield device, made
        device.synchronize()
    assert all(peer.aborts() <= 1 for peer in made)


def _until_it_fails(call: Callable[[], Any]) -> str:
    while (said := error_of(call)) == "no error":
        time.sleep(0.01)
    return said


def _loses_a_rank(stage: int, how: str) -> tuple[list[str], int]:
    """The last rank dies or fails while enqueued work of its node waits for it in a stage."""
    with _hanging_job() as (device, peers):
        me, last = dist.get_rank(), dist.get_world_size() - 1
        tensor = torch.ones(1000, device=device.device)
        locals_ = int(os.environ["LOCAL_WORLD_SIZE"])
        if me == last and how == "breaks":
            peers[stage].break_down()
        elif me != last and me // locals_ == last // locals_:
            peers[stage].hang()
        if stage == 0 and me == last:
            ranks.await_ranks("enqueued", locals_ - 1)
        if me == last and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if me == last and how == "aborts":
            dist.group.WORLD.abort()
        said = []
        try:
            work = dist.all_reduce(tensor, async_op=True)
            ranks.arrive("enqueued")
            said.append(error_of(work.wait))
        except dist.DistBackendError as error:
            said.append(f"{type(error).__name__}: {error}")
        device.synchronize()
        said.append(_until_it_fails(lambda: dist.all_reduce(tensor)))
        said.append(error_of(dist.barrier))
        # The rank that notices the failure first has its error before its engine aborts the peers.
        while not all(peer.aborts() for peer in peers):
            time.sleep(0.01)
        return said, sum(peer.aborts() for peer in peers)


LOST = {
    # The connection may break before the lifeline does.
    "dies": "PeerLostError: smddp.*rank {} .*(its process (died|ended)|its connection broke)",
    "breaks": "TransportError: smddp.*rank {} could not do its part.*unhandled error",
    "aborts": "AbortedError: smddp.*rank {} called abort",
}


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("stage", [0, 1])
def test_nccl_ends_when_a_rank_is_lost_on_rails(stage: int, how: str) -> None:
    outcomes = ranks.run_ranks(_loses_a_rank, "2x2", stage, how, env=RAILS, timeout=60)
    _check_lost(outcomes, how, peers=2)


@pytest.mark.parametrize("how", LOST)
def test_nccl_ends_when_a_rank_is_lost(how: str) -> None:
    outcomes = ranks.run_ranks(_loses_a_rank, "3", 0, how, timeout=60)
    _check_lost(outcomes, how, peers=1)


def _check_lost(outcomes: list[ranks.Outcome], how: str, peers: int) -> None:
    """Checks that NCCL was aborted once on all ranks, and that their last errors name the rank."""
    last = len(outcomes) - 1
    for outcome in outcomes[: last if how == "dies" else None]:
        assert outcome.returned, str(outcome)
        said, aborts = outcome.value
        assert aborts == peers, str(outcome)
        for text in said[:-2]:
            # Only the enqueued work may have been missing; then its call has succeeded.
            assert text == "no error" or re.search(LOST[how].format(last), text, re.S), said
        for text in said[-2:]:
            assert re.search(LOST[how].format(last), text, re.S), said


def _ends_in_order(how: str) -> list[str]:
    """A rank leaves while NCCL of another rank waits."""
    with _hanging_job() as (device, peers):
        tensor = torch.ones(1000, device=device.device)
        peers[0].hang()
        dist.all_reduce(tensor, async_op=True)
        ranks.arrive("enqueued")
        ranks.await_ranks("enqueued", 2)
        if how == "abort":
            dist.group.WORLD.abort()
        else:
            threading.Timer(0.2, peers[0].abort).start()
            dist.group.WORLD._get_backend(device.device).shutdown()
        said = error_of(lambda: dist.all_reduce(tensor)) if how == "abort" else ""
        device.synchronize()
        return [said, str(peers[0].aborts())]


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_script_ends_nccl_itself(how: str) -> None:
    """NCCL is aborted only once, and not again after a shutdown that ended by itself."""
    for said, aborts in ranks.check_ranks(_ends_in_order, "2", how):
        if how == "abort":
            assert re.match("AbortedError: smddp.*rank . called abort", said), said
        assert aborts == "1"


def _forgets_a_group() -> list[int]:
    """The last reference to a group is dropped while NCCL waits for a rank."""
    from smddp import _load

    made = []

    def make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(device_cases.Fake.module.HangingNccl(rank, size))
        return made[-1]

    with device_cases.job("fake", timeout=600) as device:
        me, size = dist.get_rank(), dist.get_world_size()
        group = _load.load().GpuProcessGroup(
            dist.distributed_c10d._get_default_store(),
            me,
            size,
            timedelta(seconds=600),
            "forgotten",
            "",
            "fake",
            lambda index: f"GPU {me}",
            make_nccl,
            "",
        )
        tensor = torch.ones(1000, device=device.device)
        group.allreduce([tensor]).wait()
        for peer in made:
            peer.hang()
        group.allreduce([tensor])
        dist.barrier()
        del group
        gc.collect()
        return [peer.aborts() for peer in made]


@pytest.mark.parametrize(("layout", "env"), [("2", {}), ("2x2", RAILS)])
def test_a_group_that_nobody_has_left_waits_for_nobody(layout: str, env: dict[str, str]) -> None:
    for aborts in ranks.check_ranks(_forgets_a_group, layout, env=env, timeout=40):
        assert aborts == [1] * len(aborts)
        assert aborts


# --- capture into a graph ------------------------------------------------------------------------


@contextlib.contextmanager
def _recording_job() -> Iterator[tuple[Any, Any]]:
    """Yields the device and the peer of the default group."""
    from smddp import backend

    made = []

    def make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(device_cases.Fake.module.RecordingNccl(rank, size))
        return made[-1]

    backend._gpu_support = lambda: ("fake", lambda index: f"GPU {os.environ['RANK']}", make_nccl)
    with device_cases.job("fake") as device:
        dist.all_reduce(torch.ones(1, device=device.device))
        yield device, made[0]


def _captured() -> tuple[list[str], int]:
    """Returns the calls of the peer during the capture, and the number of calls that break it."""
    with _recording_job() as (device, peer):
        size = dist.get_world_size()
        tensor = torch.ones(1000, device=device.device)
        parts = torch.ones(1000 * size, device=device.device)
        if dist.get_rank() == 0:  # the first message sets up its path
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        device.synchronize()
        before = len(peer.calls())
        device.module.capture()
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        dist.all_gather_into_tensor(parts, tensor)
        dist.reduce_scatter_tensor(tensor, parts)
        dist.all_gather(list(parts.chunk(size)), tensor)
        dist.all_to_all_single(parts, parts)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        with dist._coalescing_manager(device=device.device):
            dist.all_gather_into_tensor(parts, tensor)
        spoilt = device.module.spoilt()
        device.module.end_capture()
        calls = peer.calls()[before:]
        assert tensor.cpu().eq(1).all()  # the captured calls have not run
        for _ in range(2):
            device.module.replay()
        assert tensor.cpu().eq(size**4).all()
        return calls, spoilt


def test_calls_of_nccl_can_be_captured() -> None:
    """smddp passes the calls to NCCL; it neither waits nor queries a stream."""
    for rank, (calls, spoilt) in enumerate(ranks.check_ranks(_captured, "2")):
        assert spoilt == 0
        assert calls == [
            "allreduce",
            "allreduce",
            "broadcast",
            "reduce",
            "_allgather_base",
            "_reduce_scatter_base",
            "allgather",
            "alltoall_base",
            ("send", "recv")[rank],
            "allgather_into_tensor_coalesced",
        ]


# For CUDA's streams smddp asks the driver.
captures = pytest.mark.skipif(
    not hasattr(torch.Stream, "is_capturing"),
    reason="streams of this torch do not tell that they are captured, but for CUDA's",
)


def _captured_too_early() -> tuple[list[str], int]:
    with _recording_job() as (device, _):
        group = dist.new_group()
        tensor = torch.ones(1000, device=device.device)
        device.synchronize()
        device.module.capture()
        said = [
            error_of(lambda: dist.all_reduce(tensor, group=group)),
            error_of(lambda: dist.send(tensor, 1 - dist.get_rank())),
            error_of(dist.barrier),
            error_of(lambda: dist.all_reduce(torch.empty_like(tensor, dtype=torch.int16))),
        ]
        spoilt = device.module.spoilt()
        device.module.end_capture()
        # No rank waits for a call that was rejected.
        dist.all_reduce(tensor, group=group)
        return said, spoilt


@captures
def test_calls_that_cannot_be_captured() -> None:
    """The first call of a group, and calls that need the host, fail without any effect."""
    for (first, message, barrier, unserved), spoilt in ranks.check_ranks(_captured_too_early, "2"):
        assert spoilt == 0
        for said in (first, message):
            assert said.startswith("NotImplementedError: smddp: the first call of a group on GPU")
        assert barrier.startswith("NotImplementedError: smddp: barrier() cannot be captured")
        assert unserved.startswith("NotImplementedError: smddp: this call cannot be captured")


def _captured_in_memory(device: Any) -> list[str]:
    tensor = torch.ones(10, device=device.device)
    parts = [torch.ones(20, device=device.device) for _ in range(2)]
    device.synchronize()
    device.module.capture()
    said = [
        error_of(lambda: dist.all_reduce(tensor)),
        error_of(lambda: dist.all_to_all_single(*parts)),
        error_of(dist.barrier),
    ]
    assert device.module.spoilt() == 0
    device.module.end_capture()
    dist.all_reduce(tensor)
    return said


@captures
@pytest.mark.parametrize("path", ["ipc", "host"])
def test_calls_of_the_host_cannot_be_captured(path: str) -> None:
    env = {"SMDDP_GPU_PATH": path}
    for said in ranks.check_ranks(_shared, "2", _captured_in_memory, env=env):
        assert all(text.startswith("NotImplementedError: smddp: ") for text in said), said


# --- choice of the device
# ---------------------------------------------------------------------------------


def _bound_with_peer() -> tuple[str, int, int]:
    # destroy_and_tell() of _with_peer looks at the default group, which only runs barriers here.
    return _with_peer("bound", False)


def test_bound_device() -> None:
    """torch splits off the groups of a mesh; each of them has its own peers."""
    ranks.check_ranks(device_cases.bound, "4", "fake", timeout=60)
    for _, served, peers in ranks.check_ranks(_bound_with_peer, "4", timeout=60):
        assert served >= 2
        assert peers >= 2


def _pinned(local_rank: str, count: int, used: bool) -> list[int]:
    """Returns the devices that are set at the first use of CUDA."""
    from smddp import backend

    os.environ["LOCAL_RANK"] = local_rank
    waiting: list[Callable[[], None]] = []
    chosen: list[int] = []
    torch.cuda.device_count = lambda: count
    torch.cuda.is_initialized = lambda: used
    torch.cuda._lazy_call = waiting.append
    torch.cuda.set_device = chosen.append
    for _ in range(2):  # two groups
        backend._pin_device()
    assert not chosen
    for call in waiting:
        call()
    return chosen


@pytest.mark.parametrize(
    ("local_rank", "count", "used", "expected"),
    [
        ("3", 4, False, [3]),
        ("5", 4, False, [1]),  # ranks share GPUs
        ("0", 1, False, []),
        ("3", 1, False, []),  # each rank sees only its own GPU, or all share one
        ("3", 4, True, []),  # the script has already chosen a device
        ("", 4, False, []),
    ],
)
def test_device_of_the_local_rank(
    local_rank: str, count: int, used: bool, expected: list[int]
) -> None:
    """The device of a script that never calls torch.cuda.set_device()."""
    assert ranks.check_ranks(_pinned, "1", local_rank, count, used) == [expected]


# --- memory of one GPU that ranks share -----------------------------------------------------------


def _in_shared_memory(
    cases: str, shares: bool = True, part: str | None = None, tensors: bool = True
) -> tuple[str, int]:
    """Runs cases in a group whose ranks share a GPU and can map one another's memory.

    Args:
        cases: name of a function of device_cases.
        shares: whether ranks can map any memory of others.
        part: path of the CUDA part; None: the one of the device made of threads.
        tensors: whether ranks can map tensors of others, and not only workspaces.

    Returns:
        The path of the collectives, and the number of kernels.
    """
    from smddp import backend

    library = str(device_cases.find_fake()) if part is None else part
    backend._gpu_support = lambda: ("fake", lambda index: "one for all", None, library)
    paths = []
    make_fake, destroy = device_cases.Fake, dist.destroy_process_group

    def make() -> Any:
        device = make_fake()
        device.module.share_memory(shares)
        device.module.share_tensors(tensors)
        return device

    def destroy_and_tell(group: Any = None) -> None:
        paths.append(dist.group.WORLD._get_backend(torch.device("fake")).gpu_path())
        destroy(group)

    device_cases.DEVICES["fake"] = make
    dist.destroy_process_group = destroy_and_tell
    getattr(device_cases, cases)("fake")
    return paths[0], make_fake.module.jobs()


IPC = {"SMDDP_GPU_PATH": "ipc"}
# Tensors have several pieces if the memory of others cannot be mapped.
PIECES = {"SMDDP_POOL_BYTES": "262144"}


@pytest.mark.parametrize("layout", ["2", "3"])
@pytest.mark.parametrize(
    "cases",
    [
        case.__name__
        for case in (*device_cases.VALUES, *device_cases.ORDER, device_cases.shards_in_place)
    ],
)
def test_shared_memory(layout: str, cases: str) -> None:
    served = ranks.check_ranks(_in_shared_memory, layout, cases, env=IPC | PIECES, timeout=90)
    for path, jobs in served:
        # Messages use the host, and need no choice of a path for the group.
        assert path == ("" if cases in ("messages", "any_source") else "ipc")
        assert (jobs > 0) == (path == "ipc")


@pytest.mark.parametrize(
    "cases", ["reduces", "moves", "moves_blocks", "shards_in_place", "overlaps", "follows_streams"]
)
def test_shared_memory_that_cannot_be_opened(cases: str) -> None:
    """If only workspaces can be mapped, tensors are copied there piece by piece."""
    served = ranks.check_ranks(
        _in_shared_memory, "3", cases, True, None, False, env=IPC | PIECES, timeout=90
    )
    assert all(path == "ipc" and jobs > 0 for path, jobs in served)


def _lists(shares_tensors: bool) -> set[str]:
    """Returns the names of the calls that ran no kernel on this rank."""
    with _sharing_job(shares_tensors) as device:
        dist.all_reduce(torch.ones(1, device=device.device))
        lists = itertools.chain(
            device_cases.movements(), device_cases.coalesced(), device_cases.blocks()
        )
        elsewhere = set()
        for case in lists:
            before = device.module.jobs()
            device_cases.check(case, device)
            if device.module.jobs() == before:
                elsewhere.add(case.name)
        return elsewhere


@contextlib.contextmanager
def _sharing_job(shares_tensors: bool) -> Iterator[Any]:
    from smddp import backend

    library = str(device_cases.find_fake())
    backend._gpu_support = lambda: ("fake", lambda index: "one for all", None, library)
    with device_cases.job("fake") as device:
        device.module.share_tensors(shares_tensors)
        yield device


@pytest.mark.parametrize("shares", [True, False])
def test_lists_stay_in_shared_memory(shares: bool) -> None:
    """Lists, coalesced calls, blocks of any size and tensors of any dtype are served on the GPU."""
    said = ranks.check_ranks(_lists, "3", shares, env=IPC | PIECES, timeout=90)
    # In short calls some ranks have nothing to do; in empty calls no rank has.
    elsewhere = set.intersection(*said)
    assert all("(0,)" in name for name in elsewhere), elsewhere


def _bucket_jobs() -> tuple[bool, int, int]:
    """Returns whether there is memory for buckets, and a call's kernels in it and elsewhere."""
    with _sharing_job(False) as device:
        backend = dist.group.WORLD._get_backend(device.device)
        assert not backend.supports_tensor_alloc(device.device)  # not before the path is known
        kernels = []
        dist.all_reduce(torch.ones(1, device=device.device))
        able = backend.supports_tensor_alloc(device.device)
        elsewhere = torch.empty(100_000, device=device.device)
        there = elsewhere
        if able:
            there = backend.allocate_tensor(100_000, dtype=torch.float32, device=device.device)
        for tensor in (there, elsewhere):
            device.fill(tensor, dist.get_rank() + 1)
            before = device.module.jobs()
            dist.all_reduce(tensor)
            assert tensor.cpu().eq(6).all()
            kernels.append(device.module.jobs() - before)
        return able, *kernels


def test_memory_for_buckets() -> None:
    """Other ranks can map memory that the group allocates, even if they cannot map torch's."""
    env = IPC | PIECES
    for able, _, _ in ranks.check_ranks(_bucket_jobs, "3", env=env):
        assert not able
    env["SMDDP_GPU_COMM_MEMORY"] = "1"
    for able, there, elsewhere in ranks.check_ranks(_bucket_jobs, "3", env=env):
        assert able
        assert there == 1  # directly from tensor to tensor
        assert elsewhere > 4  # in pieces, through the workspaces


def test_training_in_memory_for_buckets() -> None:
    env = IPC | PIECES | {"SMDDP_GPU_COMM_MEMORY": "1"}
    served = ranks.check_ranks(
        _in_shared_memory, "2", "trains", True, None, False, env=env, timeout=90
    )
    assert all(path == "ipc" and jobs > 0 for path, jobs in served)


@pytest.mark.parametrize(
    ("shares", "part", "why"),
    [
        (False, None, "sharing memory of the GPU: the made-up device does not share its memory"),
        (True, "", "this smddp was built without its CUDA part"),
        (True, "/nowhere/libsmddp_cuda.so", "the CUDA part cannot be loaded: /nowhere"),
    ],
)
def test_shared_memory_that_is_impossible(shares: bool, part: str | None, why: str) -> None:
    """Such groups use the host, and one rank logs why."""
    outcomes = ranks.run_ranks(_in_shared_memory, "2", "moves", shares, part, env=IPC)
    for outcome in outcomes:
        assert outcome.value == ("host", 0), str(outcome)
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if why in line]
    assert len(said) == 1, said
    assert "SMDDP_GPU_PATH=ipc is not possible: rank 0: " in said[0]


def _shared(of: Callable[[Any], list[str]], seconds: float = 3) -> list[str]:
    from smddp import backend

    library = str(device_cases.find_fake())
    backend._gpu_support = lambda: ("fake", lambda index: "one for all", None, library)
    with device_cases.job("fake") as device:
        dist.all_reduce(torch.zeros(10, device=device.device))
        ranks.limit(seconds, device.device)
        return of(device)


def _absent(device: Any) -> list[str]:
    if dist.get_rank() == 1:
        ranks.await_ranks("failed", 1)
        return []
    tensor = torch.zeros(10, device=device.device)
    work = dist.all_reduce(tensor, async_op=True)
    said = [error_of(work.wait), error_of(lambda: dist.all_reduce(tensor))]
    ranks.arrive("failed")
    return said


def _stuck(device: Any) -> list[str]:
    tensor = torch.zeros(10, device=device.device)
    device.module.gate()
    said = error_of(dist.all_reduce(tensor, async_op=True).wait)
    device.module.open()
    return [said]


def _differing(device: Any) -> list[str]:
    op = dist.ReduceOp.MAX if dist.get_rank() == 1 else dist.ReduceOp.SUM
    return [error_of(lambda: dist.all_reduce(torch.zeros(10, device=device.device), op))]


def _differing_blocks(device: Any) -> list[str]:
    """Rank 1 sends more to rank 0 than rank 0 expects. All sizes of rank 2 match."""
    tensor = torch.zeros(9, device=device.device)
    to = [4, 2, 3] if dist.get_rank() == 1 else [3, 3, 3]
    return [
        error_of(lambda: dist.all_to_all_single(torch.zeros_like(tensor), tensor, [3, 3, 3], to))
    ]


def _differing_moves(device: Any) -> list[str]:
    tensor = torch.zeros(4, device=device.device)
    other = torch.zeros(4, device=device.device)
    if dist.get_rank() == 1:
        return [error_of(lambda: dist.all_to_all_single(other, tensor))]
    return [error_of(lambda: dist.gather(tensor, [other, other.clone()], 0))]


def _dying(device: Any) -> list[str]:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.zeros(10, device=device.device)
    return [error_of(lambda: dist.all_reduce(tensor))]


def _dying_in_an_exchange(device: Any) -> list[str]:
    """Rank 1 dies while the others may be reading its memory."""
    tensor = torch.zeros(100_002, device=device.device)
    device.synchronize()
    device.slow_down()
    work = dist.all_to_all_single(torch.zeros_like(tensor), tensor, async_op=True)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = error_of(work.wait)
    return [said, error_of(lambda: dist.all_to_all_single(torch.zeros_like(tensor), tensor))]


def test_absent_rank_in_shared_memory() -> None:
    for said in ranks.check_ranks(_shared, "2", _absent, env=IPC)[0]:
        assert said.startswith("CollectiveTimeoutError")
        assert "rank 1" in said


def test_device_that_never_comes_in_shared_memory() -> None:
    for said in ranks.check_ranks(_shared, "2", _stuck, env=IPC):
        assert said[0].startswith("CollectiveTimeoutError"), said
        assert "before the device had come to this call" in said[0]


def test_different_calls_in_shared_memory() -> None:
    for said in ranks.check_ranks(_shared, "2", _differing, env=IPC):
        assert said[0].startswith("CollectiveMismatchError"), said
        assert "MAX" in said[0]
        assert "SUM" in said[0]


def test_different_blocks_in_shared_memory() -> None:
    """All ranks get an error that names the two that differ, also the third."""
    for said in ranks.check_ranks(_shared, "3", _differing_blocks, env=IPC):
        assert said[0].startswith("CollectiveMismatchError"), said
        assert "rank 1 sends 16 bytes to rank 0, which expects 12" in said[0]
    for said in ranks.check_ranks(_shared, "2", _differing_moves, env=IPC):
        assert said[0].startswith("CollectiveMismatchError"), said
        assert "rank 0 is in call 2 (gather" in said[0]
        assert "rank 1 in call 2 (all_to_all)" in said[0]


def test_rank_that_dies_in_an_exchange_in_shared_memory() -> None:
    outcomes = ranks.run_ranks(_shared, "3", _dying_in_an_exchange, 30, env=IPC)
    for outcome in (outcomes[0], outcomes[2]):
        first, second = outcome.value
        # Rank 1 may have finished its part.
        assert first == "no error" or first.startswith("PeerLostError"), str(outcome)
        assert second.startswith("PeerLostError"), str(outcome)
        assert "rank 1" in second


def test_rank_that_dies_in_shared_memory() -> None:
    outcomes = ranks.run_ranks(_shared, "2", _dying, 30, env=IPC)
    assert outcomes[0].value[0].startswith("PeerLostError"), str(outcomes[0])
    assert "rank 1" in outcomes[0].value[0]


def test_peer_that_some_rank_does_not_ask_for() -> None:
    """The error names the rank that makes no call on the device."""
    outcomes = ranks.run_ranks(_one_calls, "2")
    assert "rank 1 of group" in str(outcomes[0].value)
    assert "has made no call on GPU tensors" in str(outcomes[0].value)


def _one_calls() -> str:
    from smddp import backend

    backend._gpu_support = lambda: ("fake", lambda index: os.environ["RANK"], lambda *rest: None)
    with device_cases.job("fake") as device:
        if dist.get_rank() == 1:
            return ""
        ranks.limit(2, device.device)
        return error_of(lambda: dist.all_reduce(torch.zeros(3, device=device.device)))
