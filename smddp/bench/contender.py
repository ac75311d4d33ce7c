"""The interface between the measuring loop and what it compares."""

from __future__ import annotations

from typing import Protocol

from smddp.bench.operations import Task

__all__ = ["PLACES", "Contender", "Unable"]

# In the order of the table's columns: the output is another buffer than the input, or the same.
PLACES = ("out_of_place", "in_place")


class Unable(Exception):  # noqa: N818  not an error: the row is left out, and the text printed
    """Raised if a contender cannot run a task; the text gives the reason."""


class Contender(Protocol):
    """One backend with one kind of memory. All ranks call every method, in the same order."""

    def prepare(self, task: Task) -> list[str]:
        """Allocates the buffers of a task and frees those of the task before.

        Returns:
            Those of PLACES in which the contender can run the task.

        Raises:
            Unable: the contender cannot run the task; raised on all ranks or on none.
        """

    def time(self, place: str, calls: int) -> list[float]:
        """Makes `calls` calls; returns the µs of each on its slowest rank, the same on all ranks.

        Args:
            place: one of those that prepare() returned.
            calls: number of calls.
        """

    error: float | None = None
    """The largest relative error that wrong() found so far; None where results are exact."""

    def wrong(self, place: str, shift: int) -> int | None:
        """Makes one call; returns the number of wrong elements on all ranks together.

        Args:
            place: one of those that prepare() returned.
            shift: selects the input data, so that two checks use different data.

        Returns:
            None if there is no output to check.
        """
