"""Shows the steps of a collective: `smddp plan`.

    smddp plan list
    smddp plan print allreduce 25MiB --nodes 2x2 --rank 1
    smddp plan check allreduce 1MiB --nodes 3+2+4 --algorithm ring
    smddp plan draw allreduce 25MiB --nodes 2x2 --output plan.html

Write a layout as nodes x ranks per node (8x8), or as the number of ranks of each node (3+2+4).
`smddp plan print --help` says how to read a plan.
"""

from __future__ import annotations

import argparse
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smddp.launch.layout import sizes_of_nodes
from smddp.tools import _files, plan_drawing
from smddp.tools._command import ending_at_once, run
from smddp.torch import _load

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WIRES", "main", "parse_bytes", "parse_nodes"]

WIRES = ("fp32", "bf16", "int8", "bf16+feedback", "int8+feedback")
"""How allreduces can travel between nodes."""

_NOTATION = """\
how to read a plan:
  A plan holds the steps of one rank. Mates are the ranks of its node, this rank included: mate 0
  has the local rank 0 (the first line shows this rank's). Positions and sizes are in bytes.

  pool P: 4 x 512 bytes      staging memory of each rank in the node's shared memory: 4 slots of 512
  channel with rank 2        messages to and from a rank of another node; a stream number tells
                             several channels with the same rank apart (0 if none is printed)
  preamble                   steps before all stages; they end with the arrival: each rank publishes
                             the arguments of its call, and reads those of its mates
  stage S                    steps that run in order; stages run concurrently
  25 x                       repeat the steps below 25 times; k counts from 0
  in, out, mate 1's out      input and output of this rank (one memory if the call is in place), and
                             the tensor of a mate, read or written directly
  mate 0's P slot k%4        a slot of mate 0's pool P; the four slots are used in turn
  rank 2 message k+1         the bytes of a message that has arrived; numbers begin at 1
  [a, +n)                    n bytes of it, from position a
  copy D, E <- A             copy A to D and to E
  reduce D <- A, B           D = A + B, in this order (or another reduce operation)
  pre-scaled, final          here PREMUL_SUM multiplies the operands; here AVG divides the result
  signal c1 = k+1            set this rank's counter 1, which its mates can read, to k+1
  wait c1 of mate 0 >= k+1   wait until mate 0's counter 1 is at least k+1; below 1 do not wait
  ... of the team            of all mates except this rank
  put to rank 2 <- A         send A as a message
  receive from rank 2        wait until the message has arrived
  release to rank 2          return the credit of all messages up to this one: their slots are free
  flush to rank 2            wait until the network no longer reads the source of any message up to
                             this one
"""

# A letter alone means what it does to nccl-tests and dd.
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20, "g": 2**30}
# More than a process has on a processor of 64 bits. Positions in plans stay far below 2**63.
_MOST = 2**48


def parse_bytes(text: str) -> int:
    """Returns the bytes that a text such as "25MiB", "4096", "1.5 KiB" or "25M" (25 MiB) means.

    Raises:
        ValueError: the text is not a size, not a whole number of bytes, or more than an address
            space holds.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a number of bytes; write it like 25MiB or 4096")
    size = Fraction(found[1]) * _UNITS[found[2]]
    if size.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    if size > _MOST:
        raise ValueError(f"{text[:40]!r} is more than an address space holds: {_MOST} bytes")
    return int(size)


def parse_nodes(text: str) -> list[list[int]]:
    """Returns the ranks of each node: "2x2" gives [[0, 1], [2, 3]], "1+2" gives [[0], [1, 2]].

    Raises:
        ValueError: the text is neither.
    """
    sizes = sizes_of_nodes(text)
    if not sizes:
        raise ValueError(f"{text!r} is not a layout of ranks; write it like 2x4 or 3+2")
    nodes: list[list[int]] = []
    for size in sizes:
        first = nodes[-1][-1] + 1 if nodes else 0
        nodes.append(list(range(first, first + size)))
    return nodes


def _argument(parse: Any) -> Any:
    """Makes argparse print the text of a ValueError."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _list(module: Any) -> int:
    rows = [("collective", "algorithm", "for", "chosen"), *module.list_algorithms()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0


def _plan_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments by which the module knows the plan that was asked for."""
    names = ("collective", "bytes", "nodes", "root", "shared", "algorithm", "wire")
    return {name: getattr(options, name) for name in names}


def _check(module: Any, options: argparse.Namespace) -> int:
    with ending_at_once():
        problem: str = module.check_plan(**_plan_of(options))
    if problem:
        print(problem)
        return 1
    print("right: run three times in a row, no deadlock, no race, every contribution exactly once")
    return 0


# The sliders of a drawing offer these besides what was asked for.
_SIZES = (1 << 10, 32 << 10, 1 << 20, 25 << 20, 256 << 20)
_LAYOUTS = ("1x4", "2x2", "2x4", "4x4")


def _size_text(size: int) -> str:
    for unit, bytes_of in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size and size % bytes_of == 0:
            return f"{size // bytes_of} {unit}"
    return f"{size} bytes"


def _layout_text(nodes: Sequence[Sequence[int]]) -> str:
    sizes = [len(node) for node in nodes]
    return f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else "+".join(map(str, sizes))


def _draw(module: Any, options: argparse.Namespace) -> int:
    ranks = sum(map(len, options.nodes))
    if ranks > plan_drawing.LARGEST:
        raise ValueError(
            f"--nodes {_layout_text(options.nodes)} has {ranks} ranks, and a drawing has at most "
            f"{plan_drawing.LARGEST}"
        )
    kind = options.output.suffix.lower()
    if kind not in ("", ".html", ".htm", ".svg"):
        raise ValueError(f"--output {options.output}: draws .html and .svg only")
    moves = options.collective != "barrier"
    if moves and not options.bytes:
        raise ValueError(f"how many bytes? For example: draw {options.collective} 25MiB")
    choice = plan_drawing.Choice
    sizes = sorted({options.bytes, *_SIZES} if moves else {0})
    layouts = {_layout_text(parse_nodes(text)): parse_nodes(text) for text in _LAYOUTS}
    layouts[_layout_text(options.nodes)] = options.nodes
    in_order = sorted(layouts, key=lambda name: (sum(map(len, layouts[name])), name))

    def plans(size: plan_drawing.Choice, layout: plan_drawing.Choice) -> list[str]:
        count = sum(map(len, layout.nodes))
        if options.root >= count:
            raise ValueError(f"rank {options.root}, the root, is not one of {count} ranks")
        plan = _plan_of(options) | {"bytes": size.bytes, "nodes": layout.nodes}
        return [module.print_plan(**plan, rank=rank) for rank in range(count)]

    size, layout = options.bytes if moves else 0, _layout_text(options.nodes)
    with ending_at_once():
        if kind == ".svg":
            text = plan_drawing.picture(
                plans(choice("", bytes=size), choice("", nodes=options.nodes)), options.nodes
            )
        else:
            text = plan_drawing.document(
                options.collective,
                [choice(_size_text(each), bytes=each) for each in sizes],
                [choice(name, nodes=layouts[name]) for name in in_order],
                (sizes.index(size), in_order.index(layout)),
                plans,
            )
    _files.write(options.output, text)
    print(f"wrote {options.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smddp plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the algorithms, and when each is chosen")
    for name, text in (
        ("print", "the steps of one rank"),
        ("check", "verify the plans of all ranks together"),
        ("draw", "draw the plans of all ranks into a file for a browser"),
    ):
        command = commands.add_parser(
            name,
            help=text,
            epilog=_NOTATION if name == "print" else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("collective", help="allreduce, broadcast, allgather, ...")
        command.add_argument(
            "bytes",
            type=_argument(parse_bytes),
            nargs="?",
            default=0,
            help="size of the vector; for collectives with one block per rank: of one block",
        )
        command.add_argument(
            "--nodes",
            type=_argument(parse_nodes),
            default="1x2",
            help="layout: nodes x ranks per node (8x8), or the ranks of each node (3+2+4); "
            "default 1x2",
        )
        command.add_argument("--root", type=int, default=0, help="root rank; default 0")
        command.add_argument(
            "--shared", action="store_true", help="all buffers are in communication memory"
        )
        command.add_argument(
            "--algorithm", default="", help="use this one instead of the built-in choice"
        )
        command.add_argument(
            "--wire",
            choices=WIRES,
            default="fp32",
            help="how reductions travel between nodes; default fp32",
        )
        if name == "print":
            command.add_argument(
                "--rank", type=int, default=0, help="the rank whose plan is printed; default 0"
            )
        if name == "draw":
            command.add_argument(
                "--output",
                type=Path,
                metavar="FILE",
                default=Path("plan.html"),
                help="where to draw it; default plan.html. A name that ends with .svg gets only "
                "the drawing of this size and layout",
            )
    return parser


def _require_ranks(options: argparse.Namespace) -> None:
    count = sum(len(node) for node in options.nodes)
    for name in ("root", "rank"):
        value = getattr(options, name, 0)
        if not 0 <= value < count:
            raise ValueError(f"--{name} {value} is not one of the ranks 0 to {count - 1}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool; returns its exit status."""
    options = _parser().parse_args(arguments)
    module = _load.load()
    if options.command == "list":
        return _list(module)
    try:
        _require_ranks(options)
        if options.command == "check":
            return _check(module, options)
        if options.command == "draw":
            return _draw(module, options)
        with ending_at_once():
            text: str = module.print_plan(**_plan_of(options), rank=options.rank)
    except (ValueError, OSError) as error:
        print(f"smddp plan: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    return 0


if __name__ == "__main__":
    run(main)
