"""Which algorithm is best for which size: measures all of them and writes a file for the library.

The file is what SMDDP_TUNING_FILE names; csrc/collectives/tuning.h has its format. An algorithm
gets a row only where it is clearly faster than what the library's own table chooses.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from smddp import _load
from smddp.bench.measure import Case, Measurement, Timing

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
# What the library chooses without a file; csrc/collectives/tuning.h knows the name.
_BUILT_IN = "built_in"
# Turns that the algorithms take. A machine that is slow for a while is so in some of them.
ROUNDS = 15
# An algorithm must be faster in so many rounds that one which is not would be so less often than
# this, were each round the toss of a coin (a sign test): 14 of 15.
_CHANCE = 0.001
# And by so much, over all: less is not worth a row.
_MARGIN = 0.05


def algorithms(collective: str, one_node: bool) -> list[str]:
    """Returns the algorithms of a collective that are worth measuring."""
    known = [row for row in _load.load().list_algorithms() if row[0] == NAMES.get(collective)]
    # On one node those for several do what the others do.
    inside = [row[1] for row in known if row[2].startswith("one node")]
    return inside if one_node and inside else [row[1] for row in known]


def _clearly_faster(one: Timing, other: Timing) -> bool:
    pairs = list(zip(one.rounds, other.rounds, strict=True))
    wins = sum(mine < theirs for mine, theirs in pairs)
    chance = sum(math.comb(len(pairs), k) for k in range(wins, len(pairs) + 1)) / 2 ** len(pairs)
    return chance <= _CHANCE and one.time < other.time * (1 - _MARGIN)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is best for one size, in one kind of memory."""

    collective: str
    memory: str
    size: int  # bytes, as the library counts them
    algorithm: str
    gain: float = 0.0  # share of the time that the built-in table's choice takes

    def __str__(self) -> str:
        where = "" if self.memory == "any" else f" in {self.memory} memory"
        return (
            f"{self.collective} of {self.size} bytes{where}: {self.algorithm} takes "
            f"{100 * self.gain:.0f} % less time than what the built-in table chooses"
        )


# Of one size and kind of memory: by algorithm, in each memory that it was measured in.
_Times = dict[str, list[Timing]]


def _best(times: _Times, before: str) -> tuple[str, float]:
    """Returns the algorithm to take, and its gain.

    Args:
        times: of all algorithms.
        before: what is taken for the next smaller size, and kept while nothing is clearly better.
    """
    built_in = times[_BUILT_IN]

    def beats(name: str, others: Sequence[Timing]) -> bool:
        # Where all memories share a row, in each of them.
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
    """Returns what is best, from the smallest size of each collective and memory to the largest.

    Args:
        tasks: measurements; one without an algorithm in its case is of the built-in table's choice.
        nodes: ranks of each node.
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
        return "any"  # nodes have to choose alike, and may have different memory
    return "shared" if case.memory == "communication" else "private"


def _layout(nodes: Sequence[int]) -> str:
    if len(set(nodes)) == 1:
        return f"{len(nodes)}x{nodes[0]}"
    return "+".join(map(str, nodes))


def _between(smaller: int, larger: int) -> int:
    """Where nothing was measured, sizes count by their ratio."""
    return int((smaller * larger) ** 0.5)


def _same_rows(one: Finding, other: Finding) -> bool:
    return (one.collective, one.memory) == (other.collective, other.memory)


def rows(found: Sequence[Finding], nodes: Sequence[int]) -> Iterator[str]:
    """Yields the rows of the file: one for each run of sizes with the same algorithm."""
    for one, following in itertools.zip_longest(found, found[1:]):
        goes_on = following is not None and _same_rows(following, one)
        # Nobody knows what is best beyond the largest: the library's own table goes on there.
        limit = _between(one.size, following.size) if goes_on else one.size
        if goes_on and following.algorithm == one.algorithm:
            continue
        where = f"{one.collective:<15}{_layout(nodes):<8}{one.memory:<9}"
        yield f"{where}{limit:<12}{one.algorithm}"


def verdicts(found: Sequence[Finding]) -> Iterator[str]:
    """Yields sentences for who reads the benchmark's output, or the file."""
    better = [one for one in found if one.algorithm != _BUILT_IN]
    yield from map(str, better)
    if not better:
        yield "no algorithm is clearly faster than what the built-in table chooses"


def write(lines: Iterable[str], about: Iterable[str]) -> str:
    """Returns the text of the file."""
    comments = "".join(f"# {line}\n" for line in about)
    columns = f"# {'collective':<13}{'ranks':<8}{'memory':<9}{'bytes':<12}algorithm\n"
    return "smddp-tuning 1\n" + comments + columns + "".join(f"{line}\n" for line in lines)
