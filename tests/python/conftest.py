"""Fixtures for all Python tests; see ranks.py for tests of several ranks."""

from __future__ import annotations

import collections
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import ranks
import torch

from smddp.torch import _load

# A shell lets what it runs in the background ignore SIGINT. So would all processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

# As in the ranks. Sums that tests compare with depend on the number of threads.
torch.set_num_threads(1)


_Some = TypeVar("_Some")


# `make test-fast` leaves out these modules: each takes more than about ten seconds, for what a
# change breaks less often than the calls, collectives and failures that the others test.
_SLOW_MODULES = {
    *("test_activation_memory", "test_activations", "test_arguments", "test_autograd"),
    *("test_bench", "test_bench_exchange", "test_bench_launch", "test_benchmarks"),
    *("test_bystanders", "test_changed_in_place", "test_changed_structure", "test_checkpoint"),
    *("test_checkpoint_files", "test_checkpoint_layouts", "test_collectives", "test_ddp"),
    *("test_delayed", "test_delayed_jobs", "test_device", "test_device_direct", "test_device_lost"),
    *("test_device_nccl", "test_device_rails", "test_device_shared"),
    *("test_doctor", "test_env", "test_errors", "test_examples", "test_first_step"),
    *("test_fp16_params", "test_groups", "test_half", "test_hostfile", "test_hosts"),
    *("test_interpreter_lock", "test_job_token", "test_late_ranks", "test_launch", "test_limits"),
    *("test_launch_hosts", "test_log_file", "test_mailbox", "test_memory", "test_memory_report"),
    *("test_metrics", "test_misuse", "test_optimizer_shards", "test_original_api", "test_overlaps"),
    *("test_plan_drawing", "test_profiler", "test_programs", "test_random_calls"),
    *("test_random_delays", "test_random_models", "test_registration", "test_remote_buffers"),
    *("test_sequence_parallel", "test_sharding", "test_sharding_array", "test_sharding_attributes"),
    *("test_sharding_checkpoints", "test_sharding_failures", "test_sharding_memory", "test_slurm"),
    *("test_soak", "test_step", "test_step_gradients", "test_task_order"),
    *("test_task_order_simulated", "test_tensor", "test_tensor_combined", "test_tensor_failures"),
    *("test_tensor_marks", "test_tensor_misuse", "test_tensor_simulated", "test_topology"),
    *("test_torch_suite", "test_training", "test_transformer_layers", "test_transformer_options"),
    *("test_transparency", "test_tuning", "test_types", "test_waits", "test_wire"),
}


# In `make test` a test of a slow module takes one in so many of its cases, and a module one in so
# many of its costly tests. These take one in five of their cases. With six, some would never meet
# the turns of their test.
_SHARE, _COSTLY_SHARE = 3, 5


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of slow modules; leaves out their cases, and costly tests, of other turns.

    `make` sets TEST_TURN, 0 if it is not given, and for `make test-all` also ALL_SEEDS. Without
    TEST_TURN, as under pytest alone, all cases run. A case of a slow module runs at least once in
    three turns, a costly test in nine, and each of its cases in 45.
    """
    cases = collections.defaultdict(list)
    costly: dict[str, dict[str, None]] = collections.defaultdict(dict)  # in order, each once
    for item in items:
        slow = item.path.stem in _SLOW_MODULES
        if slow:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("exhaustive") is None:
            name = item.nodeid.partition("[")[0]
            if item.get_closest_marker("costly") is not None:
                costly[name.partition("::")[0]][name] = None
            if slow:
                cases[name].append(item)
    if "TEST_TURN" not in os.environ or "ALL_SEEDS" in os.environ:
        return
    turn = int(os.environ["TEST_TURN"])
    tests: set[str] = set()
    left_out: set[str] = set()
    for module, names in costly.items():
        tests |= names.keys()
        left_out |= _of_other_turns(module, list(names), turn // _SHARE, _SHARE)
    others = {item for item in items if item.nodeid.partition("[")[0] in left_out}
    for name, found in cases.items():
        others |= _of_other_turns(name, found, turn, _COSTLY_SHARE if name in tests else _SHARE)
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=list(others))


def _of_other_turns(name: str, found: list[_Some], turn: int, share: int) -> set[_Some]:
    share = min(share, len(found))
    return {*found} - {*found[(turn + zlib.crc32(name.encode())) % share :: share]}


def _shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """Restores the environment variables after each test, for programs that later tests start."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _transport_between_nodes(request: pytest.FixtureRequest, _environment_as_before: None) -> None:
    """Gives every third test libfabric between nodes, the others TCP sockets.

    Other tests get it with each TEST_TURN. TEST_PROVIDER sets SMDDP_PROVIDER for the ranks of all.
    """
    turn = zlib.crc32(request.node.nodeid.encode()) + int(os.environ.get("TEST_TURN", "0"))
    if turn % 3 == 0 and not _load.load().build_info()["no_libfabric"]:
        os.environ.setdefault("TEST_PROVIDER", "tcp")


@pytest.fixture
def _no_settings(_environment_as_before: None) -> None:
    """Leaves out the settings of smddp that whoever runs the tests has made."""
    for name in [name for name in os.environ if name.startswith("SMDDP_")]:
        del os.environ[name]


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Checks that each test left no process except the nursery, and no file in /dev/shm."""
    before = _shared_memory()
    yield
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in ranks.nursery_pids()
    ]
    assert not left, f"processes left behind: {left}"
    # Other programs use the folder, too. Files of smddp have its name in theirs.
    # Tests that run beside this one may have some there for a moment.
    deadline = time.monotonic() + 5
    while ours := [name for name in _shared_memory() - before if "smddp" in name]:
        assert time.monotonic() < deadline, f"left in /dev/shm: {ours}"
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def _processor_time(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Machines are busy with other things, too: processor time compares where a duration cannot."""
    before = ranks.processor_seconds()
    yield
    record_property("processor", ranks.processor_seconds() - before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With --durations=N also prints the N tests that took the most processor time."""
    count = terminalreporter.config.getoption("durations")
    if count is None:
        return
    costs = [
        (dict(report.user_properties)["processor"], report.duration, report.nodeid)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "teardown" and report.user_properties
    ]
    terminalreporter.section(f"processor time: {sum(cost for cost, *_ in costs):.0f} s")
    for processor, _, name in sorted(costs, reverse=True)[: count or None]:
        terminalreporter.write_line(f"{processor:7.2f} s  {name}")
