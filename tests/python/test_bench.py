"""The benchmark as a program: its output, its arguments, its commands."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from bench_runs import bench, rows_of

from smddp.bench import launch, numa, options
from smddp.bench.__main__ import main
from smddp.bench.about import RunStart, given, write_json, written
from smddp.bench.contender import PLACES
from smddp.bench.operations import OPERATIONS


@pytest.mark.multiprocess
@pytest.mark.costly
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


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "layout", [pytest.param("--ranks=3", marks=pytest.mark.exhaustive), "--nodes=2+1"]
)
@pytest.mark.costly
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
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("half", "avg"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("uint16", "bxor"), ("bfloat16", "prod"), ("int64", "max"), ("bool", "sum"),
                ("cfloat", "sum"),
            ]
        ),
    ],
)  # fmt: skip
@pytest.mark.costly
def test_several_nodes_types_and_operations(dtype: str, op: str) -> None:
    done = bench(
        "--nodes=2+1", "--max-bytes=64KiB", "--min-bytes=64KiB", "--iterations=5", "--place=in",
        "--backends=smddp", "--memory=ordinary", f"--dtype={dtype}", f"--op={op}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes (2 + 1 ranks)" in done.stdout
    (row,) = rows_of(done.stdout)
    assert row[2:4] == [dtype, op]
    assert row[12:] == ["0", "smddp", "ordinary", "-", "-", "-"]  # nothing to compare with


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
        (["--iterations=14", "--tune=x"], "--iterations must be at least 15, the rounds of --tune"),
        (["--backends=nonsense"], "--backends 'nonsense' is not available here, only gloo"),
        (["--backends=smddp,"], "--backends '' is not available"),
        (["--backends=nccl"], "--backends 'nccl' is not available"),
        (["--backends=gloo,gloo"], "names one twice"),
        (["--wire=int4"], "--wire 'int4' is not one of fp32, bf16, int8"),
        (["--wire=int8,int8"], "--wire int8,int8 names one twice"),
        (["--wire=int8", "--backends=gloo"], "--wire is about rows of smddp"),
        (["--wire=int8", "--tune=tuning.txt"], "--wire and --tune exclude each other"),
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
        (["--json=/"], "/ is a folder, not a file"),
        (["--tune=x", "--backends=gloo"], "--tune measures smddp only: leave out --backends"),
        (["--nodes=9999999x9999999"], "is not a layout of ranks"),
        (["--every-call"], "--every-call is about the file of --json: give that, too"),
        (["--tune=x", "all"], "--tune is for one collective at a time, of allreduce"),
        (["--tune=x", "sendrecv"], "--tune is for one collective at a time"),
        (["ddp", "--models=mpl"], "--models 'mpl' is unknown; use mlp, transformer, conv"),
        (["ddp", "--backends=gloo,gloo"], "names one twice"),
        (["ddp", "--wire=int4"], "--wire 'int4' is not one of fp32, bf16, int8"),
        (["ddp", "--wire=int8", "--backends=gloo"], "--wire is about rows of smddp"),
        (["ddp", "--sleep=0"], "--sleep must be positive"),
        (["ddp", "--bucket-mib=-1"], "--bucket-mib must be positive, not -1"),
        (["ddp", "--steps=0"], "--steps must be at least 1"),
        (["ddp", "--nodes=x"], "is not a layout of ranks"),
        (["ddp", "--nodes=8x1", "--ranks=8"], "--nodes 8x1 says how many ranks there are"),
        (["ddp", "--seconds=inf"], "--seconds must be positive"),
        (["ddp", "--json=/"], "/ is a folder, not a file"),
        (["ddp", "--sleep=9", "--models=mlp"], "--sleep measures a model of its own"),
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


@pytest.mark.parametrize("what", [[], ["ddp"]])
def test_gloo_must_be_gloo(
    what: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMDDP_INSTEAD_OF", "gloo")
    assert main(what) == 2
    assert "unset SMDDP_INSTEAD_OF=gloo: with it, the rows of gloo" in capsys.readouterr().err


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


def test_algorithms_of_gpus_are_not_tuned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the file are for memory of the host."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["--tune=x", "--memory=gpu"]) == 2
    assert "--tune is for the memory of hosts" in capsys.readouterr().err


def test_only_rank_0_writes_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other hosts need not have the folder."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    options.parse(options.parser().parse_args(["--json=/no/such/folder/x"]), 2)
    monkeypatch.setenv("RANK", "0")
    assert main(["--json=/no/such/folder/x"]) == 2


@pytest.mark.parametrize("what", [[], ["ddp"]])
def test_ranks_on_hosts_that_nobody_names(
    what: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    assert main(what) == 2
    said = capsys.readouterr().err
    assert said.startswith("smddp.bench: the job has several hosts, and nothing says where rank 0")
    assert "set MASTER_ADDR" in said
    # Slurm names them.
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[7-8]")
    launch.complete_rendezvous()
    assert os.environ["MASTER_ADDR"] == "node7"


def test_the_shell_of_a_job_of_slurm_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the benchmark starts ranks, as anywhere else."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    slurm = {"PROCID": "0", "LOCALID": "0", "NTASKS": "1", "JOB_ID": "7", "STEP_NUM_TASKS": "1"}
    for name, value in (slurm | {"STEP_ID": "4294967290"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert not launch.is_rank()
    assert launch.layout_of(4, None) == [4]
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert launch.is_rank()


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        ("[ $RANK = 1 ] && kill -KILL $$; exit 1", 137,
         "smddp.bench: rank 1 was ended by SIGKILL: is there enough memory?\n"),
        ("[ $RANK = 0 ] && kill -SEGV $$; sleep 1; exit 3", 139,
         "smddp.bench: rank 0 was ended by SIGSEGV\n"),
        ("[ $RANK = 0 ] && exit 3; sleep 1; kill -ABRT $$", 3, ""),
    ],
)  # fmt: skip
def test_ranks_that_signals_end(
    script: str,
    status: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "python_command", lambda _: ["bash", "-c", script])
    assert launch.launch([2], [], 60) == status
    assert capfd.readouterr().err == text


def test_ranks_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "python_command", lambda _: ["/no/such/program"])
    assert launch.launch([2], [], 60) == 1
    assert "smddp.bench: the ranks cannot be started: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["TERM", "HUP"])
def test_a_signal_ends_the_ranks_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = getattr(signal, f"SIG{name}")
    monkeypatch.setattr(
        launch,
        "python_command",
        lambda _: ["bash", "-c", f"[ $RANK = 1 ] && kill -{name} {os.getpid()}; exec sleep 100"],
    )
    with pytest.raises(SystemExit) as raised:
        launch.launch([2], [], 60)
    assert raised.value.code == 128 + number
    assert not [each for each in psutil.Process().children() if each.name() == "sleep"]
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_file_that_cannot_be_written_in_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not written(lambda: write_json(tmp_path / "no" / "x", {}))
    said = capsys.readouterr().err
    assert said.startswith("smddp.bench: [Errno 2] No such file or directory")


@pytest.mark.parametrize(
    ("argv", "arguments"),
    [
        (["/usr/bin/smddp", "bench", "reduce"], ["reduce"]),
        (["/x/smddp/bench/__main__.py", "ddp", "--steps=1"], ["ddp", "--steps=1"]),
    ],
)
def test_recorded_arguments(
    argv: list[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert given() == arguments


@pytest.mark.multiprocess
@pytest.mark.costly
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
    from smddp.tools import cli

    call: Callable[[list[str]], int] = cli.main
    assert call(arguments) == status
    captured = capsys.readouterr()
    assert text in captured.out + captured.err
