"""Runs torch's own tests of a backend with "smddp": each test recorded as passing must pass."""

from __future__ import annotations

import sys
from pathlib import Path

import programs
import pytest
import ranks
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from torch_suite import page, record  # noqa: E402

CONFIGURATIONS = [one.name for one in record.CONFIGURATIONS if record.served_first_by(one)]

pytestmark = [
    pytest.mark.multiprocess,
    # The records are for this release. Others have other tests.
    pytest.mark.skipif(
        not torch.__version__.startswith("2.15."), reason="the records are of torch 2.15"
    ),
]


def _run(*arguments: str, timeout: float) -> None:
    done = programs.run(
        "-m", "torch_suite", *arguments, timeout=timeout, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_what_passed_passes(configuration: str) -> None:
    """Runs a third of the tests, another third with each TEST_TURN, each where it passes first.

    `make test-torch` runs all of them in all configurations.
    """
    third = ranks.rotating([0, 1, 2], 1)[0]
    _run(configuration, "--first", f"--third={third}", timeout=590)


def test_the_page_is_up_to_date_and_explains_every_test() -> None:
    text = page.PAGE.read_text()
    assert page.updated(text) == text, "run `python -m torch_suite.page`"
