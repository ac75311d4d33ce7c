"""The log of model parallelism."""

from __future__ import annotations

import logging

__all__ = ["log", "make_visible"]

log = logging.getLogger("smddp.modelparallel")


def make_visible() -> None:
    """Prints smp's log to stderr, unless the script has set up logging itself."""
    if log.level == logging.NOTSET and not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
