"""Runs the main function of a command and ends the process."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

__all__ = ["ending_at_once", "run"]

# For terminals that know few characters, as in the locale POSIX.
_PLAIN = {"✓": "ok", "✗": "FAULT", "→": "->", "–": "-", "—": "-", "…": "...", "×": "x", "µ": "u"}
# Errors of where the output goes, such as a disk that is full.
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def run(main: Callable[[], int]) -> NoReturn:
    """Ends the process with what `main` returns.

    There is no error text if nobody reads the output, as in `smddp plan list | head`, where head
    ends first; no stack trace after Ctrl-C; and one sentence if the output cannot be written, or a
    module cannot be imported.

    Args:
        main: returns the exit status.
    """
    codecs.register_error("smddp", _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="smddp")
    try:
        status = main()
        if sys.stdout is not None:  # it was closed before the command began
            sys.stdout.flush()
    except ImportError as error:  # such as a torch that smddp was not built for
        print(error, file=sys.stderr)
        status = 1
    except BrokenPipeError:
        _forget_output()
        status = 1
    except OSError as error:
        if error.errno not in _OF_OUTPUT or error.filename is not None:
            raise
        _forget_output()
        print(f"smddp: the output cannot be written: {error.strerror}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        # Python then ends by SIGINT, so that a shell does not go on with its script.
        sys.excepthook = lambda *_: None
        raise
    sys.exit(status)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Lets Ctrl-C end this process meanwhile, also in compiled code.

    Python's handler would wait for that, perhaps for minutes. Nothing that has to be tidied up may
    be begun meanwhile.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _forget_output() -> None:
    # Python flushes once more as it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """Returns what is printed in place of a character that cannot be, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if 0xDC80 <= ord(character) <= 0xDCFF:  # a byte of a name that is in no encoding
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return _PLAIN.get(character, "?"), error.start + 1
