"""Finds the best algorithm for each size from measurements, and writes a tuning file.

SMDDP_TUNING_FILE names such a file; csrc/collectives/tuning.h describes its format. An algorithm
gets a row only if it is clearly faster than the choice of the library's built-in table.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from smddp.bench.measure import Case, Measurement, Timing
from smddp.torch import _load

__all__ = ["NAMES", "ROUNDS", "Finding", "algorithms", "findings", "rows", "verdicts", "write"]

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
# Stands for the choice of the built-in table, also in the file (csrc/collectives/tuning.h).
_BUILT_IN = "built_in"
# In each round all algorithms take turns, so a slow phase of the machine affects all of them.
ROUNDS = 15
# Level of significance of a sign test over the rounds: an algorithm has to win 14 of 15. An equally
# fast one wins that many with a probability of 16 / 2**15 = 0.0005.
_CHANCE = 0.001
# An algorithm also has to be faster by this share in the median of all calls.
_MARGIN = 0.05


def algorithms(collective: str, one_node: bool) -> list[str]:
    """Returns the algorithms of a collective that --tune measures.

    Args:
        collective: a key of NAMES; others have no algorithms.
        one_node: whether all ranks are on one node.
    """
    known = [row for row in _load.load().list_algorithms() if row[0] == NAMES.get(collective)]
    # On one node, algorithms for several nodes do the same as those for one node.
    inside = [row[1] for row in known if row[2].startswith("one node")]
    return inside if one_node and inside else [row[1] for row in known]


def _clearly_faster(one: Timing, other: Timing) -> bool:
    pairs = list(zip(one.rounds, other.rounds, strict=True))
    wins = sum(mine < theirs for mine, theirs in pairs)
    chance = sum(math.comb(len(pairs), k) for k in range(wins, len(pairs) + 1)) / 2 ** len(pairs)
    return chance <= _CHANCE and one.time < other.time * (1 - _MARGIN)


@dataclasses.dataclass(frozen=True)
class Finding:
    """The best algorithm for one size, in one kind of memory."""

    collective: str
    memory: str  # "private", "shared" or "any"
    size: int  # bytes, as the library counts them
    algorithm: str
    gain: float = 0.0  # saved share of the time of the built-in table's choice

    def __str__(self) -> str:
        where = "" if self.memory == "any" else f" in {self.memory} memory"
        return (
            f"{self.collective} of {self.size} bytes{where}: {self.algorithm} takes "
            f"{100 * self.gain:.0f} % less time than what the built-in table chooses"
        )


# The timings of one size and kind of memory, by algorithm. There are two per algorithm if both
# ordinary and communication memory share a row.
_Times = dict[str, list[Timing]]


def _best(times: _Times, before: str) -> tuple[str, float]:
    """Returns the best algorithm, and its gain.

    Args:
        times: the timings of all algorithms.
        before: the algorithm of the next smaller size. It is kept unless another is clearly better.
    """
    built_in = times[_BUILT_IN]

    def beats(name: str, others: Sequence[Timing]) -> bool:
        # If both kinds of memory share a row, it has to be faster in both.
        return len(times[name]) == len(others) and all(map(_clearly_faster, times[name], others))

    able = [name for name in times if name != _BUILT_IN and beats(name, built_in)]
    if not able:
        return _BUILT_IN, 0.0
    slowest = {name: max(timing.time for timing in times[name]) for name in able}
    best = min(able, key=lambda name: slowest[name])
    if before in able and not beats(best, times[before]):
        best = before
    shares = [one.time / other.time for one, other in zip(times[best], built_in, strict=True)]
    return best, 1 - max(shares)


def findings(tasks: Iterable[Sequence[Measurement]], nodes: Sequence[int]) -> list[Finding]:
    """Returns the best algorithms, for each collective and memory from the smallest size up.

    Args:
        tasks: the rows of each task. A case without an algorithm measured the built-in choice.
        nodes: number of ranks of each node.
    """
    measured: dict[tuple[str, str], dict[int, _Times]] = {}
    for row in itertools.chain.from_iterable(tasks):
        # The library counts the bytes of one block, as csrc/collectives/collective.h says.
        size = row.size // row.task.operation.blocks(row.ranks)
        key = (NAMES[row.task.collective], _memory(row.case, nodes))
        times = measured.setdefault(key, {}).setdefault(size, {})
        times.setdefault(row.case.algorithm or _BUILT_IN, []).append(row.best)
    found = []
    for (collective, memory), by_size in measured.items():
        algorithm = _BUILT_IN
        for size, times in sorted(by_size.items()):
            algorithm, gain = _best(times, algorithm)
            found.append(Finding(collective, memory, size, algorithm, gain))
    return found


def _memory(case: Case, nodes: Sequence[int]) -> str:
    if len(nodes) > 1:
        return "any"  # all nodes have to make the same choice, but may have different memory
    return "shared" if case.memory == "communication" else "private"


def _layout(nodes: Sequence[int]) -> str:
    if len(set(nodes)) == 1:
        return f"{len(nodes)}x{nodes[0]}"
    return "+".join(map(str, nodes))


def _between(smaller: int, larger: int) -> int:
    """Returns the geometric mean of two sizes: the limit between their rows."""
    return int((smaller * larger) ** 0.5)


def _same_rows(one: Finding, other: Finding) -> bool:
    return (one.collective, one.memory) == (other.collective, other.memory)


def rows(found: Sequence[Finding], nodes: Sequence[int]) -> Iterator[str]:
    """Yields the rows of the file: one for each range of sizes with the same algorithm.

    Args:
        found: from findings().
        nodes: number of ranks of each node.
    """
    for one, following in itertools.zip_longest(found, found[1:]):
        goes_on = following is not None and _same_rows(following, one)
        # Sizes above the largest one measured use the built-in table.
        limit = _between(one.size, following.size) if goes_on else one.size
        if goes_on and following.algorithm == one.algorithm:
            continue
        where = f"{one.collective:<15}{_layout(nodes):<8}{one.memory:<9}"
        yield f"{where}{limit:<12}{one.algorithm}"


def verdicts(found: Sequence[Finding]) -> Iterator[str]:
    """Yields sentences about the findings, for the benchmark's output and the file."""
    better = [one for one in found if one.algorithm != _BUILT_IN]
    yield from map(str, better)
    if not better:
        yield "no algorithm is clearly faster than what the built-in table chooses"


def write(lines: Iterable[str], about: Iterable[str]) -> str:
    """Returns the text of the file.

    Args:
        lines: from rows().
        about: comments for the head of the file.
    """
    comments = "".join(f"# {line}\n" for line in about)
    columns = f"# {'collective':<13}{'ranks':<8}{'memory':<9}{'bytes':<12}algorithm\n"
    return "smddp-tuning 1\n" + comments + columns + "".join(f"{line}\n" for line in lines)
