"""Calls on tensors of a device, on a device made of threads: values, order, errors."""

from __future__ import annotations

from collections.abc import Callable

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
        assert said.startswith("SMDDPCollectiveTimeoutError")
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
        assert all(text.startswith("SMDDPCollectiveTimeoutError: smddp") for text in said), said
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
        assert said.startswith("SMDDPTransportError")
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
        assert all(text.startswith("SMDDPAbortedError") for text in said), said
