"""Warns when a step does not end: says where this rank is stuck, or which ranks are missing."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

import torch.distributed as dist
from torch import nn

from smddp._torch_internals import store_of_group
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.timeline import Timeline, Work

__all__ = ["StallWatch"]

log = logging.getLogger("smddp.modelparallel")

# How many calls of the stack are shown: the one that waits may be some calls below the user's code.
_LINES = 6


class StallWatch:
    """Waits for the end of a step, and warns in two cases.

    First, a piece of work on this rank does not end. It warns of that once in each step. Second,
    other ranks have not called the step. A rank that has been in a step for a tenth of
    `stall_seconds` writes that into the store of the group; after `stall_seconds`, the ranks that
    wait look there, and say which ranks are missing. Short steps write nothing.

    The thread that has called the step function waits here; it has nothing else to do. It goes on
    waiting after a warning, because nobody can know that work will never end.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, timeline: Timeline, stall_seconds: float
    ) -> None:
        """Begins.

        Args:
            group: of the pipeline; None without other ranks.
            rank: in the pipeline.
            timeline: says what runs.
            stall_seconds: seconds after which it warns; 0 for never.
        """
        self._rank, self._timeline, self._stall_seconds = rank, timeline, stall_seconds
        self._attendance = _Attendance(group) if group is not None and stall_seconds > 0 else None
        # Has it warned in this step that work on this rank does not end?
        self._said = False

    def wait(
        self,
        over: threading.Event,
        modules: Modules,
        name: str,
        step: int,
        check: Callable[[], float] | None,
    ) -> None:
        """Returns when the event is set.

        Args:
            over: is set when the thread may go on: this rank has the step's result, or the step has
                failed.
            modules: of the model.
            name: of the step function.
            step: its number, the same on all ranks.
            check: called from time to time; returns the seconds until the next call. None if there
                is nothing else to check.
        """
        if self._attendance is None:
            while not over.wait(check() if check is not None else None):
                pass
            return
        begun = time.monotonic()
        self._said = noted = asked = False
        while True:
            waits = [self._left(begun, noted, asked), check() if check is not None else None]
            if over.wait(min((wait for wait in waits if wait is not None), default=None)):
                return
            passed = time.monotonic() - begun
            if not noted and passed >= self._stall_seconds / 10:
                noted = True
                self._attendance.note(step)
            # A tenth later: by then, every rank that has come within `stall_seconds` has noted it.
            if not asked and passed >= self._stall_seconds * 1.1:
                asked = True
                self._ask(name, step)
            work = self._timeline.work
            if not self._said and work is not None and self._age(work) >= self._stall_seconds:
                self._said = True
                self._warn(work, modules)

    def _left(self, begun: float, noted: bool, asked: bool) -> float | None:
        """Returns the seconds until there may be something to do; None for never."""
        passed = time.monotonic() - begun
        waits = [] if asked else [self._stall_seconds * (1.1 if noted else 0.1) - passed]
        if not self._said:
            work = self._timeline.work
            waits.append(self._stall_seconds - (self._age(work) if work is not None else 0.0))
        return max(min(waits), 0.0) if waits else None

    @staticmethod
    def _age(work: Work) -> float:
        return time.monotonic() - work.start

    def _ask(self, name: str, step: int) -> None:
        assert self._attendance is not None
        missing = self._attendance.missing(step)
        if missing:
            log.warning(
                "smp: rank %d of the pipeline has waited for %g s in the step %s, which rank %s of "
                "the pipeline has not called. All of them have to call the same steps",
                *(self._rank, self._stall_seconds, name, ", ".join(map(str, missing))),
            )

    def _warn(self, work: Work, modules: Modules) -> None:
        top = sys._current_frames().get(work.thread)
        # Innermost first.
        calls = list(traceback.walk_stack(top)) if top is not None else []
        module = _module(calls, modules) or work.frame.name
        stack = traceback.StackSummary.extract(iter(calls[:_LINES]))
        log.warning(
            "smp: rank %d of the pipeline has worked for %g s on the %s pass of microbatch %d, in "
            "%s; other ranks wait for it. It is at\n%s",
            *(self._rank, self._stall_seconds, "forward" if work.forward else "backward"),
            *(work.frame.microbatch, f"module {module!r}" if module else "the step function"),
            "".join(traceback.format_list(stack[::-1])),
        )


class _Attendance:
    """Which rank is in which step, as noted in the store. If that is gone, nothing is reported."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store = store_of_group(group)
        self._rank, self._size = group.rank(), group.size()

    def note(self, step: int) -> None:
        """Notes that this rank is in a step."""
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key(self._rank), str(step))

    def missing(self, step: int) -> list[int]:
        """Returns the ranks that have not noted this step, or a later one."""
        try:
            return [rank for rank in range(self._size) if self._last(rank) < step]
        except RuntimeError:
            return []

    def _last(self, rank: int) -> int:
        key = self._key(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    @staticmethod
    def _key(rank: int) -> str:
        return f"smp/step/{rank}"


def _module(calls: list[tuple[FrameType, int]], modules: Modules) -> str:
    """Returns the name of the innermost module of the model whose code is on a stack; "" if none.

    Args:
        calls: on the stack, innermost first.
        modules: of the model.
    """
    for call, _ in calls:
        owner = call.f_locals.get("self")
        number = modules.number_of(owner) if isinstance(owner, nn.Module) else None
        if number is not None:
            return modules.names[number]
    return ""
