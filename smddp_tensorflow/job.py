"""The job of this process, and its place in it."""

from __future__ import annotations

import os

import smddp_numpy

__all__ = [
    "group",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "numbered_group",
    "rank",
    "shutdown",
    "size",
    "timeout",
]

_world: smddp_numpy.Group | None = None
# The same ranks, for calls whose order is that of their numbers and not that of the program.
_numbered: smddp_numpy.Group | None = None
_timeout = 0.0


def init(timeout: float = 300.0) -> None:
    """Joins the job that a launcher has started; see `smddp_numpy.init`.

    Args:
        timeout: seconds that this rank waits for the others, here and in each collective.

    Raises:
        ValueError: it has been called before, or the environment makes no sense.
        smddp_numpy.Error: the other ranks have not come.
    """
    global _numbered, _timeout, _world
    if _world is not None:
        raise ValueError(
            "init() called more than once. smdistributed.dataparallel is already initialized."
        )
    _world, _timeout = smddp_numpy.init(timeout=timeout), timeout
    _numbered = _world.split(range(_world.size))


def is_initialized() -> bool:
    """Returns whether `init` has been called, and `shutdown` has not."""
    return _world is not None


def group() -> smddp_numpy.Group:
    """Returns the group of all ranks.

    Raises:
        ValueError: `init` has not been called.
    """
    if _world is None:
        raise ValueError("smddp: call init() of smdistributed.dataparallel.tensorflow first")
    return _world


def timeout() -> float:
    """Returns the seconds that `init` was given."""
    return _timeout


def numbered_group() -> smddp_numpy.Group:
    """Returns a second group of all ranks, for calls that are ordered by their numbers."""
    group()
    assert _numbered is not None
    return _numbered


def shutdown() -> None:
    """Leaves the job. It is optional: the end of the process does the same."""
    global _numbered, _world
    for left in (_numbered, _world):
        if left is not None:
            left.leave()
    _numbered = _world = None


def rank() -> int:
    """Returns the number of this process in the job."""
    return group().rank


def size() -> int:
    """Returns the number of processes in the job."""
    return group().size


def local_rank() -> int:
    """Returns the number of this process among those of its host."""
    group()
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """Returns the number of processes on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(size())))
