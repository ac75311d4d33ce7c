"""Runs the main function of a command and ends the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

__all__ = ["run"]


def run(main: Callable[[], int]) -> NoReturn:
    """Ends the process with what `main` returns; without an error text if nobody reads the output.

    That is so in `smddp plan list | head`: head ends first.

    Args:
        main: returns the exit status.
    """
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
