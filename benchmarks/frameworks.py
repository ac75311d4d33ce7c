"""Measures the scripts of tests/frameworks with smddp and with gloo, and prints a table.

    make test-frameworks
    build/frameworks/bin/python benchmarks/frameworks.py --json FILE [--only NAME]

The seconds are those between the start of the training, or of the generation, and its end on rank
0. Imports and the start of the ranks are not among them. The backends take turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/frameworks")]

import cases  # noqa: E402
import torch  # noqa: E402
from interleaved import parsed  # noqa: E402

from smddp.bench.about import json_text  # noqa: E402
from smddp.tools import _files  # noqa: E402


def measure(case: cases.Case, runs: int) -> dict[str, Any]:
    """Returns the row of a case."""
    row: dict[str, Any] = {"case": case.name, "package": case.package}
    row |= {"version": cases.version(case.package), "launcher": case.how}
    if row["version"] is None:
        return row | {"result": "not installed"}
    seconds: dict[str, list[float]] = {"smddp": [], "gloo": []}
    apart = 0.0
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            try:
                results = {name: cases.run(case, name, Path(folder)) for name in seconds}
            except Exception as error:
                lines = str(error).strip().splitlines()
                print("\n".join(lines[-15:]), file=sys.stderr)
                return row | {"result": f"failed: {type(error).__name__}"}
        for name, result in results.items():
            seconds[name].append(round(result["seconds"], 3))
        apart = max(apart, cases.difference(results["smddp"], results["gloo"]))
        row["tokens"] = results["smddp"]["tokens"]
    equal = "bit-equal" if apart == 0 else f"equal within {apart:.1e}"
    if apart > 1e-5:
        equal = f"DIFFERENT by {apart:.1e}"
    return row | {"result": equal, **{f"{name}_seconds": each for name, each in seconds.items()}}


def line(row: dict[str, Any]) -> str:
    """Returns a row as a line of a Markdown table."""
    times = [min(row.get(f"{name}_seconds", [float("nan")])) for name in ("smddp", "gloo")]
    texts = [f"{time:.2f}" for time in times]
    if row.get("tokens"):
        rates = [f"{row['tokens'] / time:.0f} tokens/s" for time in times]
        texts = [f"{text} ({rate})" for text, rate in zip(texts, rates, strict=True)]
    cells = [row["case"], row["package"], row["version"] or "", row["launcher"], row["result"]]
    return "| " + " | ".join([*cells, *texts]) + " |"


def main() -> None:
    """Measures all cases, and writes the file after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="cases whose name or package has this text")
    parser.add_argument("--runs", type=int, default=1)
    arguments = parsed(parser)
    rows: list[dict[str, Any]] = []
    print(
        "| what | package | version | launcher, ranks | smddp against gloo | smddp: s | gloo: s |"
    )
    print("|---|---|---|---|---|---|---|")
    for case in cases.CASES:
        if arguments.only.lower() not in f"{case.name} {case.package}".lower():
            continue
        rows.append(measure(case, arguments.runs))
        print(line(rows[-1]), flush=True)
        if arguments.json:
            config = {"torch": torch.__version__, "cores": os.cpu_count()}
            config |= {"machine": platform.machine()}
            about = ["frameworks.py", f"--runs={arguments.runs}"]
            written = {"args": about, "config": config, "results": rows}
            _files.write(arguments.json, json_text(written) + "\n")


if __name__ == "__main__":
    main()
