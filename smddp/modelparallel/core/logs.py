"""The log of model parallelism."""

from __future__ import annotations

import logging
import sys
import threading
import types
import warnings
from collections.abc import Sequence

__all__ = ["frame_outside", "log", "make_visible", "warn_user"]

log = logging.getLogger("smddp.modelparallel")

# Packages whose code stands between the user's and the place that warns.
_BETWEEN = ("smddp", "smdistributed", "torch", "tensorflow", "keras", "contextlib", "threading")


def frame_outside(frame: types.FrameType | None, packages: Sequence[str]) -> types.FrameType | None:
    """Returns the innermost frame whose code is in none of some packages; None if there is none.

    Args:
        frame: to begin with.
        packages: names of packages or modules. Those inside them belong to them.
    """
    prefixes = tuple(f"{name}." for name in packages)
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(prefixes):
        frame = frame.f_back
    return frame


def warn_user(text: str) -> None:
    """Gives a UserWarning that names the line of the user's code that has led here.

    Python shows the line that a warning names, and shows the same warning once for each line. In a
    task of a step with no code of the user below it, that is the line which the main thread is in.

    Args:
        text: of the warning.
    """
    here = sys._getframe()
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    frame = frame_outside(here, _BETWEEN) or frame_outside(main, _BETWEEN) or here
    warnings.warn_explicit(
        text,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def make_visible() -> None:
    """Prints smp's log to stderr, unless the script has set up logging itself."""
    if log.level == logging.NOTSET and not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
