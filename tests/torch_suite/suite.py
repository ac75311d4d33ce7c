"""Imports torch's suite for one world size and runs tests of it, each in freshly forked ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import tempfile
import time
import unittest
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


@dataclasses.dataclass
class Outcome:
    """How one test ended."""

    status: str  # "passes", "skips" or "fails"
    detail: str = ""
    seconds: float = 0.0


class Suite:
    """One world size and set of gates; one per process, for the suite reads both when imported."""

    def __init__(self, world_size: int, mapped: bool = False, quiet: bool = True) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torch-suite-")
        os.environ.update(
            BACKEND="smddp",
            WORLD_SIZE=str(world_size),
            INIT_METHOD=f"file://{self._folder.name}/rendezvous",
            TEMP_DIR=self._folder.name,
            DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60",
        )
        for name in ("barrier", "test_dir", "init_dir"):
            (Path(self._folder.name) / name).mkdir()
        from torch.testing._internal import common_distributed

        from torch_suite import gates

        if quiet:
            common_distributed.logger.setLevel(logging.WARNING)
        gates.open_gates(world_size, mapped)
        from torch.testing._internal.distributed import distributed_test

        # Here, not in each rank: they share it.
        from smddp import _load

        _load.load()
        gates.open_lists(distributed_test)
        self._case = _case(distributed_test, quiet)

    def names(self) -> list[str]:
        """Returns all tests, those that will be skipped too."""
        return list(unittest.TestLoader().getTestCaseNames(self._case))

    def run(self, names: Iterable[str]) -> Iterable[tuple[str, Outcome]]:
        """Yields each test's name and how it ended."""
        self._case.setUpClass()
        for name in names:
            yield name, self._run(name)
        self._case.tearDownClass()

    def _run(self, name: str) -> Outcome:
        result = unittest.TestResult()
        printed = io.StringIO()
        begin = time.monotonic()
        with contextlib.redirect_stdout(printed):
            self._case(name).run(result)
        seconds = time.monotonic() - begin
        for _, reason in result.skipped:
            return Outcome("skips", reason, seconds)
        for _, trace in result.failures + result.errors:
            return Outcome("fails", trace + printed.getvalue(), seconds)
        return Outcome("passes", "", seconds)


def _case(distributed_test: Any, quiet: bool) -> type[unittest.TestCase]:
    fork = torch.multiprocessing.get_context("fork")

    class TestSmddp(
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        meeting: Any

        def setUp(self) -> None:
            super().setUp()
            type(self).meeting = fork.Barrier(int(self.world_size))
            # Torch is imported and no thread runs: forking costs milliseconds, spawning seconds.
            self._start_processes(fork.Process)

        @classmethod
        def _run(cls, *arguments: Any, **options: Any) -> None:
            if quiet:
                # Ranks report what failed through a pipe; the rest is warnings. Tests read the log.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            super()._run(*arguments, **options)

        def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
            # The suite's own looks into files every 0.1 s.
            assert wait_for in (None, int(self.world_size))
            self.meeting.wait(timeout)

    return TestSmddp
