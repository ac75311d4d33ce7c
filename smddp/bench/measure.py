"""The measuring loop: contenders take turns, size by size, and their results are checked."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from smddp.bench.contender import PLACES, Contender, Unable
from smddp.bench.operations import Task

__all__ = ["Bench", "Case", "Measurement", "Timing", "Workload"]

# Calls that are timed to choose the number of calls. The first calls of a size touch new memory.
_TRIAL_CALLS = 3
_MAX_CALLS = 2000


@dataclasses.dataclass(frozen=True)
class Case:
    """What one row of the table measures: a backend, a kind of memory and an algorithm."""

    backend: str
    memory: str = "ordinary"  # or "communication" (from smddp.empty()), or "gpu"
    algorithm: str = ""  # of smddp; empty: the backend chooses
    wire: str = ""  # of smddp, as in GroupOptions; empty: its setting


@dataclasses.dataclass
class Timing:
    """The times of one row, in place or out of place."""

    microseconds: list[float]  # of each call, on its slowest rank
    wrong: int | None  # wrong elements on all ranks together; None: there was nothing to check
    rounds: list[float] = dataclasses.field(default_factory=list)  # the median of each round
    error: float | None = None  # the largest, relative to the largest magnitude; None: exact

    @property
    def time(self) -> float:
        """The median in microseconds."""
        return statistics.median(self.microseconds)

    def percentile(self, share: float) -> float:
        """Returns a percentile in microseconds.

        Args:
            share: between 0 and 1; 0.95 is the 95th percentile.
        """
        ordered = sorted(self.microseconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclasses.dataclass
class Measurement:
    """The measurement of one task with one case."""

    case: Case
    task: Task
    size: int  # bytes of the larger buffer
    ranks: int
    out_of_place: Timing | None = None
    in_place: Timing | None = None

    def timing(self, place: str) -> Timing | None:
        """Returns the timing of one of PLACES; None if it was not measured."""
        return self.in_place if place == "in_place" else self.out_of_place

    @property
    def best(self) -> Timing:
        """The timing that ratios are computed from: in place, if it was measured in place."""
        timing = self.in_place or self.out_of_place
        assert timing is not None
        return timing

    def algbw(self, timing: Timing) -> float:
        """Returns bytes of the larger buffer per time, in GB/s."""
        return self.size / timing.time / 1e3

    def busbw(self, timing: Timing) -> float:
        """Returns algbw times the bytes that any algorithm has to move per byte and rank."""
        return self.algbw(timing) * self.task.operation.bus_factor(self.ranks)

    @property
    def wrong(self) -> int:
        """Wrong elements of both places."""
        timings = (self.timing(place) for place in PLACES)
        return sum(timing.wrong or 0 for timing in timings if timing is not None)


@dataclasses.dataclass
class Workload:
    """What is measured, and for how long."""

    tasks: Sequence[tuple[Task, int]]  # each with the bytes of its larger buffer
    places: Sequence[str] = PLACES
    check: bool = True
    seconds: float = 0.3  # per task, case and place, approximately
    iterations: int | None = None  # number of calls instead of `seconds`
    # All cases take turns in each round, so that a slow second of the machine affects all of them.
    rounds: int = 5


class Bench:
    """Measures every task with every contender."""

    def __init__(self, workload: Workload, contenders: dict[Case, Contender], ranks: int) -> None:
        self._workload = workload
        self._contenders = contenders
        self._ranks = ranks
        self._cold = True
        self.left_out: list[str] = []  # sentences about what a contender cannot do

    def run(self) -> Iterator[list[Measurement]]:
        """Yields the rows of each task."""
        for task, size in self._workload.tasks:
            yield self._measure(task, size)

    def _measure(self, task: Task, size: int) -> list[Measurement]:
        rows = []
        for case in self._contenders:
            row = Measurement(case, task, size, self._ranks)
            if self._prepare(row):
                rows.append(row)
        turns = [
            (row, place, timing)
            for row in rows
            for place in PLACES
            if (timing := row.timing(place)) is not None
        ]
        rounds = [self._calls_of_rounds(row, place) for row, place, _ in turns]
        # Calls to warm up, which do not count: as many as a round for the first task, because the
        # machine was idle; a tenth of a round for the others.
        share = 1 if self._cold else 10
        self._cold = False
        for (row, place, _), (first, *_) in zip(turns, rounds, strict=True):
            self._contenders[row.case].time(place, -(-first // share))
        for calls in zip(*rounds, strict=True):
            for (row, place, timing), number in zip(turns, calls, strict=True):
                times = self._contenders[row.case].time(place, number)
                timing.microseconds += times
                timing.rounds.append(statistics.median(times))
        for row, place, timing in turns:
            self._check(row, place, timing, shift=1)
        return rows

    def _prepare(self, row: Measurement) -> bool:
        """Prepares one row and checks its first results; False if the contender is unable."""
        contender = self._contenders[row.case]
        try:
            places = contender.prepare(row.task)
        except Unable as reason:
            name = " ".join(part for part in dataclasses.astuple(row.case) if part)
            sentence = f"{name} is left out of {row.task.collective}: {reason}"
            if sentence not in self.left_out:
                self.left_out.append(sentence)
            return False
        # A collective that cannot run in place is measured out of place even with --place in.
        wanted = [place for place in places if place in self._workload.places] or places
        for place in wanted:
            timing = Timing([], None)
            setattr(row, place, timing)
            self._check(row, place, timing, shift=0)
        return True

    def _check(self, row: Measurement, place: str, timing: Timing, shift: int) -> None:
        if not self._workload.check:
            return
        wrong = self._contenders[row.case].wrong(place, shift)
        if wrong is not None:
            timing.wrong = (timing.wrong or 0) + wrong
        timing.error = self._contenders[row.case].error

    def _calls_of_rounds(self, row: Measurement, place: str) -> list[int]:
        rounds = self._workload.rounds
        if self._workload.iterations is not None:
            return spread(self._workload.iterations, rounds)
        # time() returns the same on all ranks, so all ranks compute the same number.
        median = statistics.median(self._contenders[row.case].time(place, _TRIAL_CALLS))
        calls = int(self._workload.seconds * 1e6 / max(median, 1.0) / rounds)
        return [max(2, min(calls, _MAX_CALLS))] * rounds


def spread(total: int, rounds: int) -> list[int]:
    """Returns how many of `total` calls each round has: 7 in 5 rounds are [2, 2, 1, 1, 1].

    There are fewer rounds if there are not so many calls.
    """
    rounds = min(total, rounds)
    return [total // rounds + (number < total % rounds) for number in range(rounds)]
