"""The measuring loop: contenders take turns, size by size, and their results are checked."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from smddp.bench.contender import PLACES, Contender, Unable
from smddp.bench.operations import Task

__all__ = ["Bench", "Case", "Measurement", "Timing", "Workload"]

# Calls that say how many there will be; the first ones of a size touch new memory.
_TRIAL_CALLS = 3
_MAX_CALLS = 2000


@dataclasses.dataclass(frozen=True)
class Case:
    """One of the things compared."""

    backend: str
    memory: str = "ordinary"  # or "communication": what smddp.empty() returns; or "gpu"
    algorithm: str = ""  # as SMDDP_ALGORITHM; empty: what the backend chooses


@dataclasses.dataclass
class Timing:
    """One place of the buffers: in place or not."""

    microseconds: list[float]  # of each call, on its slowest rank
    wrong: int | None  # elements, on all ranks together; None: there was nothing to check
    rounds: list[float] = dataclasses.field(default_factory=list)  # the median of each

    @property
    def time(self) -> float:
        """The median in microseconds."""
        return statistics.median(self.microseconds)

    def percentile(self, share: float) -> float:
        """Returns the time that this share of the calls took at most."""
        ordered = sorted(self.microseconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclasses.dataclass
class Measurement:
    """One task with one case."""

    case: Case
    task: Task
    size: int  # bytes of the larger buffer
    ranks: int
    out_of_place: Timing | None = None
    in_place: Timing | None = None

    def timing(self, place: str) -> Timing | None:
        """Returns that of one of PLACES."""
        return self.in_place if place == "in_place" else self.out_of_place

    @property
    def best(self) -> Timing:
        """In place where there is such a call; what comparisons are made with."""
        timing = self.in_place or self.out_of_place
        assert timing is not None
        return timing

    def algbw(self, timing: Timing) -> float:
        """Returns bytes of the larger buffer per time, in GB/s."""
        return self.size / timing.time / 1e3

    def busbw(self, timing: Timing) -> float:
        """Returns the same, times what any algorithm has to move per byte and rank."""
        return self.algbw(timing) * self.task.operation.bus_factor(self.ranks)

    @property
    def wrong(self) -> int:
        """Wrong elements of both places."""
        timings = (self.timing(place) for place in PLACES)
        return sum(timing.wrong or 0 for timing in timings if timing is not None)


@dataclasses.dataclass
class Workload:
    """What is measured."""

    tasks: Sequence[tuple[Task, int]]  # with bytes of the larger buffer
    places: Sequence[str] = PLACES
    check: bool = True
    seconds: float = 0.3  # per task, case and place, about
    iterations: int | None = None  # instead of `seconds`
    # Blocks of calls that take turns with those of the other cases: a slow second of the machine
    # then hits all of them.
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
        """Yields the measurements of one task after the other."""
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
        calls = [self._calls_per_round(row, place) for row, place, _ in turns]
        # The first of all meets a machine that has done nothing, each other one that has done
        # something else: what is not counted makes them warm, all of it and a tenth.
        share = 1 if self._cold else 10
        self._cold = False
        for (row, place, _), number in zip(turns, calls, strict=True):
            self._contenders[row.case].time(place, -(-number // share))
        for _ in range(self._workload.rounds):
            for (row, place, timing), number in zip(turns, calls, strict=True):
                times = self._contenders[row.case].time(place, number)
                timing.microseconds += times
                timing.rounds.append(statistics.median(times))
        for row, place, timing in turns:
            self._check(row, place, timing, shift=1)
        return rows

    def _prepare(self, row: Measurement) -> bool:
        """Checks the first results; False when there are none."""
        contender = self._contenders[row.case]
        try:
            places = contender.prepare(row.task)
        except Unable as reason:
            name = " ".join(part for part in dataclasses.astuple(row.case) if part)
            sentence = f"{name} is left out of {row.task.collective}: {reason}"
            if sentence not in self.left_out:
                self.left_out.append(sentence)
            return False
        # What has no call in place is measured out of place whatever was asked for.
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

    def _calls_per_round(self, row: Measurement, place: str) -> int:
        if self._workload.iterations is not None:
            return max(1, self._workload.iterations // self._workload.rounds)
        # Every rank sees the same times, so every rank decides alike.
        median = statistics.median(self._contenders[row.case].time(place, _TRIAL_CALLS))
        calls = int(self._workload.seconds * 1e6 / max(median, 1.0) / self._workload.rounds)
        return max(2, min(calls, _MAX_CALLS))
