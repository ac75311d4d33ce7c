"""What this rank did in the last step, and when: for `smp.timeline`."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from smddp.modelparallel.torch.pipeline.frame import Frame

__all__ = ["Span", "Timeline", "Work"]


class Span(NamedTuple):
    """One uninterrupted piece of work.

    Attributes:
        start, end: seconds on the machine's monotonic clock.
        microbatch: its number.
        forward: was it forward work, not backward work?
        name: of the module that was called, the last one if there were several; empty for the body
            of the step.
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
        frame: of the task that runs.
        forward: is it forward work, not backward work?
        thread: identifier of the thread that runs it.
    """

    start: float
    frame: Frame
    forward: bool
    thread: int


class Timeline:
    """Records the spans of one step. Only the holder of the baton writes.

    Attributes:
        spans: of the step, in the order in which they ended.
        work: what runs at the moment, None if nothing does; any thread may read it.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.work: Work | None = None

    def begin(self) -> None:
        """Forgets the previous step."""
        self.spans = []

    def enter(self, frame: Frame, forward: bool) -> None:
        """Notes that a task begins to work, or goes on."""
        self.work = Work(time.monotonic(), frame, forward, threading.get_ident())

    def leave(self) -> None:
        """Notes that the task waits or has ended."""
        if self.work is not None:
            start, frame, forward, _ = self.work
            self.work = None
            self.spans.append(Span(start, time.monotonic(), frame.microbatch, forward, frame.name))
