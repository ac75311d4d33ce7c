"""Whether replicas that run their tasks in one order wait for the results of the same calls.

Such replicas know the same structures of results. But the arguments of a call may have a structure
on one replica that is new there, such as None where the others pass a mask. Then only this replica
waits for the result, and from there on the replicas make other tasks of the same calls. So a rank
that is about to wait for such a result tells the other members of its order group, which look
whether they wait, too. If one has not, the step is run again. The rank sends the call only when all
others know of it: otherwise its owners could run it beside another task of the other replicas.
"""

from __future__ import annotations

import collections
import threading
from typing import Protocol

__all__ = ["Waits"]


class WaitEvents(Protocol):
    """What `Waits` does about calls."""

    def tell_of_wait(self, task: int, call: int) -> None:
        """Tells the other members of a call; returns when they know of it. See `Waits.told`."""

    def calls_differ(self) -> None:
        """Another member waits for a call for which this rank has not waited."""


class Waits:
    """The calls of one step that tasks of this rank have made, and those for which others wait.

    A call is (number of the task in the order, number of the call in the task, from 1). Any thread
    may call the methods.
    """

    def __init__(self, events: WaitEvents) -> None:
        """Begins without calls.

        Args:
            events: does what is to be done.
        """
        self._events = events
        self._lock = threading.Lock()
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets all calls."""
        self._count: collections.Counter[int] = collections.Counter()  # of calls, by task
        self._waited: set[tuple[int, int]] = set()
        self._elsewhere: set[tuple[int, int]] = set()

    def called(self, task: int, waits: bool, new: bool) -> None:
        """Notes that a task makes its next call.

        Args:
            task: its number.
            waits: does it wait for the result?
            new: does it wait because the structure of the arguments is new here?
        """
        with self._lock:
            self._count[task] += 1
            call = task, self._count[task]
            if waits:
                self._waited.add(call)
            differs = not waits and call in self._elsewhere
        if new:
            self._events.tell_of_wait(*call)
        if differs:
            self._events.calls_differ()

    def told(self, task: int, call: int) -> None:
        """Notes that a task of another replica waits for a call whose structure is new there.

        Args:
            task: its number.
            call: the number of the call.
        """
        with self._lock:
            self._elsewhere.add((task, call))
            differs = call <= self._count[task] and (task, call) not in self._waited
        if differs:
            self._events.calls_differ()
