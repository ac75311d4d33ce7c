"""Imports torch's suite for one world size, and runs each test in newly forked ranks."""

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
    """The result of one test."""

    status: str  # "passes", "skips" or "fails"
    detail: str = ""
    seconds: float = 0.0


class Suite:
    """One world size and set of gates; one per process, because the import reads both."""

    def __init__(self, world_size: int, mapped: bool = False, quiet: bool = True) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torch-suite-")
        os.environ.update(
            BACKEND="smddp",
            WORLD_SIZE=str(world_size),
            INIT_METHOD=f"file://{self._folder.name}/rendezvous",
            TEMP_DIR=self._folder.name,
            # Seconds for one test. Some compile a model, while the machine runs other tests.
            DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="240",
        )
        for name in ("barrier", "test_dir", "init_dir"):
            (Path(self._folder.name) / name).mkdir()
        from torch.testing._internal import common_distributed

        from torch_suite import gates

        if quiet:
            common_distributed.logger.setLevel(logging.WARNING)
        gates.open_gates(world_size, mapped)
        from torch.testing._internal.distributed import distributed_test

        # Loaded here once, before the ranks are forked.
        from smddp.torch import _load

        _load.load()
        gates.open_lists(distributed_test)
        self._case = _case(distributed_test, quiet)

    def names(self) -> list[str]:
        """Returns all tests, also those that will be skipped."""
        return list(unittest.TestLoader().getTestCaseNames(self._case))

    def run(self, names: Iterable[str]) -> Iterable[tuple[str, Outcome]]:
        """Runs tests; yields the name and the result of each."""
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
            # Forks, which takes milliseconds. It is safe: torch is imported, but no thread runs.
            self._start_processes(fork.Process)

        @classmethod
        def _run(cls, *arguments: Any, **options: Any) -> None:
            if quiet:
                # Ranks report failures through a pipe, so their stderr has warnings only. Some
                # tests read the log.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            super()._run(*arguments, **options)

        def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
            # The suite's own barrier polls files every 0.1 s.
            assert wait_for in (None, int(self.world_size))
            self.meeting.wait(timeout)

    return TestSmddp
