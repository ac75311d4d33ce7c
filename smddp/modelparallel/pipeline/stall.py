"""Says where a rank is stuck: the others wait for it, and cannot know."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from types import FrameType

from torch import nn

from smddp.modelparallel.pipeline.modules import Modules
from smddp.modelparallel.pipeline.timeline import Timeline, Work

__all__ = ["StallWatch"]

log = logging.getLogger("smddp.modelparallel")

# So many lines of the stack: what waits may be some calls below the code of the user.
_LINES = 6


class StallWatch:
    """Waits for the end of a step, and warns once if a piece of work on this rank does not end.

    The thread that has called the step function waits here: it has nothing else to do then. Nobody
    can know that the work will never end, so it goes on.
    """

    def __init__(self, rank: int, timeline: Timeline, patience: float) -> None:
        """Begins.

        Args:
            rank: in the pipeline.
            timeline: knows what runs.
            patience: seconds after which it warns; 0 for never.
        """
        self._rank, self._timeline, self._patience = rank, timeline, patience
        self._silent = patience <= 0

    def wait(self, over: threading.Event, modules: Modules) -> None:
        """Returns when the event is set."""
        while not over.wait(None if self._silent else self._left()):
            work = self._timeline.work
            if work is not None and time.monotonic() - work.start >= self._patience:
                self._silent = True
                self._warn(work, modules)

    def _left(self) -> float:
        work = self._timeline.work
        passed = time.monotonic() - work.start if work is not None else 0.0
        return max(self._patience - passed, 0.0)

    def _warn(self, work: Work, modules: Modules) -> None:
        top = sys._current_frames().get(work.thread)
        # Innermost first.
        frames = list(traceback.walk_stack(top)) if top is not None else []
        module = _module(frames, modules) or work.frame.name
        stack = traceback.StackSummary.extract(iter(frames[:_LINES]))
        log.warning(
            "smp: rank %d of the pipeline has worked for %g s on the %s pass of microbatch %d, in "
            "%s; other ranks wait for it. It is at\n%s",
            *(self._rank, self._patience, "forward" if work.forward else "backward"),
            *(work.frame.microbatch, f"module {module!r}" if module else "the step function"),
            "".join(traceback.format_list(stack[::-1])),
        )


def _module(frames: list[tuple[FrameType, int]], modules: Modules) -> str:
    """Returns the innermost module of the model whose code is among frames; nothing if none is."""
    for frame, _ in frames:
        owner = frame.f_locals.get("self")
        number = modules.number_of(owner) if isinstance(owner, nn.Module) else None
        if number is not None:
            return modules.names[number]
    return ""
