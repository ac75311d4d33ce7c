"""Which slices of tasks run in a step, in which order, and whose gather is next.

What a task does from where it begins or goes on to where it waits or ends is a *slice*. All ranks
of a sharding group run the same slices in the same order.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from smddp.modelparallel.core.errors import SMPPeerError
from smddp.modelparallel.core.order import Decision

__all__ = ["Planned", "Slice", "Slices"]


class Planned(NamedTuple):
    """One gather of a plan.

    Attributes:
        number: of the parameter.
        kept: it is the first gather since the task has freed the parameter. So the parameter can be
            kept in place of being freed, and nothing is sent.
    """

    number: int
    kept: bool


class Slice:
    """A slice of a task, in this step.

    Attributes:
        key: names it: the same slice has the same key in each step.
        plan: the gathers of the last step; None if they are not known.
        order: what it has asked for.
        freed: numbers of parameters that it has freed since it has last asked for one.
        issued: the first gather of the plan that has not begun.
        under_way: gathers that have begun and that it has not asked for: place in the plan ->
            (work, memory); no memory if another task holds the parameter.
        ended: without a plan: has it asked for its last parameter, on all ranks?
    """

    def __init__(self, key: Any, plan: list[Planned] | None) -> None:
        self.key, self.plan = key, plan
        self.order: list[Planned] = []
        self.freed: set[int] = set()
        self.issued = 0
        self.under_way: dict[int, tuple[Any, torch.Tensor | None]] = {}
        self.ended = False


class _Turn(NamedTuple):
    """When the gathers of a slice begin: all of them, or the first ones because it is expected.

    Attributes:
        slice: whose gathers they are.
        until: how many gathers of its plan have begun after this turn; None for all.
    """

    slice: Slice
    until: int | None


class Slices:
    """The slices of a step, in the order in which their gathers begin.

    Any thread may call `decided` and `over`; the other methods are for the thread that runs a task.
    """

    def __init__(
        self, ordered: bool, timeout: float, count_prefetched: Callable[[list[Planned]], int]
    ) -> None:
        """Begins outside a step.

        Args:
            ordered: does an order group say which slices run? Otherwise a step is one slice.
            timeout: seconds to wait at the end of a failed step for what the leader says.
            count_prefetched: says how many gathers of a plan begin when its slice is only expected.
        """
        self._ordered, self._timeout, self._count_prefetched = ordered, timeout, count_prefetched
        self._news = threading.Condition()  # of decisions
        self.reset({})

    def reset(self, plans: dict[Any, list[Planned]]) -> None:
        """Begins a step.

        Args:
            plans: the gathers of slices in the last step, by key.
        """
        self._plans = plans
        # (decision, is it only expected?) in their order.
        self._decisions: list[tuple[Any, bool]] = []
        self._over = not self._ordered  # will there be no more decisions?
        self._begun = 0  # how many decisions belong to slices that have begun
        self._turns: list[_Turn] = []  # of the decisions that have been read
        self._names: collections.Counter[Any] = collections.Counter()
        self._tasks: list[Any] = []  # keys of the tasks that have begun
        self._parts: collections.Counter[int] = collections.Counter()  # slices, by number of a task
        # Slices that have not been decided, and whose first gathers have had their turn, by key.
        self._expected: dict[Any, Slice] = {}
        self._next = 0  # the first turn whose gathers have not all begun

    def decided(self, decision: Decision, at_once: bool = False, expected: bool = False) -> None:
        """Notes that a slice will run after those before it; or is expected to do so soon."""
        with self._news:
            place = self._begun if at_once else len(self._decisions)
            self._decisions.insert(place, (decision, expected))
            self._news.notify()

    def over(self) -> None:
        """Notes that nothing more is decided in this step."""
        with self._news:
            self._over = True
            self._news.notify()

    def begin(self) -> Slice:
        """Returns the next slice, which runs now."""
        while self._decisions[self._begun][1]:
            self._begun += 1
        found = self._turn(self._begun).slice
        self._begun += 1
        return found

    def every(self) -> list[Slice]:
        """Returns the slices that are known, also those that are only expected; each once."""
        return list(dict.fromkeys(turn.slice for turn in self._turns))

    def run(self) -> list[Slice]:
        """Returns the slices that have been decided."""
        return [turn.slice for turn in self._turns if turn.until is None]

    def coming(self) -> list[int]:
        """Returns the parameters of planned gathers that have begun and that no code has asked for.

        Of the slice that runs, and of those up to the one whose gather is next.
        """
        numbers: list[int] = []
        seen: set[Slice] = set()
        # Called at each gather, so without the calls that a comprehension makes.
        for turn in self._turns[max(self._begun - 1, 0) : self._next + 1]:
            one = turn.slice
            if one.plan is not None and one not in seen:
                seen.add(one)
                for place in one.under_way:
                    numbers.append(one.plan[place].number)
        return numbers

    def due(self) -> Slice | None:
        """Returns whose gather is next; None if that is not known, or a slice without a plan."""
        while self._next < len(self._decisions):
            one, until = self._turn(self._next)
            if one.plan is None:
                if until is None and not one.ended:
                    return None
            elif one.issued < (len(one.plan) if until is None else until):
                return one
            self._next += 1
        return None

    def due_earlier(self) -> Slice | None:
        """Returns whose gather is next if that comes before those of the slice that runs."""
        one = self.due()
        return one if self._next < self._begun - 1 else None

    def unplanned(self) -> Slice | None:
        """Returns the slice without a plan that holds up the gathers after it, if `due` is None."""
        return self._turn(self._next).slice if self._next < len(self._decisions) else None

    def await_news(self) -> bool:
        """Waits for another decision of the leader; returns False if there are no more.

        Raises:
            SMPPeerError: the leader has not ended its step in time.
        """
        deadline = time.monotonic() + self._timeout
        with self._news:
            while self._next == len(self._decisions) and not self._over:
                if not self._news.wait(deadline - time.monotonic()):
                    raise SMPPeerError(
                        "the rank that leads the order of tasks has not ended its step within "
                        f"{self._timeout:g} s"
                    )
            return self._next < len(self._decisions)

    def _turn(self, place: int) -> _Turn:
        """Returns the turn of a decision; reads those before it first."""
        while len(self._turns) <= place:
            decision, expected = self._decisions[len(self._turns)]
            self._turns.append(self._expect(decision) if expected else self._read(decision))
        return self._turns[place]

    def _read(self, decision: Decision) -> _Turn:
        if not isinstance(decision, int):
            number = len(self._tasks)
            # Several tasks may have one name; see `TaskName`.
            self._tasks.append((decision, self._names[decision]))
            self._names[decision] += 1
        else:
            number = decision
        key = self._tasks[number], self._parts[number]
        self._parts[number] += 1
        one = self._expected.pop(key, None)
        return _Turn(one or Slice(key, self._plans.get(key)), None)

    def _expect(self, decision: Decision) -> _Turn:
        if isinstance(decision, int):
            key = self._tasks[decision], self._parts[decision]
        else:
            key = (decision, self._names[decision]), 0
        one = Slice(key, self._plans.get(key))
        # If a slice that was expected before has not come yet, nothing more is prefetched.
        count = 0 if self._expected else self._count_prefetched(one.plan or [])
        if count:
            self._expected[key] = one
        return _Turn(one, count)
