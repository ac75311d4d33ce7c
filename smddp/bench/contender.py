"""What takes part in a comparison, as the measuring loop sees it."""

from __future__ import annotations

from typing import Protocol

from smddp.bench.operations import Task

__all__ = ["PLACES", "Contender", "Unable"]

# In the order of the table: the output is another buffer than the input, or the same.
PLACES = ("out_of_place", "in_place")


class Unable(Exception):  # noqa: N818  no error: the row is left out and the text printed
    """This contender cannot do this task; the text says why."""


class Contender(Protocol):
    """All ranks call every method, in the same order."""

    def prepare(self, task: Task) -> list[str]:
        """Gets ready for a task, which replaces the one before; returns which PLACES it has.

        Raises:
            Unable: on all ranks or on none.
        """

    def time(self, place: str, calls: int) -> list[float]:
        """Returns the microseconds of each call on its slowest rank; the same on all ranks."""

    def wrong(self, place: str, shift: int) -> int | None:
        """Returns how many elements of all ranks are wrong; None: there is nothing to check."""
