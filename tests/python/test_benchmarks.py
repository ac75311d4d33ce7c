"""The benchmarks of training steps in benchmarks/ run, and write what they have measured."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import interpreters
import programs
import pytest
from bench_runs import ROOT, run

BENCHMARKS = ROOT / "benchmarks"
SHORT = ("--ranks", "2", "--turns", "1", "--steps", "2")


@pytest.mark.parametrize("script", ["sharding.py sleep", "pipeline.py", "faults.py"])
def test_gloo_must_be_gloo(script: str) -> None:
    name, *given = script.split()
    done = run(str(BENCHMARKS / name), *given, SMDDP_INSTEAD_OF="gloo")
    assert done.returncode == 2
    assert "unset SMDDP_INSTEAD_OF=gloo: with it, the rows of gloo" in done.stderr


def test_a_rank_that_ends() -> None:
    """Nobody waits for it."""
    script = """
        import argparse, sys
        sys.path.insert(0, sys.argv[1])
        import interleaved
        def make(options, variant):
            raise RuntimeError("there is no such model")
        variant = {"name": "this variant", "backend": "gloo", "ranks": 2}
        interleaved.Job(make, argparse.Namespace(profile=""), variant).ask(1)
    """
    done = programs.run("-c", textwrap.dedent(script), str(BENCHMARKS), timeout=60)
    assert done.returncode == 1, done
    assert "there is no such model" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("a rank of this variant has ended")


@pytest.mark.parametrize(
    ("arguments", "variants"),
    [
        ("sharding.py sleep --partitions 1 --seconds 0.001", ["whole", "sharded"]),
        (
            "sharding.py transformer --layers 2 --width 16",
            ["smp over smddp", "FSDP2 over smddp", "FSDP2 over gloo"],
        ),
        (
            "tensor.py block --kib 4",
            [
                *("smp over smddp", "smp over gloo"),
                *("parallelize_module over smddp", "parallelize_module over gloo"),
            ],
        ),
        ("tensor.py sleep --seconds 0.001", ["pipeline", "divided"]),
    ],
)
def test_each_variant_has_a_row(arguments: str, variants: list[str], tmp_path: Path) -> None:
    script, *given = arguments.split()
    file = tmp_path / "rows.json"
    done = run(str(BENCHMARKS / script), *given, *SHORT, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["variant"] for row in rows] == variants
    assert all(row["step_ms"] > 0 for row in rows)


@pytest.mark.multiprocess
@pytest.mark.costly
@pytest.mark.parametrize(("how", "layout"), [("bare", "2"), ("torchrun", "2"), ("torchrun", "2x2")])
def test_survivors_of_a_killed_rank_say_who_it_was(how: str, layout: str) -> None:
    """In programs that import nothing but torch, with what is on by default."""
    command = [sys.executable, str(BENCHMARKS / "deaths.py"), "--trials=1"]
    ended = subprocess.run(
        [*command, f"--how={how}", f"--layouts={layout}"],
        env=interpreters.environment(TORCH_DEVICE_BACKEND_AUTOLOAD="1"),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    row = json.loads(ended.stdout)
    assert row["named_in_log"] == row["survivors"] > 0
    # torchrun may end a survivor before its script has noted the time; its log is complete.
    assert how == "torchrun" or row["errors"] == row["survivors"]
    assert row["cut_files"] == 0
