"""Sums between nodes on a device made of threads."""

from __future__ import annotations

import os
import re
from typing import Any

import device_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from device_jobs import RAILS, make_sums, place_of_sums, summing_job

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(device_cases.find_fake() is None, reason="the C++ tests are not built"),
]


@pytest.mark.parametrize("layout", ["2x2", "3x2"])
def test_sums_on_the_gpu_are_those_of_the_cpu(layout: str) -> None:
    """Sums on GPU and CPU are equal bit by bit, for values whose sums depend on the order."""
    on_cpu = ranks.check_ranks(make_sums, layout, env=RAILS | {"SMDDP_GPU_SUM": "cpu"}, timeout=120)
    on_gpu = ranks.check_ranks(make_sums, layout, env=RAILS | {"SMDDP_GPU_SUM": "gpu"}, timeout=120)
    for (cpu, no_jobs, expected), (gpu, jobs, got) in zip(on_cpu, on_gpu, strict=True):
        assert (cpu, gpu) == ("cpu", "gpu")
        assert no_jobs == 0
        assert jobs > len(got)  # several kernels for calls with several chunks
        assert got == expected


def _on_rails_with_kernels(cases: str) -> tuple[str, int]:
    from smddp.torch import _load, backend

    def make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return _load.load().ProcessGroup(store, rank, size, timeout, "peer")

    library = str(device_cases.find_fake())
    backend._gpu_support = lambda: ("fake", lambda index: os.environ["RANK"], make_nccl, library)
    places = []
    destroy = dist.destroy_process_group

    def destroy_and_tell(group: Any = None) -> None:
        places.append(place_of_sums())
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
    with summing_job(None) as device:
        tensor = torch.ones(10, device=device.device)
        dist.all_reduce(tensor)
        assert tensor.cpu().eq(dist.get_world_size()).all()
        first = place_of_sums()
        dist.all_reduce(tensor)
        return first, place_of_sums()


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
    outcomes = ranks.run_ranks(make_sums, "2x2", "/nowhere/libsmddp_cuda.so", env=env, timeout=120)
    said = [
        line for one in outcomes for line in one.stderr.splitlines() if "rails sum on the" in line
    ]
    assert len(said) == (setting == "gpu"), said
    assert all("rank 0: the CUDA part cannot be loaded" in line for line in said)
    assert all(outcome.value[:2] == ("cpu", 0) for outcome in outcomes)
