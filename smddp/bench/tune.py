"""Which algorithm is best for which size: measures all of them and writes a file for the library.

The file is what SMDDP_TUNING_FILE names; csrc/collectives/tuning.h has its format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from smddp import _load
from smddp.bench.measure import Case, Measurement

__all__ = ["NAMES", "algorithms", "rows", "write"]

# The library's names for the collectives that can be tuned.
NAMES = {
    "allreduce": "allreduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "all_gather": "allgather",
    "all_gather_into_tensor": "allgather",
    "reduce_scatter": "reduce_scatter",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all": "alltoall",
}
# Another algorithm has to be that much better than the one for the next smaller size: what differs
# by less is noise, and a table should not follow it.
_MARGIN = 0.05


def algorithms(collective: str, one_node: bool) -> list[str]:
    """Returns the algorithms of a collective that are worth measuring."""
    known = [row for row in _load.load().list_algorithms() if row[0] == NAMES.get(collective)]
    # On one node those for several do what the others do.
    inside = [row[1] for row in known if row[2].startswith("one node")]
    return inside if one_node and inside else [row[1] for row in known]


@dataclasses.dataclass(frozen=True)
class _Row:
    collective: str
    layout: str
    memory: str
    limit: int  # bytes
    algorithm: str

    def __str__(self) -> str:
        where = f"{self.collective:<15}{self.layout:<8}{self.memory:<9}"
        return f"{where}{self.limit:<12}{self.algorithm}"


def _layout(nodes: Sequence[int]) -> str:
    if len(set(nodes)) == 1:
        return f"{len(nodes)}x{nodes[0]}"
    return "+".join(map(str, nodes))


def _winners(best: Sequence[tuple[int, dict[str, float]]]) -> Iterator[tuple[int, str]]:
    """Yields size and algorithm; an algorithm is kept while nothing is clearly better."""
    kept = ""
    for size, times in best:
        fastest = min(times, key=lambda name: times[name])
        if kept not in times or times[fastest] < times[kept] * (1 - _MARGIN):
            kept = fastest
        yield size, kept


def rows(tasks: Sequence[Sequence[Measurement]], nodes: Sequence[int]) -> Iterator[str]:
    """Yields the rows of the file.

    Args:
        tasks: measurements, each with an algorithm in its case.
        nodes: ranks of each node.
    """
    measured: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for row in (row for rows_of_task in tasks for row in rows_of_task):
        if not row.case.algorithm:
            continue
        # The library counts the bytes of one block, as csrc/collectives/collective.h says.
        size = row.size // row.task.operation.blocks(row.ranks)
        key = (NAMES[row.task.collective], _memory(row.case, nodes))
        times = measured.setdefault(key, {}).setdefault(size, {})
        # The same call in other words, or between nodes in other memory: the slower one decides.
        times[row.case.algorithm] = max(row.best.time, times.get(row.case.algorithm, 0.0))
    for (collective, memory), by_size in measured.items():
        winners = list(_winners(sorted(by_size.items())))
        for number, (size, algorithm) in enumerate(winners):
            last = number + 1 == len(winners)
            if not last and winners[number + 1][1] == algorithm:
                continue
            # Nobody knows what is best beyond the largest: the library's own table goes on there.
            limit = size if last else _between(size, winners[number + 1][0])
            yield str(_Row(collective, _layout(nodes), memory, limit, algorithm))


def _memory(case: Case, nodes: Sequence[int]) -> str:
    if len(nodes) > 1:
        return "any"  # nodes have to choose alike, and may have different memory
    return "shared" if case.memory == "communication" else "private"


def _between(smaller: int, larger: int) -> int:
    """Where nothing was measured, sizes count by their ratio."""
    return int((smaller * larger) ** 0.5)


def write(lines: Iterable[str], about: Iterable[str]) -> str:
    """Returns the text of the file."""
    comments = "".join(f"# {line}\n" for line in about)
    columns = f"# {'collective':<13}{'ranks':<8}{'memory':<9}{'bytes':<12}algorithm\n"
    return "smddp-tuning 1\n" + comments + columns + "".join(f"{line}\n" for line in lines)
