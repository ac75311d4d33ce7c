"""One rank of a pipeline: its tasks, its messages, and the steps that it runs one after the other.

docs/model-parallel-design.md follows one microbatch through a step. step_run.py has the life of a
step; ending.py drives the machine that says how it ends. calls.py has the caller's side of calls
between ranks, server.py the owner's side.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from smddp.modelparallel.core.baton import Aborted, Baton, Host, Priority, Task, Ticket
from smddp.modelparallel.core.failure import Redo
from smddp.modelparallel.core.step_machine import Event
from smddp.modelparallel.torch.common import device
from smddp.modelparallel.torch.common.engine import forget_failed_pass
from smddp.modelparallel.torch.common.random_state import RandomState
from smddp.modelparallel.torch.pipeline.calls import CallerSide
from smddp.modelparallel.torch.pipeline.channel import Channel
from smddp.modelparallel.torch.pipeline.departure import AbortGroups, Departure
from smddp.modelparallel.torch.pipeline.ending import Ending
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.late_calls import LateCalls
from smddp.modelparallel.torch.pipeline.mail import Mail
from smddp.modelparallel.torch.pipeline.member import Member
from smddp.modelparallel.torch.pipeline.model import PipelineModel
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.order_group import OrderGroup
from smddp.modelparallel.torch.pipeline.protocol import Kind
from smddp.modelparallel.torch.pipeline.server import Server
from smddp.modelparallel.torch.pipeline.stall import StallWatch
from smddp.modelparallel.torch.pipeline.step import (
    Schedule,
    StepCollectives,
    StepDriver,
    StepModel,
    StepResult,
)
from smddp.modelparallel.torch.pipeline.step_run import StepRun
from smddp.modelparallel.torch.pipeline.timeline import Timeline

__all__ = ["Executor"]


class Executor(Host):
    """Runs the steps of a pipeline on one rank.

    The thread that calls `run` waits there; the baton's threads do the work, and take the messages
    between two tasks. A failed step leaves the executor ready for the next one, unless a peer was
    lost. One executor lives from the first DistributedModel to `smp.shutdown`; what belongs to one
    model is given to `adopt`, and what belongs to one step is in its `StepRun`.

    Attributes:
        rank, size: in the pipeline.
        baton: runs the tasks of this rank, one at a time.
        mail: the messages to and from the other ranks.
        caller: the call graphs that code of this rank has sent.
        server: the segments that this rank runs for any rank.
        timeline: what ran in the last step, and when.
        member: of the order group; None without one.
        collectives: those of tasks, over members of the order group; None if there are none.
        late: makes such calls for other ranks when a step has failed.
        ending: how steps end on this rank.
        departure: whether this rank takes part in steps.
        step: the one that runs; None outside steps.
        model: whose steps run; since `adopt`.
        modules: of that model.
    """

    model: PipelineModel
    modules: Modules

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        stall_warning: float,
        abort: AbortGroups,
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
        job_ranks = dist.get_process_group_ranks(group) if group is not None else [rank]
        self.collectives = collectives
        self.member: Member | None = None
        self.late: LateCalls | None = None
        if replicas is not None:
            # With one partition the microbatches run one after the other in any case.
            self.member = Member(self, job_ranks[rank], replicas, collectives, size > 1)
            if collectives is not None:
                self.late = LateCalls(replicas, collectives)
        channel = Channel(group, rank, size) if group is not None and size > 1 else None
        lock = threading.RLock()
        self.mail = Mail(rank, job_ranks, channel, lock)
        order = None if self.member is None else self.member.order
        self.baton = Baton(self, self.mail, order)
        self.departure = Departure(abort)
        self.ending = Ending(
            self.baton, self.mail, lock, self.departure, replicas, collectives, self.late
        )
        self.caller = CallerSide(self)
        self.server = Server(self, self.caller)
        self.step: StepRun | None = None
        self._steps = 0  # how many this rank has begun, including failed ones
        self.mail.work = {
            Kind.GRAPH: lambda message: self.server.on_graph(*message.header),
            Kind.FORWARD: self.server.on_forward,
            Kind.BACKWARD: self.server.on_backward,
            Kind.DROP: lambda message: self.server.on_drop(*message.header),
            Kind.DONE: lambda message: self._running.on_done(message),
        }

    def adopt(self, model: PipelineModel) -> None:
        """Serves a model from now on; all ranks do so at the same point of the script."""
        self.ending.on(Event.ADOPTED, self.size == 1)
        self.model, self.modules = model, model.modules
        self.caller.forget()
        self.server.adopt(model)

    def close(self) -> None:
        """Ends the threads; between steps."""
        self.baton.close()

    # --- steps ------------------------------------------------------------------------------------

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
        step = self.step = StepRun(self, name, model, driver)
        try:
            self._begin(step, schedule, model)
            result = step.run()
        except Redo:
            model.restore()
            raise
        except BaseException as error:
            self.ending.abandon(error)
            raise
        finally:
            model.release_step()
            self.step = None
            step.release()
            self.ending.forget()
        model.note_success()
        return result

    def _begin(self, step: StepRun, schedule: Schedule, model: StepModel) -> None:
        self.baton.context = contextvars.copy_context()
        self.server.under_way_limit = schedule.under_way_limit
        self._steps += 1
        self.timeline.begin()
        self.ending.begin(model)
        # This ends the abort of a failed step. It is done here and not at the end of that step,
        # because more failures may arrive after that.
        self.baton.begin()
        if self.member is not None:
            self.member.begin_step(self.ending.state.divided)
        self.mail.open(step)
        if self.collectives is not None:
            self.collectives.begin_step()
        if self.member is not None:
            self.member.open()

    @property
    def _running(self) -> StepRun:
        assert self.step is not None
        return self.step

    def set_divided(self) -> None:
        """Notes that this rank has applied the decision; it serves calls from now on."""
        with self.ending.lock:
            self.ending.on(Event.DIVIDED)
            if self.member is not None:
                self.member.note_division()
            if self.step is not None:
                self.step.note_division()

    def finish(self) -> None:
        """Notes that all bodies have ended; the last task of rank 0 calls this."""
        self.ending.on(Event.BODIES_ENDED)

    def wait_for_finish(self) -> None:
        """Waits until `finish` was called, and until a follower has run all that its leader has.

        Raises:
            Aborted: the step has failed.
        """
        check = None if self.member is None else self.member.check
        self._watch.wait(self.ending.woken, self.modules, self._running.name, self._steps, check)
        if self.ending.failures:
            raise Aborted

    # --- what tasks need --------------------------------------------------------------------------

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
        if ticket.done and self.member is None and not yields:
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
        assert self.step is not None
        assert self.step.driver is not None
        self.step.driver.reach_backward(frame)

    # --- see `Host` -------------------------------------------------------------------------------

    def task_failed(self, task: Task, error: BaseException) -> None:
        """Ends the step."""
        frame: Frame | None = task.frame
        if frame is not None and isinstance(error, Exception):
            # The task has relied on the structure of lazy tensors, and that may be the cause of its
            # failure. If it is wrong, its owner fails, and that failure comes here before this one.
            with contextlib.suppress(Exception, Aborted):
                self.caller.settle(frame)
        self.ending.fail(frame.microbatch if frame is not None else -1, error)

    def clean_up(self, task: Task) -> None:
        """Frees the values of its step that a task that has raised would keep in memory."""
        forget_failed_pass()
        if task.frame is not None:
            task.frame.open = None

    def save_state(self) -> Callable[[], None]:
        """Saves the state of random generators."""
        return RandomState().restore

    def prepare_thread(self) -> Callable[[], None]:
        """Returns what a new thread does first; the calling thread has the device."""
        place = device.current()

        def prepare() -> None:
            # Without this, autograd would run on one thread per device, shared by all microbatches:
            # a microbatch that waits there would block the work that it waits for.
            torch.autograd.set_multithreading_enabled(False)
            # OpenMP has a number of threads for each thread that uses it. This call takes over that
            # of `torch.set_num_threads`; without it, small products would run on all cores.
            torch.get_num_threads()
            device.use(place)

        return prepare
