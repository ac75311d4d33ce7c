"""Small random models of transformers' types on two partitions give the numbers of one process.

The main types each time, and some of the others, which change with TEST_TURN; all of them with
ALL_SEEDS, which takes an hour. zoo.py says what is compared.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cases

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.exhaustive,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(
        cases.version("transformers") is None, reason="needs transformers: make test-frameworks"
    ),
]

# Of the types that are not main ones, one in so many is tried in a turn.
SHARE = 20


def test_types_of_transformers_are_equal_or_refused(tmp_path: Path) -> None:
    arguments = [f"--table={tmp_path / 'table.json'}"]
    if "ALL_SEEDS" not in os.environ:
        arguments.append(f"--turn={int(os.environ.get('TEST_TURN', '0')) % SHARE}/{SHARE}")
    done = cases.start("zoo.py", *arguments, launcher=(), seconds=7000)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((tmp_path / "table.json").read_text())["results"]
    import zoo

    for kind in zoo.MAIN:
        for check, text in table[kind].items():
            assert text in ("equal", "-"), f"{kind}, {check}: {text}"
