"""SMDDP_METRICS counts calls in files, without touching the training; the dashboard reads them."""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import prometheus
import pytest
import ranks
import torch
import torch.distributed as dist

import smddp

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
HOST = socket.gethostname()


def _threads() -> list[str]:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def _train() -> dict[str, Any]:
    with ranks.job():
        other = dist.new_group([0, 1])
        for _ in range(5):
            dist.all_reduce(torch.ones(100))
        for _ in range(3):
            dist.all_reduce(torch.ones(500_000), async_op=True).wait()
        dist.barrier(group=other)
        if dist.get_rank() == 0:
            dist.send(torch.ones(10), 1)
        else:
            dist.recv(torch.ones(10), 0)
        return {
            "statistics": dict(smddp.statistics()),
            "barriers": dict(smddp.statistics(other)),
            "threads": _threads(),
        }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("layout", ["2", "1+1"])
def test_files_agree_with_statistics(layout: str, tmp_path: Path) -> None:
    results = ranks.check_ranks(
        _train, layout, env={"SMDDP_METRICS": f"{tmp_path}/%h-%r", "SMDDP_METRICS_SECONDS": "1"}
    )
    names = {f"{HOST}-{rank}.{kind}" for rank in (0, 1) for kind in ("jsonl", "prom")}
    assert {path.name for path in tmp_path.iterdir()} == names
    for rank, result in enumerate(results):
        assert "smddp-metrics" in result["threads"]
        families = prometheus.parse((tmp_path / f"{HOST}-{rank}.prom").read_text())
        durations = families["smddp_call_duration_seconds"]
        lines = _lines(tmp_path / f"{HOST}-{rank}.jsonl")
        for name, use in result["statistics"].items():
            collective, algorithm = name.split("/")
            labels = {"collective": collective, "algorithm": algorithm, "rank": str(rank)}
            if collective == "barrier":
                continue  # two groups have some
            assert durations.total("_count", **labels) == use["calls"]
            assert families["smddp_bytes_total"].total(**labels) == use["bytes"]
            wire = families["smddp_wire_bytes_total"].total(**labels)
            assert wire == use["fabric_bytes"]
            calls = [
                call
                for line in lines
                for call in line["calls"]
                if (call["collective"], call["algorithm"]) == (collective, algorithm)
            ]
            assert sum(call["calls"] for call in calls) == use["calls"]
            assert sum(call["bytes"] for call in calls) == use["bytes"]
            for call in calls:
                assert 0 < call["p50_seconds"] <= call["p99_seconds"]
                assert call["seconds"] > 0
        message = "send" if rank == 0 else "recv"
        assert durations.total("_count", collective=message) == 1
        (barriers,) = result["barriers"].values()
        groups = {dict(labels)["group"] for _, labels in durations.samples}
        assert len(groups) == 2
        assert barriers["calls"] == 1
        assert not families["smddp_errors_total"].samples
        assert families["smddp_stalls_total"].total() == 0
        assert abs(families["smddp_written_timestamp_seconds"].total() - time.time()) < 600
        for line in lines:
            assert (line["rank"], line["host"]) == (rank, HOST)
            assert line["errors"] == line["stalls"] == []
            assert line["interval_seconds"] >= 0


def test_nothing_is_counted_by_default(tmp_path: Path) -> None:
    for result in ranks.check_ranks(_train, "2"):
        assert "smddp-metrics" not in result["threads"]


def _slow() -> int:
    """Returns how many lines there are while the group is alive."""
    with ranks.job():
        dist.all_reduce(torch.ones(100))
        path = Path(os.environ["SMDDP_METRICS"].replace("%r", str(dist.get_rank())) + ".jsonl")
        while not path.exists() or len(_lines(path)) < 2:
            time.sleep(0.05)
        return len(_lines(path))


def test_a_line_is_written_at_each_interval(tmp_path: Path) -> None:
    env = {"SMDDP_METRICS": f"{tmp_path}/%r", "SMDDP_METRICS_SECONDS": "1"}
    for rank, count in enumerate(ranks.check_ranks(_slow, "2", env=env)):
        lines = _lines(tmp_path / f"{rank}.jsonl")
        assert len(lines) > count, "the last one is written at the end"
        assert [len(line["calls"]) for line in lines[:2]].count(1) >= 1


def _broken() -> str:
    dist.init_process_group("smddp")
    try:
        dist.all_reduce(torch.ones(10 + dist.get_rank()))
    except RuntimeError as error:
        return str(error)
    return ""


def test_errors_are_counted(tmp_path: Path) -> None:
    outcomes = ranks.check_ranks(_broken, "2", env={"SMDDP_METRICS": f"{tmp_path}/%p"})
    assert all("make the same call" in text for text in outcomes)
    files = list(tmp_path.glob("*.prom"))
    assert len(files) == 2
    for file in files:
        errors = prometheus.parse(file.read_text())["smddp_errors_total"]
        labels = {"collective": "allreduce", "kind": "CollectiveMismatchError"}
        assert errors.total(**labels) == errors.total() == 1


def _child() -> int:
    """A child of a fork ends as programs do; returns its exit status."""
    with ranks.job():
        dist.all_reduce(torch.ones(10))
        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()
            os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        dist.all_reduce(torch.ones(10))
    return status


def test_a_child_of_a_fork_writes_nothing(tmp_path: Path) -> None:
    env = {"SMDDP_METRICS": f"{tmp_path}/%r.%p"}
    outcomes = ranks.run_ranks(_child, "2", env=env)
    assert [outcome.value for outcome in outcomes] == [7, 7], outcomes
    assert {path.stem for path in tmp_path.iterdir()} == {
        f"{outcome.rank}.{outcome.pid}" for outcome in outcomes
    }
    for outcome in outcomes:
        lines = _lines(tmp_path / f"{outcome.rank}.{outcome.pid}.jsonl")
        calls = [call for line in lines for call in line["calls"]]
        assert sum(call["calls"] for call in calls if call["collective"] == "allreduce") == 2


def test_a_folder_that_is_missing_costs_a_line_of_the_log(tmp_path: Path) -> None:
    env = {"SMDDP_METRICS": f"{tmp_path}/none/%r", "SMDDP_METRICS_SECONDS": "1"}
    for outcome in ranks.run_ranks(_train, "2", env=env):
        assert outcome.returned, outcome
        said = [line for line in outcome.stderr.splitlines() if "SMDDP_METRICS" in line]
        assert len(said) == 1, outcome.stderr
        assert f"cannot write {tmp_path}/none/{outcome.rank}.prom (No such file or" in said[0]
        assert said[0].endswith("names: training goes on")


def _init() -> str:
    try:
        dist.init_process_group("smddp")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("all", "SMDDP_METRICS=all: the ranks of a host would write to the same file; add %r"),
        ("%h", "SMDDP_METRICS=%h: the ranks of a host would write to the same file; add %r"),
        ("%x", "SMDDP_METRICS=%x: expects a path in which %h (host), %p (process), %r (rank)"),
    ],
)
def test_patterns_that_cannot_work(pattern: str, said: str) -> None:
    for text in ranks.check_ranks(_init, "1", env={"SMDDP_METRICS": pattern}):
        assert said in text


def _names_in(value: object) -> set[str]:
    """Returns the names of metrics in all texts of a dashboard."""
    if isinstance(value, dict):
        return set().union(*map(_names_in, value.values()))
    if isinstance(value, list):
        return set().union(*map(_names_in, value))
    return set(re.findall(r"\bsmddp_\w+", value)) if isinstance(value, str) else set()


def test_the_dashboard_shows_what_there_is(tmp_path: Path) -> None:
    ranks.check_ranks(_broken, "2", env={"SMDDP_METRICS": f"{tmp_path}/broken-%r"})
    ranks.check_ranks(_train, "2", env={"SMDDP_METRICS": f"{tmp_path}/%r"})
    exported, labels = set(), set()
    for name in ("broken-0.prom", "0.prom"):
        for metric, family in prometheus.parse((tmp_path / name).read_text()).items():
            is_histogram = family.kind == "histogram"
            suffixes = ("_bucket", "_sum", "_count") if is_histogram else ("",)
            exported |= {metric + suffix for suffix in suffixes}
            labels |= {label for _, its in family.samples for label, _ in its}
    board = json.loads((ROOT / "examples/grafana.json").read_text())
    used = _names_in(board)
    assert used <= exported
    assert exported == used, "a metric that no panel shows"
    for panel in board["panels"]:
        for target in panel["targets"]:
            grouped = {
                label.strip()
                for by in re.findall(r"by \(([^)]*)\)", target["expr"])
                for label in by.split(",")
            }
            assert grouped <= labels
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= grouped
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
