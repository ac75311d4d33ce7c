"""Why a step failed, in a form that can be sent, so that all ranks raise the same error."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from smddp.modelparallel.core.errors import (
    SMPError,
    SMPMicrobatchError,
    SMPPartitionError,
    SMPPeerError,
)

__all__ = [
    "MODULES_NAMED",
    "ArgumentChangedError",
    "CallsDifferError",
    "DifferentiatedTwiceError",
    "Elsewhere",
    "Failure",
    "OrderMattersError",
    "PlanChangedError",
    "Raised",
    "Redo",
    "StructureChangedError",
    "as_error",
    "choose",
    "describe",
    "summary",
]


# How many of the modules that were called last an error names.
MODULES_NAMED = 5


class StructureChangedError(Exception):
    """A module has returned another structure than its caller had relied on."""


class ArgumentChangedError(Exception):
    """Code has changed an argument in place before its call was sent, or had a result."""


class DifferentiatedTwiceError(Exception):
    """Gradients of calls that were sent together are differentiated again."""


class CallsDifferError(Exception):
    """Replicas that run their tasks in one order do not wait for the results of the same calls."""


class OrderMattersError(Exception):
    """Other ranks have read a buffer that the step has changed, while microbatches overlapped."""


class PlanChangedError(Exception):
    """Sharded parameters are needed in another order, or give more gradients, than was expected."""


class Redo(Exception):  # noqa: N818  not an error of the program
    """Ends a step that has to be run again.

    In the second attempt every call waits for its result, and the microbatches run one after the
    other.
    """


class Elsewhere(NamedTuple):
    """Why a step failed, as the ranks of another replica hear of it.

    Attributes:
        rank: of the job, on which it failed.
        text: class and message of the exception, in one line.
        redo: see `Failure.redo`.
    """

    rank: int
    text: str
    redo: bool

    def error(self) -> SMPPeerError:
        """Returns the error that the other replicas raise."""
        # With tensor parallelism, that rank may have parts of the same replica.
        return SMPPeerError(f"the step failed on rank {self.rank} of the job: {self.text}")


class Raised:
    """The exception of a failure, on the rank that has raised it.

    Messages do not carry it, and all are equal: so failures are compared by what ranks say of them.

    Attributes:
        error: None elsewhere, and once the step is over. Its traceback refers to the values of the
            step.
    """

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Raised)

    def __hash__(self) -> int:
        return 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Raised, ()


_ELSEWHERE = Raised()


class Failure(NamedTuple):
    """Why a step failed, as it is sent to all ranks.

    Attributes:
        microbatch: in which it failed; -1 if not in a microbatch.
        rank: of the pipeline, on which it failed.
        text: class and message of the exception.
        trace: its traceback.
        pickled: the exception itself; None if it does not pickle.
        redo: the program has no error. What smp had assumed, about a structure, an argument,
            derivatives, buffers, the order of parameters or the calls of other replicas, was wrong,
            so the step is run again.
        order_matters: smp had assumed that no buffer changes that other ranks read.
        elsewhere: the failure of another replica that made this one end the step; None if it has
            failed itself.
        raised: the exception, on the rank that has raised it.
    """

    microbatch: int
    rank: int
    text: str
    trace: str
    pickled: bytes | None
    redo: bool = False
    order_matters: bool = False
    elsewhere: Elsewhere | None = None
    raised: Raised = _ELSEWHERE

    def for_others(self, job_ranks: Sequence[int]) -> Elsewhere:
        """Returns what other replicas hear of it.

        Args:
            job_ranks: the ranks of the pipeline, as ranks of the job.
        """
        first_line = self.text.partition("\n")[0]
        return self.elsewhere or Elsewhere(job_ranks[self.rank], first_line, self.redo)


def summary(error: BaseException) -> str:
    """Returns class and message of an exception in one line."""
    return _said(error).partition("\n")[0]


def _said(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException as other:  # all ranks would wait for one that cannot say why it failed
        text = f"(its text cannot be made: {type(other).__name__})"
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def choose(failures: Iterable[Failure]) -> Failure:
    """Returns the failure that all ranks raise; at the end of a step all know the same ones."""
    return min(failures, key=_order)


def _order(failure: Failure) -> tuple[Any, ...]:
    # A rank has one failure of its own. It may have several of other replicas, or of lost ranks.
    of_job = failure.elsewhere.rank if failure.elsewhere is not None else -1
    before = failure.microbatch < 0
    return of_job >= 0, before, failure.microbatch, failure.rank, of_job, failure.text


def as_error(failure: Failure, where: str) -> SMPError:
    """Returns the same class with the same text on all ranks, from the original where possible.

    On a rank without the original exception, its traceback is appended to the text.

    Args:
        failure: to raise.
        where: names the rank on which it was raised.

    Returns:
        SMPMicrobatchError in most cases. An error of the original's class, if smp itself has raised
        it before or after the microbatches, if the model cannot be divided, or if another replica
        has failed. SMPPeerError if a signal has ended the step: the rank that got it takes part in
        no more.
    """
    if failure.elsewhere is not None:
        return failure.elsewhere.error()
    cause = failure.raised.error
    origin = cause or _unpickled(failure)
    outside = failure.microbatch < 0 and isinstance(origin, SMPError)
    of_all = isinstance(origin, (SMPPeerError, SMPPartitionError))
    error: SMPError
    if isinstance(origin, SMPError) and (outside or of_all):
        error = type(origin)(f"{where}: {origin}")
    elif failure.microbatch < 0 and origin is not None and not isinstance(origin, Exception):
        error = SMPPeerError(f"{where}: {failure.text}")
    else:
        which = f", microbatch {failure.microbatch}" if failure.microbatch >= 0 else ""
        trace = f"\n{failure.trace}" if cause is None else ""
        error = SMPMicrobatchError(f"{where}{which}: {failure.text}{trace}")
    error.__cause__ = origin
    return error


def describe(microbatch: int, rank: int, error: BaseException) -> Failure:
    """Returns an exception of this rank as a failure.

    Args:
        microbatch: in which it was raised; -1 if not in a microbatch.
        rank: of this process in the pipeline.
        error: the exception.
    """
    notes: list[str] = getattr(error, "__notes__", [])
    text = "\n".join([_said(error), *map(str, notes)])
    trace = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except BaseException:  # of code of the script
        pickled = None
    order_matters = isinstance(error, OrderMattersError)
    wrong = (
        StructureChangedError,
        ArgumentChangedError,
        DifferentiatedTwiceError,
        PlanChangedError,
        CallsDifferError,
    )
    redo = order_matters or isinstance(error, wrong)
    return Failure(
        microbatch, rank, text, trace, pickled, redo, order_matters, raised=Raised(error)
    )


def _unpickled(failure: Failure) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        error = pickle.loads(failure.pickled)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
