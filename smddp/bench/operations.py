"""What is measured: the collectives, their sizes as nccl-tests counts them, and right results.

Free of torch: the ranks of an MPI, which run no torch, import it too.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

__all__ = ["BITWISE", "OPERATIONS", "PERIOD", "Operation", "Task", "contribution", "result"]


@dataclasses.dataclass(frozen=True)
class Operation:
    """A collective. A buffer has one block, or one for each rank."""

    name: str
    blocks_in: bool = False  # several
    blocks_out: bool = False
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True  # torch and MPI can do it
    # Of the bytes of the larger buffer, those that a rank has to move, times ranks.
    traffic: Callable[[int], int] = lambda ranks: ranks - 1

    def blocks(self, ranks: int) -> int:
        """Returns the blocks of the larger buffer; 0: there is none."""
        if self.name == "barrier":
            return 0
        return ranks if self.blocks_in or self.blocks_out else 1

    def bus_factor(self, ranks: int) -> float:
        """Returns what turns algbw into busbw."""
        return self.traffic(ranks) / ranks


_ALL = [
    Operation("allreduce", reduces=True, traffic=lambda n: 2 * (n - 1)),
    Operation("reduce", reduces=True, rooted=True, traffic=lambda n: n),
    Operation("broadcast", rooted=True, traffic=lambda n: n),
    Operation("all_gather", blocks_out=True),
    Operation("all_gather_into_tensor", blocks_out=True),
    Operation("reduce_scatter", blocks_in=True, reduces=True),
    Operation("gather", blocks_out=True, rooted=True),
    Operation("scatter", blocks_in=True, rooted=True),
    Operation("all_to_all", blocks_in=True, blocks_out=True, in_place=False),
    Operation("sendrecv", in_place=False, traffic=lambda n: n),
    Operation("barrier", in_place=False, traffic=lambda n: 0),
]
OPERATIONS = {operation.name: operation for operation in _ALL}
BITWISE = {"band": operator.and_, "bor": operator.or_, "bxor": operator.xor}


@dataclasses.dataclass(frozen=True)
class Task:
    """One line of the table. Becomes JSON on its way to the ranks of an MPI."""

    collective: str
    count: int  # elements of a block
    dtype: str = "float"
    op: str = "sum"
    root: int = 0
    offset: int = 0  # elements between the start of an allocation and the buffer

    @property
    def operation(self) -> Operation:
        """The collective."""
        return OPERATIONS[self.collective]


# Data repeats after so many elements. A prime: blocks and chunks do not begin alike.
PERIOD = 251


def contribution(task: Task, rank: int, block: int, shift: int) -> list[int]:
    """Returns one period of what a rank puts into a block of its input.

    Args:
        task: what is measured.
        rank: whose data.
        block: of the input.
        shift: other data for another check.
    """
    if task.operation.reduces:
        # Ones and twos: sums and products of a few of them are exact in every dtype.
        values = [1 + ((i * 7 + rank * 3 + block + shift) % 5 > 2) for i in range(PERIOD)]
    else:
        # What int8 can hold, and half exactly.
        values = [(i + rank * 31 + block * 57 + shift * 11) % 113 for i in range(PERIOD)]
    return [value & 1 for value in values] if task.dtype == "bool" else values


_COMBINE: dict[str, Callable[[int, int], int]] = {
    "sum": operator.add,
    "avg": operator.add,
    "prod": operator.mul,
    "min": min,
    "max": max,
    **BITWISE,
}


def _reduced(task: Task, ranks: int, block: int, shift: int) -> list[float]:
    values = [contribution(task, rank, block, shift) for rank in range(ranks)]
    combined = [functools.reduce(_COMBINE[task.op], column) for column in zip(*values, strict=True)]
    if task.dtype == "bool":
        return [float(value > 0) for value in combined]
    return [value / ranks if task.op == "avg" else value for value in combined]


def result(task: Task, ranks: int, rank: int, shift: int) -> list[list[float]] | None:
    """Returns one period of each block that a rank's output must have; None: it has no output."""
    name, root = task.collective, task.root
    everybody = range(ranks)

    def sent(source: int, block: int) -> list[float]:
        return [float(value) for value in contribution(task, source, block, shift)]

    if name == "barrier" or (name in ("reduce", "gather") and rank != root):
        return None
    if name in ("allreduce", "reduce"):
        return [_reduced(task, ranks, 0, shift)]
    if name == "reduce_scatter":
        return [_reduced(task, ranks, rank, shift)]
    if name == "broadcast":
        return [sent(root, 0)]
    if name == "scatter":
        return [sent(root, rank)]
    if name == "all_to_all":
        return [sent(source, rank) for source in everybody]
    if name == "sendrecv":
        return [sent((rank - 1) % ranks, 0)]
    return [sent(source, 0) for source in everybody]  # the gathering ones
