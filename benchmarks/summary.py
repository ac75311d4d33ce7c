"""Writes the summary of benchmarks/results into its README: `python benchmarks/summary.py`.

For each file one line with its command, and tables of how many times as fast as gloo smddp is.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BEGIN = "<!-- summary: written by `python benchmarks/summary.py` -->"
END = "<!-- end of summary -->"
SIZES = (8, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20)


def _size(count: int) -> str:
    """Returns 262144 as "256 KiB"."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.3g} {unit}"
    return f"{count} B"


def _ratio(value: float) -> str:
    return f"{value:.2g}" if value < 99.5 else f"{value:.0f}"


def _beside_gloo(rows: list[dict[str, Any]]) -> dict[tuple[str, int], str]:
    """Returns "ordinary / communication memory" in multiples of gloo's speed, by (call, bytes)."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        if row["backend"] == "smddp" and not row["algorithm"] and "x_gloo" in row:
            call = row["collective"], row["size"]
            found.setdefault(call, {})[row["memory"]] = _ratio(row["x_gloo"])
    return {call: " / ".join(each.values()) for call, each in found.items()}


def _table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _command(read: dict[str, Any]) -> str:
    """Returns the command line that a file records, with FILE for its own name."""
    for key in ("args", "arguments", "command"):
        words = read.get(key, "")
        if isinstance(words, list):
            words = shlex.join("FILE" if word.endswith(".json") else word for word in words)
        if words and isinstance(words, str):
            return words
    return ""


def summary() -> str:
    """Returns the generated part of the README."""
    files, allreduce, others, training = [], [], [], []
    for path in sorted(RESULTS.glob("*.json")):
        read = json.loads(path.read_text())
        command = _command(read)
        files.append([f"`{path.name}`", f"`{command}`" if command else ""])
        layout = path.stem.rsplit("_", 1)[0]
        rows = read.get("results", [])
        if path.stem.startswith("ddp_"):
            by_model: dict[str, list[str]] = {}
            for row in rows:
                by_model.setdefault(row["model"], []).append(
                    f"{row['backend']} {row['x_none']:.2f}"
                )
            training += [[layout, model, ", ".join(each)] for model, each in by_model.items()]
        elif path.stem.startswith("allreduce_"):
            found = {size: text for (_, size), text in _beside_gloo(rows).items()}
            if found:
                allreduce.append([layout, *(found.get(size, "") for size in SIZES)])
        elif path.stem.startswith("all_"):
            biggest = {name: (size, text) for (name, size), text in _beside_gloo(rows).items()}
            others += [[layout, name, _size(size), text] for name, (size, text) in biggest.items()]
    return "\n".join(
        [
            _table(["file", "arguments"], files),
            "Allreduce, how many times as fast as gloo, ordinary / communication memory:\n",
            _table(["layout", *map(_size, SIZES)], allreduce),
            "The other collectives at their largest size, likewise:\n",
            _table(["layout", "call", "size", "times gloo"], others),
            "Training steps, in multiples of one without synchronisation (`fake`: DDP alone):\n",
            _table(["layout", "model", "backends"], training),
        ]
    )


if __name__ == "__main__":
    page = RESULTS / "README.md"
    text = page.read_text()
    before, rest = text.split(BEGIN, 1)
    page.write_text(f"{before}{BEGIN}\n{summary()}{END}{rest.split(END, 1)[1]}")
