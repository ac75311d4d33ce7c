"""Calls that are captured into a graph."""

from __future__ import annotations

import contextlib
import os
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


@contextlib.contextmanager
def _recording_job() -> Iterator[tuple[Any, Any]]:
    """Yields the device and the peer of the default group."""
    from smddp.torch import backend

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
    for said in ranks.check_ranks(in_shared_job, "2", _captured_in_memory, env=env):
        assert all(text.startswith("NotImplementedError: smddp: ") for text in said), said
