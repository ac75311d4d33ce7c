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
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["Aborted", "Baton", "Inbox", "Priority", "Task", "Ticket"]


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


class Inbox(Protocol):
    """Where messages come from: they are taken by the thread that would have nothing to do."""

    @property
    def expects(self) -> bool:
        """May anything come?"""

    def take(self, block: bool) -> Any:
        """Returns what has come; may wait for that."""

    def deliver(self, arrived: Any) -> None:
        """Does what has to be done about it; it submits tasks and completes tickets."""

    def interrupt(self) -> None:
        """Ends the `take` that waits, or else the next one."""


class Baton:
    """Owns the worker threads, which are daemons and are used again and again.

    At most one holds the baton. It runs a task, or looks for one; if there is none, it waits
    for messages. So what comes for the task that waits on this very thread, or makes a new one, is
    gone on with without waking another thread.

    All methods may be called from any thread; `wait` only from a task.
    """

    def __init__(
        self,
        failed: Callable[[Task, BaseException], None],
        inbox: Inbox,
        keep: Callable[[], Callable[[], None]],
    ) -> None:
        """Begins without threads.

        Args:
            failed: is told what a task raises.
            inbox: where messages come from.
            keep: takes what other tasks may change while one waits; what it returns puts that back.
        """
        self._failed = failed
        self._inbox = inbox
        self._keep = keep
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
        # Does anybody hold the baton? Is it in `take`, so that it has to be interrupted?
        self._held = self._blocked = False
        self._aborted = self._settling = False
        self._quiet = threading.Condition(self._lock)
        self._current = threading.local()

    @property
    def task(self) -> Task | None:
        """The task that runs on the calling thread, if it is one of ours."""
        return getattr(self._current, "task", None)

    def begin(self) -> None:
        """Takes tasks again, after an abort; nothing may be going on."""
        with self._lock:
            self._aborted = self._last_forward = False

    def look(self) -> None:
        """Sees to it that somebody takes messages, and looks for work."""
        with self._lock:
            self._rouse()

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
        self._find_work(task.worker, task)
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
            self._rouse()

    def settle(self) -> None:
        """Waits until no task runs, waits or is ready."""
        with self._quiet:
            self._settling = True
            while self._running is not None or self._waiting or self._has_ready():
                self._quiet.wait()
            self._settling = False

    def _has_ready(self) -> bool:
        return bool(self._resumed or self._forward or self._backward)

    def _make_ready(self, task: Task) -> None:
        if not task.priority.forward:
            heap = self._backward
        else:
            heap = self._forward if task.worker is None else self._resumed
        heapq.heappush(heap, (task.priority, next(self._numbers), task))
        self._rouse()

    def _rouse(self) -> None:
        """Makes somebody look for work, unless somebody will. The lock is held."""
        if not self._held:
            self._held = True
            self._free_worker().wake.release()
        elif self._blocked:
            self._blocked = False
            self._inbox.interrupt()

    def _free_worker(self) -> _Worker:
        return self._idle.pop() if self._idle else _Worker(self)

    def _find_work(self, worker: _Worker, own: Task | None) -> Task:
        """Passes the time of a worker that holds the baton until there is something for it to do.

        Args:
            worker: who calls.
            own: the task that waits on this thread; None if the thread can take any new one.

        Returns:
            The task to go on with, or to begin.
        """
        inbox = self._inbox
        put_back: Callable[[], None] | None = None
        looked = False
        while True:
            if not looked and self._has_ready() and inbox.expects:
                # What has come meanwhile may be better than what is there.
                inbox.deliver(inbox.take(False))
            looked = False
            with self._lock:
                task = self._next()
                if task is not None and (task is own or (own is None and task.worker is None)):
                    self._running = task
                    break
                keeps = task is None and inbox.expects
                self._blocked = keeps
                if not keeps and own is not None and put_back is None:
                    put_back = self._keep()
                if task is not None:
                    self._pass_on(task)
                elif self._settling and not self._waiting:
                    self._quiet.notify_all()
                if not keeps:
                    self._held = task is not None
                    if own is None:
                        self._idle.append(worker)
            del task
            if keeps:
                arrived = inbox.take(True)
                self._blocked = False
                inbox.deliver(arrived)
                del arrived
                looked = True
                continue
            worker.wake.acquire()
            task, worker.task = worker.task, None
            if task is not None:
                break
        if put_back is not None:
            put_back()
        return task

    def _pass_on(self, task: Task) -> None:
        """Gives the baton to the worker of a task. The lock is held."""
        self._running = task
        worker = task.worker or self._free_worker()
        worker.task = task
        worker.wake.release()

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
            if number == 1:
                return heapq.heappop(self._forward)[2]
            entry = self._forward.pop(number - 1)
            heapq.heapify(self._forward)
            return entry[2]
        return None

    def _admissible(self) -> int:
        """Returns 1 + the position in the heap of the best task that may begin; 0 if none may."""
        forward = self._forward
        if not forward:
            return 0
        if forward[0][2].admitted is None or forward[0][2].admitted():
            return 1
        for entry in sorted(forward, key=lambda entry: entry[:2])[1:]:
            if entry[2].admitted is None or entry[2].admitted():
                return 1 + self._forward.index(entry)
        return 0

    def _run(self, worker: _Worker) -> None:
        """The life of a worker thread."""
        # Autograd's device threads are shared by all microbatches: one that waits in such a thread
        # would hold up the very work it waits for.
        torch.autograd.set_multithreading_enabled(False)
        worker.wake.acquire()
        task, worker.task = worker.task, None
        while True:
            if task is None:
                task = self._find_work(worker, None)
            task.worker = worker
            self._current.task = task
            try:
                task.function()
            except Aborted:
                pass
            except BaseException as error:
                self._failed(task, error)
            # Nothing of the task may live on while this thread sleeps.
            self._current.task = task = None
            with self._lock:
                self._running = None


_Entry = tuple[Priority, int, Task]


class _Worker:
    def __init__(self, baton: Baton) -> None:
        # A raw lock: unlike threading.Semaphore it is woken without Python code.
        self.wake = _thread.allocate_lock()
        self.wake.acquire()
        # What to go on with when woken; None to look for work.
        self.task: Task | None = None
        threading.Thread(target=baton._run, args=(self,), name="smp-task", daemon=True).start()
