"""One rank's part in the steps of a pipeline: what arrives, and what runs.

docs/model-parallel-design.md follows one microbatch through a step. This file has the life of a
step; ending.py drives the machine that says how it ends. calls.py has the caller's side of calls
between ranks, server.py the owner's side.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.core.baton import Aborted, Baton, Priority, Task, Ticket
from smddp.modelparallel.core.errors import SMPError, SMPUsageError
from smddp.modelparallel.core.failure import Redo, summary
from smddp.modelparallel.core.order import TaskName
from smddp.modelparallel.core.step_machine import SILENT, Event, Phase, Verdict
from smddp.modelparallel.torch.common import device
from smddp.modelparallel.torch.common.engine import forget_failed_pass
from smddp.modelparallel.torch.common.lost import smp_errors
from smddp.modelparallel.torch.common.random_state import RandomState
from smddp.modelparallel.torch.pipeline.calls import CallerSide
from smddp.modelparallel.torch.pipeline.channel import Arrival, Channel, Ended
from smddp.modelparallel.torch.pipeline.ending import SILENT_RANK, Ending
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.member import Member
from smddp.modelparallel.torch.pipeline.model import PipelineModel
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.order_group import OrderGroup
from smddp.modelparallel.torch.pipeline.protocol import Kind, Message
from smddp.modelparallel.torch.pipeline.server import Server
from smddp.modelparallel.torch.pipeline.stall import StallWatch
from smddp.modelparallel.torch.pipeline.step import (
    Schedule,
    StepBegin,
    StepCollectives,
    StepDriver,
    StepModel,
    StepResult,
)
from smddp.modelparallel.torch.pipeline.timeline import Timeline

__all__ = ["Executor"]

# Seconds that a rank waits for the others' END once it has no task left. A rank that computes
# answers when its task waits or ends.
_END_TIMEOUT = 120.0


class Executor:
    """Runs the steps of a pipeline on one rank.

    The thread that calls `run` waits there; the baton's threads do the work, and take the messages
    between two tasks. A failed step leaves the executor ready for the next one, unless a peer was
    lost. One executor lives from the first DistributedModel to `smp.shutdown`; what belongs to one
    model or one step is given to `adopt` and `run`.

    Attributes:
        rank, size: in the pipeline.
        baton: runs the tasks of this rank, one at a time.
        caller: the call graphs that code of this rank has sent.
        server: the segments that this rank runs for any rank.
        timeline: what ran in the last step, and when.
        channel: the streams to and from the other ranks; None if there are none.
        replicas: the streams to and from the other members of the order group; None without one.
        collectives: those of tasks, over members of the order group; None if there are none.
        ending: how steps end on this rank.
        member: of the order group; None without one.
        model: whose steps run; modules: its modules. Both since `adopt`.
        divided: has this rank applied the decision about where modules live? Until then it
            keeps the messages that begin or end work.
    """

    model: PipelineModel
    modules: Modules

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        stall_warning: float,
        abort: Callable[[str, bool], None],
        replicas: OrderGroup | None = None,
        collectives: StepCollectives | None = None,
    ) -> None:
        """Begins without a model.

        Args:
            group: the ranks of the pipeline; nothing else sends messages in it.
            rank: of this process in the group.
            size: of the group.
            stall_warning: seconds after which a step that does not end is logged; 0 for never.
            abort: see `Groups.abort`.
            replicas: the ranks of other replicas with which this one ends its steps, and runs its
                tasks in one order; None if there are none.
            collectives: see the class.
        """
        self.rank, self.size = rank, size
        self.timeline = Timeline()
        self._watch = StallWatch(group, rank, self.timeline, stall_warning if size > 1 else 0.0)
        self.replicas, self.collectives = replicas, collectives
        self._job_ranks = dist.get_process_group_ranks(group) if group is not None else [rank]
        self.member: Member | None = None
        if replicas is not None:
            of_job = self._job_ranks[rank]
            self.member = Member(self, of_job, replicas, collectives, size > 1, _END_TIMEOUT)
        self.baton = Baton(
            self._task_failed,
            self,
            lambda: RandomState().restore,
            None if self.member is None else self.member.order,
            _prepare_thread,
            _forget_values,
        )
        self.channel = Channel(group, rank, size) if group is not None and size > 1 else None
        self.ending = Ending(
            *(rank, self._job_ranks, self.baton, self.channel, abort, replicas, collectives),
            self._complete_late,
        )
        self.caller = CallerSide(self)
        self.server = Server(self, self.caller)
        # In a step: the model that it trains; on rank 0, what runs the body.
        self._model: StepModel | None = None
        self._driver: StepDriver | None = None
        # What to do with messages that begin or end work.
        self._handlers: dict[int, Callable[[Message], None]] = {
            Kind.GRAPH: lambda message: self.server.on_graph(*message.header),
            Kind.FORWARD: self.server.on_forward,
            Kind.BACKWARD: self.server.on_backward,
            Kind.DROP: lambda message: self.server.on_drop(*message.header),
            Kind.DONE: self._on_done,
        }
        self.divided = size == 1
        # (peer, message): what has come before this rank can use it.
        self._held: list[tuple[int, Message]] = []
        self._begun = False  # may messages of this step be acted upon?
        self._late: list[Any] = []  # the calls that it has begun for ranks that have failed
        self._random_state: RandomState | None = None  # of the script, on ranks that serve
        self._decision: Any = None  # the one that has come, and is not applied here yet
        self._steps = 0  # how many this rank has begun, including failed ones
        self._name = ""  # of the step function
        # Set when rank 0 has said where modules live, or has ended the step.
        self._placed = threading.Event()

    @property
    def peers(self) -> list[int]:
        """The other ranks of the pipeline."""
        return [peer for peer in range(self.size) if peer != self.rank]

    def adopt(self, model: PipelineModel) -> None:
        """Serves a model from now on; all ranks do so at the same point of the script."""
        self.divided = self.size == 1
        self.model, self.modules = model, model.modules
        self.caller.forget()
        self.server.adopt(model)

    def close(self) -> None:
        """Ends the threads; between steps."""
        self.baton.close()

    def finish(self) -> None:
        """Notes that all bodies have ended; the last task of rank 0 calls this."""
        self.ending.on(Event.BODIES_ENDED)

    def wait_for_finish(self) -> None:
        """Waits until `finish` was called, and until a follower has run all that its leader has.

        Raises:
            Aborted: the step has failed.
        """
        check = None if self.member is None else self.member.check
        self._watch.wait(self.ending.woken, self.modules, self._name, self._steps, check)
        if self.ending.failures:
            raise Aborted

    # --- the life of a step -----------------------------------------------------------------------

    def run(
        self, name: str, schedule: Schedule, model: StepModel, driver: StepDriver | None
    ) -> StepResult:
        """Runs one step.

        Args:
            name: of the step function that this rank has called.
            schedule: of the step, the same on all ranks.
            model: what the step trains.
            driver: on rank 0, what runs the body; None on the others.

        Returns:
            What the driver has returned, on every rank.

        Raises:
            Redo: a module returned another structure than its caller had relied on, or a buffer
                that other ranks read has changed while microbatches overlapped.
            SMPMicrobatchError: a microbatch failed, here or elsewhere.
            SMPUsageError: the arguments cannot be divided, or ranks are in different steps.
            SMPPartitionError: the model cannot be divided as asked.
            SMPPeerError: a rank is gone, or another replica has failed.
        """
        self._name = name
        self._model, self._driver = model, driver
        # Segments seed the generators of the ranks that serve.
        self._random_state = RandomState() if driver is None else None
        take_part = functools.partial(self._take_part, name)
        try:
            self._begin(schedule, model)
            result = self.ending.run(
                {
                    **dict.fromkeys(SILENT, take_part),
                    Phase.SETTLING: self._settle,
                    Phase.PLACING: self._await_place,
                    Phase.COMPLETING: self._complete_collectives,
                    Phase.CLOSING: self._close_step,
                    Phase.DRAINING: self._await_ends,
                    Phase.RELEASING: self._release,
                    Phase.MEETING: self._meet,
                    Phase.AGREEING: self._agree,
                    Phase.REDUCING: self._reduce,
                }
            )
        except Redo:
            model.restore()
            raise
        except BaseException as error:
            self.ending.abandon(error)
            raise
        finally:
            model.release_step()
            self._model = self._driver = None
            self.ending.forget()
        model.note_success()
        return result

    def _begin(self, schedule: Schedule, model: StepModel) -> None:
        self.baton.context = contextvars.copy_context()
        self._placed.clear()
        self.server.under_way_limit = schedule.under_way_limit
        self._steps += 1
        self.timeline.begin()
        self.ending.begin(model, self.divided, model.undecided)
        # This ends the abort of a failed step. It is done here and not at the end of that step,
        # because more failures may arrive after that.
        self.baton.begin()
        if self.channel is not None:
            self.channel.open()
        if self.collectives is not None:
            self.collectives.begin_step()
        if self.member is not None:
            self.member.begin_step(self.divided)

    # What the thread of the caller does in the phases of `step_machine`.

    def _take_part(self, name: str) -> None:
        """Does this rank's part in a step, until there is a result."""
        model, driver = self._model, self._driver
        assert model is not None
        if driver is None:
            model.compare()
            self.baton.wake()
            self.wait_for_finish()
        else:
            names = None if self.divided else self.modules.names
            begin = model.begin(name, names)
            for peer in self.peers:
                self.send(peer, Kind.BEGIN, begin)
            self._begin_step()
            self.ending.result = driver.drive()

    def _settle(self) -> None:
        self.baton.wake()
        self.baton.wait_until_idle()

    def _await_place(self) -> None:
        self._placed.wait(_END_TIMEOUT)

    def _complete_collectives(self) -> None:
        """Begins calls so that no rank waits for one that this rank does not make any more.

        This rank waits for them after its gathers: they may need a rank that waits in a gather.
        """
        self._apply_late_decision()
        if self.collectives is None or self.replicas is None or self.ending.left:
            return
        self.collectives.settle()
        if self.ending.failures:
            self.replicas.await_stops()
            self._complete_late()

    def _complete_late(self) -> None:
        """Begins the calls that ranks had begun which have stopped, and this one has not."""
        if self.collectives is not None and self.replicas is not None and not self.ending.left:
            made = self.replicas.stops
            ranks = self.collectives.ranks
            self._late += self.collectives.complete(made.get(rank, ()) for rank in ranks)

    def _close_step(self) -> None:
        assert self._model is not None
        error, redo = self._model.close(bool(self.ending.failures))
        if redo:
            self.ending.find_wrong_plan()
        if error is not None:
            # The others do not know of any other error, such as one for lack of memory.
            known = isinstance(error, SMPError) and not isinstance(error.__cause__, dist.DistError)
            self.ending.fail_together(error, alone=not known)
        self._await_late()

    def _await_late(self) -> None:
        late, self._late = self._late, []
        with smp_errors():
            for work, *_ in late:
                work.wait()

    def _await_ends(self) -> None:
        """Waits until all peers have ended the step.

        The streams from those that have not in time count as broken: the END that they may still
        send belongs to this step, and the next one must not read it.
        """
        assert self.channel is not None
        silent = self.channel.drain(_END_TIMEOUT)
        if not silent:
            return
        for peer in silent:
            self.channel.end(peer, Ended(RuntimeError(f"it {SILENT_RANK}")))
        self.channel.interrupt()  # wakes the thread that waits for their messages
        self.ending.time_out(silent)

    def _release(self) -> Verdict:
        """Frees what belongs to the step, which all ranks of the pipeline have ended.

        Returns:
            What this rank knows of it, besides failures.
        """
        model, driver = self._model, self._driver
        assert model is not None
        state = self._random_state if driver is None else driver.random_state
        if state is not None:
            state.restore()
        # DROP may come after this rank has sent END; the task that it makes has to end first.
        self.baton.wait_until_idle()
        self._apply_late_decision()
        self._end_step()
        if self.divided:
            order_matters = any(failure.order_matters for failure in self.ending.failures)
            model.accept_reports(self.ending.reports, order_matters)
        first = self.collectives.ranks[0] if self.collectives is not None else 0
        orders = [(rank, report.order) for rank, report in self.ending.reports.items()]
        return Verdict(
            order_matters=model.order_mattered,
            findings=self.model.learned.findings(),
            orders=frozenset([(first, frozenset(orders))]),
            gradients=torch.is_grad_enabled(),
        )

    def _meet(self) -> None:
        assert self._model is not None
        self._model.abstain(self._why)

    @property
    def _why(self) -> str:
        """Why the step has failed here, in one line; empty if it has not."""
        error = self.ending.error
        return "" if error is None else summary(error)

    def _agree(self) -> None:
        """Ends the step in the order group: from now on, all its members know the same."""
        assert self.member is not None
        own = self.ending.state.verdict
        if (why := own.elsewhere(self._job_ranks)) is not None:
            own = own._replace(failures=frozenset([self.ending.of_other(why)]))
        self._complete_late()
        said = self.member.group.end(own, self.member.history.point(over=True))
        self._await_late()
        together = functools.reduce(Verdict.join, said)
        if not (together.failures or together.redo or together.orders_differ is None):
            self.ending.fail_together(_other_order(together.orders_differ))
        self.ending.on(Event.AGREED, together)

    def _reduce(self) -> None:
        """Reduces gradients with the replicas, and exchanges the last flags."""
        assert self._model is not None
        if self.collectives is not None:
            self.collectives.end_step()
        verdict = self.ending.state.verdict
        self.model.end_step(verdict.findings)
        error = self._model.reduce(self._why, verdict, bool(self.ending.left))
        if error is not None:
            self.ending.fail_together(error)

    def _apply_late_decision(self) -> None:
        """Applies a decision that came before a failure: rank 0 has applied it already."""
        try:
            self._apply_decision()
        except Exception as error:
            self.ending.fail(-1, error)

    def _begin_step(self) -> None:
        with self.ending.lock:
            self._begun = True
            self._release_held()

    def _end_step(self) -> None:
        with self.ending.lock:
            self._begun = False
            self._held.clear()
            self.caller.clear()
            self.server.clear()
            self.model.hooks.end_step()

    def wait(self, ticket: Ticket, frame: Frame, forward: bool, yields: bool = False) -> None:
        """Lets other tasks run until a ticket is done.

        Args:
            ticket: to wait for.
            frame: of the task that waits.
            forward: does the task go on with forward work?
            yields: see `Baton.wait`.

        Raises:
            Aborted: the step has failed meanwhile.
        """
        if ticket.done and self.replicas is None and not yields:
            return
        self.timeline.leave()
        self.baton.wait(ticket, Priority(forward, frame.microbatch, frame.order), yields)
        if frame.set_by_calls:
            self.model.changes.set_attributes(frame.set_by_calls)
        self.enter(frame, forward)

    def enter(self, frame: Frame, forward: bool) -> None:
        """Notes that a task begins to work, or goes on.

        Args:
            frame: of the task.
            forward: is it forward work?

        Raises:
            SMPUsageError: saved arguments cannot be moved out of memory.
        """
        self.timeline.enter(frame, forward)
        local = self.model.local
        if local.offloader is not None:
            local.goes_on(frame, forward)

    def reach_backward(self, frame: Frame) -> None:
        """Tells the driver that a microbatch's forward pass is over; see `StepDriver`."""
        assert self._driver is not None
        self._driver.reach_backward(frame)

    def microbatch_done(self, microbatch: int, announce: bool) -> None:
        """Ends a microbatch, on rank 0.

        Args:
            microbatch: its number.
            announce: tell the other ranks, which do not learn of it otherwise.
        """
        assert self._model is not None
        self._model.end_microbatch(microbatch)
        if announce:
            for peer in self.peers:
                self.send(peer, Kind.DONE, microbatch)

    # --- messages ---------------------------------------------------------------------------------

    def send(self, peer: int, kind: Kind, header: Any, tensors: Sequence[Any] = ()) -> bool:
        """Sends a message to a rank of the pipeline, which may be this one.

        Two segments of one graph may have the same owner, and an edge between them.

        Args:
            peer: rank of the pipeline.
            kind: of the message.
            header: anything that pickles and holds no tensors.
            tensors: see `Message`.

        Returns:
            Whether it was sent: not if this rank has sent END in this step.
        """
        if peer == self.rank:
            if self.ending.end_sent:
                return False
            detached = [t if t is None else _leaf(t) for t in tensors]
            self._handle(peer, Message(kind, header, detached))
            return True
        return self.ending.send(peer, kind, header, tensors)

    @property
    def expects(self) -> bool:
        """Says whether messages may still come in this step."""
        return self.channel is not None and self.channel.expects

    def take(self, block: bool) -> list[Arrival]:
        """Returns what has come; with `block`, waits until something has."""
        assert self.channel is not None
        return self.channel.take(block)

    def deliver(self, arrived: list[Arrival]) -> None:
        """Acts upon what has come; the thread that has the baton calls this."""
        assert self.channel is not None
        for peer, item in arrived:
            if type(item) is Message:
                self._handle(peer, item)
                continue
            assert isinstance(item, Ended)
            if item.error is not None:
                self.ending.lose(peer, item.error)
                if peer == 0:
                    self._placed.set()
            self.channel.end(peer, item)

    def interrupt(self) -> None:
        """Ends the `take` that waits, or else the next one."""
        assert self.channel is not None
        self.channel.interrupt()

    def _handle(self, peer: int, message: Message) -> None:
        """Acts upon a message; an error in that ends the step."""
        try:
            with self.ending.lock:
                handler = self._handlers.get(message.kind)
                # GRAPH is always taken: the caller sends it once only, so it must not be lost if
                # the step fails before BEGIN has come.
                ready = message.kind == Kind.GRAPH or (self._begun and self.divided)
                if handler is not None and ready:
                    handler(message)
                elif message.kind == Kind.END:
                    if peer == 0:
                        self._placed.set()
                    self.ending.on_end(peer, message)
                elif message.kind == Kind.UNREADABLE:
                    raise SMPUsageError(
                        f"an object that {self.ending.who(peer)} has sent cannot be unpickled: "
                        f"{message.header}"
                    )
                elif message.kind == Kind.BEGIN:
                    self._on_begin(message.header)
                elif message.kind == Kind.PARTITION:
                    self._decision = message.header
                    self._placed.set()
                    # In a task, because hooks of the user and collectives run in it.
                    self.baton.submit(Task(Priority(False, -1), self._apply_decision))
                else:
                    # There is no order between streams: this message has come before BEGIN or
                    # PARTITION of rank 0.
                    self._held.append((peer, message))
        except Exception as error:
            self.ending.fail(-1, error)

    def _on_done(self, message: Message) -> None:
        microbatch = message.header
        if self.replicas is None:
            self._end_microbatch(microbatch)
            return
        # This may make a sum of gradients final, whose reduction then begins at the same place of
        # the order on all replicas.
        task = Task(Priority(False, microbatch), lambda: self._end_microbatch(microbatch))
        task.name = TaskName("end", microbatch)
        self.baton.submit(task)

    def _end_microbatch(self, microbatch: int) -> None:
        self.server.end_microbatch(microbatch)
        assert self._model is not None
        self._model.end_microbatch(microbatch)

    def _release_held(self) -> None:
        held, self._held = self._held, []
        for peer, message in held:
            self._handle(peer, message)

    def _on_begin(self, begin: StepBegin) -> None:
        if begin.name != self._name:
            raise SMPUsageError(
                f"rank 0 of the pipeline is in the step {begin.name}, rank {self.rank} in "
                f"{self._name}: all ranks have to call the same steps in the same order"
            )
        assert self._model is not None
        self._model.accept_begin(begin)
        self._begin_step()

    def _apply_decision(self) -> None:
        decision, self._decision = self._decision, None
        if decision is not None:
            assert self._model is not None
            self._model.apply(decision)

    def set_divided(self) -> None:
        """Notes that this rank has applied the decision; it serves calls from now on."""
        with self.ending.lock:
            self.divided = True
            self.ending.on(Event.DIVIDED)
            if self.member is not None:
                self.member.note_division()
            self._release_held()

    def _task_failed(self, task: Task, error: BaseException) -> None:
        frame: Frame | None = task.frame
        if frame is not None and isinstance(error, Exception):
            self._fetch_lazy_values(frame)
        self.ending.fail(frame.microbatch if frame is not None else -1, error)

    def _fetch_lazy_values(self, frame: Frame) -> None:
        """Fetches the values of a failed task's lazy tensors.

        The task has relied on their structure, and that may be the cause of its failure. If the
        structure is wrong, the owner fails, and its failure comes here before the task's own.
        """
        with contextlib.suppress(Exception, Aborted):
            self.caller.settle(frame)


def _prepare_thread() -> Callable[[], None]:
    """Returns what a new thread of the baton does first; the calling thread has the device."""
    place = device.current()

    def prepare() -> None:
        # Without this, autograd would run on one thread per device, shared by all microbatches: a
        # microbatch that waits there would block the work that it waits for.
        torch.autograd.set_multithreading_enabled(False)
        # OpenMP has a number of threads for each thread that uses it. This call takes over that of
        # `torch.set_num_threads`; without it, small products would run on all cores.
        torch.get_num_threads()
        device.use(place)

    return prepare


def _forget_values(task: Task) -> None:
    """Frees the values of its step that a task that has raised would keep in memory."""
    forget_failed_pass()
    if task.frame is not None:
        task.frame.open = None


def _leaf(tensor: Any) -> Any:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _other_order(first: int) -> SMPUsageError:
    return SMPUsageError(
        "the ranks of a tensor-parallel group have called their divided modules in different "
        f"orders, so the results of this step are wrong. All ranks of the group of rank {first} "
        "have to call the same modules in the same order, whatever their data are"
    )
