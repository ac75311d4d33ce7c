"""The benchmark's output: what it prints can be read, and it notices wrong results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smddp.bench import Case, Measurement, table
from smddp.bench.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "smddp.bench", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_table_and_json_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    done = bench("--max-bytes=1000", "--iterations=10", f"--json={file}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    written = json.loads(file.read_text())
    cases = [("smddp", "ordinary"), ("smddp", "communication"), ("gloo", "ordinary")]
    sizes = ["8", "64", "512", "1000"]
    assert [(row[0], row[5], row[6]) for row in rows] == [(s, *c) for s in sizes for c in cases]
    for row, result in zip(rows, written["results"], strict=True):
        assert int(row[0]) == result["size"] == 4 * result["count"]
        measured = result["in_place"]
        assert float(row[7]) == pytest.approx(measured["time"], abs=0.01)
        assert measured["calls"] == 10
        assert 0 < measured["p50"] <= measured["p95"] <= measured["p99"]
        # Two ranks: the bus carries what the algorithm does.
        assert measured["bus_bw"] == pytest.approx(measured["alg_bw"])
        assert measured["nwrong"] == int(row[10]) == 0
        assert (result["x_gloo"] == 1) == (row[5] == "gloo")
    assert written["out_of_bounds"] == {"count": 0, "okay": True}
    assert len(written["average_bus_bandwidth"]) == len(cases)
    assert written["config"]["ranks_of_nodes"] == [2]
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert done.stdout.count("# Avg bus bandwidth") == len(cases)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "op"),
    [("bfloat16", "prod"), ("int64", "max"), ("half", "avg"), ("uint16", "bxor"), ("bool", "sum")],
)
def test_several_nodes_types_and_operations(dtype: str, op: str) -> None:
    done = bench(
        "--nodes=2+1", "--max-bytes=64KiB", "--min-bytes=64KiB", "--iterations=5",
        "--backends=smddp", "--memory=ordinary", f"--dtype={dtype}", f"--op={op}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes (2 + 1 ranks)" in done.stdout
    (row,) = rows_of(done.stdout)
    assert row[2:4] == [dtype, op]
    assert row[10:] == ["0", "-"]  # nothing wrong, nothing to compare with


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-bytes=4"], "--min-bytes"),
        (["--max-bytes=64 parsecs"], "is no number of bytes"),
        (["--nodes=2y2"], "is no layout of ranks"),
        (["--factor=1"], "--factor must be at least 2"),
        (["--op=avg"], "gloo has no avg"),
        (["--op=band"], "--op band of --dtype float is undefined"),
        (["--dtype=int16"], "gloo has no int16"),
        (["--backends=nonsense"], "--backends 'nonsense' is not available here, only gloo"),
        (["--backends=smddp,"], "--backends '' is not available"),
        (["--backends=nccl"], "--backends 'nccl' is not available"),
        (["--backends=gloo,gloo"], "names one twice"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("smddp.bench: ")
    assert text in said
    assert said.count("\n") == 1


def measurement(backend: str, microseconds: list[float], wrong: int = 0) -> Measurement:
    case = Case(backend, "ordinary")
    return Measurement(case, 4_000_000, 1_000_000, "float", "sum", 4, microseconds, wrong)


def test_bandwidths_follow_from_the_median() -> None:
    row = measurement("smddp", [900.0, 1000.0, 9000.0])
    assert row.time == 1000
    assert row.algbw == pytest.approx(4)  # 4 MB in 1 ms
    assert row.busbw == pytest.approx(6)  # times 2 (n - 1) / n
    assert row.percentile(0.95) == 9000


def test_ratio_is_relative_to_gloo() -> None:
    rows = [measurement("smddp", [100.0]), measurement("gloo", [250.0])]
    assert table.ratio(rows[0], rows) == pytest.approx(2.5)
    assert table.ratio(rows[0], rows[:1]) is None


def test_wrong_elements_are_counted_and_named() -> None:
    sizes = [[measurement("smddp", [1.0], wrong=3)], [measurement("smddp", [1.0], wrong=4)]]
    assert table.count_wrong(sizes) == 7
    assert "# Out of bounds values : 7 FAILED" in table.footer(sizes)
    assert table.as_json(sizes, [4], "now", "")["out_of_bounds"] == {"count": 7, "okay": False}
