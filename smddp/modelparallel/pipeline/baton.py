"""Runs the tasks of a rank, one at a time, each on a thread of its own.

A task is Python code of the user that may have to wait in the middle, for another rank. So each
has a thread; but only the one that holds the *baton* runs. Whoever waits or ends picks the next
runnable task and hands the baton over, without a scheduling thread in between. The choice is by
rule (see `_next`), so the order of work is decided by us and not by the operating system.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Aborted", "Baton", "Priority", "Task", "Ticket"]


class Aborted(BaseException):
    """Unwinds a waiting task when its step has failed. Not an Exception: users catch those."""


class Priority(NamedTuple):
    """Within a kind of work, smaller runs first: older microbatches, then call order."""

    forward: bool
    microbatch: int
    order: tuple[int, ...] = ()


class Ticket:
    """Something a task can wait for, once."""

    __slots__ = ("done", "waiter")

    def __init__(self) -> None:
        self.done = False
        self.waiter: Task | None = None


class Task:
    """A function to run; afterwards, or while it waits, what is needed to resume it."""

    __slots__ = ("admitted", "function", "local", "priority", "worker")

    def __init__(
        self,
        priority: Priority,
        function: Callable[[], None],
        admitted: Callable[[], bool] | None = None,
    ) -> None:
        self.priority = priority
        self.function = function
        # May it begin now? Asked only before it has begun.
        self.admitted = admitted
        self.worker: _Worker | None = None
        # For the executor: the frame that runs here.
        self.local: Any = None


class Baton:
    """Owns the worker threads, which are daemons and are used again and again.

    All methods may be called from any thread; `wait` only from a task.
    """

    def __init__(self, failed: Callable[[Task, BaseException], None]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        # Heaps: forward work that goes on, forward work to begin, backward work.
        self._resumed: list[_Entry] = []
        self._forward: list[_Entry] = []
        self._backward: list[_Entry] = []
        self._last_forward = False
        self._numbers = itertools.count()
        self._idle: list[_Worker] = []
        self._waiting: set[Task] = set()
        self._running: Task | None = None
        self._aborted = False
        self._quiet = threading.Condition(self._lock)
        self._current = threading.local()

    @property
    def task(self) -> Task | None:
        """The task that runs on the calling thread, if it is one of ours."""
        return getattr(self._current, "task", None)

    def submit(self, task: Task) -> None:
        """Makes a task runnable."""
        with self._lock:
            if not self._aborted:
                self._make_ready(task)

    def wait(self, ticket: Ticket, priority: Priority) -> None:
        """Gives the baton away until the ticket is done.

        Raises:
            Aborted: the step failed meanwhile.
        """
        task = self.task
        assert task is not None
        assert task.worker is not None
        with self._lock:
            if self._aborted:
                raise Aborted
            if ticket.done:
                return
            ticket.waiter = task
            task.priority = priority
            self._waiting.add(task)
            self._running = None
            self._hand_over()
        task.worker.wake.acquire()
        if self._aborted:
            raise Aborted

    def complete(self, ticket: Ticket) -> None:
        """Marks a ticket as done; its waiter becomes runnable."""
        with self._lock:
            if ticket.done:
                return
            ticket.done = True
            task, ticket.waiter = ticket.waiter, None
            if task is not None and task in self._waiting:
                self._waiting.discard(task)
                self._make_ready(task)

    def abort(self) -> None:
        """Drops what has not begun, and unwinds what waits."""
        with self._lock:
            self._aborted = True
            begun = [
                entry
                for entry in (*self._resumed, *self._forward, *self._backward)
                if entry[2].worker is not None
            ]
            self._resumed = begun
            self._forward, self._backward = [], []
            for task in self._waiting:
                self._resumed.append((task.priority, next(self._numbers), task))
            heapq.heapify(self._resumed)
            self._waiting.clear()
            if self._running is None:
                self._hand_over()

    def begin(self) -> None:
        """Takes tasks again, after an abort; nothing may be going on."""
        with self._lock:
            self._aborted = self._last_forward = False

    def settle(self) -> None:
        """Waits until no task runs, waits or is ready."""
        with self._quiet:
            while self._running is not None or self._waiting or self._has_ready():
                self._quiet.wait()

    def look_again(self) -> None:
        """Says that a task that was not admitted may be now."""
        with self._lock:
            if self._running is None:
                self._hand_over()

    def _has_ready(self) -> bool:
        return bool(self._resumed or self._forward or self._backward)

    def _make_ready(self, task: Task) -> None:
        if not task.priority.forward:
            heap = self._backward
        else:
            heap = self._forward if task.worker is None else self._resumed
        heapq.heappush(heap, (task.priority, next(self._numbers), task))
        if self._running is None:
            self._hand_over()

    def _hand_over(self) -> None:
        """Gives the baton to the best runnable task. The lock is held, and nobody runs."""
        task = self._next()
        if task is None:
            if not self._waiting and not self._has_ready():
                self._quiet.notify_all()
            return
        self._running = task
        if task.worker is None:
            task.worker = self._idle.pop() if self._idle else _Worker(self)
            task.worker.task = task
        task.worker.wake.release()

    def _next(self) -> Task | None:
        """Takes the best runnable task.

        What goes on comes first: it is often the loss, which all other ranks wait for. Then
        forward and backward work take turns, as in a 1F1B schedule, as far as both are there.
        """
        if self._resumed:
            return heapq.heappop(self._resumed)[2]
        if self._backward and (self._last_forward or not self._admissible()):
            self._last_forward = False
            return heapq.heappop(self._backward)[2]
        number = self._admissible()
        if number:
            self._last_forward = True
            entry = self._forward[number - 1]
            self._forward.remove(entry)
            heapq.heapify(self._forward)
            return entry[2]
        return None

    def _admissible(self) -> int:
        """Returns 1 + the position in the heap of the best task that may begin; 0 if none may."""
        for entry in sorted(self._forward, key=lambda entry: entry[:2]):
            if entry[2].admitted is None or entry[2].admitted():
                return 1 + self._forward.index(entry)
        return 0

    def _run(self, worker: _Worker) -> None:
        """The life of a worker thread."""
        while True:
            worker.wake.acquire()
            task = worker.task
            assert task is not None
            self._current.task = task
            try:
                task.function()
            except Aborted:
                pass
            except BaseException as error:
                self._failed(task, error)
            self._current.task = worker.task = None
            with self._lock:
                self._idle.append(worker)
                self._running = None
                self._hand_over()
            # Nothing of the task may live on while this thread sleeps.
            del task


_Entry = tuple[Priority, int, Task]


class _Worker:
    def __init__(self, baton: Baton) -> None:
        # A raw lock: unlike threading.Semaphore it is woken without Python code.
        self.wake = _thread.allocate_lock()
        self.wake.acquire()
        self.task: Task | None = None
        threading.Thread(target=baton._run, args=(self,), name="smp-task", daemon=True).start()
