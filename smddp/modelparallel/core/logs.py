"""The log of model parallelism."""

from __future__ import annotations

import logging
import sys
import types
import warnings

__all__ = ["log", "make_visible", "warn_user"]

log = logging.getLogger("smddp.modelparallel")

# Python modules whose code stands between the user's and the place that warns.
_BETWEEN = frozenset({"smddp", "smdistributed", "torch", "tensorflow", "keras", "contextlib"})


def warn_user(text: str) -> None:
    """Gives a UserWarning that names the line of the user's code that has led here.

    Python prints a warning once for each line that it names, so one that named smp's own line
    would be printed once for the whole process.

    Args:
        text: of the warning.
    """
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and _package_of(frame) in _BETWEEN:
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)


def _package_of(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def make_visible() -> None:
    """Prints smp's log to stderr, unless the script has set up logging itself."""
    if log.level == logging.NOTSET and not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
