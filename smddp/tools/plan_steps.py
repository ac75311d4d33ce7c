"""Reads the text of plans (`smddp plan print`): steps, and what each of them waits for.

The text is what Python has of a plan. `smddp plan print --help` describes it, and
csrc/plan/print.cc writes it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

__all__ = ["Block", "Job", "Number", "Plan", "Stage", "Step", "read"]


@dataclasses.dataclass(frozen=True)
class Number:
    """A number that may change with the repetition k of its block, such as 2k+1."""

    base: int
    per_trip: int

    @classmethod
    def read(cls, text: str) -> Number:
        """Returns the number of a text such as "4", "k-3" or "2k+1"."""
        found = re.fullmatch(r"(?:(-?\d*)k)?([+-]?\d+)?", text)
        assert found is not None, f"{text!r} is not a number of a plan"
        slope = {None: "0", "": "1", "-": "-1"}.get(found[1], found[1])
        return cls(int(found[2] or 0), int(slope or 0))

    def first_trip(self, value: int, trips: int) -> int | None:
        """Returns the first repetition in which the number is at least `value`; None if never."""
        if self.base >= value:
            return 0
        if self.per_trip <= 0:
            return None
        trip = -((self.base - value) // self.per_trip)
        return trip if trip < trips else None

    def trip_of(self, value: int, trips: int) -> int | None:
        """Returns the repetition in which the number is `value`; None if in none."""
        trip = self.first_trip(value, trips)
        return trip if trip is not None and self.base + trip * self.per_trip == value else None


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a plan."""

    text: str
    operation: str  # copy, reduce, signal, wait, put, post, receive, release or flush
    peer: int | None = None  # of a message: a rank; of a wait: a mate, or None for the team
    stream: int = 0
    counter: str = ""  # "arrival" or "c1", ...
    value: Number = Number(0, 0)


@dataclasses.dataclass(frozen=True)
class Block:
    """Steps that are repeated."""

    trips: int
    steps: list[Step]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps that run in order; all stages after the preamble run concurrently."""

    name: str
    blocks: list[Block]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of one rank."""

    title: str
    stages: list[Stage]  # the first is the preamble
    messages: int  # that it sends to other nodes
    message_bytes: int


_STREAM = r"rank (\d+)(?: stream (\d+))?"
_PATTERNS = {
    "put": re.compile(rf"put to {_STREAM} <- .*, message (\S+)"),
    "receive": re.compile(rf"receive from {_STREAM} \d+ bytes, message (\S+)"),
    "signal": re.compile(r"signal (\w+) = (\S+)"),
    "wait": re.compile(r"wait (\w+) of (?:the team|mate (\d+)) >= (\S+)"),
}


def _step(text: str) -> Step:
    operation = text.split(" ", 1)[0]
    if operation not in _PATTERNS:
        return Step(text, operation)
    found = _PATTERNS[operation].fullmatch(text)
    assert found is not None, f"{text!r} is not a step of a plan"
    if operation in ("put", "receive"):
        return Step(text, operation, int(found[1]), int(found[2] or 0), "", Number.read(found[3]))
    if operation == "signal":
        return Step(text, operation, counter=found[1], value=Number.read(found[2]))
    mate = None if found[2] is None else int(found[2])
    return Step(text, operation, mate, 0, found[1], Number.read(found[3]))


def read(text: str) -> Plan:
    """Returns the plan that a text of `print_plan` describes."""
    title, *lines = text.splitlines()
    stages: list[Stage] = []
    messages = message_bytes = 0
    for line in lines:
        indent, words = len(line) - len(line.lstrip()), line.strip()
        if indent == 2 and words == "preamble":
            stages.append(Stage(words, [Block(1, [])]))
        elif indent == 2 and words.startswith("stage "):
            stages.append(Stage(words.removeprefix("stage "), []))
        elif indent == 2:
            if found := re.search(r"(\d+) messages with (\d+) bytes", words):
                messages, message_bytes = int(found[1]), int(found[2])
        elif block := re.fullmatch(r"(\d+) x", words):
            stages[-1].blocks.append(Block(int(block[1]), []))
        else:
            stages[-1].blocks[-1].steps.append(_step(words))
    return Plan(title, stages, messages, message_bytes)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a step is: rank, stage, block and position, each counted from 0."""

    rank: int
    stage: int
    block: int
    index: int


@dataclasses.dataclass(frozen=True)
class Link:
    """A step that waits for another one."""

    kind: str  # "put" or "wait"
    source: Place
    target: Place
    trip: int  # the repetition of the source that the first repetition of the target waits for


class Job:
    """The plans of all ranks, and which step waits for which.

    Args:
        plans: of each rank.
        nodes: the ranks of each node.
    """

    def __init__(self, plans: Sequence[Plan], nodes: Sequence[Sequence[int]]) -> None:
        self.plans = list(plans)
        self.nodes = [list(node) for node in nodes]
        self.steps: dict[Place, Step] = {}
        self._blocks: dict[Place, int] = {}
        for rank, plan in enumerate(self.plans):
            for s, stage in enumerate(plan.stages):
                for b, block in enumerate(stage.blocks):
                    for i, step in enumerate(block.steps):
                        self.steps[Place(rank, s, b, i)] = step
                        self._blocks[Place(rank, s, b, i)] = block.trips
        self.links: list[Link] = []
        self.earlier: list[Place] = []
        """Waits for an earlier repetition only: the first one does not wait."""
        self._link()

    def node_of(self, rank: int) -> int:
        """Returns the node of a rank."""
        return next(number for number, node in enumerate(self.nodes) if rank in node)

    def _link(self) -> None:
        receives: dict[tuple[int, int | None, int], list[Place]] = {}
        signals: dict[tuple[int, str], list[Place]] = {}
        for place, step in self.steps.items():
            if step.operation == "receive":
                receives.setdefault((place.rank, step.peer, step.stream), []).append(place)
            elif step.operation == "signal":
                signals.setdefault((place.rank, step.counter), []).append(place)
        for place, step in self.steps.items():
            if step.operation == "put":
                assert step.peer is not None
                self._link_put(place, step, receives[step.peer, place.rank, step.stream])
            elif step.operation == "wait":
                self._link_wait(place, step, signals)

    def _link_put(self, place: Place, step: Step, receives: list[Place]) -> None:
        for receive in receives:
            trip = self.steps[receive].value.trip_of(step.value.base, self._blocks[receive])
            if trip is not None:
                self.links.append(Link("put", place, receive, trip))
                return
        raise AssertionError(f"nobody receives {step.text!r} of rank {place.rank}")

    def _link_wait(
        self, place: Place, step: Step, signals: dict[tuple[int, str], list[Place]]
    ) -> None:
        if step.value.base < 1:
            if step.value.per_trip > 0 and self._blocks[place] > 1:
                self.earlier.append(place)
            return
        mates = self.nodes[self.node_of(place.rank)]
        team = [rank for rank in mates if rank != place.rank]
        for rank in team if step.peer is None else [mates[step.peer]]:
            for signal in signals[rank, step.counter]:
                trip = self.steps[signal].value.first_trip(step.value.base, self._blocks[signal])
                if trip is not None:
                    self.links.append(Link("wait", signal, place, trip))
                    break

    def columns(self, widths: dict[Place, int]) -> dict[Place, int]:
        """Returns a column for each step: behind the step before it, and behind what it waits for.

        Each block is drawn once. Where stages wait for one another in different repetitions, no
        order of such drawings shows all waits from left to right; then one of them goes back.

        Args:
            widths: columns to leave free before a step.
        """
        before: dict[Place, Place | None] = {}
        last_of_preamble: dict[int, Place] = {}
        last: dict[tuple[int, int], Place] = {}
        for place in self.steps:
            lane = (place.rank, place.stage)
            before[place] = last.get(lane, last_of_preamble.get(place.rank))
            last[lane] = place
            if place.stage == 0:
                last_of_preamble[place.rank] = place
        waits: dict[Place, set[Place]] = {place: set() for place in self.steps}
        for link in self.links:
            waits[link.target].add(link.source)
        found: dict[Place, int] = {}
        open_places = list(self.steps)
        while open_places:
            left = []
            for place in open_places:
                previous = before[place]
                if (previous is None or previous in found) and waits[place] <= found.keys():
                    behind = [found[source] + 1 for source in waits[place]]
                    start = 0 if previous is None else found[previous] + 1
                    found[place] = max([*behind, start + widths.get(place, 0)])
                else:
                    left.append(place)
            if len(left) == len(open_places):
                stuck = next(p for p in left if before[p] is None or before[p] in found)
                waits[stuck] &= found.keys()
            open_places = left
        return found
