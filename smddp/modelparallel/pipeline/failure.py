"""Why a step failed, in a form that can be sent: all ranks raise the same."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from smddp.modelparallel.common.errors import SMPError, SMPMicrobatchError, SMPPeerError

__all__ = [
    "Failure",
    "Redo",
    "StructureChangedError",
    "choose",
    "describe",
    "raise_as_error",
    "summary",
]


class StructureChangedError(Exception):
    """A module has not returned what its caller had taken for granted."""


class Redo(Exception):  # noqa: N818 - no error: the step is made again
    """The step has to be made again, without taking anything for granted."""


class Failure(NamedTuple):
    """Why a step failed: the same on all ranks.

    Attributes:
        microbatch, rank: where; -1 if it was in none.
        text, trace, pickled: the exception.
        redo: nothing is wrong with the program: the step can be made again.
    """

    microbatch: int
    rank: int
    text: str
    trace: str
    pickled: bytes | None
    redo: bool = False


def summary(error: BaseException) -> str:
    """Returns an exception in one line, for those who have no use for its traceback."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def choose(failures: Sequence[Failure]) -> Failure:
    """Returns the one that all ranks name; they know the same ones at the end of a step."""
    return min(failures, key=lambda f: (f.microbatch < 0, f.microbatch, f.rank))


def raise_as_error(failure: Failure, cause: BaseException | None) -> NoReturn:
    """Raises the same class with the same text on all ranks, from the original where possible.

    That is SMPMicrobatchError, unless smp itself has refused the step before or after its
    microbatches, or it has failed elsewhere: then what says that. Who has no traceback gets that of
    the other rank behind the text.
    """
    where = f"rank {failure.rank} of the pipeline"
    origin = cause or _unpickled(failure)
    refused = failure.microbatch < 0 and isinstance(origin, SMPError)
    if origin is not None and (refused or isinstance(origin, SMPPeerError)):
        raise type(origin)(f"{where}: {origin}") from origin
    which = f", microbatch {failure.microbatch}" if failure.microbatch >= 0 else ""
    trace = f"\n{failure.trace}" if cause is None else ""
    raise SMPMicrobatchError(f"{where}{which}: {failure.text}{trace}") from origin


def describe(microbatch: int, rank: int, error: BaseException) -> Failure:
    """Returns an exception of this rank as a failure."""
    notes: list[str] = getattr(error, "__notes__", [])
    text = "\n".join([f"{type(error).__name__}: {error}", *notes])
    trace = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    redo = isinstance(error, StructureChangedError)
    return Failure(microbatch, rank, text, trace, pickled, redo)


def _unpickled(failure: Failure) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        error = pickle.loads(failure.pickled)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
