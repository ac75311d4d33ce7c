"""Where the benchmark runs: under launchers, on hosts, beside MPI; times of training steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hosts
import interpreters
import pytest
from bench_runs import ROOT, bench, rows_of, run

from smddp.bench import mpi
from smddp.bench.operations import OPERATIONS
from smddp.torch import _load

# An environment of its own, because some programs behave differently if they find mpi4py.
MPI_PREFIX = next((p for p in [ROOT / ".venv-mpi"] if p.exists()), Path(sys.prefix))


@pytest.mark.multiprocess
@pytest.mark.costly
def test_under_torchrun() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--max-bytes=64", "--iterations=5", "--backends=smddp,bound", "--memory=ordinary"]
    done = run(*command, "-m", "smddp.bench", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rows_of(done.stdout)) == 4


@pytest.mark.multiprocess
@pytest.mark.costly
def test_under_mpirun() -> None:
    """Starts ranks as mpirun does: with its variables, and without MASTER_ADDR."""
    options = ["--max-bytes=8", "--iterations=5", "--backends=smddp", "--memory=ordinary"]
    environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environments = []
    for rank in (0, 1):
        own = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        variables = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in own.items()}
        environments.append(environment | variables)
    # New interpreters, which none of the other tests of the benchmark has.
    done = interpreters.run_together(["-m", "smddp.bench", *options], environments)
    assert [job.returncode for job in done] == [0, 0]
    assert len(rows_of(done[0].stdout)) == 1
    assert done[1].stdout == ""


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
@pytest.mark.skipif(hosts.unavailable() is not None, reason=str(hosts.unavailable()))
@pytest.mark.costly
def test_on_hosts_with_a_link(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    hosts_py = [str(ROOT / "tools" / "hosts.py"), "--hosts=2", "--ranks=2", "--rate=1gbit", "--"]
    options = ["--min-bytes=1MiB", "--max-bytes=1MiB", "--iterations=5", f"--json={file}"]
    done = run(*hosts_py, "-m", "smddp.bench", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    assert written["config"]["ranks_of_nodes"] == [2, 2]
    assert written["config"]["congestion_control"] == _load.load().congestion_control()
    # One gigabit less the headers. It would be more if the link were not limited.
    assert 0 < written["config"]["limits"]["link_gbps"] < 0.125
    assert [r["backend"] for r in written["results"]] == ["smddp", "smddp", "gloo", "bound"]
    assert written["out_of_bounds"]["okay"]


@pytest.mark.exhaustive
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
@pytest.mark.skipif(hosts.unavailable() is not None, reason=str(hosts.unavailable()))
def test_ddp_example_on_hosts() -> None:
    hosts_py = [str(ROOT / "tools" / "hosts.py"), "--hosts=2", "--ranks=1", "--rate=1gbit", "--"]
    done = run(*hosts_py, str(ROOT / "examples" / "train_digits.py"), "--epochs=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy" in done.stdout


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", list(mpi.MPIS))
def test_mpi_beside_the_others(name: str) -> None:
    reason = mpi.missing(name, MPI_PREFIX)
    if reason is not None:
        pytest.skip(f"{reason}; or run `make mpi`")
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


def _ddp_rows(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    assert done.returncode == 0, done.stdout + done.stderr
    return rows_of(done.stdout)


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("parallel", "backends"),
    [
        ("ddp", ["smddp", "gloo", "fake"]),
        pytest.param("fsdp", ["smddp"], marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.costly
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
@pytest.mark.costly
def test_steps_in_each_wire_format() -> None:
    options = ["--nodes=2x1", "--steps=5", "--backends=smddp", "--wire=bf16,int8+feedback"]
    rows = _ddp_rows(bench("ddp", "--models=mlp", *options))
    assert [row[-2] for row in rows] == ["bf16", "int8+feedback", "-"]
    assert [row[-1] for row in rows] == ["right", "right", "-"]


@pytest.mark.multiprocess
@pytest.mark.costly
def test_steps_whose_compute_is_sleep() -> None:
    rows = _ddp_rows(
        bench("ddp", "--sleep=40", "--nodes=2x1", "--steps=5", "--backends=smddp",
              "--sleep-parameters=80000")
    )  # fmt: skip
    assert [row[0] for row in rows] == ["sleep"] * 2
    for row in rows:
        assert float(row[4]) >= 40
        assert float(row[8]) <= 2 * float(rows[1][4]) / float(row[4]) + 0.01  # scaling
