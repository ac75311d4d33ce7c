"""The job of this process, and its place in it."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import NamedTuple

import numpy as np

import smddp.numpy
from smddp.tensorflow import interrupts, kernels

__all__ = [
    "group",
    "groups",
    "init",
    "is_initialized",
    "is_shared",
    "join",
    "local_rank",
    "local_size",
    "operations",
    "rank",
    "shutdown",
    "size",
    "timeout",
]

_FIRST = 300.0  # seconds at least that a rank waits for others to compile

_timeout = 0.0
# The group of all ranks first, then other groups that Ctrl-C ends.
groups: list[smddp.numpy.Group] = []
_watch: interrupts.Watch | None = None


class Operations(NamedTuple):
    """The operations of kernels.cc in this job.

    Attributes:
        kernels: what was compiled.
        program: the number of the group for calls that the program orders.
        numbered: that of a second group of the same ranks, for calls that their numbers order.
    """

    kernels: kernels.Kernels
    program: int
    numbered: int


# None: not known yet. False: collectives run in Python, on all ranks.
_operations: Operations | bool | None = None


def init(timeout: float = 300.0, port: int | None = None) -> None:
    """Joins the job that a launcher has started, and compiles operations if that was not done yet.

    Args:
        timeout: seconds that this rank waits for the others, here and in each collective.
        port: on which rank 0 serves the store where the ranks meet; see `smddp.numpy.init`.

    Raises:
        ValueError: it has been called before, or the environment makes no sense.
        smddp.numpy.Error: the other ranks have not come.
    """
    join(timeout, port)
    try:
        operations()
    except BaseException:
        shutdown()  # so that it can be called again
        raise


def join(timeout: float, port: int | None = None) -> None:
    """Does what `init` does, without operations; see `smddp.numpy.init`."""
    global _timeout, _watch
    if groups:
        raise ValueError(
            "init() called more than once. smdistributed.dataparallel is already initialized."
        )
    groups.append(smddp.numpy.init(port=port, timeout=timeout))
    _timeout = timeout
    _watch = interrupts.Watch(_progress, _abort)


def operations() -> Operations | None:
    """Returns the operations, if all ranks have them. The first time, all ranks call it."""
    global _operations
    if _operations is None:
        world, found = group(), kernels.load()
        has = world.allgather(np.array(found is not None), timeout=max(_timeout, _FIRST))
        if found is None or not has.all():
            if found is not None:
                warnings.warn(
                    f"rank(s) {np.flatnonzero(~has).tolist()} have no operations for their "
                    "TensorFlow, so no rank uses them, which is slower",
                    RuntimeWarning,
                    stacklevel=2,
                )
            _operations = False
        else:
            second = world.split(range(world.size))
            assert second is not None
            groups.append(second)
            add = found.library.smddp_kernels_add
            _operations = Operations(found, add(world._use()), add(second._use()))
    return _operations if isinstance(_operations, Operations) else None


def _progress() -> tuple[int, int]:
    begun, ended = interrupts.progress()
    if isinstance(_operations, Operations):
        library = _operations.kernels.library
        # In this order, lest more have ended than begun.
        ended += library.smddp_kernels_ended()
        begun += library.smddp_kernels_begun()
    return begun, ended


def _abort(reason: str) -> None:
    if isinstance(_operations, Operations):
        for number in _operations[1:]:
            _operations.kernels.library.smddp_kernels_abort(number, reason.encode())
    for one in groups:
        with contextlib.suppress(smddp.numpy.Error):
            one.abort(reason)


def is_initialized() -> bool:
    """Returns whether `init` has been called, and `shutdown` has not."""
    return bool(groups)


def is_shared() -> bool:
    """Returns whether several ranks train one model after `init`; `join` alone does not say so."""
    return bool(groups) and _operations is not None and size() > 1


def group() -> smddp.numpy.Group:
    """Returns the group of all ranks.

    Raises:
        ValueError: `init` has not been called.
    """
    if not groups:
        raise ValueError("smddp: call init() of smdistributed.dataparallel.tensorflow first")
    return groups[0]


def timeout() -> float:
    """Returns the seconds that `init` was given."""
    return _timeout


def shutdown() -> None:
    """Leaves the job. It is optional: the end of the process does the same."""
    global _operations, _watch
    if _watch is not None:
        _watch.close()
    if isinstance(_operations, Operations):
        for number in _operations[1:]:
            _operations.kernels.library.smddp_kernels_leave(number)
    _operations = _watch = None
    with contextlib.ExitStack() as stack:  # an error of one does not keep the others
        for one in groups:
            stack.callback(one.leave)
        groups.clear()


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
