"""The benchmarks of training steps in benchmarks/ run, and write what they have measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_runs import ROOT, run

SHORT = ("--ranks", "2", "--turns", "1", "--steps", "2")


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
    done = run(str(ROOT / "benchmarks" / script), *given, *SHORT, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["variant"] for row in rows] == variants
    assert all(row["step_ms"] > 0 for row in rows)
