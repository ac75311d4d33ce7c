"""Groups on a device made of threads, in the ways that several test_device_*.py need."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import device_cases
import ranks
import torch
import torch.distributed as dist


def with_peer(cases: str, shared: bool) -> tuple[str, int, int]:
    """Runs cases in a group with smddp's CPU groups in place of NCCL, the peers.

    Returns:
        The path of the collectives, the calls that the peers served, and the number of peers.
    """
    from smddp.torch import _load, backend

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


RAILS = {"SMDDP_GPU_PATH": "rails", "SMDDP_POOL_BYTES": "262144"}


@contextlib.contextmanager
def job_with_part(library: str | None) -> Iterator[Any]:
    """Creates a job with a CUDA part, or with `library` in its place. Yields the device."""
    from smddp.torch import _load, backend

    def make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return _load.load().ProcessGroup(store, rank, size, timeout, "peer")

    part = str(device_cases.find_fake()) if library is None else library
    backend._gpu_support = lambda: ("fake", lambda index: os.environ["RANK"], make_nccl, part)
    with device_cases.job("fake") as device:
        yield device


def in_shared_job(of: Callable[[Any], list[str]], seconds: float = 3) -> list[str]:
    from smddp.torch import backend

    library = str(device_cases.find_fake())
    backend._gpu_support = lambda: ("fake", lambda index: "one for all", None, library)
    with device_cases.job("fake") as device:
        dist.all_reduce(torch.zeros(10, device=device.device))
        ranks.limit(seconds, device.device)
        return of(device)
