"""Rails: a stand-in for NCCL inside nodes, smddp between them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import device_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from device_cases import error_of
from device_jobs import RAILS, with_peer

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(device_cases.find_fake() is None, reason="the C++ tests are not built"),
]


def _on_rails(cases: str) -> tuple[str, int, int]:
    return with_peer(cases, False)


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
    return with_peer(cases, False)


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
    outcomes = ranks.run_ranks(with_peer, "2", "reduces", False)
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
    outcomes = ranks.run_ranks(with_peer, layout, "moves", shared, env=RAILS)
    for outcome in outcomes:
        assert outcome.value == ("host", 0, 0), str(outcome)
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if why in line]
    assert len(said) == 1, said
    assert "SMDDP_GPU_PATH=rails is not possible" in said[0]


@contextlib.contextmanager
def _rails_job(timeout: float) -> Iterator[Any]:
    from smddp.torch import _load, backend

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
