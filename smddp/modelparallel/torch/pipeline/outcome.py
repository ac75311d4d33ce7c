"""What the caller of a step gets: a result or an error."""

from __future__ import annotations

from smddp.modelparallel.core.errors import SMPPeerError
from smddp.modelparallel.core.failure import Redo, as_error
from smddp.modelparallel.core.step_machine import State
from smddp.modelparallel.torch.pipeline.mail import Mail
from smddp.modelparallel.torch.pipeline.step import StepReport, StepResult

__all__ = ["Outcome"]


class Outcome:
    """What is known on a rank of the end of one step, besides the `Verdict`.

    Attributes:
        result: what the driver has returned, once it is here.
        reports: by rank of the pipeline, what END has said.
        raised: what this rank raises whatever others raise; only the thread of the caller sets it.
        loss: a rank of the pipeline is gone.
    """

    def __init__(self, mail: Mail) -> None:
        """Knows nothing yet.

        Args:
            mail: names ranks.
        """
        self._mail = mail
        self.result: StepResult | None = None
        self.reports: dict[int, StepReport] = {}
        self.raised: BaseException | None = None
        self.loss: SMPPeerError | None = None

    def first(self, state: State) -> BaseException | None:
        """Returns what this rank raises as far as is known now; None for nothing.

        Args:
            state: of the machine.
        """
        first = state.verdict.first
        if self.raised is not None or self.loss is not None or first is None:
            return self.raised or self.loss
        return as_error(first, self._mail.who(first.rank))

    def error(self, state: State, left: str) -> BaseException | None:
        """Returns what this rank raises, once all of the pipeline have ended the step.

        Args:
            state: of the machine.
            left: why this rank takes part in no more steps; empty if it does.

        Returns:
            None if the step has succeeded, or has to be run again.
        """
        first = self.first(state)
        if first is None and left and not state.verdict.redo:
            # The order group has lost a rank since the tasks have ended.
            return SMPPeerError(f"this rank has left the job: {left}")
        return first

    def returned(self, state: State, left: str) -> StepResult:
        """Returns the result, or raises.

        Args:
            state: of the machine.
            left: see `error`.

        Raises:
            Redo, SMPError: see `Executor.run`.
        """
        error, result = self.error(state, left), self.result
        try:
            if error is not None:
                raise error
            if state.verdict.redo:
                raise Redo
        finally:
            del error  # its traceback refers to this frame
        assert result is not None
        return result
