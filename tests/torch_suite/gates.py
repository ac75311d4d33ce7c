"""Enables the tests of torch's suite that "smddp" can pass, although they name other backends.

The suite decides by the backend's name which tests to skip, while it is imported. So these
functions run before the import.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

from torch.testing._internal import common_distributed, common_utils

from torch_suite import devices

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]

# Reasons for which the suite skips a test of other backends, and which do not hold for smddp on CPU
# tensors.
_SERVED_ON_CPU = [
    r"Test requires backend smddp to be one of \{'gloo'\}",
    r"Only gloo backend supports timeouts",
    r"GLOO Batch Send Recv CPU",
    r"Only MPI supports (CPU )?all_to_all",
    r"Only Gloo backend supports sparse all reduce",
    r"get_future is only supported on",
]
# The same for tests that are written for GPUs.
_SERVED_ON_DEVICES = [
    *_SERVED_ON_CPU,
    r"Test requires backend smddp to be one of \{'nccl'\}",
    r"NCCL (Batch )?Send Recv Only",
    r"Only (Gloo and )?(Nccl|NCCL)",
    r"Only Nccl & Gloo backend",
    r"Coalescing manager currently tests with NCCL only",
]


def open_gates(world_size: int, mapped: bool) -> None:
    """Makes the suite run all tests that "smddp" can pass at this world size.

    Args:
        world_size: number of ranks. The suite requires 8 where 3 are enough.
        mapped: whether to run tests for GPUs as well, with their devices mapped to the CPU.
    """
    cases = common_distributed.DistTestCases
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        cases.backend_feature[feature].add("smddp")
    served = [re.compile(text) for text in (_SERVED_ON_DEVICES if mapped else _SERVED_ON_CPU)]
    _open_skips(served)
    if world_size >= 3:
        common_distributed.skip_if_small_worldsize = _always
    if mapped:
        devices.count = world_size
        for name in ("skip_if_no_gpu", "skip_if_lt_x_gpu", "requires_nccl_version"):
            _keep(name)
        devices.map_to_cpu()


def open_lists(suite: Any) -> None:
    """Adds "smddp" to the backends that the imported suite profiles."""
    suite.BACKEND = _Name("smddp")
    suite.PROFILING_SUPPORTED_BACKENDS.append("smddp")
    suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append("smddp")
    if devices.count:
        suite.CUDA_PROFILING_SUPPORTED_BACKENDS.append("smddp")


class _Name(str):
    """Makes tests that check the name themselves take the branch of gloo."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _always(function: F) -> F:
    return function


def _keep(name: str) -> None:
    """Returns a decorator, with or without arguments, that skips nothing."""
    replacement: Any = _always if name == "skip_if_no_gpu" else lambda *_args, **_options: _always
    setattr(common_distributed, name, replacement)


def _open_skips(served: list[re.Pattern[str]]) -> None:
    skip_if, skip = (
        common_utils.skip_but_pass_in_sandcastle_if,
        common_utils.skip_but_pass_in_sandcastle,
    )

    @functools.wraps(skip_if)
    def open_skip_if(condition: bool, reason: str) -> Decorator[Any]:
        concerns_us = any(pattern.match(reason) for pattern in served)
        return skip_if(condition and not concerns_us, reason)

    @functools.wraps(skip)
    def open_skip(reason: str) -> Decorator[Any]:
        return open_skip_if(True, reason)

    common_utils.skip_but_pass_in_sandcastle_if = open_skip_if
    common_utils.skip_but_pass_in_sandcastle = open_skip
