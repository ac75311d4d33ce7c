"""The error texts in docs/troubleshooting.md occur in the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Written by torch or pip, not by smddp.
FOREIGN = (
    "Timed out after … seconds waiting for clients",
    "Unknown backend type",
    "element 0 of tensors",
    "environment variable RANK expected, but not set",
    "is not a supported wheel on this platform",
)


def _literals() -> str:
    """Returns the text of all sources, with adjacent string literals joined."""
    paths = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cc")]
    paths += ROOT.glob("smddp/**/*.py")
    text = "\n".join(path.read_text() for path in sorted(paths))
    return re.sub(r'["\']\s*\n\s*f?["\']', "", text).replace('\\"', '"')


def _texts() -> list[str]:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [text for row in rows for text in re.findall(r"`([^`]*)`", row)]


SOURCES = _literals()


@pytest.mark.parametrize("text", [t for t in _texts() if not t.startswith(FOREIGN)])
def test_a_text_stands_in_the_sources(text: str) -> None:
    # "…", single letters, and names of settings and errors stand for variable parts. The sources
    # concatenate sentences at commas, colons and verbs.
    pieces = re.split(r"…|\bA\b|\bB\b|SMDDP_\w+|SMP\w+Error|\bhas\b|[,:] ", text)
    for piece in (p.strip(' :=."?,') for p in pieces):
        if len(piece) > 3:
            assert piece in SOURCES, f"no source writes {piece!r} of {text!r}"
