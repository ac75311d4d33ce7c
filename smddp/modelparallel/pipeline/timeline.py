"""What this rank did when, in the last step: for the timeline that users can look at."""

from __future__ import annotations

import time
from typing import NamedTuple

__all__ = ["Span", "Timeline"]


class Span(NamedTuple):
    """One uninterrupted piece of work.

    Attributes:
        start, end: seconds on the machine's monotonic clock.
        microbatch: whose work it was.
        forward: forward or backward.
        name: of the module that was called; empty for the code of the step itself.
    """

    start: float
    end: float
    microbatch: int
    forward: bool
    name: str


class Timeline:
    """Records the spans of one step; whoever holds the baton writes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.spans: list[Span] = []
        self.began = self.ended = 0.0
        self._open: tuple[float, int, bool, str] | None = None

    def begin(self) -> None:
        """Forgets the previous step."""
        self.spans = []
        self.began = time.monotonic()

    def end(self) -> None:
        """Ends the step."""
        self.ended = time.monotonic()

    def enter(self, microbatch: int, forward: bool, name: str) -> None:
        """Work goes on."""
        self._open = (time.monotonic(), microbatch, forward, name)

    def leave(self) -> None:
        """Work stops, to wait or for good."""
        if self._open is not None:
            start, microbatch, forward, name = self._open
            self.spans.append(Span(start, time.monotonic(), microbatch, forward, name))
            self._open = None
