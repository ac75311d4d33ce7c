"""The collectives that are measured, their sizes as in nccl-tests, and their expected results.

This module does not import torch, because the processes of MPI import it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

__all__ = ["BITWISE", "OPERATIONS", "PERIOD", "Operation", "Task", "contribution", "result"]


@dataclasses.dataclass(frozen=True)
class Operation:
    """A collective. Its input and its output have one block each, or one block per rank."""

    name: str
    blocks_in: bool = False  # the input has one block per rank
    blocks_out: bool = False  # the output has one block per rank
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True  # whether torch and MPI can run it in place
    # Number of ranks -> share of the larger buffer that a rank has to move, times the number of
    # ranks. Allreduce of 4 ranks: 2 x 3 = 6, that is 6/4 of the buffer.
    traffic: Callable[[int], int] = lambda ranks: ranks - 1

    def blocks(self, ranks: int) -> int:
        """Returns the number of blocks of the larger buffer; 0 if there is no buffer."""
        if self.name == "barrier":
            return 0
        return ranks if self.blocks_in or self.blocks_out else 1

    def bus_factor(self, ranks: int) -> float:
        """Returns busbw divided by algbw."""
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
    """A collective with its arguments. It is sent to the processes of MPI as JSON."""

    collective: str
    count: int  # elements of a block
    dtype: str = "float"
    op: str = "sum"
    root: int = 0
    offset: int = 0  # elements between the start of an allocation and the buffer

    @property
    def operation(self) -> Operation:
        """The properties of the collective."""
        return OPERATIONS[self.collective]


# The data repeats after this many elements. It is a prime, so blocks and chunks begin with
# different values.
PERIOD = 251


def contribution(task: Task, rank: int, block: int, shift: int) -> list[int]:
    """Returns one period of the values of an input block.

    Args:
        task: what is measured.
        rank: the rank whose input it is.
        block: number of the block.
        shift: selects the data, so that two checks use different data.
    """
    if task.operation.reduces:
        # Ones and twos, whose sums and products over a few ranks are exact in every dtype.
        values = [1 + ((i * 7 + rank * 3 + block + shift) % 5 > 2) for i in range(PERIOD)]
    else:
        # Values below 113, which int8 and half represent exactly.
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
    """Returns one period of each block of the expected output; None if the rank has no output.

    Args:
        task: what is measured.
        ranks: number of ranks.
        rank: the rank whose output it is.
        shift: as for contribution().
    """
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
    return [sent(source, 0) for source in everybody]  # gather and all_gather
