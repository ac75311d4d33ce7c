"""Which device a group and a rank use."""

from __future__ import annotations

import os
from collections.abc import Callable

import device_cases
import pytest
import ranks
import torch
from device_jobs import with_peer

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(device_cases.find_fake() is None, reason="the C++ tests are not built"),
]


def _bound_with_peer() -> tuple[str, int, int]:
    # destroy_and_tell() of with_peer looks at the default group, which only runs barriers here.
    return with_peer("bound", False)


@pytest.mark.skipif(
    torch.__version__ < (2, 14),
    reason="DeviceMesh splits groups of bound devices; torch before 2.14 can only split its own",
)
def test_bound_device() -> None:
    """torch splits off the groups of a mesh; each of them has its own peers."""
    ranks.check_ranks(device_cases.bound, "4", "fake", timeout=60)
    for _, served, peers in ranks.check_ranks(_bound_with_peer, "4", timeout=60):
        assert served >= 2
        assert peers >= 2


def _pinned(local_rank: str, count: int, used: bool) -> list[int]:
    """Returns the devices that are set at the first use of CUDA."""
    from smddp.torch import backend

    os.environ["LOCAL_RANK"] = local_rank
    waiting: list[Callable[[], None]] = []
    chosen: list[int] = []
    torch.cuda.device_count = lambda: count
    torch.cuda.is_initialized = lambda: used
    backend.call_when_cuda_starts = waiting.append
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
