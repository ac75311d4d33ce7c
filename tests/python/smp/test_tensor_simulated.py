"""Tensor parallelism in random schedules, without processes: threads are the ranks of a job.

A rank has its `Executor`, `Driver`, `OrderGroup` and `Collectives`, as in a job. Simulated are

* the streams: their messages come late, and overtake those of other streams;
* the collective calls: each ends when all ranks of the tp group have begun it;
* the modules: tasks run the random programs of test_task_order_simulated.py, and exchange values
  with the other ranks of the tp group. In some steps a task fails on one rank. In others all ranks
  but one join two calls of a task in one graph, because they know the structure of the first
  result; then all have to run the step again.

A rank runs many steps, and waits for other ranks only as a step does. All steps have to end, with
the same outcome on all ranks. The ranks of a tp group have to make the same calls in the same
order, in failed steps as well, and the members of an order group have to run the same slices.
Results have to have the bits of one thread, which runs one task after the other.
"""

from __future__ import annotations

import collections
import itertools
import random
import threading
import time
import types
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from smp.test_task_order_simulated import Program
from torch import Tensor, nn

from smddp.modelparallel.core.baton import Priority, Task, Ticket
from smddp.modelparallel.core.errors import SMPError
from smddp.modelparallel.core.failure import Redo, StructureChangedError, summary
from smddp.modelparallel.core.order import Follower, TaskName
from smddp.modelparallel.core.step_machine import Verdict
from smddp.modelparallel.core.topology import Topology
from smddp.modelparallel.torch.job import collectives as collectives_module
from smddp.modelparallel.torch.job.collectives import Collectives
from smddp.modelparallel.torch.job.init import _order_groups
from smddp.modelparallel.torch.pipeline import channel as channel_module
from smddp.modelparallel.torch.pipeline.channel import Arrival, Ended
from smddp.modelparallel.torch.pipeline.driver import Body, Driver
from smddp.modelparallel.torch.pipeline.executor import Executor
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.model import PipelineModel
from smddp.modelparallel.torch.pipeline.order_group import OrderGroup
from smddp.modelparallel.torch.pipeline.protocol import Kind, Message
from smddp.modelparallel.torch.pipeline.step import Schedule, StepBegin, StepReport

STALLED = 30.0  # seconds after which a rank has stalled
TIMEOUT = timedelta(seconds=300)  # of the groups: stalls have to be found before it
WIDTH = 12  # elements of a value; 2, 3 and 4 ranks divide it
KINDS = ["all_gather", "all_to_all", "reduce_scatter", "sum", "maximum"]


# --- what is simulated ----------------------------------------------------------------------------


class Shared:
    """What the members of a group have in common: the ends of their streams, and their calls."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.streams: dict[int, Streams] = {}
        self.meeting = Meeting(len(ranks))


class Group:
    """Stands for a process group."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self._rank = shared, shared.ranks.index(rank)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.shared.ranks)

    def _get_backend(self, device: torch.device) -> None:
        return None


class Streams:
    """Streams in memory, in place of those over other backends than smddp."""

    def __init__(self, group: Group, peers: list[int]) -> None:
        self._rank, self._streams = group.rank(), group.shared.streams
        self._streams[self._rank] = self
        self._coming: dict[int, collections.deque[Message]] = {
            peer: collections.deque() for peer in peers
        }
        self._open: set[int] = set()
        self._interrupted = False
        self._changed = threading.Condition()
        self._source = random.Random(f"{group.shared.ranks} {self._rank}")

    def open(self) -> None:
        with self._changed:
            self._open.update(self._coming)
            self._changed.notify()

    def send(self, peer: int, header: bytes, tensors: Sequence[Any], last: bool) -> None:
        pause(self._source)
        self._streams[peer].put(self._rank, channel_module._message(header, list(tensors)))

    def put(self, sender: int, message: Message) -> None:
        with self._changed:
            self._coming[sender].append(message)
            self._changed.notify()

    def _arrived(self) -> list[int]:
        return [peer for peer in self._open if self._coming[peer]]

    def take(self, block: bool) -> list[Arrival]:
        with self._changed:
            while block and not self._interrupted and not self._arrived():
                self._changed.wait()
            self._interrupted &= not block
            peers = self._arrived()
            self._source.shuffle(peers)
            taken: list[Arrival] = []
            for peer in peers:
                if taken and self._source.random() < 0.5:
                    continue
                for _ in range(self._source.randint(1, len(self._coming[peer]))):
                    message = self._coming[peer].popleft()
                    taken.append((peer, message))
                    if message.kind == Kind.END:  # what follows belongs to the next step
                        taken.append((peer, Ended(None)))
                        self._open.discard(peer)
                        break
            return taken

    def interrupt(self) -> None:
        with self._changed:
            self._interrupted = True
            self._changed.notify()

    def flush(self) -> None:
        pass

    def abort(self) -> None:
        pass


def pause(source: random.Random) -> None:
    """Sometimes lets other threads go first."""
    if source.random() < 0.1:
        time.sleep(source.random() * 2e-4)


class Call:
    """A collective call; `result` is there when all ranks have begun it."""

    def __init__(self, what: Any) -> None:
        self.what = what
        self.arguments: dict[int, Tensor] = {}
        self.results: list[Tensor] | None = None
        self.zeros = False  # has a rank completed it after a failure?


class Meeting:
    """The calls of a group, in the order in which each rank has begun them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.forget()

    def forget(self) -> None:
        self.calls: list[Call] = []
        self.counts = [0] * self.size

    def begin(self, rank: int, kind: str, result: Tensor, argument: Tensor, zeros: bool) -> Call:
        what = kind, result.shape, argument.shape
        with self.changed:
            number = self.counts[rank]
            self.counts[rank] += 1
            if number == len(self.calls):
                self.calls.append(Call(what))
            call = self.calls[number]
            assert call.what == what, f"call {number}: {what} meets {call.what}"
            call.arguments[rank] = argument.clone()
            call.zeros |= zeros
            if len(call.arguments) == self.size:
                arguments = [call.arguments[member] for member in range(self.size)]
                call.results = combined(kind, arguments)
                self.changed.notify_all()
            return call

    def end(self, rank: int, call: Call, result: Tensor) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: call.results is not None, STALLED), (
                f"{call.what} of rank {rank} has stalled: it has only {sorted(call.arguments)}"
            )
        assert call.results is not None
        result.copy_(call.results[rank])


def collective(kind: str) -> Any:
    """Returns what makes calls of a kind, as the functions of `torch.distributed` do."""

    def make(result: Tensor, argument: Tensor, group: Group, async_op: bool = False) -> Any:
        meeting = group.shared.meeting
        call = meeting.begin(group.rank(), kind, result, argument, zeros=async_op)

        def wait() -> None:
            meeting.end(group.rank(), call, result)

        return types.SimpleNamespace(wait=wait) if async_op else wait()

    return make


# --- what tasks do --------------------------------------------------------------------------------


def combined(kind: str, arguments: list[Tensor]) -> list[Tensor]:
    """Returns the results of a collective call on all ranks."""
    size = len(arguments)
    if kind == "all_gather":
        return [torch.cat(arguments)] * size
    if kind == "all_to_all":
        parts = [argument.chunk(size) for argument in arguments]
        return [torch.cat(mine) for mine in zip(*parts, strict=True)]
    stacked = torch.stack(arguments)
    total = stacked.amax(0) if kind == "maximum" else stacked.sum(0)
    return list(total.chunk(size)) if kind == "reduce_scatter" else [total] * size


def buffers(kind: str, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns the result, and the argument, of a call with which a task exchanges a value."""
    if kind == "all_gather":
        return x.new_empty(size * WIDTH), x
    if kind == "all_to_all":
        return torch.empty_like(x), x
    if kind == "reduce_scatter":
        return torch.empty_like(x), torch.cat([x + member for member in range(size)])
    result = x.clone()
    return result, result


def exchanged(x: Tensor, result: Tensor) -> Tensor:
    """Returns the value of a task after a call."""
    return torch.sin(x + result.view(-1, WIDTH).sum(0))


def work(program: Program, seed: int, name: TaskName, x: Tensor) -> Generator[Any, Any, Tensor]:
    """Does what a task does with a value; returns what its caller gets.

    It yields ("exchange", kind, value), ("backward", None, value), ("call", called task, value) and
    ("wait", called task, value); it is sent the new value, or the answer of the called task.
    """
    slices = itertools.count()

    def exchanges(x: Tensor) -> Generator[Any, Any, Tensor]:
        source = random.Random(f"{seed} {name} {next(slices)}")
        for _ in range(source.randrange(3)):
            x = yield "exchange", source.choice(KINDS), x
        return x

    x = yield from exchanges(x)
    called: list[TaskName] = []
    calls = program.calls[name]
    for number, (one, _, waits) in enumerate(calls, 1):
        if name.kind == "body" and one.kind == "backward":
            yield "backward", None, x
        yield "call", one, x
        called.append(one)
        while called and (waits or number == len(calls)):
            answer = yield "wait", called.pop(0), x
            x = yield from exchanges(x + answer)
    return x


def expected(program: Program, seed: int, name: TaskName, values: list[Tensor]) -> list[Tensor]:
    """Runs a task, and all that it calls, on all ranks of a tp group in this thread."""
    tasks = [work(program, seed, name, x) for x in values]
    replies: list[Any] = [None for _ in values]
    answers = {}
    while True:
        asked, ended = [], []
        for task, reply in zip(tasks, replies, strict=True):
            try:
                asked.append(task.send(reply))
            except StopIteration as end:
                ended.append(end.value)
        if ended:
            return ended
        what, key, _ = asked[0]
        values = [x for *_, x in asked]
        replies = [None for _ in values]
        if what == "exchange":
            results = combined(key, [buffers(key, x, len(values))[1] for x in values])
            replies = [exchanged(*each) for each in zip(values, results, strict=True)]
        elif what == "call":
            answers[key] = expected(program, seed, key, values)
        elif what == "wait":
            replies = answers.pop(key)


def first_value(microbatch: int, rank: int) -> Tensor:
    """Returns the value with which a body begins."""
    return torch.cos(torch.arange(float(WIDTH)) + 10 * microbatch + rank)


# --- ranks and jobs -------------------------------------------------------------------------------


class Case:
    """One step of all ranks, and what has become of it.

    Attributes:
        fault: the rank that fails, how often that rank calls `Rank.may_fail` before, and the error.
        failed: has it?
        joined: two calls that one task makes in one graph; None if there are none.
        odd: the rank where this task makes two graphs of them.
        outcomes: by rank, why the step has failed, whether it has to be run again, and its results.
        slices: by rank.
    """

    def __init__(self, seed: int, job: Job) -> None:
        source = random.Random(seed)
        self.seed = seed
        self.program = Program(source, job.partitions)
        pipeline = "simple" if source.random() < 0.2 else "interleaved"
        self.schedule = Schedule.of(
            pipeline, self.program.microbatches, self.program.active, job.partitions
        )
        self.fault: tuple[int, int, Exception] | None = None
        if source.random() < 0.5:
            error = source.choice([ZeroDivisionError, ZeroDivisionError, StructureChangedError])
            count = source.randint(1, source.choice([5, 20, 80]))
            self.fault = source.randrange(job.size), count, error("told to fail")
        self.failed = False
        self.joined: tuple[TaskName, TaskName] | None = None
        self.odd = -1
        pairs = self.program.pairs()
        if self.fault is None and job.partitions > 1 and pairs and source.random() < 0.5:
            caller, first, second = source.choice(pairs)
            self.joined = first, second
            home = self.program.home[caller]
            places = [rank for rank in job.ranks if rank.topology.rank_in("pp") == home]
            self.odd = source.choice(places).number
        self.outcomes: dict[int, tuple[str, bool, list[Tensor]]] = {}
        self.slices: dict[int, list[Any]] = {}

    def check(self, job: Job) -> None:
        for replica in job.replicas:
            failed = self.failed and self.fault is not None and self.fault[0] in replica
            redo = failed and isinstance(self.fault[2], StructureChangedError)  # type: ignore[index]
            if self.odd in replica:
                failed = redo = True
            for rank in replica:
                why, again, _ = self.outcomes[rank]
                assert ("told to fail" in why) == (failed and not redo), f"{self}: {why}"
                assert bool(why) == (failed and not redo), f"{self}: {why}"
                assert again == redo, f"{self}: {again}"
            if not failed:
                self._check_results(job, replica)

    def _check_results(self, job: Job, replica: Sequence[int]) -> None:
        firsts = [
            [first_value(microbatch, rank) for rank in range(job.degree)]
            for microbatch in range(self.program.microbatches)
        ]
        wanted = [
            expected(self.program, self.seed, TaskName("body", number), values)
            for number, values in enumerate(firsts)
        ]
        for rank in replica:
            place = job.ranks[rank].topology
            results = self.outcomes[rank][2]
            assert len(results) == len(wanted)
            for result, values in zip(results, wanted, strict=True):
                assert torch.equal(result, values[place.rank_in("tp")]), f"{self} has other bits"
            first = job.ranks[rank].member.group.ranks[0]  # type: ignore[union-attr]
            assert self.slices[rank] == self.slices[first], f"{self} has another order"

    def __str__(self) -> str:
        return f"case {self.seed} with fault {self.fault}, {self.joined} not joined on {self.odd}"


class Model:
    """What a step trains: nothing."""

    undecided, order_mattered = False, False

    def __init__(self) -> None:
        self.steps = 0

    def begin(self, name: str, names: Any) -> StepBegin:
        return StepBegin(self.steps, name, None, names, 0)

    def compare(self) -> None:
        pass

    def accept_begin(self, begin: StepBegin) -> None:
        assert begin.number == self.steps

    def apply(self, decision: Any) -> None:
        raise AssertionError("the model is divided from the beginning")

    def end_microbatch(self, microbatch: int) -> None:
        pass

    def report(self) -> StepReport:
        return StepReport(False, {})

    def close(self, failed: bool) -> tuple[None, bool]:
        return None, False

    def accept_reports(self, reports: Any, order_matters: bool) -> None:
        pass

    def abstain(self, failure: str) -> None:
        raise AssertionError("the model is divided from the beginning")

    def reduce(self, failure: str, verdict: Verdict, alone: bool) -> None:
        if verdict.redo and not failure:
            raise Redo

    def restore(self) -> None:
        pass

    def release_step(self) -> None:
        pass

    def note_success(self) -> None:
        pass


def _leave(reason: str, lost: bool) -> None:
    raise AssertionError(f"no rank is lost here, and one leaves: {reason}")


class Rank(Executor):
    """One rank of a job. It serves tasks of programs in place of segments."""

    def __init__(self, job: Job, topology: Topology) -> None:
        self.job, self.topology, self.number = job, topology, topology.rank
        groups: Any = {kind: job.group(kind, self.number) for kind in ("pp", "order", "tp")}
        super().__init__(
            *(groups["pp"], topology.rank_in("pp"), topology.pp_size, 0.0, _leave),
            OrderGroup(groups["order"], TIMEOUT),
            Collectives(groups["tp"]),
        )
        self.adopt(PipelineModel(self, self.caller, nn.Module()))
        self.set_divided()
        assert self.member is not None
        assert (self.member.waits is None) == (self.size == 1)
        self.member.on_wait = self._on_wait  # type: ignore[method-assign]
        self.trained = Model()
        self.mail.work[Kind.FORWARD] = self._on_call
        self.mail.work[Kind.BACKWARD] = self._on_answer
        self.source = random.Random(self.number)

    def steps(self, cases: list[Case]) -> None:
        """Runs a step for each case."""
        try:
            for case in cases:
                self._step(case)
                self.job.progress = time.monotonic()
        except BaseException as error:
            self.job.errors.append(error)

    def _step(self, case: Case) -> None:
        self.case, self.count = case, 0
        self.slices: list[Any] = []
        self.answers: dict[TaskName, Tensor] = {}
        self.tickets: dict[TaskName, Ticket] = collections.defaultdict(Ticket)
        self.under_way: collections.Counter[int] = collections.Counter()
        self.trained.steps += 1
        driver = None
        if self.rank == 0:
            # It was called before, with gradients or not.
            body = Body(self._body, "body", (), {}, True, trains=case.seed % 2 == 0)
            numbers = torch.arange(float(case.schedule.microbatches))
            driver = Driver(self, body, case.schedule, (numbers,), {}, self._same_seed)
        pause(self.source)
        failure, redo, results = "", False, []
        try:
            results = self.run("step", case.schedule, self.trained, driver).tensors
        except Redo:
            redo = True
        except SMPError as error:
            failure = summary(error)
        case.outcomes[self.number] = failure, redo, results
        case.slices[self.number] = self.slices

    def _same_seed(self, seed: int, _: Any) -> int:
        """Fails before there is a task."""
        self.may_fail()
        return seed

    def may_fail(self) -> None:
        """Fails if the case says so."""
        pause(self.source)
        self.count += 1
        fault = self.case.fault
        if fault is not None and fault[:2] == (self.number, self.count):
            self.case.failed = True
            raise fault[2]

    def _on_wait(self, task: int, call: int) -> None:
        time.sleep(0.01)  # the other rank has to wait for the answer
        assert self.member is not None
        type(self.member).on_wait(self.member, task, call)

    # --- tasks

    def _body(self, part: Tensor) -> Tensor:
        microbatch = int(part)
        task = self.baton.task
        assert task is not None
        x = first_value(microbatch, self.topology.rank_in("tp"))
        return self._work(TaskName("body", microbatch), task.frame, x)

    def _on_call(self, message: Message) -> None:
        fields, also, caller = message.header
        name, (x,) = TaskName(*fields), message.tensors
        also = TaskName(*also) if also is not None else None
        forward = name.kind == "forward"
        frame = Frame(name.microbatch, forward, name.path, "", len(name.path), True)

        def serve() -> None:
            assert x is not None
            self._serve(name, also, frame, x, caller)

        task = Task(
            Priority(forward, name.microbatch, frame.order),
            serve,
            (lambda: self._may_begin(name.microbatch)) if forward else None,
        )
        task.frame, task.name = frame, name
        self.baton.submit(task)

    def _on_answer(self, message: Message) -> None:
        name = TaskName(*message.header)
        self.answers[name] = message.tensors[0]  # type: ignore[assignment]
        self.baton.complete(self.tickets[name])

    def _may_begin(self, microbatch: int) -> bool:
        assert not isinstance(self.baton.order, Follower), "a follower has decided alone"
        active = +self.under_way
        return (
            self.case.schedule.simple
            or not active
            or microbatch in active
            or microbatch < min(active)
            or len(active) < 2
        )

    def _serve(
        self, name: TaskName, also: TaskName | None, frame: Frame, x: Tensor, caller: int
    ) -> None:
        forward = name.kind == "forward"
        self.enter(frame, forward)
        try:
            for one in [name] if also is None else [name, also]:
                if forward:
                    self.under_way[name.microbatch] += 1
                y = self._work(one, frame, x)
                if not forward:
                    self.under_way[name.microbatch] -= 1
                    if self.source.random() < 0.3:  # as a task that drops a graph
                        self.baton.submit(Task(Priority(False, name.microbatch), lambda: None))
                self.mail.send(caller, Kind.BACKWARD, tuple(one), [y])
        finally:
            self.timeline.leave()

    def _work(self, name: TaskName, frame: Frame, x: Tensor) -> Tensor:
        program, reply = self.case.program, None
        task = work(program, self.case.seed, name, x)
        self.slices.append(name)
        while True:
            try:
                what, key, x = task.send(reply)
            except StopIteration as end:
                what, key, x = "end", None, end.value
            self.may_fail()
            reply = None
            if what == "exchange":
                reply = self._exchange(key, x)
            elif what == "backward":
                self.reach_backward(frame)
            elif what == "call" and self.size == 1:  # as a module of the same rank
                self.answers[key] = self._work(key, frame, x)
                self.baton.complete(self.tickets[key])
            elif what == "call":
                self._call(key, frame, x)
            elif what == "end":
                return x
            else:
                if self.case.joined is None or key != self.case.joined[0] or not self._is_odd:
                    self.wait(self.tickets[key], frame, program.goes_on(name))
                self.slices.append((name, key))
                reply = self.answers.pop(key)

    @property
    def _is_odd(self) -> bool:
        return self.case.odd == self.number

    def _call(self, key: TaskName, frame: Frame, x: Tensor) -> None:
        first, second = self.case.joined or (None, None)
        new = self._is_odd and key == first
        task, also = self.baton.task, None
        assert task is not None
        assert task.number is not None
        assert self.member is not None
        assert self.member.waits is not None
        self.member.waits.called(task.number, new, new)
        if not self._is_odd and key == first:
            return
        if not self._is_odd and key == second:
            key, also = first, tuple(second)  # type: ignore[assignment,arg-type]
        home = self.case.program.home[key]
        self.mail.send(home, Kind.FORWARD, (tuple(key), also, self.rank), [x])
        if new:
            self.wait(self.tickets[key], frame, frame.forward)

    def _exchange(self, kind: str, x: Tensor) -> Tensor:
        assert self.collectives is not None
        meeting, place = self.job.shared["tp", self.number].meeting, self.topology.rank_in("tp")
        number = meeting.counts[place]
        result, argument = buffers(kind, x, self.topology.tp_size)
        self.collectives.make(kind, result, argument)  # type: ignore[attr-defined]
        assert not meeting.calls[number].zeros, "a task has got what a failed rank has sent"
        return exchanged(x, result)

    def task_failed(self, task: Task, error: BaseException) -> None:
        if isinstance(error, AssertionError):
            self.job.errors.append(error)
        super().task_failed(task, error)


class Job:
    """The ranks of a job.

    Attributes:
        replicas: the ranks that have to agree how a step has ended.
        progress: when a rank has ended a step.
    """

    def __init__(self, degree: int, partitions: int, replicas: int, one_order: bool) -> None:
        self.degree, self.partitions = degree, partitions
        self.size = degree * partitions * replicas
        self.shared: dict[tuple[str, int], Shared] = {}
        topologies = [
            Topology(rank, self.size, rank, self.size, partitions, degree, "DPT")
            for rank in range(self.size)
        ]
        cfg: Any = types.SimpleNamespace(
            sharded_data_parallel_degree=1, deterministic_server=one_order
        )
        for kind, groups in {
            "pp": topologies[0].groups("pp"),
            "tp": topologies[0].groups("tp"),
            "order": _order_groups(cfg, topologies[0]),
        }.items():
            for members in groups:
                shared = Shared(members)
                self.shared.update({(kind, rank): shared for rank in members})
        self.replicas = [range(self.size)]
        if not one_order:
            whole = degree * partitions
            self.replicas = [range(first, first + whole) for first in range(0, self.size, whole)]
        self.errors: list[BaseException] = []
        self.ranks = [Rank(self, topology) for topology in topologies]

    def group(self, kind: str, rank: int) -> Group:
        return Group(self.shared[kind, rank], rank)

    def run(self, seeds: Sequence[int]) -> list[Case]:
        """Runs a step for each seed, and checks them.

        Raises:
            AssertionError: a rank has stalled, or something is not as it should be.
        """
        cases = [Case(seed, self) for seed in seeds]
        self.progress = time.monotonic()
        threads = [
            threading.Thread(target=rank.steps, args=(cases,), daemon=True) for rank in self.ranks
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.002)
            assert not self.errors, self.errors
            stalled = next((c for c in cases if len(c.outcomes) < self.size), cases[-1])
            assert time.monotonic() < self.progress + 2 * STALLED, (
                f"{stalled} has stalled: only {sorted(stalled.outcomes)} have ended it"
            )
        assert not self.errors, self.errors
        for case in cases:
            case.check(self)
        for meeting in {shared.meeting for shared in self.shared.values()}:
            assert len(set(meeting.counts)) == 1, meeting.counts
            meeting.forget()
        return cases


@pytest.fixture(autouse=True)
def simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks_of(group: Group) -> list[int]:
        return group.shared.ranks

    monkeypatch.setattr(dist, "get_process_group_ranks", ranks_of)
    monkeypatch.setattr(channel_module, "_ThreadStreams", Streams)
    monkeypatch.setattr(collectives_module, "_KINDS", {kind: collective(kind) for kind in KINDS})


# The degree of tensor parallelism, partitions, replicas, do these run in one order; and how many
# cases there are, of which the first ones run in `make test`.
JOBS = [
    *((2, 1, 1, False, 600), (3, 1, 1, False, 300), (4, 1, 1, False, 300)),
    *((2, 1, 2, False, 300), (3, 1, 2, False, 150), (4, 1, 2, False, 150)),
    *((2, 2, 1, False, 2000), (3, 2, 1, False, 1000), (4, 2, 1, False, 800)),
    *((2, 3, 1, False, 1000), (3, 3, 1, False, 600), (4, 3, 1, False, 400)),
    *((2, 2, 2, False, 500), (3, 2, 2, False, 250), (4, 2, 2, False, 150)),
    *((2, 2, 2, True, 500), (3, 2, 2, True, 250), (4, 2, 2, True, 150)),
    *((2, 3, 2, False, 150), (3, 3, 2, False, 100), (4, 3, 2, False, 100)),
    *((2, 3, 2, True, 150), (3, 3, 2, True, 100), (4, 3, 2, True, 100)),
]
AT_A_TIME = 30


@pytest.mark.parametrize(
    ("job", "seeds"),
    [
        pytest.param(job, seeds, marks=marks)
        for *job, count in JOBS
        for seeds, marks in (
            (range(AT_A_TIME), ()),
            (range(AT_A_TIME, count), (pytest.mark.exhaustive,)),
        )
    ],
)
@pytest.mark.timeout(1800)
@pytest.mark.costly
def test_all_ranks_make_the_same_calls(job: Any, seeds: range) -> None:
    made = Job(*job)
    failed = odd = 0
    for first in range(seeds.start, seeds.stop, AT_A_TIME):
        cases = made.run(seeds[first - seeds.start :][:AT_A_TIME])
        failed += sum(case.failed for case in cases)
        odd += sum(case.joined is not None for case in cases)
    assert 0 < failed < len(seeds)
    assert (odd > 0) == (made.partitions > 1)
