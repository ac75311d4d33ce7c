"""Turns the errors of collective calls, which torch raises, into those that smp raises for them.

A rank that waits in a collective call when another one is lost shall raise what the other ranks
raise, whatever they wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from smddp_smp.errors import SMPPeerError

__all__ = ["as_smp_error", "smp_errors"]


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
