"""How the steps of a rank end: what has failed, END to the other ranks, and leaving the job."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from smddp.modelparallel.core.baton import Baton
from smddp.modelparallel.core.errors import SMPPeerError
from smddp.modelparallel.core.failure import (
    Elsewhere,
    Failure,
    Redo,
    choose,
    describe,
    raise_as_error,
    summary,
)
from smddp.modelparallel.core.order import Follower
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

__all__ = ["SILENT", "Ending"]

SILENT = "has not ended its step in time"


class Ending:
    """How the steps of one rank end.

    The first failure on any rank ends the step on all: this rank aborts its tasks, and sends END to
    the others, who do the same. Whoever waits for the end of the step then raises the failure that
    `choose` picks, which is the same on all ranks.

    A rank that can take part in no more steps *leaves* (docs/model-parallel-design.md).

    Any thread may call the methods; `lock` guards what they change.

    Attributes:
        lock: also held by the executor while it acts upon a message, because that may end the step.
        left: why this rank takes part in no more steps; empty if it does.
        over: set when the thread that waits for the end of the step may go on.
        order_over: set when this rank has run all that its leader has run. Only then does a
            follower say in END that the step has succeeded here.
        failures: of all ranks, as far as they are known here.
        end_sent: has this rank sent END in this step?
        result: what the driver has returned, once it is here.
        reports: by rank of the pipeline, what END has said.
    """

    def __init__(
        self,
        rank: int,
        job_ranks: Sequence[int],
        baton: Baton,
        channel: Channel | None,
        abort: Callable[[str, bool], None],
        replicas: OrderGroup | None,
        collectives: StepCollectives | None,
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
        """
        self._rank, self._job_ranks = rank, job_ranks
        self._baton, self._channel, self._abort = baton, channel, abort
        self._replicas, self._collectives = replicas, collectives
        self.lock = threading.RLock()
        # Held for a check of `end_sent` and the send: no message may follow END, because the
        # receiver would take it for one of the next step.
        self._send_lock = threading.Lock()
        self.left = ""
        self._all_ended = False  # has this rank ended all groups of smp, because a rank was lost?
        self._reset()

    def _reset(self) -> None:
        self.over, self.order_over = threading.Event(), threading.Event()
        self._deciding = False  # see `deciding`
        self._postponed: list[Failure] = []  # failures that have come meanwhile
        self.failures: list[Failure] = []
        # The exception of this rank. Its traceback refers to the model and to all of the step.
        self._cause: BaseException | None = None
        self._loss: SMPPeerError | None = None  # a rank of the pipeline has been lost
        self.end_sent = False
        self.result: StepResult | None = None
        self.reports: dict[int, StepReport] = {}
        self._model: StepModel | None = None

    def begin(self, model: StepModel) -> None:
        """Begins a step, which trains this model."""
        self._reset()
        self._model = model

    def forget(self) -> None:
        """Frees the values of the step, once its caller has the result or an error."""
        self._cause = self.result = self._model = None

    def check(self) -> None:
        """Raises SMPPeerError if there can be no step any more; called before each."""
        if self.left:
            raise SMPPeerError(f"this rank has left the job in an earlier step: {self.left}")

    # --- END --------------------------------------------------------------------------------------

    def send(self, peer: int, kind: Kind, header: Any, tensors: Sequence[Any]) -> bool:
        """Sends a message to another rank, unless this one has sent END; returns whether it did."""
        assert self._channel is not None
        with self._send_lock:
            if self.end_sent:
                return False
            self._channel.send(peer, kind, header, tensors)
            return True

    def succeed(self) -> None:
        """Sends END of this rank, unless that was done.

        Raises:
            TypeError: something in the result of the step function does not pickle.
        """
        if self.end_sent:
            return
        assert self._model is not None
        report = self._model.report()
        if self._collectives is not None:
            report = report._replace(order=self._collectives.order_after(self._collectives.begun))
        self.reports[self._rank] = report
        if self._rank > 0:
            self._send_end(report, [])
            return
        assert self.result is not None
        try:
            self._send_end((self.result.header, report), self.result.tensors)
        except Exception:
            # END was not sent, so no rank has this report; name the value that does not pickle.
            del self.reports[self._rank]
            structures, objects = self.result.header
            for structure in structures:
                raise_if_unpicklable("the step function returns", structure, objects)
            raise

    def on_end(self, peer: int, message: Message) -> None:
        """Notes that another rank of the pipeline has ended the step; `lock` is held."""
        if isinstance(message.header, Failure):
            self.failures.append(message.header)
            self._send_end(None, [])
            self._stop()
        elif message.header is None:
            pass  # it has heard of a failure, which comes here from the rank that has failed
        elif peer == 0:
            header, self.reports[peer] = message.header
            self.result = StepResult(header, message.tensors)  # type: ignore[arg-type]
            # Sent here, not by the thread in `run`, which has to wake first: all ranks wait for it.
            if not isinstance(self._baton.order, Follower):
                self.succeed()
            self.over.set()
        else:
            self.reports[peer] = message.header

    def _send_end(self, header: Any, tensors: list[Any]) -> None:
        with self.lock, self._send_lock:
            if self.end_sent:
                return
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

    # --- failure ----------------------------------------------------------------------------------

    def fail(self, microbatch: int, error: BaseException) -> None:
        """Ends the step on all ranks because of an error on this one. Only the first error counts.

        Args:
            microbatch: in which it was raised; -1 if not in a microbatch.
            error: the exception.
        """
        self._note(microbatch, as_smp_error(error))
        if isinstance(error, dist.DistError):  # the next step could not use the process group
            self.leave(error)

    def fail_on_all(self, error: Exception) -> None:
        """Ends the step on all replicas, unless all ranks of this pipeline have ended it.

        Args:
            error: why.
        """
        self._stop_with(describe(-1, self._rank, error))

    def _note(self, microbatch: int, error: BaseException) -> None:
        """Notes the first error of this rank in a step, and tells the others."""
        failure = describe(microbatch, self._rank, error)
        with self.lock:
            if self.failures:
                return
            self.failures.append(failure)
            if self._model is not None:
                self._cause = error
            self._send_end(failure, [])
            self._stop()

    def lose(self, peer: int, error: Exception) -> None:
        """Ends the step, and leaves, because the stream from a rank of the pipeline has failed."""
        assert self._channel is not None
        self._channel.broken[peer] = error
        reason = SMPPeerError(loss(self.who(peer), error))
        reason.__cause__ = error
        failure = describe(-1, self._rank, reason)
        lost = tells_of_loss(reason)
        with self.lock:
            if lost:
                self._loss = self._loss or reason
            # Else another failure may be why the streams have ended.
            if lost or not self.failures:
                self.failures.append(failure)
            self._send_end(failure, [])
            self._stop()
        self.leave(reason)

    def stop(self, elsewhere: Elsewhere) -> None:
        """Ends the step because another replica has ended it."""
        self._stop_with(
            Failure(-1, self._rank, elsewhere.text, "", None, elsewhere.redo, elsewhere=elsewhere)
        )

    def lose_replica(self, rank: int, error: Exception) -> None:
        """Ends the step, and leaves, because the stream from a rank of another replica has failed.

        Args:
            rank: of the job.
            error: of the stream.
        """
        lost = Elsewhere(rank, loss("it", error), redo=False)
        self.stop(lost)
        reason = lost.error()
        reason.__cause__ = error
        self.leave(reason)

    def _stop_with(self, failure: Failure) -> None:
        """Ends the step; or only what is left of it, if all ranks of the pipeline have ended it."""
        with self.lock:
            if self.failures:
                return
            if self._deciding:
                self._postponed.append(failure)
                return
            if self.end_sent:
                self._abort_tasks(failure.elsewhere or self._for_others(failure))
                return
            self.failures.append(failure)
            self._send_end(failure, [])
            self._stop()

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """In this context rank 0 agrees with other replicas on a decision, and tells its ranks.

        A failure on another replica ends the step here only then. Otherwise this rank could have
        the decision, and could not tell it any more.
        """
        with self.lock:
            self._deciding = True
        try:
            yield
        finally:
            with self.lock:
                self._deciding = False
                for failure in self._postponed:
                    self._stop_with(failure)

    def _stop(self) -> None:
        self._abort_tasks(self.as_elsewhere())
        self.over.set()
        self.order_over.set()

    def _abort_tasks(self, why: Elsewhere) -> None:
        self._baton.abort()
        if self._replicas is not None:
            calls = self._collectives.stop() if self._collectives is not None else []
            self._replicas.stop(why, calls)

    def as_elsewhere(self, failure: str = "") -> Elsewhere:
        """Returns why this replica has ended the step, for the others.

        Args:
            failure: the reason if no failure of this step is known.
        """
        if not self.failures:
            return Elsewhere(self._job_ranks[self._rank], failure, redo=False)
        first = choose(self.failures)
        if first.elsewhere is not None:
            return first.elsewhere
        redo = any(one.redo for one in self.failures)
        return self._for_others(first)._replace(redo=redo)

    def _for_others(self, failure: Failure) -> Elsewhere:
        """Returns what the other replicas hear of a failure in this one."""
        first_line = failure.text.partition("\n")[0]
        return Elsewhere(self._job_ranks[failure.rank], first_line, failure.redo)

    # --- leaving ----------------------------------------------------------------------------------

    def leave(self, error: BaseException) -> None:
        """Takes part in no more steps, because a rank was lost, or a signal has raised here.

        No rank waits for this one in a step any more, nor this one for others: each rank that tries
        raises, and leaves, too.

        Args:
            error: why.
        """
        error = as_smp_error(error)
        lost, first = tells_of_loss(error), not self.left
        self.left = self.left or summary(error)
        self._note(-1, error)
        if first or (lost and not self._all_ended):
            self._all_ended |= lost
            self._abort(self.left, lost)
        self.end_order()

    def leave_after_signal(self, error: BaseException) -> None:
        """Leaves because a signal has raised in `run`, if others need this rank during a step.

        Without a pipeline, and without replicas that wait for this rank while tasks run, the others
        hear of it at the end of the step.

        Args:
            error: what the signal has raised.
        """
        if self._channel is None and self._replicas is None:
            self.fail(-1, error)
        else:
            self.leave(error)

    def end_order(self) -> None:
        """Lets no task wait for announcements of the leader any more."""
        with self._baton.changing_order() as order:
            if order is not None:
                order.end()

    # --- what the caller of the step gets ---------------------------------------------------------

    def outcome(self, silent: Sequence[int]) -> StepResult:
        """Returns the result of the step, once all ranks of the pipeline have ended it.

        Args:
            silent: the ranks that have not ended it in time.

        Raises:
            Redo, SMPError: see `Executor.run`.
        """
        if silent:
            text = f"{self.who(silent[0])} {SILENT}"
            if self.failures:
                first = choose(self.failures)
                text += f", which had failed on {self.who(first.rank)}: {first.text}"
            silence = SMPPeerError(text)
            self.leave(silence)
            raise silence
        if self._loss is not None:
            raise self._loss
        if any(failure.redo for failure in self.failures):
            raise Redo
        if self.failures:
            first = choose(self.failures)
            cause = self._cause if first.rank == self._rank else None
            raise_as_error(first, self.who(first.rank), cause)
        assert self.result is not None
        return self.result

    def who(self, peer: int) -> str:
        """Returns how messages name a rank of the pipeline; there is none with one partition."""
        of_job = self._job_ranks[peer]
        if len(self._job_ranks) == 1:
            return f"rank {of_job} of the job"
        return f"rank {peer} of the pipeline" + (f" (rank {of_job} of the job)" * (of_job != peer))
