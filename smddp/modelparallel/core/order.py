"""One order of tasks on the ranks of an order group: its leader decides, the others replay it.

The ranks of an *order group* have the same place in pipelines that are replicas of each other. Code
of a task may call collectives over them, so they have to run the same tasks in the same order. The
leader chooses as any rank does, and announces each of its *decisions*: which task begins, or which
task goes on after a wait. A follower runs exactly these tasks, each as soon as it is runnable here.

Both classes are parts of a `Baton`, which calls their methods while it holds its lock, unless a
method says otherwise. They start no thread and send nothing themselves.

Some tasks have no name: those that free memory, and the one that applies the division. They call
nothing that other ranks of the group have to call at the same time, or are alone; so each rank runs
them when they come.

This does not deadlock. Call a *slice* what a task does from where it begins or goes on to where it
waits or ends. Order the slices by their beginning in the leader's replica: a slice comes after all
that have sent it messages, and after those that its rank has run before. Take the first slice that
does not end on some replica. All before it have ended everywhere. If the replicas make the same
calls, its messages have been sent on every replica, so it is runnable; it is announced, and
announcements wait for nobody; so every member begins it. All make the same collectives in it, and
none waits for another slice; so it ends, which is a contradiction. A task keeps the baton while it
blocks in a collective. That is safe because no sender of messages needs its receiver.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = [
    "Decision",
    "Follower",
    "Leader",
    "OrderedTask",
    "SliceObserver",
    "TaskName",
    "TaskOrder",
]


class TaskName(NamedTuple):
    """Names a task in a step; the same on all ranks of an order group. Sent as a plain tuple.

    Two tasks may have the same name, such as a segment's forward pass and the one that a checkpoint
    makes again. One of them then ends before the other can begin, so their order is no question.

    Attributes:
        kind: "body", "forward", "backward", or "end" for the end of a microbatch.
        microbatch: its number.
        path: see `Frame.path`.
        module: the number of the first module that it calls, for texts; -1 if there is none.
        calls: a number that is another one, most likely, if it makes other calls.
    """

    kind: str
    microbatch: int
    path: tuple[int, ...] = ()
    module: int = -1
    calls: int = 0

    def text(self, names: Sequence[str]) -> str:
        """Describes the task.

        Args:
            names: of the modules, by number.
        """
        what = {
            "body": "the body of microbatch {0}",
            "end": "the end of microbatch {0}",
        }.get(self.kind, "the {1} pass of microbatch {0}, call {2}")
        text = what.format(self.microbatch, self.kind, ".".join(map(str, self.path)))
        return f"{text} (module {names[self.module]!r})" if self.module >= 0 else text


# The name of a task that begins, as a plain tuple; or the number of one that goes on. Tasks are
# numbered in the order in which they begin.
Decision = tuple[Any, ...] | int
# A decision; or a list of it and of what the leader expects to decide soon, for observers.
Announcement = Decision | list[Decision]


class SliceObserver(Protocol):
    """What wants to know which *slices* run: what a task does until it waits or ends.

    All ranks of an order group tell their observers the same decisions in the same order.
    """

    def decided(self, decision: Decision, at_once: bool = False, expected: bool = False) -> None:
        """Notes which slice comes next.

        Args:
            decision: what begins it.
            at_once: it runs now, before others that were decided.
            expected: the leader expects it soon; it is decided later, if at all.
        """

    def begun(self) -> None:
        """Notes that the next slice that was decided runs now."""

    def ended(self) -> None:
        """Notes that the slice that runs ends without an error; its own thread says so."""

    def stopped(self) -> None:
        """Notes that the step has failed on this rank."""

    def over(self) -> None:
        """Notes that the leader decides nothing more in this step."""


class OrderedTask(Protocol):
    """What an order sees of a `Task`; see there."""

    name: TaskName | None
    number: int | None


class TaskOrder(Protocol):
    """What a `Baton` needs of a leader or a follower.

    Attributes:
        alone: is the model not divided yet? Then the only tasks with names are the bodies, which
            run one after the other. Each rank runs them without the others, because a replica may
            wait in its body until all replicas have called the model, or have ended the step.
        observer: is told which slices run; None for nobody.
        note: is told of the end of each slice, once the model is divided, and whether its task
            waits; None for nobody.
    """

    alone: bool
    observer: SliceObserver | None
    note: Callable[[bool], None] | None

    def begin(self) -> None:
        """Begins a step."""

    def add(self, task: OrderedTask) -> bool:
        """Takes a task that has become runnable, or returns False: the baton keeps it."""

    def next(
        self,
        choose: Callable[[], OrderedTask | None],
        likely: Callable[[], OrderedTask | None],
    ) -> Any:
        """Returns the task to run next; None if there is none yet.

        Args:
            choose: takes the next task from those that the baton keeps.
            likely: returns which task it would choose now, and does not take it.
        """

    def has_ready(self) -> bool:
        """Says whether it keeps runnable tasks."""

    def ended(self, number: int) -> None:
        """Notes that a task has ended, which has a number."""

    def slice_ends(self, waits: bool) -> None:
        """Notes that a task with a name waits or ends; its thread calls this without the lock.

        Args:
            waits: does it wait?
        """

    def abort(self) -> list[Any]:
        """Forgets what it keeps, because the step has failed; returns the tasks that had begun."""

    def settle(self) -> None:
        """Does what `next` has left to do without the lock. Any thread may call it."""


class _Observed:
    """What leader and follower have in common."""

    def __init__(self) -> None:
        self.alone = False
        self.observer: SliceObserver | None = None
        self.note: Callable[[bool], None] | None = None

    def slice_ends(self, waits: bool) -> None:
        """Tells the observer, and whoever keeps the history."""
        if not self.alone and self.note is not None:
            self.note(waits)
        if self.observer is not None:
            self.observer.ended()

    def end(self) -> None:
        """Notes that the leader has announced everything."""
        if self.observer is not None:
            self.observer.over()

    def abort(self) -> list[Any]:
        """Tells the observer; returns nothing."""
        if self.observer is not None:
            self.observer.stopped()
        return []


class Leader(_Observed):
    """Lets the baton choose, and announces its decisions."""

    def __init__(self, announce: Callable[[list[Announcement]], None]) -> None:
        """Begins without decisions.

        Args:
            announce: sends decisions to the followers, in their order.
        """
        super().__init__()
        self._announce = announce
        self._begun = 0
        self._decisions: deque[Announcement] = deque()
        # Decisions of one thread must not overtake those that another thread has made before.
        self._sending = threading.Lock()

    def begin(self) -> None:
        """Begins a step."""
        self._begun = 0
        self._decisions.clear()

    def add(self, task: OrderedTask) -> bool:
        """Returns False: the baton keeps all tasks."""
        return False

    def next(
        self,
        choose: Callable[[], OrderedTask | None],
        likely: Callable[[], OrderedTask | None],
    ) -> Any:
        """Returns what the baton chooses, and notes the decision."""
        task = choose()
        if task is None or task.name is None:
            return task
        decision = _decision(task)
        if task.number is None:
            task.number = self._begun
            self._begun += 1
        announcement: Announcement = decision
        if self.observer is not None:
            self.observer.decided(decision)
            after = None if self.alone else likely()
            if after is not None and after.name is not None:
                expected = _decision(after)
                self.observer.decided(expected, expected=True)
                announcement = [decision, expected]
            self.observer.begun()
        if not self.alone:
            self._decisions.append(announcement)
        return task

    def has_ready(self) -> bool:
        """Returns False: the baton keeps all tasks."""
        return False

    def ended(self, number: int) -> None:
        """Does nothing."""

    def settle(self) -> None:
        """Announces the decisions, together if there are several.

        When it returns, another thread has announced what it had taken, too: no decision may come
        after the end of the step.
        """
        with self._sending:
            decisions = []
            while self._decisions:
                decisions.append(self._decisions.popleft())
            if decisions:
                self._announce(decisions)


class FollowerEvents(Protocol):
    """What a follower finds; called without the lock of the baton."""

    def diverged(
        self, reason: str, announced: tuple[Any, ...] | None, ready: list[TaskName]
    ) -> None:
        """This replica does not make the calls of the leader's; at most once in a step.

        Args:
            reason: "over" if the leader has ended the step, "silent" if it announces nothing for
                too long, "stuck" if what it has announced does not become runnable here.
            announced: the name of the task that was announced and is not runnable here; None if
                there is none.
            ready: what is runnable here.
        """

    def completed(self) -> None:
        """Everything has run that the leader has run."""


class Follower(_Observed):
    """Keeps tasks until the leader has announced them.

    It finds out that its replica does not make the calls of the leader's: at once if the leader
    lets a task go on that has ended here, or has ended the step without a task that is runnable
    here; else if nothing runs for long.
    """

    def __init__(self, events: FollowerEvents) -> None:
        """Begins without announcements.

        Args:
            events: is told what this finds.
        """
        super().__init__()
        self._events = events
        self._ready: dict[Any, deque[OrderedTask]] = {}
        self.begin()

    def begin(self) -> None:
        """Begins a step."""
        self._announced: deque[Decision] = deque()
        self._ready.clear()
        self._names: list[tuple[Any, ...]] = []  # of the tasks that have begun
        self._ended: set[int] = set()  # their numbers
        self._over = False  # has the leader announced everything?
        self._since: float | None = None  # when this rank had nothing to run, and still has not
        # The text about a replica that differs; and has that been found out in this step?
        self._verdict: str = ""
        self._found = self._complete = False

    def announce(self, announcements: Sequence[Announcement]) -> None:
        """Takes decisions of the leader."""
        for announcement in announcements:
            decisions = announcement if isinstance(announcement, list) else [announcement]
            self._announced.append(decisions[0])
            if self.observer is not None:
                self.observer.decided(decisions[0])
                for decision in decisions[1:]:
                    self.observer.decided(decision, expected=True)

    def end(self) -> None:
        """Notes that the leader has ended the step."""
        super().end()
        self._over = True
        if self._since is not None:
            self._since = time.monotonic()

    def add(self, task: OrderedTask) -> bool:
        """Keeps a task that has a name."""
        if task.name is None:
            return False
        key = task.name[:3] if task.number is None else task.number
        self._ready.setdefault(key, deque()).append(task)
        return True

    def next(
        self,
        choose: Callable[[], OrderedTask | None],
        likely: Callable[[], OrderedTask | None],
    ) -> Any:
        """Returns a task without a name, or else the one that was announced, if it is runnable."""
        task = choose()
        if task is not None:
            return task
        if self.alone and self._ready:
            (first,) = next(iter(self._ready.values()))
            own = _decision(first)
            self._announced.appendleft(own)
            if self.observer is not None:
                self.observer.decided(own, at_once=True)
        key = self._key(self._announced[0]) if self._announced else None
        waiting = self._ready.get(key)
        if waiting is None:
            if self._since is None:
                self._since = time.monotonic()
            if key in self._ended:
                self._find("stuck")
            if self._over and not self._announced and not self._ready:
                self._complete = True
            if self._over and self._ready:
                announced = {self._key(decision) for decision in self._announced}
                if not announced.issuperset(self._ready):
                    self._find("over")
            return None
        decision = self._announced.popleft()
        task = waiting.popleft()
        if not waiting:
            del self._ready[key]
        if not isinstance(decision, int):
            task.number = len(self._names)
            self._names.append(decision)
        self._since = None
        if self.observer is not None:
            self.observer.begun()
        return task

    def has_ready(self) -> bool:
        """Says whether it keeps runnable tasks."""
        return bool(self._ready)

    def ended(self, number: int) -> None:
        """Notes that a task has ended: the leader must not let it go on."""
        self._ended.add(number)

    def abort(self) -> list[Any]:
        """Forgets everything; returns the tasks that had begun."""
        begun = [
            task for tasks in self._ready.values() for task in tasks if task.number is not None
        ]
        self._ready.clear()
        self._announced.clear()
        self._found, self._verdict = True, ""
        return begun + super().abort()

    def check(self, stuck: float, silent: float, over: float) -> float:
        """Looks whether this rank has had nothing to run for too long; then `settle` tells so.

        Args:
            stuck: seconds to wait for a task that was announced; half the timeout of the process
                group.
            silent: seconds to wait for an announcement; three quarters of that timeout.
            over: seconds to wait for a task that was announced, once the leader has ended the step;
                as `stuck`, but at most 120.

        Returns:
            Seconds until the next check.
        """
        announced = bool(self._announced)
        if self._since is None or not (announced or self._ready):
            return min(stuck, silent, over)
        limit = (over if self._over else stuck) if announced else silent
        left = self._since + limit - time.monotonic()
        if left > 0:
            return left
        self._find("stuck" if announced else "silent")
        return limit

    def settle(self) -> None:
        """Tells what was found out."""
        if self._complete:
            self._complete = False
            self._events.completed()
        if not self._verdict:
            return
        verdict, self._verdict = self._verdict, ""
        self._events.diverged(verdict, self._missing, self._runnable)

    def _find(self, verdict: str) -> None:
        if self._found:
            return
        self._found, self._verdict = True, verdict
        first = self._announced[0] if self._announced else None
        if isinstance(first, int):
            first = self._names[first] if first < len(self._names) else None
        self._missing = first
        ready = [task.name for tasks in self._ready.values() for task in tasks]
        self._runnable = [name for name in ready if name is not None]

    @staticmethod
    def _key(decision: Decision) -> Any:
        return decision if isinstance(decision, int) else decision[:3]


def _decision(task: OrderedTask) -> Decision:
    """Returns the decision that lets a task with a name run."""
    assert task.name is not None
    return tuple(task.name) if task.number is None else task.number
