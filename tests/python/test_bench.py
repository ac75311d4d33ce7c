"""The benchmark: its output, its arguments, and its checks of results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts
import pytest
import ranks
import torch
import torch.distributed as dist

from smddp.bench import Case, Measurement, Timing, mpi, numa, table
from smddp.bench.__main__ import main
from smddp.bench.about import RunStart, json_text
from smddp.bench.contender import PLACES, Contender
from smddp.bench.measure import Bench, Workload
from smddp.bench.operations import OPERATIONS, Task, contribution, result
from smddp.bench.plot import draw
from smddp.bench.steps import hidden_share
from smddp.bench.torch_calls import TorchContender

ROOT = Path(__file__).resolve().parents[2]
# An environment of its own, because some programs behave differently if they find mpi4py.
MPI_PREFIX = next((p for p in [ROOT / ".venv-mpi"] if p.exists()), Path(sys.prefix))


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=280
    )


def bench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "smddp.bench", *arguments, **variables)


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.multiprocess
@pytest.mark.slow
def test_table_and_json_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    secret = "5e9d3c7a1b2f4806"
    options = ["--max-bytes=1000", "--iterations=10", f"--json={file}", "--every-call"]
    done = bench(*options, SMDDP_JOB_TOKEN=secret)
    assert secret not in file.read_text() + done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    written = json.loads(file.read_text())
    cases = [
        ("smddp", "ordinary"),
        ("smddp", "communication"),
        ("gloo", "ordinary"),
        ("bound", "-"),
    ]
    sizes = ["8", "64", "512", "1000"]
    assert [(row[0], row[13], row[14]) for row in rows] == [(s, *c) for s in sizes for c in cases]
    for row, measured in zip(rows, written["results"], strict=True):
        assert int(row[0]) == measured["size"] == 4 * measured["count"]
        assert row[1:5] == [str(measured["count"]), "float", "sum", "-1"]
        for place, cells in ((PLACES[0], row[5:9]), (PLACES[1], row[9:13])):
            _check_place(measured, place, cells)
        assert (measured["x_gloo"] == 1) == (row[13] == "gloo")
        assert (measured["of_bound"] == 1) == (row[13] == "bound")
    assert written["version"] == 3
    assert {"start_time", "args", "env", "nccl_version", "config"} <= set(written)
    assert written["out_of_bounds"] == {"count": 0, "okay": True}
    assert len(written["average_bus_bandwidth"]) == len(cases)
    assert written["config"]["ranks_of_nodes"] == [2]
    assert written["config"]["numa_nodes"] == [numa.nodes_of()] * 2
    assert written["config"]["limits"]["copy_gbps"] > 0
    (cores,) = written["config"]["busy_cores"]  # of one host
    assert f"# other programs at the start: {cores:.2f} of " in done.stdout
    busy = RunStart("", [cores], [2], written["config"]["cores"]).warning
    assert [line for line in done.stdout.splitlines() if "WARNING" in line] == [f"# {busy}"] * bool(
        busy
    )
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert f"# wrote {file}\n" in done.stdout
    assert done.stdout.count("# Avg bus bandwidth") == len(cases)


@pytest.mark.parametrize(
    ("others", "ranks", "cores", "busy"),
    [
        ([0.2], [2], 2, False),  # only the system itself
        ([0.0], [4], 2, False),
        ([1.3], [2], 4, False),  # enough free cores
        ([1.3], [2], 2, True),
        ([7.0], [2], 8, True),
        ([0.1, 3.0], [2, 2], 4, True),  # one host of two
    ],
)
def test_a_busy_machine_is_said(
    others: list[float], ranks: list[int], cores: int, busy: bool
) -> None:
    start = RunStart("", others, ranks, cores)
    first, *rest = start.lines()
    assert first.startswith(f"other programs at the start: {max(others):.2f} of {cores} cores")
    assert len(rest) == busy
    for line in rest:
        assert line.startswith(f"WARNING: other programs are at work on {max(others):.2f} cores: ")


def _check_place(measured: dict[str, Any], place: str, cells: list[str]) -> None:
    timing = measured[place]
    if timing is None:
        assert cells == ["-"] * 4
        return
    assert float(cells[0]) == pytest.approx(timing["time"], abs=0.01)
    assert timing["calls"] == 10
    assert 0 < timing["p50"] <= timing["p95"] <= timing["p99"]
    # With two ranks algbw and busbw are equal.
    assert timing["bus_bw"] == pytest.approx(timing["alg_bw"])
    assert cells[3] == ("N/A" if measured["backend"] == "bound" else "0")
    calls = measured[f"{place}_per_iter"]
    assert len(calls["times_us"]) == 10
    assert calls["min_us"] == min(calls["times_us"]) <= calls["avg_us"] <= calls["max_us"]
    assert calls["p50_us"] == timing["p50"]


def test_columns_are_those_of_nccl_tests() -> None:
    _, names, units = table.header().splitlines()
    timing = ["time", "algbw", "busbw", "#wrong"]
    assert names.replace("#wrong", "~").startswith("#")
    assert names[1:].split()[:13] == ["size", "count", "type", "redop", "root", *timing, *timing]
    assert units[1:].split()[:4] == ["(B)", "(elements)", "(us)", "(GB/s)"]
    lines = [table.header(), table.format_rows([measurement("gloo", [1e6])])]
    assert len({len(line) for line in "\n".join(lines).splitlines()[1:]}) == 1


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [pytest.param("--ranks=3", marks=pytest.mark.exhaustive), "--nodes=2+1"]
)
def test_every_collective_is_right(layout: str) -> None:
    done = bench(
        "all", layout, "--backends=smddp,gloo,fake", "--counts=1,1001", "--offset=1",
        "--iterations=5", "--root=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert "left out" not in done.stdout
    tables = re.split(r"^# (?=[a-z_]+$)", done.stdout, flags=re.MULTILINE)[1:]
    assert [text.split("\n")[0] for text in tables] == list(OPERATIONS)
    for text in tables:
        name = text.split("\n")[0]
        measured = [row for row in rows_of(text)[1:] if row[13] in ("smddp", "gloo")]
        # Two rows of smddp, one per kind of memory.
        assert len(measured) == (3 if name == "barrier" else 6), text
        for row in measured:
            assert row[4] == ("2" if OPERATIONS[name].rooted else "-1")
            assert row[8] == ("N/A" if name == "barrier" else "0"), text
            assert row[12] == ("0" if OPERATIONS[name].in_place else "-"), text


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("half", "avg"), ("uint16", "bxor"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [("bfloat16", "prod"), ("int64", "max"), ("bool", "sum"), ("cfloat", "sum")]
        ),
    ],
)  # fmt: skip
def test_several_nodes_types_and_operations(dtype: str, op: str) -> None:
    done = bench(
        "--nodes=2+1", "--max-bytes=64KiB", "--min-bytes=64KiB", "--iterations=5", "--place=in",
        "--backends=smddp", "--memory=ordinary", f"--dtype={dtype}", f"--op={op}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes (2 + 1 ranks)" in done.stdout
    (row,) = rows_of(done.stdout)
    assert row[2:4] == [dtype, op]
    assert row[12:] == ["0", "smddp", "ordinary", "-", "-"]  # nothing to compare with


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-bytes=4"], "--min-bytes"),
        (["--max-bytes=64 parsecs"], "is not a number of bytes"),
        (["--nodes=2y2"], "is not a layout of ranks"),
        (["--nodes=2x2", "--ranks=4"], "--nodes 2x2 says how many ranks there are"),
        (["--ranks=0"], "--ranks must be at least 1"),
        (["--factor=1"], "--factor must be at least 2"),
        (["--op=avg"], "gloo has no avg"),
        (
            ["--op=band"],
            "with --dtype float: that has sum, prod, min, max, avg; band goes with int8",
        ),
        (
            ["--op=max", "--dtype=cfloat"],
            "cannot be measured with --dtype cfloat: that has sum, avg;",
        ),
        (
            ["--op=avg", "--dtype=bool"],
            "avg goes with float, double, half, bfloat16, cfloat, cdoubl",
        ),
        (["--dtype=int16"], "gloo has no int16"),
        (["--iterations=0"], "--iterations must be at least 1"),
        (["--backends=nonsense"], "--backends 'nonsense' is not available here, only gloo"),
        (["--backends=smddp,"], "--backends '' is not available"),
        (["--backends=nccl"], "--backends 'nccl' is not available"),
        (["--backends=gloo,gloo"], "names one twice"),
        (["alreduce"], "'alreduce' is not a collective; use allreduce, reduce"),
        (["--counts=1,x"], "--counts '1,x' are not numbers of elements"),
        (["--counts=0"], "are not numbers of elements"),
        (["--root=2"], "--root 2 is not among 2 ranks"),
        (["--offset=-1"], "--offset must not be negative"),
        (["--memory=gpu"], "--memory gpu"),
        (["--seconds=nan"], "--seconds must be positive"),
        (["--limit=0"], "--limit must be positive, not 0"),
        (["all", "allreduce"], "all is every collective: leave out the others"),
        (["--min-bytes=2KiB", "--max-bytes=1KiB"], "positive, and at most --max-bytes 1KiB"),
        (["--plot=x.gif"], "draws .png and .svg only"),
        (["--json=/no/such/folder/x"], "there is no such folder"),
        (["--tune=x", "all"], "--tune is for one collective at a time, of allreduce"),
        (["--tune=x", "sendrecv"], "--tune is for one collective at a time"),
        (["ddp", "--models=mpl"], "--models 'mpl' is unknown; use mlp, transformer, conv"),
        (["ddp", "--backends=gloo,gloo"], "names one twice"),
        (["ddp", "--sleep=0"], "--sleep must be positive"),
        (["ddp", "--bucket-mib=-1"], "--bucket-mib must be positive, not -1"),
        (["ddp", "--steps=0"], "--steps must be at least 1"),
        (["ddp", "--nodes=x"], "is not a layout of ranks"),
        (["ddp", "--nodes=8x1", "--ranks=8"], "--nodes 8x1 says how many ranks there are"),
        (["ddp", "--seconds=inf"], "--seconds must be positive"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    # Some machines have NCCL.
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setitem(dist.Backend.backend_capability, "nccl", ["cuda"])
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("smddp.bench: ")
    assert text in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("asked", ["--ranks=4", "--nodes=2x2"])
@pytest.mark.parametrize("what", [[], ["ddp"]])
def test_a_launcher_decides_how_many_ranks(
    asked: str,
    what: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*what, asked]) == 2
    said = capsys.readouterr().err
    assert "but the launcher has started 2 ranks: leave it out" in said
    assert asked.replace("=", " ") in said


class _CountingContender(Contender):
    """Records the order of its calls, and their number in each block."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def prepare(self, task: Task) -> list[str]:
        self.blocks.append(0)
        return ["in_place"]

    def time(self, place: str, calls: int) -> list[float]:
        self.blocks.append(calls)
        return [float(len(self.blocks))] * calls

    def wrong(self, place: str, shift: int) -> int | None:
        return None


def test_every_size_begins_warm() -> None:
    contender = _CountingContender()
    tasks = [(Task("allreduce", count), 4 * count) for count in (2, 16)]
    bench = Bench(Workload(tasks, iterations=100), {Case("gloo"): contender}, 2)
    first, second = (rows[0].in_place for rows in bench.run())
    # The first blocks only warm up: as many calls as a round for the first size, then a tenth.
    assert contender.blocks == [0, 20] + [20] * 5 + [0, 2] + [20] * 5
    assert first is not None
    assert min(first.microseconds) == 3
    assert second is not None
    assert min(second.microseconds) == 10
    assert len(first.microseconds) == len(second.microseconds) == 100


def _machine(folder: Path, *cpulists: str) -> Path:
    """Writes the files with which the kernel describes NUMA nodes."""
    folder.mkdir()
    for number, cpulist in enumerate(cpulists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cpulist + "\n")
    (folder / "has_cpu").write_text("0\n")
    return folder


@pytest.mark.parametrize(
    ("cpulists", "cores", "nodes"),
    [
        (["0-1"], {0, 1}, [0]),
        (["0-3,8-11", "4-7,12-15"], {5}, [1]),
        (["0-3,8-11", "4-7,12-15"], {8, 9}, [0]),
        (["0-3,8-11", "4-7,12-15"], {3, 4}, [0, 1]),
        (["0", "1", "", "2"], {2}, [3]),  # node 2 has memory but no cores
        (["0"], {1}, []),
        ([], {0}, []),
    ],
)
def test_numa_nodes_of_cores(
    cpulists: list[str], cores: set[int], nodes: list[int], tmp_path: Path
) -> None:
    assert numa.nodes_of(cores, _machine(tmp_path / "node", *cpulists)) == nodes


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        ([[0], [0]], ""),
        ([[], []], ""),
        ([[0], [0], [1]], "NUMA: ranks by where they may run, node 0: 0,1; node 1: 2"),
        (
            [[0, 1], [0, 1]],
            "NUMA: ranks by where they may run, nodes 0,1: 0,1 "
            "(bind each rank to one: numactl --cpunodebind, mpirun --bind-to numa)",
        ),
    ],
)
def test_numa_nodes_in_a_sentence(nodes: list[list[int]], sentence: str) -> None:
    assert numa.describe(nodes) == sentence


def measurement(backend: str, microseconds: list[float], wrong: int = 0) -> Measurement:
    task = Task("allreduce", 1_000_000)
    timing = Timing(microseconds, wrong)
    return Measurement(Case(backend), task, 4_000_000, 4, in_place=timing)


def test_bandwidths_follow_from_the_median() -> None:
    row = measurement("smddp", [900.0, 1000.0, 9000.0])
    assert row.best.time == 1000
    assert row.algbw(row.best) == pytest.approx(4)  # 4 MB in 1 ms
    assert row.busbw(row.best) == pytest.approx(6)  # times 2 (n - 1) / n
    assert row.best.percentile(0.95) == 9000


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("allreduce", 1.5), ("reduce", 1), ("broadcast", 1), ("all_gather", 0.75),
        ("reduce_scatter", 0.75), ("gather", 0.75), ("all_to_all", 0.75), ("sendrecv", 1),
        ("barrier", 0),
    ],
)  # fmt: skip
def test_bus_bandwidths_are_those_of_nccl_tests(name: str, factor: float) -> None:
    assert OPERATIONS[name].bus_factor(4) == factor


def test_ratio_is_relative_to_gloo() -> None:
    rows = [measurement("smddp", [100.0]), measurement("gloo", [250.0])]
    assert table.ratio(rows[0], rows) == pytest.approx(2.5)
    assert table.ratio(rows[0], rows[:1]) is None


def test_wrong_elements_are_counted_and_named() -> None:
    tasks = [[measurement("smddp", [1.0], wrong=3)], [measurement("smddp", [1.0], wrong=4)]]
    assert table.count_wrong(tasks) == 7
    assert "# Out of bounds values : 7 FAILED" in table.footer(tasks)
    assert table.as_json(tasks, {})["out_of_bounds"] == {"count": 7, "okay": False}


# --- right and wrong results ----------------------------------------------------------------------


def test_right_results_by_hand() -> None:
    given = [[contribution(Task("all_to_all", 1), s, b, 0)[5] for b in (0, 1)] for s in (0, 1)]
    moved = [result(Task("all_to_all", 1), 2, rank, 0) for rank in (0, 1)]
    assert [[block[5] for block in blocks or []] for blocks in moved] == [
        [given[0][0], given[1][0]],
        [given[0][1], given[1][1]],
    ]
    for op, combine in {"sum": sum, "max": max, "avg": lambda v: sum(v) / 3}.items():
        task = Task("allreduce", 1, op=op)
        values = [contribution(task, rank, 0, shift=1) for rank in range(3)]
        (block,) = result(task, 3, 0, shift=1) or []
        assert block == [combine(column) for column in zip(*values, strict=True)]
    assert result(Task("gather", 1, root=1), 2, 0, 0) is None
    # All ranks, blocks and shifts have different data; otherwise a swap of two would not be
    # noticed.
    task = Task("all_to_all", 1)
    several = {
        tuple(contribution(task, r, b, s)) for r in range(4) for b in range(4) for s in (0, 1)
    }
    assert len(several) == 32


def _damage(collective: str, place: str) -> tuple[int | None, int | None]:
    dist.init_process_group("gloo")
    contender = TorchContender("gloo", "ordinary")
    contender.prepare(Task(collective, 1000, root=0))
    before = contender.wrong(place, shift=0)
    call, (_, out) = contender._calls[place], contender._buffers[place]

    def damaging() -> None:
        call()
        if dist.get_rank() == 0:
            out[17] += 1

    contender._calls[place] = damaging
    after = contender.wrong(place, shift=0)
    dist.destroy_process_group()
    return before, after


@pytest.mark.multiprocess
@pytest.mark.parametrize("collective", [name for name in OPERATIONS if name != "barrier"])
def test_one_wrong_element_is_noticed(collective: str) -> None:
    place = "in_place" if OPERATIONS[collective].in_place else "out_of_place"
    assert ranks.check_ranks(_damage, "2", collective, place) == [(0, 1), (0, 1)]


def _do_nothing(place: str) -> list[int | None]:
    dist.init_process_group("gloo")
    contender = TorchContender("gloo", "ordinary")
    found = []
    for collective in OPERATIONS:
        contender.prepare(Task(collective, 1000))
        if place in contender._calls:
            contender._calls[place] = lambda: None
            found.append(contender.wrong(place, shift=0))
    dist.destroy_process_group()
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("place", PLACES)
def test_a_backend_that_does_nothing_is_noticed(place: str) -> None:
    for found in ranks.check_ranks(_do_nothing, "2", place):
        assert all(wrong is None or wrong > 100 for wrong in found), found
        assert found.count(None) == (1 if place == "out_of_place" else 0)


# --- where it runs --------------------------------------------------------------------------------


@pytest.mark.multiprocess
@pytest.mark.slow
def test_under_torchrun() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--max-bytes=64", "--iterations=5", "--backends=smddp,bound", "--memory=ordinary"]
    done = run(*command, "-m", "smddp.bench", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rows_of(done.stdout)) == 4


@pytest.mark.multiprocess
@pytest.mark.slow
def test_under_mpirun() -> None:
    """Starts ranks as mpirun does: with its variables, and without MASTER_ADDR."""
    options = ["--max-bytes=8", "--iterations=5", "--backends=smddp", "--memory=ordinary"]
    environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    jobs = []
    for rank in (0, 1):
        own = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        variables = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in own.items()}
        command = [sys.executable, "-m", "smddp.bench", *options]
        jobs.append(
            subprocess.Popen(
                command, env={**environment, **variables}, stdout=subprocess.PIPE, text=True
            )
        )
    texts = [job.communicate(timeout=110)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert len(rows_of(texts[0])) == 1
    assert texts[1] == ""


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(hosts.unavailable() is not None, reason=str(hosts.unavailable()))
def test_on_hosts_with_a_link(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    hosts_py = [str(ROOT / "tools" / "hosts.py"), "--hosts=2", "--ranks=2", "--rate=1gbit", "--"]
    options = ["--min-bytes=1MiB", "--max-bytes=1MiB", "--iterations=5", f"--json={file}"]
    done = run(*hosts_py, "-m", "smddp.bench", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    assert written["config"]["ranks_of_nodes"] == [2, 2]
    # One gigabit less the headers. It would be more if the link were not limited.
    assert 0 < written["config"]["limits"]["link_gbps"] < 0.125
    assert [r["backend"] for r in written["results"]] == ["smddp", "smddp", "gloo", "bound"]
    assert written["out_of_bounds"]["okay"]


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(hosts.unavailable() is not None, reason=str(hosts.unavailable()))
def test_ddp_example_on_hosts() -> None:
    hosts_py = [str(ROOT / "tools" / "hosts.py"), "--hosts=2", "--ranks=1", "--rate=1gbit", "--"]
    done = run(*hosts_py, str(ROOT / "examples" / "train_digits.py"), "--epochs=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy" in done.stdout


# --- other backends -------------------------------------------------------------------------------


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("name", list(mpi.MPIS))
def test_mpi_beside_the_others(name: str) -> None:
    reason = mpi.missing(name, MPI_PREFIX)
    if reason is not None:
        pytest.skip(reason)
    done = bench(
        "all", "--ranks=3", f"--backends=gloo,{name}", f"--mpi={MPI_PREFIX}", "--counts=1,1001",
        "--iterations=5", "--offset=1", "--root=1", "--dtype=double", "--op=max",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in rows_of(done.stdout) if row[13] == name]
    assert len(rows) == 2 * (len(OPERATIONS) - 1) + 1
    assert f"# {name}: {mpi.MPIS[name].title[:4]}" in done.stdout
    assert "# Out of bounds values : 0 OK" in done.stdout


def test_missing_mpi_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, other in mpi.MPIS.items():
        absent = tmp_path / "absent"
        sentence = f"{other.title} is missing in {absent}: `pip install {name} mpi4py numpy`"
        assert sentence in str(mpi.missing(name, absent))


def test_all_leaves_out_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from smddp.bench import options

    monkeypatch.setenv("PATH", str(tmp_path))
    parsed = options.parser().parse_args(["--backends=all", f"--mpi={tmp_path / 'nothing'}"])
    found = options.parse(parsed, 2)
    assert {"smddp", "gloo", "fake", "bound"} <= {case.backend for case in found.cases}
    assert not {"openmpi", "mpich"} & {case.backend for case in found.cases}
    assert any("Open MPI is missing" in sentence for sentence in found.left_out)


# --- pictures, training steps, the command --------------------------------------------------------


@pytest.mark.multiprocess
@pytest.mark.slow
def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.svg"
    done = bench(
        "broadcast",
        "allreduce",
        "--max-bytes=512",
        "--iterations=5",
        "--place=in",
        f"--plot={file}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"# wrote {file}\n" in done.stdout
    content = file.read_text()
    assert content.startswith("<?xml")
    for text in ("broadcast", "allreduce", "what the hardware allows", "communication memory"):
        assert text in content, text


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_formats_of_pictures(suffix: str, magic: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"bench.{suffix}"
    draw([[measurement("smddp", [900.0]), measurement("gloo", [1000.0])]], "two points", file)
    assert file.read_bytes().startswith(magic)


@pytest.mark.parametrize(
    ("communication", "compute", "share"),
    [
        ([], [(0, 1)], None),
        ([(0, 10)], [], 0.0),
        ([(0, 10)], [(0, 10)], 1.0),
        ([(0, 10)], [(5, 20)], 0.5),
        ([(0, 4), (2, 6), (10, 14)], [(0, 1), (3, 5), (4, 11)], 0.5),
        ([(0, 10)], [(1, 3), (2, 3), (9, 30)], 0.3),
    ],
)
def test_hidden_share(
    communication: list[tuple[float, float]],
    compute: list[tuple[float, float]],
    share: float | None,
) -> None:
    assert hidden_share(communication, compute) == pytest.approx(share)


def _ddp_rows(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    assert done.returncode == 0, done.stdout + done.stderr
    return rows_of(done.stdout)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("parallel", "backends"), [("ddp", ["smddp", "gloo", "fake"]), ("fsdp", ["smddp"])]
)
def test_training_steps(parallel: str, backends: list[str], tmp_path: Path) -> None:
    file = tmp_path / "ddp.json"
    options = [f"--parallel={parallel}", f"--backends={','.join(backends)}", f"--json={file}"]
    rows = _ddp_rows(bench("ddp", "--models=mlp", "--steps=5", *options))
    assert [row[3] for row in rows] == [*backends, "none"]
    for row in rows:
        assert row[-1] == ("right" if row[3] in ("smddp", "gloo") else "-")
    for row, written in zip(rows, json.loads(file.read_text())["results"], strict=True):
        assert float(row[4]) == pytest.approx(written["step_ms"], abs=0.01)
        assert int(row[1]) == written["parameters"] == 4 * 2048 * 2049
        assert len(written["milliseconds"]) == 5
        hidden = written["hidden"]
        assert (hidden is not None) == (parallel == "ddp" and row[3] in ("smddp", "gloo"))
        assert hidden is None or 0 <= hidden <= 1


@pytest.mark.multiprocess
@pytest.mark.slow
def test_steps_whose_compute_is_sleep() -> None:
    rows = _ddp_rows(
        bench("ddp", "--sleep=40", "--nodes=2x1", "--steps=5", "--backends=smddp",
              "--sleep-parameters=80000")
    )  # fmt: skip
    assert [row[0] for row in rows] == ["sleep"] * 2
    for row in rows:
        assert float(row[4]) >= 40
        assert float(row[8]) <= 2 * float(rows[1][4]) / float(row[4]) + 0.01  # scaling


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--help"], 0, "bench ddp"),
        ([], 0, "usage: smddp COMMAND"),
        (["plan", "list"], 0, "two_phase"),
        (["env"], 0, "SMDDP_TUNING_FILE"),
        (["bench", "--factor=1"], 2, "--factor must be"),
        (["bnech"], 2, "'bnech' is not a command"),
    ],
)
def test_command(
    arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from smddp import cli

    call: Callable[[list[str]], int] = cli.main
    assert call(arguments) == status
    captured = capsys.readouterr()
    assert text in captured.out + captured.err


def test_bare_loop_sums_in_place() -> None:
    from smddp import _load

    add = _load.load().sum_in_place
    for count in (0, 1, 5, 1023, 5000):
        for number in (2, 3, 5):
            tensors = [torch.arange(count, dtype=torch.float32) + i for i in range(number)]
            right = torch.stack(tensors).sum(0)
            add([memoryview(t.numpy()) for t in tensors])
            assert all(torch.equal(t, right) for t in tensors)
    floats = memoryview(bytearray(8)).cast("f")
    for wrong in ([floats], [floats, floats[:1]], [floats, memoryview(bytearray(8)).cast("i")]):
        with pytest.raises(ValueError, match="expects"):
            add(wrong)


# --- recorded results -----------------------------------------------------------------------------


def test_results_have_one_row_per_line() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        text = path.read_text()
        assert text == json_text(json.loads(text)) + "\n", path.name


def test_page_of_results_is_what_the_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import summary

    assert summary.PAGE.read_text() == summary.summary(), "run python benchmarks/summary.py"
