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
def summing_job(library: str | None) -> Iterator[Any]:
    """Creates a job on rails; `library` replaces the CUDA part. Yields the device."""
    from smddp.torch import _load, backend

    def make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return _load.load().ProcessGroup(store, rank, size, timeout, "peer")

    part = str(device_cases.find_fake()) if library is None else library
    backend._gpu_support = lambda: ("fake", lambda index: os.environ["RANK"], make_nccl, part)
    with device_cases.job("fake") as device:
        yield device


def place_of_sums() -> str:
    place: str = dist.group.WORLD._get_backend(torch.device("fake")).gpu_sum()
    return place


# The dtypes that rails reduce, and a count that is not a multiple of the ranks or nodes. It is so
# large that the CPU sums in the order of nodes.
SUMMED = [*device_cases.FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64]

SUMMED_COUNT = 20_011


def make_sums(library: str | None = None) -> tuple[str, int, dict[str, bytes]]:
    """Returns where sums were made, the number of kernels, and the bytes of the results by call."""
    with summing_job(library) as device:
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
        return place_of_sums(), device.module.jobs(), results


def in_shared_job(of: Callable[[Any], list[str]], seconds: float = 3) -> list[str]:
    from smddp.torch import backend

    library = str(device_cases.find_fake())
    backend._gpu_support = lambda: ("fake", lambda index: "one for all", None, library)
    with device_cases.job("fake") as device:
        dist.all_reduce(torch.zeros(10, device=device.device))
        ranks.limit(seconds, device.device)
        return of(device)
