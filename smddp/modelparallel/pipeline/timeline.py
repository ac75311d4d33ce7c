"""What this rank did when, in the last step: for the timeline that users can look at."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from smddp.modelparallel.pipeline.frame import Frame

__all__ = ["Span", "Timeline", "Work"]


class Span(NamedTuple):
    """One uninterrupted piece of work.

    Attributes:
        start, end: seconds on the machine's monotonic clock.
        microbatch: whose work it was.
        forward: forward or backward.
        name: of the module that was called, the last one if there were several; empty for the code
            of the step itself.
    """

    start: float
    end: float
    microbatch: int
    forward: bool
    name: str


class Work(NamedTuple):
    """What runs at the moment.

    Attributes:
        start: seconds on the machine's monotonic clock.
        frame: whose work it is.
        forward: forward or backward.
        thread: which runs it.
    """

    start: float
    frame: Frame
    forward: bool
    thread: int


class Timeline:
    """Records the spans of one step; whoever holds the baton writes.

    Attributes:
        work: what runs at the moment; any thread may look.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.work: Work | None = None

    def begin(self) -> None:
        """Forgets the previous step."""
        self.spans = []

    def enter(self, frame: Frame, forward: bool) -> None:
        """Work goes on."""
        self.work = Work(time.monotonic(), frame, forward, threading.get_ident())

    def leave(self) -> None:
        """Work stops, to wait or for good."""
        if self.work is not None:
            start, frame, forward, _ = self.work
            self.work = None
            self.spans.append(Span(start, time.monotonic(), frame.microbatch, forward, frame.name))
