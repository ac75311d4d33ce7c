"""Writes the tables of docs/torch-suite.md from the record."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from torch_suite import record

PAGE = Path(__file__).resolve().parents[2] / "docs" / "torch-suite.md"
BEGIN = "<!-- written by `python -m torch_suite.page` -->"
END = "<!-- end of what is written -->"


def tables() -> str:
    """Returns the number of tests that pass, and the reasons of those that never pass."""
    lines = ["| configuration | pass | skip | fail |", "|---|---|---|---|"]
    for configuration in record.CONFIGURATIONS:
        counts = record.counts(record.read(configuration).values())
        cells = " | ".join(str(counts[how]) for how in ("passes", "skips", "fails"))
        lines.append(f"| {configuration.name} | {cells} |")
    never = record.never_passing()
    total = len(record.read(record.CONFIGURATIONS[0]))
    lines += [
        "",
        f"Of {total} tests {total - len(never)} pass in at least one configuration. The others:",
        "",
        "| why | tests |",
        "|---|---|",
    ]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in never.items():
        by_reason[reason].append(f"`{name}`")
    lines += [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(by_reason.items())]
    return "\n".join(lines)


def updated(text: str) -> str:
    """Returns the page with up-to-date tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
    sys.exit(0)
