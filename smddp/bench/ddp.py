"""Measures training steps with DDP or FSDP: `python -m smddp.bench ddp`.

The same model is wrapped once for each backend, and once for steps without communication. The
wrapped models take turns, a few steps each. One step is zero_grad, forward, backward and SGD.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smddp.bench.about import RunStart, about, nodes_of_ranks, record_start, write_json, written
from smddp.bench.launch import (
    DEFAULT_RANKS,
    complete_rendezvous,
    is_rank,
    launch,
    layout_of,
    require_files,
    require_own_backends,
    require_positive,
)
from smddp.bench.models import MODELS, Trainee, sleeper
from smddp.bench.options import WIRE_HELP, notes_about_wires, split_wires
from smddp.bench.steps import FAKE, NOTHING, Amount, Row, measure

__all__ = ["main"]

_BACKENDS = ("smddp", "gloo", FAKE)


_COLUMNS = (
    ("model", 12), ("parameters", 11), ("ranks", 6), ("backend", 8), ("step", 9), ("p95", 9),
    ("steps/s", 8), (f"x {NOTHING}", 7), ("scaling", 8), ("hidden", 7), ("wire", 14),
    ("gradients", 10),
)  # fmt: skip


def _header() -> str:
    units = {"step": "(ms)", "p95": "(ms)", "scaling": "(of one)"}
    names = "#" + "".join(name.rjust(width) for name, width in _COLUMNS)
    return names + "\n#" + "".join(units.get(name, "").rjust(width) for name, width in _COLUMNS)


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    alone = next(other.step for other in rows if other.backend == NOTHING)
    p95 = sorted(row.milliseconds)[
        min(len(row.milliseconds) - 1, int(0.95 * len(row.milliseconds)))
    ]
    hidden = "-" if row.hidden is None else f"{100 * row.hidden:.0f} %"
    gradients = "-" if row.right is None else ("right" if row.right else "WRONG")
    return [
        row.model, str(row.parameters), str(row.ranks), row.backend, f"{row.step:.2f}",
        f"{p95:.2f}", f"{1e3 / row.step:.2f}", f"{row.step / alone:.3f}",
        f"{row.ranks * alone / row.step:.2f}", hidden, row.wire or "-", gradients,
    ]  # fmt: skip


def _format(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        cells = zip(_cells(row, rows), _COLUMNS, strict=True)
        lines.append(" " + "".join(cell.rjust(width) for cell, (_, width) in cells))
    return "\n".join(lines)


def _as_json(models: Sequence[Sequence[Row]], start: RunStart) -> dict[str, Any]:
    results = []
    for rows in models:
        alone = next(row.step for row in rows if row.backend == NOTHING)
        for row in rows:
            result = dataclasses.asdict(row) | {"step_ms": row.step, "steps_per_s": 1e3 / row.step}
            results.append(result | {f"x_{NOTHING}": row.step / alone})
    return {"version": 1, **about(start), "results": results}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m smddp.bench ddp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, help=f"number of ranks on this machine (default {DEFAULT_RANKS})"
    )
    parser.add_argument(
        "--nodes", help="ranks on this machine that play several nodes, such as 2x2 or 8x1"
    )
    parser.add_argument("--models", help=f"some of {', '.join(MODELS)} (default all)")
    parser.add_argument(
        "--backends",
        default=",".join(_BACKENDS),
        help=f"some of {', '.join(_BACKENDS)} (default all); {FAKE} does nothing and shows what "
        f"DDP or FSDP itself costs; {NOTHING}, without communication, is always measured",
    )
    parser.add_argument(
        "--wire",
        default="",
        metavar="FORMATS",
        help=f"{WIRE_HELP} (default: what SMDDP_WIRE says)",
    )
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp", help="default ddp")
    parser.add_argument(
        "--sleep",
        type=float,
        metavar="MS",
        help="measure one model instead, whose steps sleep for MS milliseconds in place of compute",
    )
    parser.add_argument(
        "--sleep-parameters",
        type=int,
        default=4 << 20,
        metavar="COUNT",
        help="parameters of the model of --sleep (default 4194304, 16 MiB of gradients)",
    )
    parser.add_argument(
        "--bucket-mib",
        type=float,
        help="size of DDP's buckets (default 25 as in torch; with --sleep one of eight layers)",
    )
    parser.add_argument(
        "--seconds", type=float, default=5, help="approximate seconds per row (default 5)"
    )
    parser.add_argument("--steps", type=int, help="number of steps per row, instead of --seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    parser.add_argument(
        "--limit", type=float, default=900, help="seconds after which the ranks are killed"
    )
    return parser


def _check(options: argparse.Namespace) -> list[int]:
    """Checks the options, splits lists and fills in defaults; returns the ranks of each node.

    Raises:
        ValueError: an option is invalid.
    """
    require_own_backends()
    if options.models is None:
        options.models = ",".join(MODELS)
    elif options.sleep is not None:
        raise ValueError("--sleep measures a model of its own: leave out --models")
    options.models, options.backends = options.models.split(","), options.backends.split(",")
    for asked, known, name in (
        (options.models, list(MODELS), "--models"),
        (options.backends, list(_BACKENDS), "--backends"),
    ):
        for each in asked:
            if each not in known:
                raise ValueError(f"{name} {each!r} is unknown; use {', '.join(known)}")
        if len(set(asked)) < len(asked):
            raise ValueError(f"{name} {','.join(asked)} names one twice")
    if options.wire and "smddp" not in options.backends:
        raise ValueError("--wire is about rows of smddp: add it to --backends")
    options.wire = split_wires(options.wire)
    require_positive(options, "sleep", "bucket_mib", "seconds", "limit")
    if options.sleep_parameters < 8:
        raise ValueError("--sleep-parameters must be at least 8")
    if options.sleep is not None and options.bucket_mib is None:
        options.bucket_mib = options.sleep_parameters * 4 / 8 / 2**20
    if options.steps is not None and options.steps < 1:
        raise ValueError("--steps must be at least 1")
    require_files(options.json)
    return layout_of(options.ranks, options.nodes)


def _models(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Trainee]]]:
    if options.sleep is not None:
        yield "sleep", sleeper(options.sleep / 1e3, options.sleep_parameters)
        return
    for name in options.models:
        yield name, MODELS[name]


def _amount(options: argparse.Namespace) -> Amount:
    cases = [
        (backend, wire)
        for backend in options.backends
        for wire in (options.wire if backend == "smddp" else [""])
    ]
    return Amount(cases, options.parallel, options.bucket_mib, options.seconds, options.steps)


def _be_rank(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    start = record_start()
    torch.set_num_threads(1)  # the ranks share the cores
    prints = dist.get_rank() == 0
    head = [f"{options.parallel} steps, median, each on its slowest rank", *start.lines()]
    head += notes_about_wires(options.wire, nodes_of_ranks())
    if prints:
        print("\n".join(f"# {line}" for line in head), flush=True)
    models: list[list[Row]] = []
    for name, make in _models(options):
        rows = measure(name, make, _amount(options))
        if prints and not models:
            for description in (row.description for row in rows if row.description):
                print(f"# {description}")
            print(_header())
        models.append(rows)
        if prints:
            print(_format(rows), flush=True)
    is_written = True
    if prints and options.json is not None:
        is_written = written(lambda: write_json(options.json, _as_json(models, start)))
    dist.barrier()
    dist.destroy_process_group()
    is_right = all(row.right is not False for rows in models for row in rows)
    return 0 if is_right and is_written else 1


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark; returns 1 when it failed or gradients were wrong, 2 for bad arguments."""
    options = _parser().parse_args(arguments)
    # Otherwise the profiler prints that it starts, and that there is no GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        layout = _check(options)
        if is_rank():
            complete_rendezvous()
    except (ValueError, OSError) as error:
        print(f"smddp.bench: {error}", file=sys.stderr)
        return 2
    if not is_rank():
        return launch(layout, ["ddp", *arguments], options.limit)
    return _be_rank(options)
