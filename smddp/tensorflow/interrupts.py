"""Ctrl-C while TensorFlow waits for other ranks on the main thread.

Python runs handlers of signals on that thread only, so not before the operation ends. But it writes
the number of a signal to a file at once; a thread reads it there, and ends the operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["Watch", "progress", "waiting"]

_GRACE = 0.3  # seconds in which an operation may end by itself


class _Calls:
    """Calls in Python, on threads of TensorFlow, that wait for other ranks."""

    begun = ended = 0


_lock = threading.Lock()


def progress() -> tuple[int, int]:
    """Returns how many contexts of `waiting` have begun and ended."""
    return _Calls.begun, _Calls.ended


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Marks a call that waits for other ranks; that of the main thread sees Ctrl-C itself."""
    if threading.current_thread() is threading.main_thread():
        yield
        return
    with _lock:
        _Calls.begun += 1
    try:
        yield
    finally:
        with _lock:
            _Calls.ended += 1


class Watch:
    """Looks at Ctrl-C, if Python's own handler is in force, until it is closed."""

    def __init__(
        self, progress: Callable[[], tuple[int, int]], abort: Callable[[str], None]
    ) -> None:
        """Begins.

        Args:
            progress: returns how many operations have begun and ended.
            abort: ends them, on all ranks, with a text.
        """
        self._progress, self._abort = progress, abort
        self._is_open = True
        self._thread: threading.Thread | None = None
        # Elsewhere Python does not allow it.
        if threading.current_thread() is threading.main_thread():
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._former = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._run, name="smddp-ctrl-c", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends. On another thread than the main one, Python goes on writing to the descriptor.

        It stays open then, and numbers of signals go to whoever had asked for them before.
        """
        self._is_open = False
        if self._thread is None or threading.current_thread() is not threading.main_thread():
            return
        former = signal.set_wakeup_fd(self._former)
        if former != self._write:  # that of somebody else
            signal.set_wakeup_fd(former)
        os.write(self._write, b"\0")
        self._thread.join()
        self._thread = None
        os.close(self._read)
        os.close(self._write)

    def _run(self) -> None:
        while numbers := os.read(self._read, 64):
            if 0 in numbers:
                return
            if self._former >= 0:
                os.write(self._former, numbers)
            handler = signal.getsignal(signal.SIGINT)
            if self._is_open and signal.SIGINT in numbers and handler is signal.default_int_handler:
                self._end_what_waits()

    def _end_what_waits(self) -> None:
        _, before = self._progress()
        while True:
            time.sleep(_GRACE)
            started, ended = self._progress()
            if started == ended:
                return
            if ended == before:
                _interrupt_again()
                self._abort("smddp: a wait was interrupted")
                return
            before = ended


def _interrupt_again() -> None:
    """Lets the main thread see Ctrl-C twice when it runs Python again.

    The first time is in the constructor of TensorFlow's error for the operation that was ended;
    its caller, in C++, makes a RuntimeError of the KeyboardInterrupt.
    """
    again = ctypes.cast(ctypes.pythonapi.PyErr_SetInterruptEx, ctypes.c_void_p)
    ctypes.pythonapi.Py_AddPendingCall(again, ctypes.c_void_p(signal.SIGINT))
