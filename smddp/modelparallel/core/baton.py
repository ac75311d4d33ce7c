"""Runs the tasks of a rank, one at a time, each on a thread of its own.

A task runs code of the user, which may have to wait in the middle for another rank. So each task
has a thread; but only the thread that holds the *baton* runs. A task that waits or ends picks the
next runnable task and passes the baton to it; there is no scheduling thread. `_choose` makes the
choice by a fixed rule, so the order of work does not depend on the operating system. It does depend
on which messages have come; ranks that must run their tasks in one order share a `TaskOrder`.
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from smddp.modelparallel.core.order import TaskName, TaskOrder

__all__ = ["Aborted", "Baton", "Current", "Host", "Inbox", "Priority", "Task", "Ticket"]


class Aborted(BaseException):
    """Ends a waiting task when its step has failed.

    It is not an Exception, because users catch those.
    """


class Priority(NamedTuple):
    """Says which task runs first among those of one heap: the one with the smaller tuple.

    Attributes:
        forward: is it forward work, not backward work? It chooses the heap; within a heap it is
            the same for all, except after `Baton.abort`.
        microbatch: older microbatches have smaller numbers.
        order: where the work stands within its microbatch; see `Frame.order`.
    """

    forward: bool
    microbatch: int
    order: tuple[int, ...] = ()


class Ticket:
    """An event that one task can wait for, and that happens once.

    Attributes:
        done: has it happened?
        waiter: the task that waits for it; None if there is none.
    """

    __slots__ = ("done", "waiter")

    def __init__(self) -> None:
        self.done = False
        self.waiter: Task | None = None


class Task:
    """A function to run, and once it has begun, the thread on which it runs.

    Attributes:
        priority: of the work that it does next.
        function: the work.
        admitted: says whether the task may begin now; None if it always may. It is not asked again
            once the task has begun.
        worker: the thread, once the task has begun.
        frame: where its code stands in the program, a `Frame`; the driver and the server set it,
            and the baton does not use it.
        name: the same on all ranks of an order group; None for a task that they need not run in
            the same order.
        number: with an order, how many tasks that have names had begun before it; None if it has
            not begun, or there is no order.
    """

    __slots__ = ("admitted", "frame", "function", "name", "number", "priority", "worker")

    def __init__(
        self,
        priority: Priority,
        function: Callable[[], None],
        admitted: Callable[[], bool] | None = None,
    ) -> None:
        self.priority = priority
        self.function = function
        self.admitted = admitted
        self.worker: _Worker | None = None
        self.frame: Any = None
        self.name: TaskName | None = None
        self.number: int | None = None


class Current(threading.local):
    """What is different on each thread.

    Attributes:
        task: that runs on it; None on threads that are not of a baton, and between tasks.
    """

    task: Task | None = None


class Inbox(Protocol):
    """Where messages come from; the thread that holds the baton takes them between two tasks."""

    @property
    def expects(self) -> bool:
        """Says whether messages may still come."""

    def take(self, block: bool, /) -> Any:
        """Returns the messages that have come; with `block`, waits until there is one."""

    def deliver(self, arrived: Any, /) -> None:
        """Acts upon what `take` has returned: submits tasks and completes tickets."""

    def interrupt(self) -> None:
        """Ends the `take` that waits, or else the next one."""


class Host:
    """What happens around the tasks of a rank, besides their order. This one does nothing."""

    def task_failed(self, task: Task, error: BaseException) -> None:
        """Acts upon the exception that a task has raised, except Aborted."""

    def clean_up(self, task: Task) -> None:
        """Called after that, also for Aborted, with the task and on its thread."""

    def save_state(self) -> Callable[[], None]:
        """Saves what other tasks may change while a task waits; returns what restores it.

        That may be the state of random generators. Called only if the waiting thread passes the
        baton on.
        """
        return _nothing

    def prepare_thread(self) -> Callable[[], None]:
        """Returns what runs first on the thread of a worker; called on a thread that makes one."""
        return _nothing


class Baton:
    """Owns the worker threads, which are daemons and are used again and again.

    At most one thread holds the baton. It runs a task, or looks for one; if there is none, it waits
    for messages. When a message lets the task of this thread go on, or makes a new task, the same
    thread runs it, and no other thread has to be woken.

    Any thread may call any method, but only a task may call `wait`, and no task may call
    `wait_until_idle`.

    Attributes:
        current: the tasks of threads, for code that asks often.
        order: decides, with other ranks, which task is next; None if this rank decides alone.
        watch: makes a context that is entered around each task; None for nothing.
        context: the values of ContextVars that tasks find.
    """

    def __init__(
        self,
        host: Host,
        inbox: Inbox,
        order: TaskOrder | None = None,
    ) -> None:
        """Begins without threads.

        Args:
            host: is told of what happens to tasks.
            inbox: where messages come from.
            order: decides, with other ranks, which task is next; None if this rank decides alone.
        """
        self.order = order
        self._host = host
        self.watch: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
        self.context = contextvars.copy_context()
        self._inbox = inbox
        self._lock = threading.Lock()
        # Heaps: forward tasks that go on after a wait, forward tasks that have not begun, and
        # backward tasks. After an abort all tasks that have begun are in the first one.
        self._resumed: list[_Entry] = []
        self._forward: list[_Entry] = []
        self._backward: list[_Entry] = []
        self._last_forward = False
        self._numbers = itertools.count()
        self._idle: list[_Worker] = []
        self._waiting: set[Task] = set()
        self._running: Task | None = None
        # Does a thread hold the baton? Does that thread wait in `Inbox.take`?
        self._held = self._blocked = False
        self._aborted = self._idle_awaited = self._closed = False
        self._quiet = threading.Condition(self._lock)
        self.current = Current()

    @property
    def task(self) -> Task | None:
        """The task that runs on the calling thread; None on other threads."""
        return self.current.task

    def begin(self) -> None:
        """Begins a step: accepts tasks again after an abort. No task may be left."""
        with self._lock:
            self._aborted = self._last_forward = False
            if self.order is not None:
                self.order.begin()

    @contextlib.contextmanager
    def changing_order(self) -> Iterator[Any]:
        """Returns a context in which the calling thread may change `order`, which it gets.

        Afterwards the task runs that may run now.
        """
        with self._lock:
            yield self.order
            self._rouse()

    def wake(self) -> None:
        """Makes sure that a thread takes messages, and runs tasks that may begin now."""
        with self._lock:
            self._rouse()

    def submit(self, task: Task) -> None:
        """Makes a task runnable."""
        with self._lock:
            if not self._aborted:
                self._make_ready(task)

    def wait(self, ticket: Ticket, priority: Priority, yields: bool = False) -> None:
        """Passes the baton on until a ticket is done.

        Args:
            ticket: to wait for.
            priority: with which the task goes on afterwards.
            yields: if the ticket is done already, let tasks of higher priority go first.

        Raises:
            Aborted: the step failed meanwhile.
        """
        task = self.current.task
        assert task is not None
        assert task.worker is not None
        if self.order is not None and task.number is not None and not self._aborted:
            self.order.slice_ends(True)
        with self._lock:
            if self._aborted:
                raise Aborted
            if ticket.done and self.order is None and not yields:
                return
            task.priority = priority
            self._running = None
            if ticket.done:
                # Whether it is done already depends on timing. With an order every wait is a
                # decision, so that all ranks of the group make the same ones.
                self._make_ready(task)
            else:
                ticket.waiter = task
                self._waiting.add(task)
        self._find_work(task.worker, task)
        if self._aborted:
            ticket.waiter = None  # the task may refer to the ticket
            raise Aborted

    def complete(self, ticket: Ticket) -> None:
        """Marks a ticket as done, so that its waiter can run."""
        with self._lock:
            if ticket.done:
                return
            ticket.done = True
            task, ticket.waiter = ticket.waiter, None
            if task is not None and task in self._waiting:
                self._waiting.discard(task)
                self._make_ready(task)

    def abort(self) -> None:
        """Drops the tasks that have not begun, and raises Aborted in those that wait."""
        with self._lock:
            self._aborted = True
            begun = [
                entry
                for entry in (*self._resumed, *self._forward, *self._backward)
                if entry[2].worker is not None
            ]
            self._resumed = begun
            self._forward, self._backward = [], []
            ordered = self.order.abort() if self.order is not None else []
            for task in (*ordered, *self._waiting):
                self._resumed.append((task.priority, next(self._numbers), task))
            heapq.heapify(self._resumed)
            self._waiting.clear()
            self._rouse()

    def wait_until_idle(self) -> None:
        """Waits until no task runs, waits or is runnable."""
        with self._quiet:
            self._idle_awaited = True
            while self._running is not None or self._waiting or self._has_ready():
                self._quiet.wait()
            self._idle_awaited = False

    def close(self) -> None:
        """Ends the threads. There must be no tasks, and none can be submitted any more."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for worker in idle:
            worker.wake.release()

    def _has_ready(self) -> bool:
        kept = self._resumed or self._forward or self._backward
        return bool(kept or (self.order is not None and self.order.has_ready()))

    def _make_ready(self, task: Task) -> None:
        if self.order is not None and self.order.add(task):
            self._rouse()
            return
        if not task.priority.forward:
            heap = self._backward
        else:
            heap = self._forward if task.worker is None else self._resumed
        heapq.heappush(heap, (task.priority, next(self._numbers), task))
        self._rouse()

    def _rouse(self) -> None:
        """Makes a thread look for work, unless one will anyway. The caller holds the lock."""
        if not self._held:
            self._held = True
            self._free_worker().wake.release()
        elif self._blocked:
            self._blocked = False
            self._inbox.interrupt()

    def _free_worker(self) -> _Worker:
        return self._idle.pop() if self._idle else _Worker(self)

    def _find_work(self, worker: _Worker, own: Task | None) -> Task:
        """Finds the next task for a worker that holds the baton.

        It passes the baton to other workers while the next task is theirs, and takes messages while
        there is no task at all.

        Args:
            worker: of the calling thread.
            own: the task that waits on this thread; None if the thread can begin any new task.

        Returns:
            The task to go on with: `own`, or a new one.
        """
        inbox = self._inbox
        restore_state: Callable[[], None] | None = None
        looked = False
        while True:
            if not looked and self._has_ready() and inbox.expects:
                # A message may make a task that should run before those there are.
                inbox.deliver(inbox.take(False))
            looked = False
            with self._lock:
                task = self._next()
                mine = task is not None and (task is own or (own is None and task.worker is None))
                keeps_baton = task is None and inbox.expects
                self._blocked = keeps_baton
                if mine:
                    self._running = task
                elif not keeps_baton and own is not None and restore_state is None:
                    restore_state = self._host.save_state()
                if task is None and self._idle_awaited and not self._waiting:
                    self._quiet.notify_all()
                if task is not None and not mine:
                    self._pass_on(task)
                if not (mine or keeps_baton):
                    self._held = task is not None
                    if own is None:
                        self._idle.append(worker)
            if self.order is not None:
                self.order.settle()
            if mine:
                break
            del task
            if keeps_baton:
                arrived = inbox.take(True)
                self._blocked = False
                inbox.deliver(arrived)
                del arrived
                looked = True
                continue
            if not self._closed:
                worker.wake.acquire()
            if self._closed:
                raise SystemExit  # ends the thread
            task, worker.task = worker.task, None
            if task is not None:
                break
        if restore_state is not None:
            restore_state()
        assert task is not None
        return task

    def _pass_on(self, task: Task) -> None:
        """Passes the baton to the worker of a task. The caller holds the lock."""
        self._running = task
        worker = task.worker or self._free_worker()
        worker.task = task
        worker.wake.release()

    def _next(self) -> Task | None:
        """Takes the next task to run; returns None if no task can run."""
        if self.order is None or self._aborted:
            return self._choose()
        task: Task | None = self.order.next(self._choose, self._likely)
        return task

    def _likely(self) -> Task | None:
        """Returns what `_choose` would take now; None if no task can run."""
        if self._resumed:
            return self._resumed[0][2]
        entry = None if self._backward and self._last_forward else self._admissible()
        if entry is None and self._backward:
            entry = self._backward[0]
        return None if entry is None else entry[2]

    def _choose(self) -> Task | None:
        """Takes the next task off its heap; returns None if no task can run.

        Forward work that goes on after a wait comes first: it is often the loss, for which the
        owner of the last segment waits. Then forward and backward work take turns, as in a 1F1B
        schedule; if only one kind is there, that runs.
        """
        if self._resumed:
            return heapq.heappop(self._resumed)[2]
        entry = None if self._backward and self._last_forward else self._admissible()
        if entry is not None:
            self._last_forward = True
            if entry is self._forward[0]:
                heapq.heappop(self._forward)
            else:
                self._forward.remove(entry)
                heapq.heapify(self._forward)
            return entry[2]
        if self._backward:
            self._last_forward = False
            return heapq.heappop(self._backward)[2]
        return None

    def _admissible(self) -> _Entry | None:
        """Returns the first, by priority, of the forward tasks that may begin; None if none may."""
        forward = self._forward
        if forward and _may_begin(forward[0][2]):
            return forward[0]
        rest = sorted(forward, key=lambda entry: entry[:2])[1:]
        return next((entry for entry in rest if _may_begin(entry[2])), None)

    def _run(self, worker: _Worker) -> None:
        """The life of a worker thread."""
        worker.prepare()
        worker.wake.acquire()
        task, worker.task = worker.task, None
        while True:
            if task is None:
                task = self._find_work(worker, None)
            task.worker = worker
            self.current.task = task
            try:
                # Each task changes a copy of its own.
                context = self.context.copy()
                if self.watch is None:
                    context.run(task.function)
                else:
                    with self.watch():
                        context.run(task.function)
                if self.order is not None and task.number is not None and not self._aborted:
                    self.order.slice_ends(False)
            except BaseException as error:
                if not isinstance(error, Aborted):
                    self._host.task_failed(task, error)
                self._host.clean_up(task)
            number = task.number
            # While this thread sleeps, it must not keep the task's objects alive.
            self.current.task = task = None
            with self._lock:
                self._running = None
                if number is not None and self.order is not None:
                    self.order.ended(number)


def _nothing() -> None:
    pass


def _may_begin(task: Task) -> bool:
    return task.admitted is None or task.admitted()


# An entry of a heap. The number decides between equal priorities; it is the order in which the
# tasks became runnable.
_Entry = tuple[Priority, int, Task]


class _Worker:
    """A thread that runs tasks. It sleeps while it waits for the baton."""

    def __init__(self, baton: Baton) -> None:
        # A raw lock, because releasing it runs no Python code; threading.Semaphore would.
        self.wake = _thread.allocate_lock()
        self.wake.acquire()
        # The task to run after waking; None to look for one.
        self.task: Task | None = None
        self.prepare = baton._host.prepare_thread()
        threading.Thread(target=baton._run, args=(self,), name="smp-task", daemon=True).start()
