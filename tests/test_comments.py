"""Comments keep to the width of the page: 120 columns in C++, where clang-format leaves them alone.

ruff looks at Python.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120


def too_wide(text: str) -> list[int]:
    """Returns the numbers of the lines with a comment that are too wide; links cannot be broken."""
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > WIDTH and "//" in line and "://" not in line
    ]


def test_comments_are_not_too_wide() -> None:
    names = subprocess.run(
        ["git", "ls-files", "*.h", "*.cc", "*.cu", "*.cuh", "*.inl"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    found = [f"{name}:{number}" for name in names for number in too_wide((ROOT / name).read_text())]
    assert found == []


def test_a_wide_comment_is_found() -> None:
    wide = "x" * WIDTH
    assert too_wide(f"// {wide}\nint a;  // {wide}\n// https://{wide}\n// short\n{wide}\n") == [
        1,
        2,
    ]
