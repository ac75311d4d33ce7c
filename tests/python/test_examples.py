"""Every example runs as a user would run it, and reaches an accuracy."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return programs.run(
        *command, timeout=360, modules=["sklearn.datasets"], PYTHONWARNINGS="ignore"
    )


def torchrun(ranks: int, script: str, *arguments: str) -> str:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = run(*command, str(EXAMPLES / script), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy_in(text: str) -> float:
    found = re.search(r"accuracy (\d\.\d+) on held-out digits", text)
    assert found, text
    return float(found[1])


# An untrained network recognises one digit in ten.
LEARNED = 0.5


@pytest.mark.costly
def test_ddp() -> None:
    assert accuracy_in(torchrun(2, "train_digits.py", "--epochs=6")) > LEARNED


@pytest.mark.costly
def test_fsdp2() -> None:
    output = torchrun(2, "train_fsdp2.py", "--epochs=6")
    assert accuracy_in(output) > LEARNED
    assert "algorithms: " in output


@pytest.mark.costly
def test_lightning() -> None:
    pytest.importorskip("pytorch_lightning")
    done = run(str(EXAMPLES / "train_lightning.py"), "--epochs=6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert accuracy_in(done.stdout) > LEARNED


@pytest.mark.costly
def test_demo_learns_the_same_as_gloo(tmp_path: Path) -> None:
    done = run(str(EXAMPLES / "demo.py"), "--epochs=2", "--seconds=0.3", f"--output={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes (2 + 2 ranks)" in " ".join(done.stdout.split())
    apart = re.search(r"difference between the final parameters: (\S+)", done.stdout)
    assert apart is not None
    assert 0 <= float(apart[1]) <= 1e-6
    for picture in ("loss.png", "speed.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    for row in ("allreduce of 4 MiB", "training step"):
        assert done.stdout.count(row) == 2


@pytest.mark.parametrize(
    ("arguments", "variables", "text"),
    [
        ([], {"SMDDP_INSTEAD_OF": "gloo"}, "unset SMDDP_INSTEAD_OF=gloo"),
        (["--epochs=0"], {}, "--epochs must be at least 1"),
        (["--seconds=0"], {}, "--seconds must be more than 0"),
        (["--output=/dev/null"], {}, "--output: "),
    ],
)
def test_demo_refuses_what_it_cannot_do(
    arguments: list[str], variables: dict[str, str], text: str, tmp_path: Path
) -> None:
    done = programs.run(str(EXAMPLES / "demo.py"), f"--output={tmp_path}", *arguments, **variables)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_ends_with_one_sentence_when_a_run_takes_too_long(tmp_path: Path) -> None:
    done = run(str(EXAMPLES / "demo.py"), "--limit=0.1", f"--output={tmp_path}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "demo: the run with smddp took longer than 0 s"


_RANK = """
import os, time
from pathlib import Path
Path(os.environ["PIDS"], str(os.getpid())).touch()
time.sleep(300)
"""
_STARTED_AND_STOPPED = """
import os, sys, time
from pathlib import Path
script, log, pids, examples = map(Path, sys.argv[1:])
sys.path.insert(0, str(examples))
import demo
with demo.reserved_port() as port:
    nodes = [demo.start_node(node, port, [str(script)], log) for node in range(2)]
    end = time.monotonic() + 100
    while len(list(pids.iterdir())) < 4 and time.monotonic() < end:
        time.sleep(0.1)
    demo.stop(nodes)
"""


def test_demo_leaves_no_ranks_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, pids = tmp_path / "rank.py", tmp_path / "pids"
    script.write_text(_RANK)
    pids.mkdir()
    monkeypatch.setenv("PIDS", str(pids))
    done = run(
        "-c", _STARTED_AND_STOPPED, str(script), str(tmp_path / "log"), str(pids), str(EXAMPLES)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = []
    for pid in (int(file.name) for file in pids.iterdir()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            left.append(pid)
    assert len(list(pids.iterdir())) == 4
    assert not left


@pytest.mark.exhaustive
def test_demo_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMDDP_PROVIDER", "carrier_pigeon")
    done = run(str(EXAMPLES / "demo.py"), "--epochs=1", f"--output={tmp_path}")
    assert done.returncode == 1
    assert done.stderr.startswith("demo: the run with smddp failed: ")
    assert "SMDDP_PROVIDER=carrier_pigeon names a provider" in done.stderr
