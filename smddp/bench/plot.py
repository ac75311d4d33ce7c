"""Plots the table: time and bus bandwidth against size, with a line for each row's backend."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from smddp.bench.measure import Case, Measurement
from smddp.bench.table import BOUND
from smddp.tools import _files

__all__ = ["FORMATS", "draw", "unavailable"]

FORMATS = (".png", ".svg")


def unavailable(file: Path) -> str | None:
    """Returns the reason why this file cannot be drawn; None if it can."""
    if file.suffix not in FORMATS:
        return f"--plot {file}: draws {' and '.join(FORMATS)} only"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "--plot needs matplotlib: pip install matplotlib"
    return None


def _label(case: Case) -> str:
    if case.backend == BOUND:
        return "what the hardware allows"
    memory = "" if case.memory == "ordinary" else f"{case.memory} memory"
    parts = (case.backend, case.algorithm, memory, case.wire)
    return ", ".join(part for part in parts if part)


def _style(case: Case, number: int) -> dict[str, str]:
    """Returns the line style of a case, the same in every plot."""
    if case.backend == BOUND:
        return {"linestyle": ":", "color": "black"}
    return {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}


def draw(tasks: Sequence[Sequence[Measurement]], title: str, file: Path) -> None:
    """Draws two plots side by side for each collective.

    Args:
        tasks: the rows of each task.
        title: the title of the figure.
        file: the file to write; its name ends in one of FORMATS.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, dict[Case, list[Measurement]]] = {}
    for row in (row for rows in tasks for row in rows):
        lines.setdefault(row.task.collective, {}).setdefault(row.case, []).append(row)
    every_case = dict.fromkeys(case for cases in lines.values() for case in cases)
    styles = {case: _style(case, number) for number, case in enumerate(every_case)}
    figure, grid = pyplot.subplots(
        len(lines), 2, figsize=(11, 4 * len(lines) + 0.5), squeeze=False, layout="constrained"
    )
    for (collective, cases), (times, bandwidths) in zip(lines.items(), grid, strict=True):
        for case, rows in cases.items():
            style = styles[case]
            sizes = [max(row.size, 1) for row in rows]
            for axes, values in (
                (times, [row.best.time for row in rows]),
                (bandwidths, [row.busbw(row.best) for row in rows]),
            ):
                axes.plot(sizes, values, marker=".", label=_label(case), **style)
        times.set(title=collective, xscale="log", yscale="log", xlabel="bytes", ylabel="µs")
        bandwidths.set(title=collective, xscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
        times.legend()
        for axes in (times, bandwidths):
            axes.grid(alpha=0.3)
    figure.suptitle(title)
    content = io.BytesIO()
    figure.savefig(content, format=file.suffix[1:], dpi=120)
    pyplot.close(figure)
    _files.write(file, content.getvalue())
