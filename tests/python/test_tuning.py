"""The choice of algorithms: tuning files, options of a group, and agreement of all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from bench_runs import bench

import smddp
from smddp.bench import Case, Measurement, Timing, tune
from smddp.bench.operations import Task
from smddp.bench.torch_calls import preferring

pytestmark = pytest.mark.multiprocess


class Failure(NamedTuple):
    kind: str
    text: str


def failure_of(action: Callable[[], Any]) -> Failure:
    """Returns the error of an action. Errors of the caller are not a DistBackendError."""
    with pytest.raises((ValueError, dist.DistBackendError)) as caught:
        action()
    return Failure(type(caught.value).__name__, str(caught.value))


def _row(size: int, algorithm: str, *rounds: float, memory: str = "ordinary") -> Measurement:
    """Returns a measurement with these rounds. No algorithm means the built-in table's choice."""
    times = list(rounds) * (1 if len(rounds) > 1 else tune.ROUNDS)
    task = Task("allreduce", size // 4)
    return Measurement(
        Case("smddp", memory, algorithm), task, size, 2, in_place=Timing(times, 0, times)
    )


def _rows(tasks: list[list[Measurement]], nodes: list[int]) -> list[list[str]]:
    return [row.split() for row in tune.rows(tune.findings(tasks, nodes), nodes)]


def test_rows_follow_what_is_clearly_faster() -> None:
    tasks = [
        [_row(100, "", 10), _row(100, "a", 9.8), _row(100, "b", 12)],  # the gain is too small
        [_row(400, "", 10), _row(400, "a", 9), _row(400, "b", 8.8)],
        [_row(1600, "", 20), _row(1600, "a", 9.8), _row(1600, "b", 10)],  # b is not better than a
        [_row(6400, "", 50), _row(6400, "a", 30)],  # "b" could not
        [_row(25600, "", 80), _row(25600, "a", 90)],
    ]
    assert _rows(tasks, [2]) == [
        ["allreduce", "1x2", "private", "200", "built_in"],
        ["allreduce", "1x2", "private", "3200", "b"],
        ["allreduce", "1x2", "private", "12800", "a"],
        ["allreduce", "1x2", "private", "25600", "built_in"],  # larger sizes were not measured
    ]
    first, *rest = tune.verdicts(tune.findings(tasks, [2]))
    assert first == (
        "allreduce of 400 bytes in private memory: b takes 12 % less time than what the built-in "
        "table chooses"
    )
    assert len(rest) == 2


def test_rows_know_memory_on_one_node_only() -> None:
    shared = "communication"
    tasks = [[
        _row(100, "", 12), _row(100, "a", 10),
        _row(100, "", 30, memory=shared), _row(100, "a", 40, memory=shared),
        _row(100, "b", 10), _row(100, "b", 12, memory=shared),
    ]]  # fmt: skip
    assert [row[2::2] for row in _rows(tasks, [2])] == [["private", "a"], ["shared", "b"]]
    # Between nodes all ranks make the same choice: an algorithm that is faster in both memories.
    assert [row[1:] for row in _rows(tasks, [3, 1])] == [["3+1", "any", "100", "b"]]


def test_most_rounds_have_to_be_faster() -> None:
    """A machine that was slow during the turns of other algorithms causes no row."""
    usual = [10.0] * tune.ROUNDS
    for lost in range(5):
        rounds = [11.0] * lost + [5.0] * (tune.ROUNDS - lost)
        tasks = [[_row(100, "", *usual), _row(100, "a", *rounds)]]
        (row,) = _rows(tasks, [2])
        assert row[-1] == ("a" if lost <= 1 else "built_in"), lost


def test_noise_makes_no_rows() -> None:
    """Equally fast algorithms cause no row, on a machine whose speed varies by a third."""
    random = Random(5)

    def noisy(size: int, algorithm: str) -> Measurement:
        return _row(size, algorithm, *(random.gauss(100, 30) for _ in range(tune.ROUNDS)))

    tasks = [[noisy(size, name) for name in ("", "a", "b", "c")] for size in range(4, 2000, 4)]
    assert len(_rows(tasks, [2])) <= 4, "1500 comparisons, of which 1 in 1000 may err"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "layout", [pytest.param("--ranks=2", marks=pytest.mark.exhaustive), "--nodes=2x1"]
)
def test_what_is_measured_is_obeyed(layout: str, tmp_path: Path) -> None:
    file = tmp_path / "tuning.txt"
    options = [layout, "--max-bytes=4096", "--iterations=15", "--place=in"]
    done = bench(*options, f"--tune={file}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in file.read_text().splitlines() if not line.startswith("#")]
    assert rows[0] == ["smddp-tuning", "1"]
    assert len(rows) > 1
    assert {row[1] for row in rows[1:]} == {"1x2" if "ranks" in layout else "2x1"}
    done = bench(*options, "--backends=smddp", SMDDP_TUNING_FILE=str(file), SMDDP_LOG="trace")
    assert done.returncode == 0, done.stdout + done.stderr
    where = next(
        i for i, row in enumerate(file.read_text().splitlines(), 1) if row.startswith("allr")
    )
    said = [line for line in done.stderr.splitlines() if "allreduce of 8 bytes in private" in line]
    assert said
    assert all(line.endswith(f"{file}:{where} says {rows[1][4]}") for line in said), said


def _reduce_with(text: str, shared: bool) -> tuple[list[str], bool]:
    os.environ["SMDDP_TUNING_FILE"] = text
    dist.init_process_group("smddp")
    right = True
    for count in (1, 1000, 100_000):
        tensor = smddp.empty(count) if shared else torch.empty(count)
        for turn in range(3):
            tensor.copy_(torch.arange(count) % 7 + dist.get_rank() + turn)
            dist.all_reduce(tensor)
            right &= torch.equal(tensor, 2.0 * (torch.arange(count) % 7 + turn) + 1)
    names = sorted(name for name in smddp.statistics() if name.startswith("allreduce"))
    dist.destroy_process_group()
    return names, right


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        # Steps before the arrival must not depend on what the ranks tell each other in it.
        ["private max two_phase", "shared max one_shot"],
        ["private max two_phase"],
        ["shared max one_shot"],
        ["private 100 one_shot", "any max two_phase"],
    ],
)
def test_any_file_gives_right_results(rows: list[str], shared: bool, tmp_path: Path) -> None:
    file = tmp_path / "tuning.txt"
    file.write_text("smddp-tuning 1\n" + "".join(f"allreduce 1x2 {row}\n" for row in rows))
    for names, right in ranks.check_ranks(_reduce_with, "2", str(file), shared):
        assert right, names


def _fail(paths: list[str]) -> Failure:
    os.environ["SMDDP_TUNING_FILE"] = paths[int(os.environ["RANK"])]
    return failure_of(lambda: dist.init_process_group("smddp"))


def test_bad_file_ends_init_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "tuning.txt"
    file.write_text("smddp-tuning 1\nallreduce 1x2 any 8 rign\n")
    for failure in ranks.check_ranks(_fail, "2", [str(file)] * 2):
        assert failure.kind == "ValueError"
        assert (
            f'SMDDP_TUNING_FILE: {file}:2: allreduce has no algorithm "rign", only one_shot'
            in failure.text
        )


def test_file_for_another_layout_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "tuning.txt"
    file.write_text("smddp-tuning 1\nallreduce 1x4 any max two_phase\n")
    outcomes = ranks.run_ranks(_reduce_with, "2", str(file), False)
    for outcome in outcomes:
        names, right = outcome.value
        assert right
        assert len(names) > 1, "the built-in table takes several"
    text = f"SMDDP_TUNING_FILE={file} has no row for nodes of 2 ranks"
    assert [outcome.stderr.count(text) for outcome in outcomes] == [1, 0]


def _describe(file: str) -> str:
    os.environ.update(SMDDP_TUNING_FILE=file, SMDDP_LOG="info")
    dist.init_process_group("smddp")
    group = dist.new_group(pg_options=smddp.GroupOptions(algorithm="allreduce=two_phase"))
    texts = smddp.describe() + "\n" + smddp.describe(group)
    dist.destroy_process_group()
    return texts


def test_file_in_use_is_said(tmp_path: Path) -> None:
    file = tmp_path / "tuning.txt"
    row = "any max two_phase\n"
    file.write_text(
        f"smddp-tuning 1\nallreduce 1x2 {row}reduce 1x2 any 9 one_shot\nallreduce 4 {row}"
    )
    by = f"SMDDP_TUNING_FILE={file} (3 rows, 2 for these nodes), then the built-in table"
    for outcome in ranks.run_ranks(_describe, "2", str(file)):
        whole, part = outcome.value.splitlines()
        assert whole.endswith(f"; algorithms by {by}")
        assert part.endswith(f"; algorithms by the group's allreduce=two_phase, then {by}")
        lines = [line for line in outcome.stderr.splitlines() if by in line]
        assert [line.split(" info: ")[1] for line in lines] == [whole, part]


def test_different_files_end_init(tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, size in zip(files, (8, 9), strict=True):
        file.write_text(f"smddp-tuning 1\nallreduce 1x2 any {size} two_phase\n")
    for failure in ranks.check_ranks(_fail, "2", [str(file) for file in files]):
        assert failure.kind == "SMDDPCollectiveMismatchError"
        assert "would choose different algorithms" in failure.text
        assert "SMDDP_TUNING_FILE" in failure.text


def _group_of_its_own(algorithms: list[str]) -> tuple[list[str], Failure | None]:
    dist.init_process_group("smddp")
    options = smddp.GroupOptions(algorithm=algorithms[dist.get_rank()])
    made = []
    failure = None
    if len(set(algorithms)) > 1 or "nothing" in algorithms[0]:
        failure = failure_of(lambda: dist.new_group(backend="smddp", pg_options=options))
        return [], failure
    group = dist.new_group(backend="smddp", pg_options=options)
    assert isinstance(group, dist.ProcessGroup)
    for each in (group, None):
        tensor = torch.ones(10)
        dist.all_reduce(tensor, group=each)
        assert torch.equal(tensor, torch.full((10,), 2.0))
        made.append(next(name for name in smddp.statistics(each) if name.startswith("allreduce")))
    dist.destroy_process_group()
    return made, None


def test_group_with_an_algorithm_of_its_own() -> None:
    for names, _ in ranks.check_ranks(_group_of_its_own, "2x1", ["allreduce=ring"] * 2):
        assert names[0] == "allreduce/ring"
        assert names[1] != "allreduce/ring"


def test_group_options_have_to_agree() -> None:
    for _, failure in ranks.check_ranks(_group_of_its_own, "2", ["allreduce=ring", ""]):
        assert failure is not None
        assert "would choose different algorithms" in failure.text
    for _, failure in ranks.check_ranks(_group_of_its_own, "2", ["allreduce=nothing"] * 2):
        assert failure is not None
        assert failure.kind == "ValueError"
        assert 'algorithm=allreduce=nothing: allreduce has no algorithm "nothing"' in failure.text


def _reduce_twice(async_op: bool) -> list[Failure]:
    def reduce() -> None:
        work = dist.all_reduce(torch.ones(10), async_op=async_op)
        assert work is not None
        work.wait()

    dist.init_process_group("smddp")
    failures = [failure_of(reduce), failure_of(reduce)]
    dist.destroy_process_group()
    return failures


@pytest.mark.parametrize("async_op", [False, True])
def test_an_algorithm_that_cannot_serve_a_call_ends_it(async_op: bool) -> None:
    variables = {"SMDDP_ALGORITHM": "allreduce=zero_copy"}
    for failures in ranks.check_ranks(_reduce_twice, "2", async_op, env=variables, timeout=20):
        for number, (kind, text) in enumerate(failures, 1):
            assert kind == "ValueError"
            assert f"allreduce of 10 float32 (40 B) with SUM #{number} (group" in text
            assert "of 40 bytes in private buffers on 1 node(s); add to it one_shot" in text


def _wrong_options() -> list[str]:
    texts = []
    for options in ({"algorithm": "allreduce=ring"}, "allreduce=ring"):
        with pytest.raises(TypeError) as caught:
            dist.init_process_group("smddp", pg_options=options)
        texts.append(str(caught.value))
    with pytest.raises(TypeError) as caught:
        smddp.GroupOptions(algorithm=None)  # type: ignore[arg-type]
    texts.append(str(caught.value))
    return texts


def test_other_options_are_refused() -> None:
    for mapping, text, none in ranks.check_ranks(_wrong_options, "1"):
        assert "but got {'algorithm': 'allreduce=ring'}" in mapping
        assert 'smddp.GroupOptions(wire="int8"), but got' in text
        assert none.endswith('algorithm is text such as "allreduce=ring", or "", but got None')


def _options_of_another_backend() -> str:
    options = dist.ProcessGroupGloo._Options()
    dist.init_process_group("smddp", pg_options=options)
    text = smddp.describe()
    dist.destroy_process_group()
    return text


def test_options_of_another_backend_are_left_to_it() -> None:
    for text in ranks.check_ranks(_options_of_another_backend, "1"):
        assert text.endswith("; algorithms by the built-in table")


def test_preferred_algorithm_comes_first_and_all_others_after_it() -> None:
    names = [entry.split("=")[1] for entry in preferring("allreduce/ring").split(",")]
    assert names[0] == "ring"
    assert sorted(names) == sorted(set(names))
    assert names[-1] == "one_shot"
