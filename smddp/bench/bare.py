"""The programs behind the rows `bound`: sums without a library, in memory and over sockets.

They are compiled in a clone of smddp, as part of its benchmarks (benchmarks/bound.cc). They are not
in wheels.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smddp.torch import _load

__all__ = ["BareExchange", "summing", "unavailable"]

# How a turn of an exchange ends; benchmarks/bound.cc has the same values.
_COMPLETE, _MOVED, _STILL, _LOST = range(4)


def _path() -> Path:
    return _load.check().with_name("libsmddp_bound.so")


def unavailable() -> str | None:
    """Returns a sentence if there are no such programs here; None if there are."""
    if _path().exists():
        return None
    return "its programs are part of a clone of smddp (`make setup` builds them), not of wheels"


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_path()), use_errno=True)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, result, arguments in (
        ("sum", None, [pointer, size, size]),
        ("exchange_new", pointer, [pointer, size, size]),
        ("exchange_delete", None, [pointer]),
        ("exchange_begin", None, [pointer, pointer, size]),
        ("exchange_run", ctypes.c_int, [pointer]),
        ("exchange_lost", size, [pointer]),
        ("exchange_lacks", ctypes.c_int, [pointer, size]),
    ):
        function = getattr(library, f"bound_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _floats(buffer: memoryview[Any]) -> Any:
    """Returns the memory of contiguous float32 for a call; keeps it alive."""
    assert buffer.format == "f", buffer.format
    return (ctypes.c_float * len(buffer)).from_buffer(buffer)


def summing(buffers: Sequence[memoryview[Any]]) -> Callable[[], None]:
    """Returns a function that replaces each of several buffers by the sum of all.

    Args:
        buffers: at least two of float32, all of one length.
    """
    arrays = [_floats(buffer) for buffer in buffers]
    assert len(buffers) > 1, buffers
    assert len({len(buffer) for buffer in buffers}) == 1, buffers
    pointers = (ctypes.c_void_p * len(arrays))(*map(ctypes.addressof, arrays))
    add, count = _library().bound_sum, len(buffers[0])

    def run() -> None:
        assert arrays  # which own the memory
        add(pointers, len(pointers), count)

    return run


class BareExchange:
    """Ranks that exchange vectors over stream sockets and sum them, and do nothing else.

    After an error the connections hold the rest of an exchange, so further calls raise, too.

    Args:
        sockets: the connection to each rank, which the caller keeps open; None for this rank.
        rank: which rank this is.
    """

    def __init__(self, sockets: Sequence[socket.socket | None], rank: int) -> None:
        self._sockets, self._usable = sockets, True
        numbers = [-1 if each is None else each.fileno() for each in sockets]
        library = _library()
        self._exchange = library.bound_exchange_new(
            (ctypes.c_int * len(numbers))(*numbers), len(numbers), rank
        )
        weakref.finalize(self, library.bound_exchange_delete, self._exchange)

    def sum_in_place(self, buffer: memoryview[Any], timeout: float) -> None:
        """Replaces a vector by the sum of all ranks' vectors.

        Args:
            buffer: float32, as many as on the other ranks.
            timeout: seconds in which something must move.

        Raises:
            RuntimeError: a connection ended, nothing moved for too long, or a call failed before.
        """
        if not self._usable:
            raise RuntimeError("an exchange failed before: its connections cannot be used")
        self._usable = False
        library, floats = _library(), _floats(buffer)
        library.bound_exchange_begin(self._exchange, floats, len(buffer))
        last_move = 0.0
        while (turn := library.bound_exchange_run(self._exchange)) != _COMPLETE:
            if turn == _LOST:
                lost = self._name(library.bound_exchange_lost(self._exchange))
                error = ctypes.get_errno()
                why = os.strerror(error) if error else "it has closed the connection"
                raise RuntimeError(f"lost {lost} in an exchange: {why}")
            now = time.monotonic()
            if turn == _MOVED or not last_move:
                last_move = now
            elif now - last_move > timeout:
                lacking = [
                    self._name(rank)
                    for rank in range(len(self._sockets))
                    if library.bound_exchange_lacks(self._exchange, rank)
                ]
                raise RuntimeError(
                    f"nothing has moved for {timeout:g} s in an exchange with {', '.join(lacking)}"
                )
        self._usable = True

    def _name(self, rank: int) -> str:
        stream = self._sockets[rank]
        try:
            host = stream.getpeername() if stream is not None else ""
        except OSError:
            host = ""  # the connection is gone
        return f"rank {rank} at {host[0]}" if isinstance(host, tuple) else f"rank {rank}"
