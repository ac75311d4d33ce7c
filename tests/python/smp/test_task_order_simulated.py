"""The order of tasks by itself: batons of simulated ranks, whose messages come in random order.

Each case is a random program: bodies that call tasks on other ranks, which call others. Several
replicas run it in one process. Every slice of a task, from where it begins or goes on to where it
waits or ends, meets the same slice on the other replicas, as a collective would. So a case ends
only if all members of an order group run the same slices in the same order.
"""

from __future__ import annotations

import collections
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from ranks import rotating_or_all

from smddp.modelparallel.core.baton import Baton, Host, Priority, Task, Ticket
from smddp.modelparallel.core.order import Follower, Leader, TaskName

STALLED = 20.0  # seconds after which a case has stalled


class Mail:
    """An `Inbox` that lets the messages of any stream overtake those of other streams."""

    def __init__(self, deliver: Callable[[Any], None]) -> None:
        self.expects = True
        self.source = random.Random()
        self._deliver = deliver
        self._streams: dict[int, collections.deque[Any]] = collections.defaultdict(
            collections.deque
        )
        self._changed = threading.Condition()
        self._interrupted = False

    def put(self, sender: int, message: Any) -> None:
        with self._changed:
            self._streams[sender].append(message)
            self._changed.notify()

    def take(self, block: bool) -> list[Any]:
        with self._changed:
            while block and not self._interrupted and not any(self._streams.values()):
                self._changed.wait()
            if block:
                self._interrupted = False
            streams = [stream for stream in self._streams.values() if stream]
            self.source.shuffle(streams)
            taken: list[Any] = []
            for stream in streams:
                if taken and self.source.random() < 0.5:
                    continue
                count = self.source.randint(1, len(stream))
                taken.extend(stream.popleft() for _ in range(count))
            return taken

    def deliver(self, arrived: list[Any]) -> None:
        for message in arrived:
            self._deliver(message)

    def interrupt(self) -> None:
        with self._changed:
            self._interrupted = True
            self._changed.notify()


class Program:
    """What the tasks of a case do.

    Attributes:
        calls: of every task: (called task, its rank, does the caller wait then?).
        home: the rank of every task.
        microbatches: how many there are.
        active: how many of them may be active.
    """

    def __init__(self, source: random.Random, size: int) -> None:
        """Makes a random one for `size` ranks."""
        self.calls: dict[TaskName, list[tuple[TaskName, int, bool]]] = {}
        self.home: dict[TaskName, int] = {}
        self.microbatches = source.randint(2, 4)
        self.active = source.randint(2, 4)
        self._forward_waits = source.random() < 0.8

        def fill(name: TaskName, rank: int, depth: int) -> None:
            self.home[name] = rank
            calls = self.calls[name] = []
            for number in range(source.randint(1, 3) if depth == 0 else source.randint(0, 2)):
                if depth >= 2:
                    break
                target = source.randrange(size)
                called = TaskName("forward", name.microbatch, (*name.path, number))
                fill(called, target, depth + 1)
                calls.append((called, target, source.random() < 0.5))
            if name.kind == "body":
                for called, target, _ in list(calls):
                    back = TaskName("backward", name.microbatch, called.path)
                    self.home[back] = target
                    self.calls[back] = [
                        (
                            TaskName("backward", name.microbatch, inner.path),
                            place,
                            source.random() < 0.5,
                        )
                        for inner, place, _ in self.calls[called]
                    ]
                    for inner, place, _ in self.calls[back]:
                        self.home[inner], self.calls[inner] = place, []
                    calls.append((back, target, True))

        for microbatch in range(self.microbatches):
            fill(TaskName("body", microbatch), 0, 0)

    def pairs(self) -> list[tuple[TaskName, TaskName, TaskName]]:
        """Returns tasks with two calls that they make one after the other on the same rank."""
        return [
            (name, first, second)
            for name, calls in self.calls.items()
            for (first, place, waits), (second, other, _) in itertools.pairwise(calls)
            if not waits and place == other and first.kind == second.kind
        ]

    def goes_on(self, name: TaskName) -> bool:
        """Does a task go on with forward work after a wait?"""
        return name.kind != "backward" and self._forward_waits


class Rank(Host):
    """One rank of one replica."""

    def __init__(self, job: Job, replica: int, number: int) -> None:
        self.job, self.replica, self.number = job, replica, number
        self.mail = Mail(self.receive)
        order: Any = None
        if job.ordered:
            order = Follower(self) if replica else Leader(self.announce)
        self.baton = Baton(self, self.mail, order)
        self.pending: list[Any] = []  # announcements on their way here
        self.log: list[Any] = []
        self.tickets: dict[Any, Ticket] = {}
        self.under_way: collections.Counter[int] = collections.Counter()
        self.ended = 0
        self.errors: list[Any] = []

    def begin(self, seed: int) -> None:
        self.mail.source = random.Random(seed)
        self.log, self.tickets, self.ended = [], {}, 0
        self.under_way.clear()
        self.baton.begin()
        self.baton.wake()

    # --- the order group

    def announce(self, decisions: list[Any]) -> None:
        for replica in self.job.ranks[1:]:
            follower = replica[self.number]
            follower.pending.extend(decisions)
            # Otherwise they go with the next ones, or when the test thread looks.
            if self.mail.source.random() < 0.5:
                follower.carry()

    def carry(self) -> None:
        with self.baton.changing_order() as order:
            batch, self.pending = self.pending, []
            order.announce(batch)

    def diverged(self, *what: Any) -> None:
        self.errors.append(what)
        self.baton.abort()

    def completed(self) -> None:
        pass

    def task_failed(self, task: Task, error: BaseException) -> None:
        self.errors.append(error)
        self.baton.abort()

    # --- the work

    def send(self, target: int, message: Any) -> None:
        self.job.ranks[self.replica][target].mail.put(self.number, message)

    def receive(self, message: Any) -> None:
        kind, name, *rest = message
        if kind == "answer":
            self.baton.complete(self.ticket(name))
        elif kind == "free":
            self.baton.submit(Task(Priority(False, name), self.finish))
        else:
            self.submit(name, *rest)

    def ticket(self, name: Any) -> Ticket:
        return self.tickets.setdefault(name, Ticket())

    def finish(self) -> None:
        self.ended += 1

    def submit(self, name: TaskName, caller: int) -> None:
        forward = name.kind != "backward"
        admitted = None
        if name.kind == "forward":
            admitted = lambda: self.admits(name.microbatch)  # noqa: E731
        priority = Priority(forward, name.microbatch, name.path)
        task = Task(priority, lambda: self.work(name, caller), admitted)
        task.name = name
        self.baton.submit(task)

    def admits(self, microbatch: int) -> bool:
        assert self.replica == 0 or not self.job.ordered, "a follower has decided alone"
        active = +self.under_way
        return not active or microbatch in active or microbatch < min(active) or len(active) < 2

    def use(self, name: TaskName, number: int) -> None:
        """Does what else there is to do in a slice of a task."""

    def leave(self, name: TaskName) -> None:
        """Does what else there is to do at the end of a task."""

    def work(self, name: TaskName, caller: int) -> None:
        """Runs the program of a task: calls others, and sometimes waits before it has to."""
        if name.kind == "forward":
            self.under_way[name.microbatch] += 1
        slices = 0

        def meet() -> None:
            nonlocal slices
            what = (name, slices)
            self.log.append(what)
            self.use(name, slices)
            if self.job.meets:
                self.job.meetings[self.number].wait(STALLED)
            slices += 1

        def wait(called: TaskName) -> None:
            # The answer may have come already.
            self.baton.wait(
                self.ticket(called),
                Priority(self.job.program.goes_on(name), name.microbatch, name.path),
            )
            meet()

        meet()
        if self.job.pauses:
            time.sleep(self.mail.source.random() * self.job.pauses)
        open_calls: list[TaskName] = []
        for called, rank, waits in self.job.program.calls[name]:
            self.send(rank, ("call", called, self.number))
            open_calls.append(called)
            if waits:
                for one in open_calls:
                    wait(one)
                open_calls = []
        for one in open_calls:
            wait(one)
        self.leave(name)
        if name.kind == "backward":
            self.under_way[name.microbatch] -= 1
            if self.mail.source.random() < 0.3:
                self.baton.submit(Task(Priority(False, name.microbatch), lambda: None))
        if name.kind == "body":
            self.job.start_more(self)
        else:
            self.send(caller, ("answer", name))
        self.finish()


class Job:
    """Replicas of a pipeline, and the program of a case."""

    RANK: type[Rank] = Rank

    def __init__(self, ranks: int, replicas: int, ordered: bool = True, meets: bool = True) -> None:
        self.ordered, self.meets, self.pauses = ordered, meets, 0.0
        self.size = ranks
        self.ranks: list[list[Rank]] = []
        self.ranks = [
            [self.RANK(self, replica, rank) for rank in range(ranks)] for replica in range(replicas)
        ]
        # For the ranks of each order group, as in a collective.
        self.meetings = [threading.Barrier(replicas) for _ in range(ranks)]

    def everybody(self) -> list[Rank]:
        return [rank for replica in self.ranks for rank in replica]

    def start_more(self, rank: Rank) -> None:
        if self.started[rank.replica] < self.program.microbatches:
            self.started[rank.replica] += 1
            rank.submit(TaskName("body", self.started[rank.replica] - 1), -1)

    def run(self, seed: int) -> None:
        """Runs a case.

        Raises:
            AssertionError: it has stalled, or ranks of an order group ran different things.
        """
        source = random.Random(seed)
        self.program = Program(source, self.size)
        expected = collections.Counter(self.program.home.values())
        for rank in self.everybody():
            rank.begin(source.randrange(1 << 30))
        self.started = [0] * len(self.ranks)
        for replica in self.ranks:
            for _ in range(self.program.active):
                self.start_more(replica[0])
        deadline = time.monotonic() + STALLED
        while any(rank.ended < expected[rank.number] for rank in self.everybody()):
            time.sleep(0.0003)
            for replica in self.ranks[1:] if self.ordered else []:
                for rank in replica:
                    if rank.pending:
                        rank.carry()
            errors = [error for rank in self.everybody() for error in rank.errors]
            assert not errors, f"case {seed}: {errors}"
            assert time.monotonic() < deadline, f"case {seed} has stalled"
        for rank in self.everybody():
            rank.baton.wait_until_idle()
            assert rank.log == self.ranks[0][rank.number].log, f"case {seed} differs"


@pytest.mark.parametrize(
    ("ranks", "replicas", "cases"), [(2, 2, 800), (3, 2, 500), (2, 3, 400), (4, 2, 300)]
)
def test_followers_replay_the_order_of_the_leader(ranks: int, replicas: int, cases: int) -> None:
    job = Job(ranks, replicas)
    for case in rotating_or_all(list(range(cases)), cases // 4):
        # Without meetings a replica can be far behind the leader's.
        job.meets = case % 3 > 0
        job.pauses = 1e-4 if case % 5 == 0 else 0.0
        job.run(case)


def test_without_an_order_the_ranks_differ() -> None:
    job = Job(2, 2, ordered=False)
    job.meets = False

    def run() -> None:
        for case in range(100):
            job.run(case)

    with pytest.raises(AssertionError, match=r"^case \d+ differs"):
        run()


def test_a_leader_announces_all_before_it_ends() -> None:
    entered, goes_on = threading.Event(), threading.Event()
    told: list[Any] = []

    def announce(decisions: list[Any]) -> None:
        entered.set()
        assert goes_on.wait(STALLED)
        told.extend(decisions)

    leader = Leader(announce)
    one = task("body", 0)
    assert leader.next(lambda: one, nothing) is one
    worker = threading.Thread(target=leader.settle)
    worker.start()
    assert entered.wait(STALLED)
    ends = threading.Thread(target=leader.settle)
    ends.start()
    ends.join(0.1)
    assert ends.is_alive(), "the other thread has not announced its decision yet"
    goes_on.set()
    for thread in (worker, ends):
        thread.join(STALLED)
    assert told == [tuple(one.name or ())]


# --- a follower alone -----------------------------------------------------------------------------


class Told(list[Any]):
    def diverged(self, *what: Any) -> None:
        self.append(what)

    def completed(self) -> None:
        pass


def task(kind: str, microbatch: int, *path: int) -> Task:
    made = Task(Priority(True, microbatch), lambda: None)
    made.name = TaskName(kind, microbatch, path)
    return made


def nothing() -> None:
    return None


def test_a_follower_tells_tasks_apart() -> None:
    follower = Follower(Told())
    one, two, three = task("forward", 0, 0), task("forward", 0, 0), task("backward", 0, 0)
    for made in (three, one, two):
        assert follower.add(made)
    assert follower.next(nothing, nothing) is None
    follower.announce([tuple(one.name or ()), tuple(three.name or ()), ("forward", 0, (0,), 7), 0])
    # Tasks of one name begin in the order in which they have become runnable.
    assert [follower.next(nothing, nothing) for _ in range(3)] == [one, three, two]
    assert [made.number for made in (one, three, two)] == [0, 1, 2]
    follower.add(two)
    assert follower.next(nothing, nothing) is None, (
        "the first one goes on, not the other of this name"
    )
    follower.add(one)
    assert follower.next(nothing, nothing) is one
    assert follower.has_ready()
    free = Task(Priority(False, 0), lambda: None)
    assert not follower.add(free)
    assert follower.next(lambda: free, nothing) is free, "a task without a name waits for nobody"
    assert follower.abort() == [two]


def test_a_follower_finds_what_the_leader_has_not_run() -> None:
    told = Told()
    follower = Follower(told)
    first, second = task("forward", 0, 0), task("forward", 1, 0)
    follower.add(first)
    follower.announce([("forward", 0, (9,), -1), ("forward", 0, (0,), -1)])
    follower.end()
    assert follower.next(nothing, nothing) is None
    follower.settle()
    assert not told, "it is announced, and waits for another task"
    follower.add(second)
    assert follower.next(nothing, nothing) is None
    follower.settle()
    follower.settle()
    assert told == [("over", ("forward", 0, (9,), -1), [first.name, second.name])]


def test_a_follower_does_not_wait_for_ever() -> None:
    told = Told()
    follower = Follower(told)
    assert follower.next(nothing, nothing) is None
    assert follower.check(0.0, 0.0, 60.0) == 0.0
    follower.settle()
    assert not told, "there is nothing to run here, so nothing is held up"
    one = task("body", 0)
    follower.add(one)
    assert follower.check(0.0, 60.0, 60.0) > 50, "the time of an announcement has not come"
    assert follower.check(0.0, 0.0, 60.0) == 0.0
    follower.settle()
    assert told.pop() == ("silent", None, [one.name])
    follower.begin()
    follower.add(one)
    follower.announce([("body", 0, (), -1), 0])
    assert follower.next(nothing, nothing) is one
    assert follower.next(nothing, nothing) is None
    assert follower.check(60.0, 0.0, 0.0) > 50
    follower.end()
    assert follower.check(0.0, 0.0, 60.0) > 50
    follower.check(60.0, 60.0, 0.0)
    follower.settle()
    assert told == [("stuck", ("body", 0, (), -1), [])], "the body does not go on here"
