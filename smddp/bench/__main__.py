"""The command line: `python -m smddp.bench`.

Starts its ranks on this machine, or is a rank itself under torchrun.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

import smddp.bench
from smddp.bench import table
from smddp.bench.launch import launch
from smddp.bench.measure import BITWISE, DTYPES, NOT_IN_GLOO, OPS, Bench, Case, Workload
from smddp.plan import parse_bytes, parse_nodes

_MEMORY = {
    "ordinary": ["ordinary"],
    "communication": ["communication"],
    "both": ["ordinary", "communication"],
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m smddp.bench",
        description=smddp.bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ranks", type=int, default=2, help="on this machine (default 2)")
    where.add_argument("--nodes", help="ranks that play several nodes, as 2x2 or 3+1")
    parser.add_argument("--backends", default="smddp,gloo", help="default smddp,gloo")
    parser.add_argument(
        "--memory",
        choices=list(_MEMORY),
        default="both",
        help="tensors for smddp: from torch.empty, from smddp.empty, or both (default)",
    )
    parser.add_argument("--min-bytes", default="8", help="default 8")
    parser.add_argument("--max-bytes", default="64MiB", help="default 64MiB")
    parser.add_argument("--factor", type=int, default=8, help="between sizes (default 8)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float")
    parser.add_argument("--op", choices=list(OPS), default="sum")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="about, per size and row (default 0.5)"
    )
    parser.add_argument("--iterations", type=int, help="calls per size and row, instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    parser.add_argument(
        "--limit", type=float, default=900, help="seconds after which the ranks are ended"
    )
    return parser


def _sizes(options: argparse.Namespace) -> list[int]:
    smallest, largest = parse_bytes(options.min_bytes), parse_bytes(options.max_bytes)
    if not 0 < smallest <= largest:
        raise ValueError(f"--min-bytes {smallest} must be positive, and at most --max-bytes")
    if options.factor < 2:
        raise ValueError("--factor must be at least 2")
    sizes = [smallest]
    while sizes[-1] * options.factor <= largest:
        sizes.append(sizes[-1] * options.factor)
    return sizes if sizes[-1] == largest else [*sizes, largest]


def _backends(options: argparse.Namespace) -> list[str]:
    """Returns those asked for: each must be one that torch knows here, for CPU tensors."""
    known = [
        name
        for name, devices in dist.Backend.backend_capability.items()
        if "cpu" in devices and dist.is_backend_available(name)
    ]
    asked: list[str] = options.backends.split(",")
    for backend in asked:
        if backend not in known:
            names = ", ".join(known)
            raise ValueError(f"--backends {backend!r} is not available here, only {names}")
    if len(set(asked)) < len(asked):
        raise ValueError(f"--backends {options.backends} names one twice")
    return asked


def _workload(options: argparse.Namespace) -> Workload:
    cases = []
    for backend in _backends(options):
        memories = _MEMORY[options.memory] if backend == "smddp" else ["ordinary"]
        cases += [Case(backend, memory) for memory in memories]
    is_float = DTYPES[options.dtype].is_floating_point
    if options.op == "avg" and not is_float:
        raise ValueError(f"--op avg of --dtype {options.dtype} is truncated, which is not checked")
    if options.op in BITWISE and is_float:
        raise ValueError(f"--op {options.op} of --dtype {options.dtype} is undefined")
    if any(case.backend == "gloo" for case in cases):
        if options.op == "avg":
            raise ValueError("gloo has no avg; use --backends smddp")
        if options.dtype in NOT_IN_GLOO:
            raise ValueError(f"gloo has no {options.dtype}; use --backends smddp")
    sizes = _sizes(options)
    return Workload(sizes, cases, options.dtype, options.op, options.seconds, options.iterations)


def _layout(options: argparse.Namespace) -> list[int]:
    if options.nodes is not None:
        return [len(node) for node in parse_nodes(options.nodes)]
    if options.ranks < 1:
        raise ValueError("--ranks must be at least 1")
    return [options.ranks]


def _be_rank(workload: Workload, layout: Sequence[int], file: Path | None) -> int:
    start = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    # The bench's own messages go through gloo, whatever is measured.
    dist.init_process_group("gloo")
    bench = Bench(workload)
    speaker = dist.get_rank() == 0
    description = bench.describe()
    if speaker:
        print(f"# allreduce, in place, median of calls; {dist.get_world_size()} ranks")
        print(f"# {description}")
        print(table.header(), flush=True)
    sizes = []
    for rows in bench.run():
        sizes.append(rows)
        if speaker:
            print(table.format_rows(rows), flush=True)
    if speaker:
        print(table.footer(sizes), flush=True)
        if file is not None:
            result = table.as_json(sizes, layout, start, description)
            file.write_text(json.dumps(result, indent=2) + "\n")
    dist.destroy_process_group()
    return 1 if table.count_wrong(sizes) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 when it failed or a result was wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    try:
        workload, layout = _workload(options), _layout(options)
    except ValueError as error:
        print(f"smddp.bench: {error}", file=sys.stderr)
        return 2
    if "RANK" not in os.environ:
        return launch(layout, arguments, options.limit)
    if sum(layout) != int(os.environ["WORLD_SIZE"]):
        layout = [int(os.environ["WORLD_SIZE"])]
    return _be_rank(workload, layout, options.json)


if __name__ == "__main__":
    sys.exit(main())
