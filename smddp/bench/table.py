"""Formats measurements as a table and as JSON, with the columns and keys of nccl-tests.

Scripts for nccl-tests can read both. Columns for the backend, the memory and ratios follow.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from smddp.bench.contender import PLACES
from smddp.bench.measure import Case, Measurement, Timing

__all__ = [
    "BOUND",
    "REFERENCE",
    "as_json",
    "count_wrong",
    "footer",
    "format_rows",
    "header",
    "ratio",
]

# The backend that the others are compared with, if it is measured.
REFERENCE = "gloo"
# The row of the hardware's limit.
BOUND = "bound"

_TASK = (("size", 12, "(B)"), ("count", 12, "(elements)"), ("type", 8, ""), ("redop", 6, ""))
_TIMING = (("time", 9, "(us)"), ("algbw", 7, "(GB/s)"), ("busbw", 7, "(GB/s)"), ("#wrong", 6, ""))
_CASE = (
    ("backend", 8, ""),
    ("memory", 13, ""),
    (f"x {REFERENCE}", 8, "(speed)"),
    (f"of {BOUND}", 8, "(speed)"),
    ("error", 8, "(max)"),
)
_COLUMNS = (*_TASK, ("root", 5, ""), *_TIMING, *_TIMING, *_CASE)
_ABSENT = "-"


def _line(cells: Iterable[str], mark: str = " ") -> str:
    widths = [width for _, width, _ in _COLUMNS]
    return mark + " ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))


def header() -> str:
    """Returns the lines above a table."""
    task = sum(width + 1 for _, width, _ in (*_TASK, _COLUMNS[len(_TASK)]))
    timing = sum(width + 1 for _, width, _ in _TIMING)
    above = "#" + " " * task + "out-of-place".center(timing) + "in-place".center(timing)
    names = _line((name for name, _, _ in _COLUMNS), "#")
    return "\n".join([above.rstrip(), names, _line((unit for _, _, unit in _COLUMNS), "#")])


def ratio(
    row: Measurement, rows: Sequence[Measurement], reference: str = REFERENCE
) -> float | None:
    """Returns the speed of a row divided by that of a backend; None if that was not measured.

    Args:
        row: the row.
        rows: all rows of its task.
        reference: the backend to compare with.
    """
    for other in rows:
        if other.case.backend == reference and row.best.time > 0:
            return other.best.time / row.best.time
    return None


def _share(row: Measurement, rows: Sequence[Measurement]) -> str:
    share = ratio(row, rows, BOUND)
    return _ABSENT if share is None else f"{100 * share:.1f} %"


def _number(value: float, width: int, decimals: int) -> str:
    """Returns a number with up to `decimals` decimals, as many as fit into `width` characters."""
    texts = [f"{value:.{places}f}" for places in range(decimals, -1, -1)]
    return next((text for text in texts if len(text) <= width), texts[-1])


def _timing_cells(row: Measurement, timing: Timing | None) -> list[str]:
    if timing is None:
        return [_ABSENT] * len(_TIMING)
    cells = [_number(timing.time, 9, 2)]
    cells += [_number(value, 7, 3) for value in (row.algbw(timing), row.busbw(timing))]
    return [*cells, "N/A" if timing.wrong is None else str(timing.wrong)]


def _redop(row: Measurement) -> str:
    return row.task.op if row.task.operation.reduces else "none"


def _root(row: Measurement) -> int:
    return row.task.root if row.task.operation.rooted else -1


def format_rows(rows: Sequence[Measurement]) -> str:
    """Returns the lines of one task."""
    lines = []
    for row in rows:
        faster = ratio(row, rows)
        cells = [str(row.size), str(row.task.count), row.task.dtype, _redop(row), str(_root(row))]
        for place in PLACES:
            cells += _timing_cells(row, row.timing(place))
        cells += [row.case.algorithm or row.case.wire or row.case.backend]
        cells += [row.case.memory or _ABSENT]
        cells += [_ABSENT if faster is None else f"{faster:.2f}", _share(row, rows)]
        cells += [_ABSENT if row.best.error is None else f"{row.best.error:.1e}"]
        lines.append(_line(cells))
    return "\n".join(lines)


def count_wrong(tasks: Sequence[Sequence[Measurement]]) -> int:
    """Returns the number of wrong elements in all rows."""
    return sum(row.wrong for rows in tasks for row in rows)


def _average_busbw(tasks: Sequence[Sequence[Measurement]]) -> dict[Case, float]:
    bandwidths: dict[Case, list[float]] = {}
    for row in (row for rows in tasks for row in rows):
        timings = [timing for place in PLACES if (timing := row.timing(place)) is not None]
        bandwidths.setdefault(row.case, []).extend(row.busbw(timing) for timing in timings)
    return {case: sum(values) / len(values) for case, values in bandwidths.items()}


def footer(tasks: Sequence[Sequence[Measurement]]) -> str:
    """Returns the lines below the table."""
    wrong = count_wrong(tasks)
    lines = [f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"]
    for case, average in _average_busbw(tasks).items():
        parts = (case.backend, case.memory, case.algorithm, case.wire)
        name = ", ".join(part for part in parts if part)
        lines.append(f"# Avg bus bandwidth    : {average:.4f} ({name})")
    return "\n".join(lines)


def _place_as_json(row: Measurement, timing: Timing) -> dict[str, Any]:
    return {
        "time": timing.time,
        "alg_bw": row.algbw(timing),
        "bus_bw": row.busbw(timing),
        "nwrong": timing.wrong,
        "p50": timing.time,
        "p95": timing.percentile(0.95),
        "p99": timing.percentile(0.99),
        "calls": len(timing.microseconds),
    }


def _calls_as_json(timing: Timing, every_call: bool) -> dict[str, Any]:
    times = timing.microseconds
    average, deviation = statistics.fmean(times), statistics.pstdev(times)
    return {
        "min_us": min(times),
        "max_us": max(times),
        "avg_us": average,
        "p50_us": timing.time,
        "p95_us": timing.percentile(0.95),
        "p99_us": timing.percentile(0.99),
        "stdev_us": deviation,
        "cv_pct": 100 * deviation / average if average else 0.0,
        **({"times_us": times} if every_call else {}),
    }


def _row_as_json(row: Measurement, rows: Sequence[Measurement], every_call: bool) -> dict[str, Any]:
    case, task = row.case, row.task
    result: dict[str, Any] = {"size": row.size, "count": task.count, "type": task.dtype}
    result |= {"redop": _redop(row), "root": _root(row), "collective": task.collective}
    result |= {"backend": case.backend, "memory": case.memory, "algorithm": case.algorithm}
    result |= {"offset": task.offset, "wire": case.wire, "error": row.best.error}
    for place in PLACES:
        timing = row.timing(place)
        result[place] = None if timing is None else _place_as_json(row, timing)
        if timing is not None:
            result[f"{place}_per_iter"] = _calls_as_json(timing, every_call)
    result[f"x_{REFERENCE}"] = ratio(row, rows)
    result[f"of_{BOUND}"] = ratio(row, rows, BOUND)
    return result


def as_json(
    tasks: Sequence[Sequence[Measurement]], about: dict[str, Any], every_call: bool = False
) -> dict[str, Any]:
    """Returns all measurements as a value for JSON.

    Args:
        tasks: the rows of each task.
        about: from about.about(); comes before the results.
        every_call: whether to include the time of each call.
    """
    wrong = count_wrong(tasks)
    return {
        "version": 3,
        **about,
        "results": [_row_as_json(row, rows, every_call) for rows in tasks for row in rows],
        "out_of_bounds": {"count": wrong, "okay": wrong == 0},
        "average_bus_bandwidth": [
            {**dataclasses.asdict(case), "bandwidth": bandwidth}
            for case, bandwidth in _average_busbw(tasks).items()
        ],
    }
