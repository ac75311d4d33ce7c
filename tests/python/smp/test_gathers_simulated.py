"""Gathers of sharded parameters in random schedules, on real batons without processes.

The programs and the simulated ranks are those of test_task_order_simulated.py. In each slice a task
holds and frees parameters at random, the same on all replicas. A gather meets those of the other
replicas: it ends when all have begun it, and they have to begin the same ones in the same order.
Steps are repeated, so that they have plans; some change their plans, and in some a replica fails.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from smp.test_task_order_simulated import STALLED, Job, Program, Rank

from smddp.modelparallel.core.baton import Task
from smddp.modelparallel.core.errors import SMPPeerError
from smddp.modelparallel.core.failure import PlanChangedError
from smddp.modelparallel.core.order import Leader, TaskName
from smddp.modelparallel.torch.sharding.gathers import Gathers, _Done
from smddp.modelparallel.torch.sharding.group_calls import GroupCalls

PARAMETERS = 5


class Entry:
    """A parameter, and this replica's part of it."""

    def __init__(self, number: int, replica: int, degree: int) -> None:
        self.number, self.name, self.padded = number, f"p{number}", degree
        self.holds = 0
        self.flat: Any = None
        self.shard = torch.tensor([10.0 * number + replica])

    def unshard(self, flat: Any) -> None:
        assert self.flat is None
        self.flat = flat

    def reshard(self) -> bool:
        self.flat = None
        return False


class Meeting:
    """The collective calls of one order group."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.counts = [0] * degree
        self.calls: list[tuple[Any, dict[int, Any]]] = []
        self.changed = threading.Condition()

    def join(self, replica: int, what: Any, mine: Any) -> int:
        with self.changed:
            number = self.counts[replica]
            self.counts[replica] += 1
            if number == len(self.calls):
                self.calls.append((what, {}))
            assert self.calls[number][0] == what, f"call {number}: {what}, {self.calls[number][0]}"
            self.calls[number][1][replica] = mine
            self.changed.notify_all()
            return number

    def result(self, number: int) -> list[Any]:
        with self.changed:
            parts = self.calls[number][1]
            if not self.changed.wait_for(lambda: len(parts) == self.degree, STALLED):
                raise AssertionError(f"call {number}, {self.calls[number][0]}, has only {parts}")
            return [parts[replica] for replica in range(self.degree)]


class Work:
    def __init__(self, meeting: Meeting, number: int, flat: Any) -> None:
        self.meeting, self.number, self.flat = meeting, number, flat

    def wait(self) -> None:
        self.flat.copy_(torch.cat(self.meeting.result(self.number)))


class Simulated(GroupCalls):
    """Calls that meet those of the other replicas in this process."""

    def __init__(self, meeting: Meeting, replica: int) -> None:
        super().__init__(None, "task")  # type: ignore[arg-type]
        self.meeting, self.replica = meeting, replica

    def gather(self, entry: Any, flat: Any) -> Any:
        number = self.meeting.join(self.replica, entry.number, entry.shard)
        return Work(self.meeting, number, flat)

    def compare(self, number: int) -> None:
        said = self.meeting.result(self.meeting.join(self.replica, "say", number))
        if len(set(said)) > 1:
            self.closed = True
            assert -2 in said, said
            if number != -2:
                raise SMPPeerError("the step failed on another replica")


class ToldError(Exception):
    """A task raises it on one replica."""


class ShardedRank(Rank):
    job: ShardedJob

    def __init__(self, job: Job, replica: int, number: int) -> None:
        super().__init__(job, replica, number)
        self.held: dict[Any, set[int]] = {}
        self.carrying = threading.Lock()

    def prepare(self, meeting: Meeting, degree: int) -> None:
        """Begins a case."""
        self.gathers = Gathers(None, self.job.limit, True, STALLED)  # type: ignore[arg-type]
        self.gathers.calls = Simulated(meeting, self.replica)
        entries: Any = [Entry(n, self.replica, degree) for n in range(PARAMETERS)]
        self.gathers.calls.entries = entries
        assert self.baton.order is not None
        self.baton.order.observer = self.gathers

    def announce(self, decisions: list[Any]) -> None:
        for replica in self.job.ranks[1:]:
            follower: Any = replica[self.number]
            with follower.carrying:
                follower.pending.extend(decisions)
            if self.mail.source.random() < 0.5:
                follower.carry()

    def carry(self) -> None:
        with self.carrying:
            super().carry()

    def task_failed(self, task: Task, error: BaseException) -> None:
        if not isinstance(error, (PlanChangedError, SMPPeerError, ToldError)):
            self.errors.append(error)
        self.job.stop(self, error)

    def use(self, name: TaskName, number: int) -> None:
        job = self.job
        if job.told == (self.replica, self.number, len(self.log)):
            raise ToldError
        held = self.held.setdefault(name, set())
        draws = random.Random(f"{job.case} {job.variant_of(name)} {name} {number}")
        for _ in range(draws.randint(0, 3)):
            entry: Any = self.gathers.calls.entries[draws.randrange(PARAMETERS)]
            if entry.number in held:
                held.discard(entry.number)
                self.gathers.release(entry)
                continue
            self.gathers.hold(entry)
            expected = [10.0 * entry.number + replica for replica in range(len(job.ranks))]
            assert entry.flat.tolist() == expected
            if draws.random() < 0.6:
                self.gathers.release(entry)
            else:
                held.add(entry.number)

    def leave(self, name: TaskName) -> None:
        for number in sorted(self.held.pop(name, ())):
            self.gathers.release(self.gathers.calls.entries[number])

    def end(self, failed: Any) -> None:
        """Ends the step, as `Executor` does."""
        while failed() and not self.baton._aborted:
            time.sleep(1e-4)  # no rank ends a failed step before it has heard of the failure
        self.baton.wait_until_idle()
        order: Any = self.baton.order
        if isinstance(order, Leader):
            order.settle()
            order.end()
            for replica in self.job.ranks[1:]:
                follower: Any = replica[self.number]
                follower.carry()
                if self.baton._aborted:
                    # The leader has said so on the same stream.
                    follower.baton.abort()
                with follower.baton.changing_order() as theirs:
                    theirs.end()
        try:
            self.redo = self.gathers.end_step(failed())
        except SMPPeerError:
            self.redo = False
        except BaseException as error:
            self.errors.append(error)


class ShardedJob(Job):
    RANK = ShardedRank

    def variant_of(self, name: TaskName) -> int:
        changes = random.Random(f"{self.case} {name}").random() < 0.1
        return self.variant if changes else 0

    def stop(self, rank: Any, error: BaseException) -> None:
        """Ends the step on all ranks, on each a little later."""
        with self.stopping:
            if self.stopped_by is not None:
                return
            self.stopped_by = error
        rank.baton.abort()
        others = [one for one in self.everybody() if one is not rank]
        self.delays.shuffle(others)
        for one in others:
            if self.delays.random() < 0.2:
                time.sleep(1e-4)
            one.baton.abort()

    def start(self, case: int) -> None:
        source = random.Random(f"program {case}")
        self.case, self.variant, self.told = case, 0, None
        self.limit = source.choice([1, 2, 5, 100]) * len(self.ranks)
        self.delays = random.Random(case)
        self.stopping = threading.Lock()
        self.program = Program(source, self.size)
        self.meetings_of_gathers = [Meeting(len(self.ranks)) for _ in range(self.size)]
        for rank in self.everybody():
            rank.prepare(self.meetings_of_gathers[rank.number], len(self.ranks))  # type: ignore[attr-defined]

    def step(self, seed: int, again: bool) -> str:
        """Runs a step; returns how it has ended: "", "redo" or "failed"."""
        source = random.Random(seed)
        expected: dict[int, int] = {}
        for home in self.program.home.values():
            expected[home] = expected.get(home, 0) + 1
        self.stopped_by = None
        ranks: list[Any] = self.everybody()
        for rank in ranks:
            rank.gathers.begin_step("step", again)
            rank.held = {}
            rank.mail._streams.clear()
        self.started = [0] * len(self.ranks)
        for rank in ranks:
            rank.begin(source.randrange(1 << 30))
        for replica in self.ranks:
            for _ in range(self.program.active):
                self.start_more(replica[0])
        deadline = time.monotonic() + 2 * STALLED
        while any(rank.ended < expected.get(rank.number, 0) for rank in ranks):
            if self.stopped_by is not None:
                break
            time.sleep(0.0003)
            for rank in ranks:
                if rank.pending:
                    rank.carry()
            assert time.monotonic() < deadline, f"case {self.case} has stalled"
        failed = lambda: self.stopped_by is not None  # noqa: E731
        threads = [threading.Thread(target=rank.end, args=(failed,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.0003)
            for rank in ranks:
                if rank.pending:
                    rank.carry()
            assert time.monotonic() < deadline, f"case {self.case} has stalled at its end"
        errors = [error for rank in ranks for error in rank.errors]
        assert not errors, f"case {self.case}: {errors}"
        for meeting in self.meetings_of_gathers:
            assert len(set(meeting.counts)) == 1, f"case {self.case}: {meeting.counts}"
        redo = any(rank.redo for rank in ranks)
        if self.stopped_by is None and not redo:
            for rank in ranks:
                assert rank.log == self.ranks[0][rank.number].log, f"case {self.case} differs"
                rank.gathers.accept()
        for rank in ranks:
            rank.gathers.leave_step()
        if isinstance(self.stopped_by, ToldError):
            return "failed"
        assert redo == (self.stopped_by is not None), f"case {self.case}: {self.stopped_by!r}"
        return "redo" if redo else ""


def run(job: ShardedJob, cases: range) -> dict[str, int]:
    """Runs cases of eight schedules and more each; returns how often something happened."""
    seen = {"prefetched": 0, "redo": 0, "failed": 0, "schedules": 0}

    def step(again: bool = False) -> str:
        seen["schedules"] += 1
        how = job.step(1000 * job.case + seen["schedules"], again)
        seen["prefetched"] += sum(rank.gathers.prefetched for rank in job.everybody())  # type: ignore[attr-defined]
        if how:
            seen[how] += 1
        return how

    for case in cases:
        job.meets = False
        job.pauses = 1e-4 if case % 5 == 0 else 0.0
        job.start(case)
        draws = random.Random(f"failure {case}")

        def fail_in_a_step(draws: random.Random = draws) -> str:
            # The replica, the rank, and how many slices it has run then; perhaps there are fewer.
            replica, number = draws.randrange(len(job.ranks)), draws.randrange(job.size)
            job.told = (replica, number, draws.randrange(1, 12))
            how = step()
            job.told = None
            return how

        fail_in_a_step()  # without plans
        assert step() == ""
        assert step() == "", "the plans are right"
        fail_in_a_step()
        assert step() == ""
        job.variant = 1
        if step() == "redo":
            assert step(again=True) == ""
        assert step() == ""
        job.variant = 2
        if fail_in_a_step() == "redo":  # whichever comes first
            assert step(again=True) == ""
    return seen


@pytest.mark.parametrize(
    ("ranks", "replicas", "cases"),
    [
        (2, 2, range(8)),
        (3, 2, range(4)),
        (2, 3, range(4)),
        pytest.param(2, 2, range(8, 500), marks=pytest.mark.exhaustive),
        pytest.param(3, 2, range(4, 300), marks=pytest.mark.exhaustive),
        pytest.param(2, 3, range(4, 300), marks=pytest.mark.exhaustive),
        pytest.param(4, 2, range(180), marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.timeout(1800)
def test_all_replicas_gather_the_same(ranks: int, replicas: int, cases: range) -> None:
    seen = run(ShardedJob(ranks, replicas), cases)
    assert all(seen.values()), seen
    assert seen["schedules"] >= 8 * len(cases)


class Alone(GroupCalls):
    """Notes gathers, and does not wait for other ranks."""

    def __init__(self) -> None:
        super().__init__(None, "task")  # type: ignore[arg-type]
        self.entries = [Entry(n, 0, 1) for n in range(PARAMETERS)]  # type: ignore[misc]
        self.made: list[int] = []

    def gather(self, entry: Any, flat: Any) -> Any:
        self.made.append(entry.number)
        flat.copy_(entry.shard)
        return _Done()

    def compare(self, number: int) -> None:
        pass


def run_task(gathers: Gathers, name: str, numbers: list[int]) -> None:
    """Runs a task of one slice that holds parameters one after the other."""
    gathers.decided((name,))
    gathers.begun()
    for number in numbers:
        gathers.hold(gathers.calls.entries[number])
        gathers.release(gathers.calls.entries[number])
    gathers.ended()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_rank_that_leaves_a_plan_makes_its_gathers(goes_on: bool) -> None:
    """So it does if it runs another task before it hears that the step has failed."""
    gathers = Gathers(None, 100, True, STALLED)  # type: ignore[arg-type]
    gathers.calls = alone = Alone()
    gathers.begin_step("step", again=False)
    run_task(gathers, "a", [1, 1, 2])  # the second time it has been kept
    run_task(gathers, "b", [])
    gathers.over()
    gathers.end_step(failed=False)
    gathers.accept()
    gathers.leave_step()
    alone.made.clear()

    gathers.begin_step("step", again=False)
    with pytest.raises(PlanChangedError):
        run_task(gathers, "a", [3])
    if goes_on:
        run_task(gathers, "b", [])
    gathers.stopped()
    gathers.over()
    assert gathers.end_step(failed=True)
    assert alone.made == [1, 2]
