"""The benchmark's figures: measured, computed, printed, drawn, and kept in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_runs import ROOT, measurement

from smddp.bench import Case, numa, table
from smddp.bench.about import RunStart, json_text
from smddp.bench.contender import Contender
from smddp.bench.measure import Bench, Workload
from smddp.bench.operations import OPERATIONS, Task
from smddp.bench.plot import _label, draw
from smddp.bench.steps import Amount, _steps, hidden_share


def test_lines_of_a_plot_have_names_of_their_own() -> None:
    cases = [
        Case("smddp"),
        *(Case("smddp", memory) for memory in ("communication", "gpu")),
        *(Case("smddp", wire=wire) for wire in ("fp32", "int8")),
        *(Case("smddp", memory, "ring") for memory in ("ordinary", "communication")),
    ]
    assert len({_label(case) for case in cases}) == len(cases)
    assert _label(Case("smddp", "communication", wire="int8")) == (
        "smddp, communication memory, int8"
    )


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


def test_columns_are_those_of_nccl_tests() -> None:
    _, names, units = table.header().splitlines()
    timing = ["time", "algbw", "busbw", "#wrong"]
    assert names.replace("#wrong", "~").startswith("#")
    assert names[1:].split()[:13] == ["size", "count", "type", "redop", "root", *timing, *timing]
    assert units[1:].split()[:4] == ["(B)", "(elements)", "(us)", "(GB/s)"]
    lines = [table.header(), table.format_rows([measurement("gloo", [1e6])])]
    assert len({len(line) for line in "\n".join(lines).splitlines()[1:]}) == 1


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


@pytest.mark.parametrize(
    ("asked", "blocks"), [(9, [2, 2, 2, 2, 1]), (3, [1, 1, 1]), (20, [4, 4, 4, 4, 4])]
)
def test_as_many_calls_as_asked_for(asked: int, blocks: list[int]) -> None:
    contender = _CountingContender()
    tasks = [(Task("allreduce", 2), 8)]
    bench = Bench(Workload(tasks, iterations=asked), {Case("gloo"): contender}, 2)
    ((row,),) = bench.run()
    assert contender.blocks[2:] == blocks
    assert row.in_place is not None
    assert len(row.in_place.microseconds) == asked


@pytest.mark.parametrize(("asked", "blocks"), [(1, [1]), (9, [2, 2, 2, 2, 1])])
def test_as_many_steps_as_asked_for(asked: int, blocks: list[int]) -> None:
    assert _steps(Amount([], "ddp", None, seconds=5, steps=asked), milliseconds=1) == blocks


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


def test_results_have_one_row_per_line() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        text = path.read_text()
        assert text == json_text(json.loads(text)) + "\n", path.name


def test_only_the_newest_results_are_kept() -> None:
    names = [path.stem for path in (ROOT / "benchmarks" / "results").iterdir()]
    assert len(names) <= 31, "30 files and the page; git has the others"
    layouts = [name.rpartition("_")[0] for name in names]
    assert len(set(layouts)) == len(layouts), "a file was replaced and is still there"


def test_page_of_results_is_what_the_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import summary

    assert summary.PAGE.read_text() == summary.summary(), "run python benchmarks/summary.py"
