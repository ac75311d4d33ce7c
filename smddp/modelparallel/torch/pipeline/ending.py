"""How the steps of a rank end: drives its `step_machine`, and sends END to the pipeline."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from smddp.modelparallel.core.baton import Aborted, Baton
from smddp.modelparallel.core.errors import SMPError, SMPPeerError
from smddp.modelparallel.core.failure import (
    Elsewhere,
    Failure,
    PlanChangedError,
    Raised,
    Redo,
    choose,
    describe,
)
from smddp.modelparallel.core.order import Follower, Leader
from smddp.modelparallel.core.step_machine import (
    ENDED,
    SILENT,
    Action,
    Event,
    Phase,
    Place,
    Rules,
    State,
)
from smddp.modelparallel.torch.common.lost import as_smp_error, loss, tells_of_loss
from smddp.modelparallel.torch.pipeline.departure import Departure
from smddp.modelparallel.torch.pipeline.late_calls import LateCalls
from smddp.modelparallel.torch.pipeline.mail import Mail
from smddp.modelparallel.torch.pipeline.order_group import OrderGroup
from smddp.modelparallel.torch.pipeline.outcome import Outcome
from smddp.modelparallel.torch.pipeline.protocol import Message, raise_if_unpicklable
from smddp.modelparallel.torch.pipeline.step import StepCollectives, StepModel, StepResult

__all__ = ["SILENT_RANK", "Ending", "Phases"]

SILENT_RANK = "has not ended its step in time"

# What the thread of the caller does in each phase; what it returns comes with DONE.
Phases = Mapping[Phase, Callable[[], Any]]


class Ending:
    """Turns messages, errors and signals into events of the machine, and does what it says.

    Any thread may call the methods. What they change is guarded by `lock`, under which the actions
    of an event are done, too; but for those that end process groups, or begin calls in them. Only
    the thread of the caller calls `begin`, `run` and `forget`.

    Attributes:
        lock: also held while a message is acted upon, because that may end the step.
        state: of the machine.
        woken: set when the thread of the caller may go on; see `Action.WAKE`.
        outcome: what its caller gets; another one in each step.
    """

    _RULES = Rules()

    def __init__(
        self,
        baton: Baton,
        mail: Mail,
        lock: threading.RLock,
        departure: Departure,
        group: OrderGroup | None,
        collectives: StepCollectives | None,
        late: LateCalls | None,
    ) -> None:
        """Begins no step yet.

        Args:
            baton: of this rank.
            mail: sends END.
            lock: see the class.
            departure: whether this rank has left.
            group: the order group; None if there is none.
            collectives: those of tasks; None if there are none.
            late: makes such calls for others, with an order group.
        """
        self._baton, self._mail, self._departure = baton, mail, departure
        self._group, self._collectives, self._late = group, collectives, late
        self.lock = lock
        follows = isinstance(baton.order, Follower)
        self._place = Place(mail.rank, len(mail.job_ranks), group is not None, follows)
        self.state = State(divided=self._place.size == 1)
        self.woken = threading.Event()
        self._model: StepModel | None = None
        self.outcome = Outcome(mail)

    def begin(self, model: StepModel) -> None:
        """Begins a step.

        Args:
            model: what it trains.
        """
        self.woken.clear()
        self._model, self.outcome = model, Outcome(self._mail)
        self.on(Event.BEGUN, model.undecided)

    def forget(self) -> None:
        """Frees the values of the step, once its caller has the result or an error."""
        self._model, self.outcome = None, Outcome(self._mail)
        for failure in (*self.failures, *self.state.postponed):
            failure.raised.error = None

    @property
    def failures(self) -> frozenset[Failure]:
        """Those of all ranks of the pipeline, as far as they are known here."""
        return self.state.verdict.failures

    @property
    def error(self) -> BaseException | None:
        """See `Outcome.error`."""
        return self.outcome.error(self.state, self._departure.reason)

    # --- events and actions -----------------------------------------------------------------------

    def on(self, event: Event, value: Any = None) -> None:
        """Lets an event happen.

        Args:
            event: what has happened.
            value: what comes with it.
        """
        later: list[Callable[[], None]] = []
        with self.lock:
            before = self.state
            self.state, actions = self._RULES.advance(self._place, before, event, value)
            for action in actions:
                if action is Action.LEAVE:
                    self._departure.leave(value.raised.error)
                    later.append(functools.partial(self._leave, value.raised.error))
                elif action is Action.COMPLETE_CALLS:
                    later.append(self._complete_calls)
                elif action is Action.REPLAY:
                    for failure in before.postponed:
                        self.on(Event.STOPPED, failure)
                else:
                    self._do(action, value)
        for what in later:
            what()

    def _do(self, action: Action, value: Any) -> None:
        if action is Action.SUCCEED:
            self._succeed()
        elif action is Action.SEND_FAILURE:
            self._mail.send_end(value, [])
        elif action is Action.SEND_NOTHING:
            self._mail.send_end(None, [])
        elif action is Action.ABORT_TASKS:
            self._baton.abort()
        elif action is Action.STOP_REPLICAS:
            if self._group is not None:
                job_ranks = self._mail.job_ranks
                why = self.state.verdict.elsewhere(job_ranks)
                calls = self._collectives.stop() if self._collectives is not None else []
                self._group.stop(why or value.for_others(job_ranks), calls)
        elif action is Action.WAKE:
            self.woken.set()
        elif action is Action.ROUSE:
            self._baton.wake()
        elif action is Action.ANNOUNCE_END:
            order = self._baton.order
            if isinstance(order, Leader) and self._group is not None:
                order.settle()
                self._group.announce_end()
                order.end()

    def _complete_calls(self) -> None:
        try:
            if self._late is not None and not self.state.left:
                self._late.begin()
        except Exception as error:
            self.leave(error)

    def _leave(self, error: BaseException) -> None:
        self._departure.end_groups(error)
        self.end_order()

    def end_order(self) -> None:
        """Lets no task wait for announcements of the leader any more."""
        with self._baton.changing_order() as order:
            if order is not None:
                order.end()

    # --- END --------------------------------------------------------------------------------------

    def _succeed(self) -> None:
        """Sends END with the report of this rank."""
        try:
            self._send_report()
        except Exception as error:
            self.fail(-1, error)
        else:
            self.on(Event.SUCCEEDED)

    def _send_report(self) -> None:
        assert self._model is not None
        report, outcome, rank = self._model.report(), self.outcome, self._place.rank
        if self._collectives is not None:
            report = report._replace(order=self._collectives.order_after(self._collectives.begun))
        if rank > 0:
            self._mail.send_end(report, [])
        else:
            assert outcome.result is not None
            try:
                self._mail.send_end((outcome.result.header, report), outcome.result.tensors)
            except Exception:
                # Nothing was sent; name the value that does not pickle.
                structures, objects = outcome.result.header
                for structure in structures:
                    raise_if_unpicklable("the step function returns", structure, objects)
                raise
        outcome.reports[rank] = report

    def on_end(self, peer: int, message: Message) -> None:
        """Takes the END of another rank of the pipeline; `lock` is held."""
        if isinstance(message.header, Failure):
            self.on(Event.HEARD_FAILURE, message.header)
        elif message.header is None:
            pass  # it has heard of a failure, which comes here from the rank that has failed
        elif peer == 0:
            header, self.outcome.reports[peer] = message.header
            self.outcome.result = StepResult(header, message.tensors)  # type: ignore[arg-type]
            self.on(Event.BODIES_ENDED)
        else:
            self.outcome.reports[peer] = message.header

    # --- what has failed --------------------------------------------------------------------------

    def fail(self, microbatch: int, error: BaseException) -> None:
        """Ends the step on all ranks because of an error on this one. Only the first error counts.

        Args:
            microbatch: in which it was raised; -1 if not in a microbatch.
            error: the exception.
        """
        # The next step could not use a process group that has failed.
        event = Event.LEAVES if isinstance(error, dist.DistError) else Event.FAILED
        self.tell(event, as_smp_error(error), microbatch)

    def tell(self, event: Event, error: BaseException, microbatch: int = -1) -> None:
        """Lets an event happen because of an exception of this rank.

        Args:
            event: what has happened.
            error: the exception.
            microbatch: in which it was raised; -1 if not in a microbatch.
        """
        self.on(event, describe(microbatch, self._place.rank, error))

    def leave(self, error: BaseException) -> None:
        """Takes part in no more steps.

        Args:
            error: why.
        """
        outside = self.state.phase is Phase.OUTSIDE
        self.tell(Event.BROKEN if outside else Event.LEAVES, as_smp_error(error))

    def find_wrong_plan(self) -> None:
        """Notes at the end of the gathers that the step has to be run again."""
        self.tell(Event.REDO, PlanChangedError("parameters were not needed as in the last step"))

    def lose(self, peer: int, error: Exception) -> None:
        """Ends the step, and leaves, because the stream from a rank of the pipeline has failed."""
        reason = SMPPeerError(loss(self._mail.who(peer), error))
        reason.__cause__ = error
        if tells_of_loss(reason):
            self.outcome.loss = self.outcome.loss or reason
            self.tell(Event.STREAM_LOST, reason)
        else:
            self.tell(Event.STREAM_ENDED, reason)

    def lose_replica(self, rank: int, error: Exception) -> None:
        """Ends the step, and leaves, because the stream from a rank of another replica has failed.

        Args:
            rank: of the job.
            error: of the stream.
        """
        lost = Elsewhere(rank, loss("it", error), redo=False)
        reason = lost.error()
        reason.__cause__ = error
        self.on(Event.REPLICA_LOST, self.of_other(lost)._replace(raised=Raised(reason)))

    def of_other(self, elsewhere: Elsewhere) -> Failure:
        """Returns a failure of another replica as one that ends this step."""
        text, redo = elsewhere.text, elsewhere.redo
        return Failure(-1, self._place.rank, text, "", None, redo, elsewhere=elsewhere)

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """In this context rank 0 agrees with other replicas on a decision, and tells its ranks."""
        self.on(Event.DECIDES)
        try:
            yield
        finally:
            self.on(Event.DECIDED)

    # --- the thread of the caller -----------------------------------------------------------------

    def run(self, phases: Phases) -> StepResult:
        """Goes through the phases of a step.

        Args:
            phases: what the thread does in each of them.

        Returns:
            The result of the step.

        Raises:
            Redo, SMPError: see `Executor.run`.
        """
        while self.state.phase is not Phase.OUTSIDE:
            self._pass(phases)
        return self.outcome.returned(self.state, self._departure.reason)

    def abandon(self, error: BaseException) -> None:
        """Leaves if the step has not ended: a signal has come between two phases.

        Args:
            error: what it has raised.
        """
        if self.state.phase is not Phase.OUTSIDE:
            self.tell(Event.ABANDONED, as_smp_error(error))

    def _pass(self, phases: Phases) -> None:
        """Does what there is to do in a phase."""
        phase = self.state.phase
        try:
            value = phases[phase]()
            if phase in SILENT:
                self.on(Event.COLLECTED)
            elif self.state.phase is phase:
                self.on(Event.DONE, value)
        except BaseException as error:
            self._on_error(phase, error)

    def _on_error(self, phase: Phase, error: BaseException) -> None:
        """Acts upon what the thread of the caller has raised in a phase."""
        if isinstance(error, Aborted):
            self.on(Event.COLLECTED)
        elif phase in SILENT and isinstance(error, Exception):
            self.fail(-1, error)
        elif phase in SILENT:
            self.outcome.raised = error
            self.tell(Event.SIGNALLED, error)
        elif phase is Phase.REDUCING and isinstance(error, Redo):
            self.on(Event.REDO)
        elif phase in (Phase.MEETING, Phase.REDUCING) and isinstance(error, SMPError):
            self.fail_together(error)
            if phase is Phase.MEETING:
                self.on(Event.DONE)
        else:
            error = as_smp_error(error)
            follows = isinstance(error, RuntimeError) and phase not in ENDED
            known = self.error if phase is Phase.REDUCING else self.outcome.first(self.state)
            self.outcome.raised = known if follows and known is not None else error
            self.tell(Event.BROKEN, error)

    def fail_together(self, error: Exception, alone: bool = False) -> None:
        """Notes what this rank raises, unless the step has failed before.

        Args:
            error: to raise.
            alone: do other ranks not know of it?
        """
        self.outcome.raised = self.outcome.first(self.state) or error
        self.tell(Event.LEAVES if alone else Event.FAILED, as_smp_error(error))

    def time_out(self, silent: Sequence[int]) -> None:
        """Notes that ranks of the pipeline have not ended the step in time."""
        who = self._mail.who
        text = f"{who(silent[0])} {SILENT_RANK}"
        if self.failures:
            first = choose(self.failures)
            text += f", which had failed on {who(first.rank)}: {first.text}"
        self.outcome.raised = SMPPeerError(text)
        self.tell(Event.TIMED_OUT, self.outcome.raised)
