"""How the steps of a rank end: drives its `step_machine`, and sends END to the pipeline."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from smddp.modelparallel.core.baton import Aborted, Baton
from smddp.modelparallel.core.errors import SMPError, SMPPeerError
from smddp.modelparallel.core.failure import (
    Elsewhere,
    Failure,
    PlanChangedError,
    Redo,
    as_error,
    choose,
    describe,
    summary,
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
from smddp.modelparallel.torch.pipeline.channel import Channel
from smddp.modelparallel.torch.pipeline.order_group import OrderGroup
from smddp.modelparallel.torch.pipeline.protocol import Kind, Message, raise_if_unpicklable
from smddp.modelparallel.torch.pipeline.step import (
    StepCollectives,
    StepModel,
    StepReport,
    StepResult,
)

__all__ = ["SILENT_RANK", "Ending"]

SILENT_RANK = "has not ended its step in time"


class Ending:
    """Turns messages, errors and signals into events of the machine, and does what it says.

    Any thread may call the methods. What they change is guarded by `lock`, under which the actions
    of an event are done, too; but for those that end process groups, or begin calls in them. Only
    the thread of the caller calls `begin`, `run` and `forget`, and changes `_raised`.

    Attributes:
        lock: also held by the executor while it acts upon a message, because that may end the step.
        state: of the machine.
        left: why this rank takes part in no more steps; empty if it does.
        woken: set when the thread of the caller may go on; see `Action.WAKE`.
        result: what the driver has returned, once it is here.
        reports: by rank of the pipeline, what END has said.
    """

    _RULES = Rules()

    def __init__(
        self,
        rank: int,
        job_ranks: Sequence[int],
        baton: Baton,
        channel: Channel | None,
        abort: Callable[[str, bool], None],
        replicas: OrderGroup | None,
        collectives: StepCollectives | None,
        complete: Callable[[], None],
    ) -> None:
        """Begins no step yet.

        Args:
            rank: of this process in the pipeline.
            job_ranks: the ranks of the pipeline, as ranks of the job.
            baton: of this rank.
            channel: see `Executor`.
            abort: see `Groups.abort`.
            replicas: see `Executor`.
            collectives: see `Executor`.
            complete: begins the collective calls that other ranks have begun; may raise.
        """
        self._rank, self._job_ranks = rank, job_ranks
        self._baton, self._channel, self._abort = baton, channel, abort
        self._replicas, self._collectives = replicas, collectives
        self._complete = complete
        self.lock = threading.RLock()
        # Held for a check of the phase and the send: no message may follow END, because the
        # receiver would take it for one of the next step.
        self._send_lock = threading.Lock()
        self._place = Place(
            rank, len(job_ranks), replicas is not None, isinstance(baton.order, Follower)
        )
        self.state = State()
        self.end_sent = False
        self.left = ""
        # Has this rank ended the groups of steps? And all groups of smp, because a rank was lost?
        self._ended_groups = self._all_ended = False
        self.woken = threading.Event()
        self._model: StepModel | None = None
        self._reset()

    def _reset(self) -> None:
        self.woken.clear()
        # The first exception of this rank. Its traceback refers to the model and to all of the
        # step. And what this rank raises whatever others raise.
        self._cause: BaseException | None = None
        self._raised: BaseException | None = None
        self._loss: SMPPeerError | None = None  # a rank of the pipeline is gone
        self.result: StepResult | None = None
        self.reports: dict[int, StepReport] = {}

    def begin(self, model: StepModel, divided: bool, undecided: bool) -> None:
        """Begins a step.

        Args:
            model: what it trains.
            divided: see `State`.
            undecided: see `State`.
        """
        self._reset()
        self._model = model
        self.end_sent = False
        self.on(Event.BEGUN, State(divided=divided, undecided=undecided))

    def forget(self) -> None:
        """Frees the values of the step, once its caller has the result or an error."""
        self._cause = self._raised = self._loss = self.result = self._model = None

    def check(self) -> None:
        """Raises SMPPeerError if there can be no step any more; called before each."""
        if self.left:
            raise SMPPeerError(f"this rank has left the job in an earlier step: {self.left}")

    @property
    def failures(self) -> frozenset[Failure]:
        """Those of all ranks of the pipeline, as far as they are known here."""
        return self.state.verdict.failures

    # --- events and actions -----------------------------------------------------------------------

    def on(self, event: Event, value: Any = None, error: BaseException | None = None) -> None:
        """Lets an event happen.

        Args:
            event: what has happened.
            value: what comes with it.
            error: why, if this rank may leave because of it.
        """
        later: list[Callable[[], None]] = []
        with self.lock:
            before = self.state
            if error is not None and self._model is not None and not before.verdict.failures:
                self._cause = error
            self.state, actions = self._RULES.advance(self._place, before, event, value)
            for action in actions:
                if action is Action.LEAVE:
                    assert error is not None
                    self.left = self.left or summary(error)
                    later.append(functools.partial(self._leave, error))
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
            self._send_end(value, [])
        elif action is Action.SEND_NOTHING:
            self._send_end(None, [])
        elif action is Action.ABORT_TASKS:
            self._baton.abort()
        elif action is Action.STOP_REPLICAS:
            if self._replicas is not None:
                why = self.state.verdict.elsewhere(self._job_ranks)
                calls = self._collectives.stop() if self._collectives is not None else []
                self._replicas.stop(why or value.for_others(self._job_ranks), calls)
        elif action is Action.WAKE:
            self.woken.set()
        elif action is Action.ROUSE:
            self._baton.wake()
        elif action is Action.ANNOUNCE_END:
            order = self._baton.order
            if isinstance(order, Leader) and self._replicas is not None:
                order.settle()
                self._replicas.announce_end()
                order.end()

    def _complete_calls(self) -> None:
        try:
            self._complete()
        except Exception as error:
            self.leave(error)

    def _leave(self, error: BaseException) -> None:
        """Ends the process groups: no rank waits for this one any more, nor this one for others.

        Each rank that tries raises, and leaves, too; see docs/model-parallel-design.md.
        """
        lost = tells_of_loss(error)
        with self.lock:
            news = not self._ended_groups or (lost and not self._all_ended)
            self._ended_groups = True
            self._all_ended |= lost
        if news:
            self._abort(self.left, lost)
        self.end_order()

    def end_order(self) -> None:
        """Lets no task wait for announcements of the leader any more."""
        with self._baton.changing_order() as order:
            if order is not None:
                order.end()

    # --- END --------------------------------------------------------------------------------------

    def send(self, peer: int, kind: Kind, header: Any, tensors: Sequence[Any]) -> bool:
        """Sends a message to another rank, unless this one has sent END; returns whether it did."""
        assert self._channel is not None
        with self._send_lock:
            if self.end_sent:
                return False
            self._channel.send(peer, kind, header, tensors)
            return True

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
        report = self._model.report()
        if self._collectives is not None:
            report = report._replace(order=self._collectives.order_after(self._collectives.begun))
        if self._rank > 0:
            self._send_end(report, [])
        else:
            assert self.result is not None
            try:
                self._send_end((self.result.header, report), self.result.tensors)
            except Exception:
                # Nothing was sent; name the value that does not pickle.
                structures, objects = self.result.header
                for structure in structures:
                    raise_if_unpicklable("the step function returns", structure, objects)
                raise
        self.reports[self._rank] = report

    def on_end(self, peer: int, message: Message) -> None:
        """Takes the END of another rank of the pipeline; `lock` is held."""
        if isinstance(message.header, Failure):
            self.on(Event.HEARD_FAILURE, message.header)
        elif message.header is None:
            pass  # it has heard of a failure, which comes here from the rank that has failed
        elif peer == 0:
            header, self.reports[peer] = message.header
            self.result = StepResult(header, message.tensors)  # type: ignore[arg-type]
            self.on(Event.BODIES_ENDED)
        else:
            self.reports[peer] = message.header

    def _send_end(self, header: Any, tensors: list[Any]) -> None:
        with self._send_lock:
            channel = self._channel
            if channel is not None:
                for peer in channel.peers:
                    if peer in channel.broken:
                        continue
                    try:
                        channel.send(peer, Kind.END, header, tensors)
                    except RuntimeError as error:
                        channel.broken[peer] = error
            self.end_sent = True

    # --- what has failed --------------------------------------------------------------------------

    def fail(self, microbatch: int, error: BaseException) -> None:
        """Ends the step on all ranks because of an error on this one. Only the first error counts.

        Args:
            microbatch: in which it was raised; -1 if not in a microbatch.
            error: the exception.
        """
        # The next step could not use a process group that has failed.
        event = Event.LEAVES if isinstance(error, dist.DistError) else Event.FAILED
        self._tell(event, as_smp_error(error), microbatch)

    def _tell(self, event: Event, error: BaseException, microbatch: int = -1) -> None:
        """Lets an event happen because of an exception of this rank."""
        self.on(event, describe(microbatch, self._rank, error), error)

    def leave(self, error: BaseException) -> None:
        """Takes part in no more steps.

        Args:
            error: why.
        """
        outside = self.state.phase is Phase.OUTSIDE
        self._tell(Event.BROKEN if outside else Event.LEAVES, as_smp_error(error))

    def find_wrong_plan(self) -> None:
        """Notes at the end of the gathers that the step has to be run again."""
        self._tell(Event.REDO, PlanChangedError("parameters were not needed as in the last step"))

    def calls_differ(self, error: Exception) -> None:
        """Ends the step, which is run again, if this rank has not ended it.

        Args:
            error: why.
        """
        self._tell(Event.CALLS_DIFFER, error)

    def lose(self, peer: int, error: Exception) -> None:
        """Ends the step, and leaves, because the stream from a rank of the pipeline has failed."""
        assert self._channel is not None
        self._channel.broken[peer] = error
        reason = SMPPeerError(loss(self.who(peer), error))
        reason.__cause__ = error
        if tells_of_loss(reason):
            self._loss = self._loss or reason
            self.on(Event.STREAM_LOST, describe(-1, self._rank, reason), reason)
        else:
            self.on(Event.STREAM_ENDED, describe(-1, self._rank, reason), reason)

    def stop(self, elsewhere: Elsewhere) -> None:
        """Ends the step because another replica has ended it."""
        self.on(Event.STOPPED, self.of_other(elsewhere))

    def stop_all(self, error: Exception) -> None:
        """Ends the step on all replicas, unless all ranks of this pipeline have ended it.

        Args:
            error: why.
        """
        self.on(Event.STOPPED, describe(-1, self._rank, error))

    def lose_replica(self, rank: int, error: Exception) -> None:
        """Ends the step, and leaves, because the stream from a rank of another replica has failed.

        Args:
            rank: of the job.
            error: of the stream.
        """
        lost = Elsewhere(rank, loss("it", error), redo=False)
        reason = lost.error()
        reason.__cause__ = error
        self.on(Event.REPLICA_LOST, self.of_other(lost), reason)

    def of_other(self, elsewhere: Elsewhere) -> Failure:
        """Returns a failure of another replica as one that ends this step."""
        return Failure(
            -1, self._rank, elsewhere.text, "", None, elsewhere.redo, elsewhere=elsewhere
        )

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """In this context rank 0 agrees with other replicas on a decision, and tells its ranks."""
        self.on(Event.DECIDES)
        try:
            yield
        finally:
            self.on(Event.DECIDED)

    # --- the thread of the caller -----------------------------------------------------------------

    def run(self, activities: dict[Phase, Callable[[], Any]]) -> StepResult:
        """Goes through the phases of a step.

        Args:
            activities: what the thread does in each of them; what they return comes with DONE.

        Returns:
            The result of the step.

        Raises:
            Redo, SMPError: see `Executor.run`.
        """
        while self.state.phase is not Phase.OUTSIDE:
            self._pass(activities)
        return self._outcome()

    def abandon(self, error: BaseException) -> None:
        """Leaves if the step has not ended: a signal has come between two phases.

        Args:
            error: what it has raised.
        """
        if self.state.phase is not Phase.OUTSIDE:
            self.leave(error)
            self.state = self.state._replace(phase=Phase.OUTSIDE)

    def _pass(self, activities: dict[Phase, Callable[[], Any]]) -> None:
        """Does what there is to do in a phase."""
        phase = self.state.phase
        try:
            value = activities[phase]()
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
            self._raised = error
            self._tell(Event.SIGNALLED, error)
        elif phase is Phase.REDUCING and isinstance(error, Redo):
            self.on(Event.REDO)
        elif phase in (Phase.MEETING, Phase.REDUCING) and isinstance(error, SMPError):
            self.fail_together(error)
            if phase is Phase.MEETING:
                self.on(Event.DONE)
        else:
            error = as_smp_error(error)
            follows = isinstance(error, RuntimeError) and phase not in ENDED
            known = self.error if phase is Phase.REDUCING else self._first
            self._raised = known if follows and known is not None else error
            self._tell(Event.BROKEN, error)

    def fail_together(self, error: Exception, alone: bool = False) -> None:
        """Notes what this rank raises, unless the step has failed before.

        Args:
            error: to raise.
            alone: do other ranks not know of it?
        """
        self._raised = self._first or error
        self._tell(Event.LEAVES if alone else Event.FAILED, as_smp_error(error))

    def time_out(self, silent: Sequence[int]) -> None:
        """Notes that ranks of the pipeline have not ended the step in time."""
        text = f"{self.who(silent[0])} {SILENT_RANK}"
        if self.failures:
            first = choose(self.failures)
            text += f", which had failed on {self.who(first.rank)}: {first.text}"
        self._raised = SMPPeerError(text)
        self._tell(Event.TIMED_OUT, self._raised)

    @property
    def error(self) -> BaseException | None:
        """What this rank raises, once all of the pipeline have ended the step.

        None if the step has succeeded, or has to be run again.
        """
        if self._first is None and self.left and not self.state.verdict.redo:
            # The order group has lost a rank since the tasks have ended.
            return SMPPeerError(f"this rank has left the job: {self.left}")
        return self._first

    @property
    def _first(self) -> BaseException | None:
        first = self.state.verdict.first
        if self._raised is not None or self._loss is not None or first is None:
            return self._raised or self._loss
        cause = self._cause if first.rank == self._rank else None
        return as_error(first, self.who(first.rank), cause)

    def _outcome(self) -> StepResult:
        error, result = self.error, self.result
        try:
            if error is not None:
                raise error
            if self.state.verdict.redo:
                raise Redo
        finally:
            del error  # its traceback refers to this frame
        assert result is not None
        return result

    def who(self, peer: int) -> str:
        """Returns how messages name a rank of the pipeline; there is none with one partition."""
        of_job = self._job_ranks[peer]
        if len(self._job_ranks) == 1:
            return f"rank {of_job} of the job"
        return f"rank {peer} of the pipeline" + (f" (rank {of_job} of the job)" * (of_job != peer))
