"""The log of model parallelism."""

from __future__ import annotations

import logging
import sys
import threading
import types
import warnings

__all__ = ["log", "make_visible", "warn_user"]

log = logging.getLogger("smddp.modelparallel")

# Packages whose code stands between the user's and the place that warns.
_BETWEEN = frozenset(
    {"smddp", "smdistributed", "torch", "tensorflow", "keras", "contextlib", "threading"}
)


def warn_user(text: str) -> None:
    """Gives a UserWarning that names the line of the user's code that has led here.

    Python shows the line that a warning names, and shows the same warning once for each line. In a
    task of a step with no code of the user below it, that is the line which the main thread is in.

    Args:
        text: of the warning.
    """
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    frame = _of_user(sys._getframe()) or _of_user(main) or sys._getframe()
    warnings.warn_explicit(
        text,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _of_user(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and _package_of(frame) in _BETWEEN:
        frame = frame.f_back
    return frame


def _package_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def make_visible() -> None:
    """Prints smp's log to stderr, unless the script has set up logging itself."""
    if log.level == logging.NOTSET and not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
