"""Runs the benchmark, for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import programs

from smddp.bench import Case, Measurement, Timing
from smddp.bench.operations import Task

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return programs.run(*command, timeout=280, **variables)


def bench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "smddp.bench", *arguments, **variables)


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def measurement(backend: str, microseconds: list[float], wrong: int = 0) -> Measurement:
    task = Task("allreduce", 1_000_000)
    timing = Timing(microseconds, wrong)
    return Measurement(Case(backend), task, 4_000_000, 4, in_place=timing)
