"""Turns the errors of collective calls, which torch raises, into those that smp raises for them.

A rank that waits in a collective call when another one is lost shall raise what the other ranks
raise, whatever they wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from smddp.modelparallel.core.errors import SMPPeerError
from smddp.torch.errors import AbortedError

__all__ = ["as_smp_error", "loss", "smp_errors", "tells_of_loss"]


def as_smp_error(error: BaseException) -> BaseException:
    """Returns SMPPeerError for an error of a process group; any other error itself."""
    if not isinstance(error, dist.DistError):
        return error
    found = SMPPeerError(f"{type(error).__name__}: {error}")
    found.__cause__ = error
    return found


@contextlib.contextmanager
def smp_errors() -> Iterator[None]:
    """In this context, or in a function that it decorates, such an error becomes SMPPeerError."""
    try:
        yield
    except dist.DistError as error:
        raise as_smp_error(error) from error


def loss(who: str, error: Exception) -> str:
    """Returns what to say when the stream of messages from a rank has failed.

    Args:
        who: the rank.
        error: of the stream.
    """
    text = f"nothing comes from {who} any more: {error}"
    if not tells_of_loss(error):
        return text
    return (
        f"{text}. The log of the lost process says why; if it came to its end, it made fewer steps "
        "than others"
    )


def tells_of_loss(error: BaseException) -> bool:
    """Says whether a rank that leaves because of an error has to end all groups of smp.

    Not after a signal, nor if it has only heard that another rank has left: that one knows whether
    a rank is lost, and has ended its own groups.
    """
    if not isinstance(error, Exception):
        return False
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, AbortedError):
        cause = cause.__cause__
    return cause is None
