"""How measurements are written down: columns and JSON keys are those of nccl-tests."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from smddp import _load
from smddp.bench.measure import Case, Measurement

# What times are compared with, where it is one of the backends.
REFERENCE = "gloo"

_COLUMNS = (
    ("size", 12, "(B)"),
    ("count", 12, "(elements)"),
    ("type", 9, ""),
    ("redop", 6, ""),
    ("root", 5, ""),
    ("backend", 9, ""),
    ("memory", 14, ""),
    ("time", 10, "(us)"),
    ("algbw", 8, "(GB/s)"),
    ("busbw", 8, "(GB/s)"),
    ("#wrong", 7, ""),
    (f"x {REFERENCE}", 8, "(speed)"),
)


def _line(cells: Iterable[str], mark: str = " ") -> str:
    widths = [width for _, width, _ in _COLUMNS]
    return mark + " ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))


def header() -> str:
    """Returns the two lines above the table."""
    names = _line((name for name, _, _ in _COLUMNS), "#")
    return f"{names}\n{_line((unit for _, _, unit in _COLUMNS), '#')}"


def ratio(row: Measurement, rows: Sequence[Measurement]) -> float | None:
    """Returns how many times faster than the reference a row is, if that was measured beside it."""
    for other in rows:
        if other.case.backend == REFERENCE:
            return other.time / row.time
    return None


def format_rows(rows: Sequence[Measurement]) -> str:
    """Returns the lines of one size."""
    lines = []
    for row in rows:
        faster = ratio(row, rows)
        cells = [str(row.size), str(row.count), row.dtype, row.op, "-1"]
        cells += [row.case.backend, row.case.memory, f"{row.time:.2f}"]
        cells += [f"{row.algbw:.3f}", f"{row.busbw:.3f}", str(row.wrong)]
        cells.append("-" if faster is None else f"{faster:.2f}")
        lines.append(_line(cells))
    return "\n".join(lines)


def _by_case(sizes: Sequence[Sequence[Measurement]]) -> dict[Case, list[Measurement]]:
    result: dict[Case, list[Measurement]] = {}
    for rows in sizes:
        for row in rows:
            result.setdefault(row.case, []).append(row)
    return result


def count_wrong(sizes: Sequence[Sequence[Measurement]]) -> int:
    """Returns the number of wrong elements of all rows."""
    return sum(row.wrong for rows in sizes for row in rows)


def _average_busbw(rows: Sequence[Measurement]) -> float:
    return sum(row.busbw for row in rows) / len(rows)


def footer(sizes: Sequence[Sequence[Measurement]]) -> str:
    """Returns the lines below the table."""
    wrong = count_wrong(sizes)
    lines = [f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"]
    for case, rows in _by_case(sizes).items():
        average = _average_busbw(rows)
        lines.append(f"# Avg bus bandwidth    : {average:.4f} ({case.backend}, {case.memory})")
    return "\n".join(lines)


def as_json(
    sizes: Sequence[Sequence[Measurement]], layout: Sequence[int], start: str, description: str
) -> dict[str, Any]:
    """Returns everything that was measured, and where."""
    results = []
    for rows in sizes:
        for row in rows:
            in_place = {
                "time": row.time,
                "alg_bw": row.algbw,
                "bus_bw": row.busbw,
                "nwrong": row.wrong,
                "p50": row.time,
                "p95": row.percentile(0.95),
                "p99": row.percentile(0.99),
                "calls": len(row.microseconds),
            }
            result = {"size": row.size, "count": row.count, "type": row.dtype, "redop": row.op}
            result |= {"root": -1, "backend": row.case.backend, "memory": row.case.memory}
            results.append(result | {"in_place": in_place, f"x_{REFERENCE}": ratio(row, rows)})
    wrong = count_wrong(sizes)
    return {
        "version": 3,
        "start_time": start,
        "args": ["smddp.bench", *sys.argv[1:]],
        "env": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("SMDDP_", "OMP_"))},
        "config": {
            "ranks": sum(layout),
            "ranks_of_nodes": list(layout),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "smddp": _load.load().build_info(),
            "description": description,
        },
        "results": results,
        "out_of_bounds": {"count": wrong, "okay": wrong == 0},
        "average_bus_bandwidth": [
            {"backend": case.backend, "memory": case.memory, "bandwidth": _average_busbw(rows)}
            for case, rows in _by_case(sizes).items()
        ],
    }
