"""One step on one rank: what the thread of its caller does in each phase, and what messages do.

step_machine.py says which phase follows which.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

import torch
import torch.distributed as dist

from smddp.modelparallel.core.baton import Baton, Priority, Task
from smddp.modelparallel.core.errors import SMPError, SMPUsageError
from smddp.modelparallel.core.failure import summary
from smddp.modelparallel.core.order import TaskName
from smddp.modelparallel.core.step_machine import SILENT, Event, Phase, Verdict
from smddp.modelparallel.torch.common.random_state import RandomState
from smddp.modelparallel.torch.pipeline import step
from smddp.modelparallel.torch.pipeline.calls import CallerSide
from smddp.modelparallel.torch.pipeline.channel import Ended
from smddp.modelparallel.torch.pipeline.ending import SILENT_RANK, Ending
from smddp.modelparallel.torch.pipeline.late_calls import LateCalls
from smddp.modelparallel.torch.pipeline.mail import Mail
from smddp.modelparallel.torch.pipeline.member import Member
from smddp.modelparallel.torch.pipeline.model import PipelineModel
from smddp.modelparallel.torch.pipeline.protocol import Kind, Message
from smddp.modelparallel.torch.pipeline.server import Server
from smddp.modelparallel.torch.pipeline.step import (
    StepBegin,
    StepCollectives,
    StepDriver,
    StepModel,
    StepResult,
)

__all__ = ["StepRank", "StepRun"]


class StepRank(Protocol):
    """The rank, in what a step needs of it; `Executor` implements it.

    Attributes:
        baton, mail, ending, caller, server, member, collectives, late, model: see there.
    """

    baton: Baton
    mail: Mail
    ending: Ending
    caller: CallerSide
    server: Server
    member: Member | None
    collectives: StepCollectives | None
    late: LateCalls | None
    model: PipelineModel

    def wait_for_finish(self) -> None:
        """Waits until all bodies have ended; see `Executor.wait_for_finish`."""


class StepRun:
    """Runs one step; the `Recipient` of its messages.

    Attributes:
        name: of the step function that this rank has called.
        driver: on rank 0, what runs the body; None on the others.
    """

    def __init__(
        self, rank: StepRank, name: str, model: StepModel, driver: StepDriver | None
    ) -> None:
        """Begins nothing yet.

        Args:
            rank: this one.
            name: of the step function.
            model: what the step trains.
            driver: see the class.
        """
        self._rank, self._ending, self._mail = rank, rank.ending, rank.mail
        self.name, self.driver = name, driver
        self._trained: StepModel | None = model
        # Segments seed the generators of the ranks that serve.
        self._random_state = RandomState() if driver is None else None
        self._begun = False  # has rank 0 begun it, as far as is known here?
        self._decision: Any = None  # the one that has come, and is not applied here yet
        # Set when rank 0 has said where modules live, or has ended the step.
        self._placed = threading.Event()

    def run(self) -> StepResult:
        """Goes through the phases of the step; see `Executor.run`."""
        return self._ending.run(
            {
                **dict.fromkeys(SILENT, self._take_part),
                Phase.SETTLING: self._settle,
                Phase.PLACING: self._await_place,
                Phase.COMPLETING: self._complete_collectives,
                Phase.CLOSING: self._close,
                Phase.DRAINING: self._await_ends,
                Phase.RELEASING: self._release,
                Phase.MEETING: self._meet,
                Phase.AGREEING: self._agree,
                Phase.REDUCING: self._reduce,
            }
        )

    def release(self) -> None:
        """Frees the values of the step. What comes late still finds this object."""
        self._trained = self.driver = self._decision = None

    @property
    def _model(self) -> StepModel:
        assert self._trained is not None, "the step is over"
        return self._trained

    # --- phases -----------------------------------------------------------------------------------

    def _take_part(self) -> None:
        """Does this rank's part in a step, until there is a result."""
        rank, model = self._rank, self._model
        if self.driver is None:
            model.compare()
            rank.baton.wake()
            rank.wait_for_finish()
        else:
            divided = self._ending.state.divided
            begin = model.begin(self.name, None if divided else rank.model.modules.names)
            for peer in self._mail.peers:
                self._mail.send(peer, Kind.BEGIN, begin)
            self._begin_work()
            self._ending.outcome.result = self.driver.drive()

    def _settle(self) -> None:
        self._rank.baton.wake()
        self._rank.baton.wait_until_idle()

    def _await_place(self) -> None:
        self._placed.wait(step.END_TIMEOUT)

    def _complete_collectives(self) -> None:
        """Begins calls so that no rank waits for one that this rank does not make any more."""
        self._apply_late_decision()
        if self._rank.late is not None and not self._ending.state.left:
            self._rank.late.settle(bool(self._ending.failures))

    def _close(self) -> None:
        error, redo = self._model.close(bool(self._ending.failures))
        if redo:
            self._ending.find_wrong_plan()
        if error is not None:
            # The others do not know of any other error, such as one for lack of memory.
            known = isinstance(error, SMPError) and not isinstance(error.__cause__, dist.DistError)
            self._ending.fail_together(error, alone=not known)
        if self._rank.late is not None:
            self._rank.late.wait()

    def _await_ends(self) -> None:
        """Waits until all peers have ended the step.

        The streams from those that have not in time count as broken: the END that they may still
        send belongs to this step, and the next one must not read it.
        """
        channel = self._mail.channel
        assert channel is not None
        silent = channel.drain(step.END_TIMEOUT)
        if not silent:
            return
        for peer in silent:
            channel.end(peer, Ended(RuntimeError(f"it {SILENT_RANK}")))
        channel.interrupt()  # wakes the thread that waits for their messages
        self._ending.time_out(silent)

    def _release(self) -> Verdict:
        """Frees what belongs to the step, which all ranks of the pipeline have ended.

        Returns:
            What this rank knows of it, besides failures.
        """
        rank, model, ending = self._rank, self._model, self._ending
        state = self._random_state if self.driver is None else self.driver.random_state
        if state is not None:
            state.restore()
        # DROP may come after this rank has sent END; the task that it makes has to end first.
        rank.baton.wait_until_idle()
        self._apply_late_decision()
        with ending.lock:
            self._mail.end_step()
            rank.caller.clear()
            rank.server.clear()
            rank.model.hooks.end_step()
        reports = ending.outcome.reports
        if ending.state.divided:
            order_matters = any(failure.order_matters for failure in ending.failures)
            model.accept_reports(reports, order_matters)
        first = rank.collectives.ranks[0] if rank.collectives is not None else 0
        orders = [(peer, report.order) for peer, report in reports.items()]
        return Verdict(
            order_matters=model.order_mattered,
            findings=rank.model.learned.findings(),
            orders=frozenset([(first, frozenset(orders))]),
            gradients=torch.is_grad_enabled(),
        )

    def _meet(self) -> None:
        self._model.abstain(self._why)

    @property
    def _why(self) -> str:
        """Why the step has failed here, in one line; empty if it has not."""
        error = self._ending.error
        return "" if error is None else summary(error)

    def _agree(self) -> None:
        """Ends the step in the order group: from now on, all its members know the same."""
        member, late, ending = self._rank.member, self._rank.late, self._ending
        assert member is not None
        own = ending.state.verdict
        if (why := own.elsewhere(self._mail.job_ranks)) is not None:
            own = own._replace(failures=frozenset([ending.of_other(why)]))
        if late is not None and not ending.state.left:
            late.begin()
        said = member.group.end(own, member.history.point(over=True))
        if late is not None:
            late.wait()
        together = functools.reduce(Verdict.join, said)
        if not (together.failures or together.redo or together.orders_differ is None):
            ending.fail_together(_other_order(together.orders_differ))
        ending.on(Event.AGREED, together)

    def _reduce(self) -> None:
        """Reduces gradients with the replicas, and exchanges the last flags."""
        if self._rank.collectives is not None:
            self._rank.collectives.end_step()
        verdict = self._ending.state.verdict
        self._rank.model.end_step(verdict.findings)
        error = self._model.reduce(self._why, verdict, self._ending.state.left)
        if error is not None:
            self._ending.fail_together(error)

    # --- messages; see `Recipient` ----------------------------------------------------------------

    def on_begin(self, begin: StepBegin) -> None:
        """Begins what rank 0 has begun."""
        if begin.name != self.name:
            raise SMPUsageError(
                f"rank 0 of the pipeline is in the step {begin.name}, rank {self._mail.rank} in "
                f"{self.name}: all ranks have to call the same steps in the same order"
            )
        self._model.accept_begin(begin)
        self._begin_work()

    def _begin_work(self) -> None:
        with self._ending.lock:
            self._begun = True
            if self._ending.state.divided:
                self._mail.let_work_in()

    def on_decision(self, decision: Any) -> None:
        """Applies where modules live; in a task, because hooks of the user and collectives run."""
        self._decision = decision
        self._placed.set()
        self._rank.baton.submit(Task(Priority(False, -1), self._apply_decision))

    def _apply_decision(self) -> None:
        decision, self._decision = self._decision, None
        if decision is not None:
            self._model.apply(decision)

    def _apply_late_decision(self) -> None:
        """Applies a decision that came before a failure: rank 0 has applied it already."""
        try:
            self._apply_decision()
        except Exception as error:
            self._ending.fail(-1, error)

    def note_division(self) -> None:
        """Serves calls from now on; the lock of the ending is held."""
        if self._begun:
            self._mail.let_work_in()

    def on_done(self, message: Message) -> None:
        """Ends a microbatch that rank 0 has ended."""
        microbatch = message.header
        if self._rank.member is None:
            self._end_microbatch(microbatch)
            return
        # This may make a sum of gradients final, whose reduction then begins at the same place of
        # the order on all replicas.
        task = Task(Priority(False, microbatch), lambda: self._end_microbatch(microbatch))
        task.name = TaskName("end", microbatch)
        self._rank.baton.submit(task)

    def _end_microbatch(self, microbatch: int) -> None:
        self._rank.server.end_microbatch(microbatch)
        self._model.end_microbatch(microbatch)

    def on_end(self, peer: int, message: Message) -> None:
        """Notes that a rank has ended the step."""
        if peer == 0:
            self._placed.set()
        self._ending.on_end(peer, message)

    def on_lost(self, peer: int, error: Exception) -> None:
        """Ends the step because the stream from a rank is broken."""
        self._ending.lose(peer, error)
        if peer == 0:
            self._placed.set()

    def on_error(self, error: Exception) -> None:
        """Ends the step because a message could not be acted upon."""
        self._ending.fail(-1, error)

    # --- tasks of rank 0 --------------------------------------------------------------------------

    def end_body(self, microbatch: int, announce: bool) -> None:
        """Ends a microbatch, on rank 0.

        Args:
            microbatch: its number.
            announce: tell the other ranks, which do not learn of it otherwise.
        """
        self._model.end_microbatch(microbatch)
        if announce:
            for peer in self._mail.peers:
                self._mail.send(peer, Kind.DONE, microbatch)


def _other_order(first: int) -> SMPUsageError:
    return SMPUsageError(
        "the ranks of a tensor-parallel group have called their divided modules in different "
        f"orders, so the results of this step are wrong. All ranks of the group of rank {first} "
        "have to call the same modules in the same order, whatever their data are"
    )
