"""Runs the benchmark, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from smddp.bench import Case, Measurement, Timing
from smddp.bench.operations import Task

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=280
    )


def bench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "smddp.bench", *arguments, **variables)


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def measurement(backend: str, microseconds: list[float], wrong: int = 0) -> Measurement:
    task = Task("allreduce", 1_000_000)
    timing = Timing(microseconds, wrong)
    return Measurement(Case(backend), task, 4_000_000, 4, in_place=timing)
