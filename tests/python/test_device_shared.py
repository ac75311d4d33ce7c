"""Ranks that share one device and its memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import device_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from device_cases import error_of
from device_jobs import in_shared_job

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(device_cases.find_fake() is None, reason="the C++ tests are not built"),
]


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
    from smddp.torch import backend

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
    from smddp.torch import backend

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
    for said in ranks.check_ranks(in_shared_job, "2", _absent, env=IPC)[0]:
        assert said.startswith("SMDDPCollectiveTimeoutError")
        assert "rank 1" in said


def test_device_that_never_comes_in_shared_memory() -> None:
    for said in ranks.check_ranks(in_shared_job, "2", _stuck, env=IPC):
        assert said[0].startswith("SMDDPCollectiveTimeoutError"), said
        assert "before the device had come to this call" in said[0]


def test_different_calls_in_shared_memory() -> None:
    for said in ranks.check_ranks(in_shared_job, "2", _differing, env=IPC):
        assert said[0].startswith("SMDDPCollectiveMismatchError"), said
        assert "MAX" in said[0]
        assert "SUM" in said[0]


def test_different_blocks_in_shared_memory() -> None:
    """All ranks get an error that names the two that differ, also the third."""
    for said in ranks.check_ranks(in_shared_job, "3", _differing_blocks, env=IPC):
        assert said[0].startswith("SMDDPCollectiveMismatchError"), said
        assert "rank 1 sends 16 bytes to rank 0, which expects 12" in said[0]
    for said in ranks.check_ranks(in_shared_job, "2", _differing_moves, env=IPC):
        assert said[0].startswith("SMDDPCollectiveMismatchError"), said
        assert "rank 0 is in call 2 (gather" in said[0]
        assert "rank 1 in call 2 (all_to_all)" in said[0]


def test_rank_that_dies_in_an_exchange_in_shared_memory() -> None:
    outcomes = ranks.run_ranks(in_shared_job, "3", _dying_in_an_exchange, 30, env=IPC)
    for outcome in (outcomes[0], outcomes[2]):
        first, second = outcome.value
        # Rank 1 may have finished its part.
        assert first == "no error" or first.startswith("SMDDPPeerLostError"), str(outcome)
        assert second.startswith("SMDDPPeerLostError"), str(outcome)
        assert "rank 1" in second


def test_rank_that_dies_in_shared_memory() -> None:
    outcomes = ranks.run_ranks(in_shared_job, "2", _dying, 30, env=IPC)
    assert outcomes[0].value[0].startswith("SMDDPPeerLostError"), str(outcomes[0])
    assert "rank 1" in outcomes[0].value[0]


def test_peer_that_some_rank_does_not_ask_for() -> None:
    """The error names the rank that makes no call on the device."""
    outcomes = ranks.run_ranks(_one_calls, "2")
    assert "rank 1 of group" in str(outcomes[0].value)
    assert "has made no call on GPU tensors" in str(outcomes[0].value)


def _one_calls() -> str:
    from smddp.torch import backend

    backend._gpu_support = lambda: ("fake", lambda index: os.environ["RANK"], lambda *rest: None)
    with device_cases.job("fake") as device:
        if dist.get_rank() == 1:
            return ""
        ranks.limit(2, device.device)
        return error_of(lambda: dist.all_reduce(torch.zeros(3, device=device.device)))
