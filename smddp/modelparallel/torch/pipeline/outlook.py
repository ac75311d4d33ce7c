"""Predicts how many tasks run on this rank before the backward pass of each microbatch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.step import Schedule

__all__ = ["Outlook", "key_of"]


class Outlook:
    """Follows the order in which `Baton` chooses tasks; time plays no part.

    Backward passes run in the order of microbatches, and within one from the end of the program to
    its beginning. As long as there are microbatches that have not begun here, a forward task runs
    between two of them; in the simple pipeline, all forward tasks run first.
    """

    def __init__(self, horizon: int) -> None:
        """Begins without a step.

        Args:
            horizon: how many tasks ahead `soonest` looks.
        """
        self._horizon = horizon
        self.begin_step(Schedule(1, False, 1, 1))

    def begin_step(self, schedule: Schedule) -> None:
        """Begins a step."""
        self._schedule = schedule
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._running: Hashable = None

    def enter(self, frame: Frame, forward: bool) -> None:
        """Notes that a task begins to work, or goes on."""
        self._begun.add(frame.microbatch)
        if not forward:
            self._ended.add(frame.microbatch)
        self._running = None if forward else key_of(frame)

    def soonest(self, keys: list[Hashable]) -> list[Hashable]:
        """Returns those frames whose backward pass is near enough, in the order of these passes.

        Args:
            keys: of frames that have saved something for it; see `key_of`.
        """
        found = [self._running] if self._running in keys else []
        waiting = sorted((key for key in keys if key != self._running), key=_turn)
        schedule = self._schedule
        if schedule.simple and not self._ended:
            forward = min(schedule.microbatches, schedule.active) - len(self._begun)
            return found + waiting[: max(0, self._horizon - forward)]
        forward = schedule.microbatches - len(self._begun)
        for position, key in enumerate(waiting):
            if position + 1 + min(position, forward) <= self._horizon:
                found.append(key)
        return found


def key_of(frame: Frame) -> Hashable:
    """Returns what is the same in the forward and the backward pass of a microbatch's frame."""
    return frame.microbatch, frame.path


def _turn(key: Any) -> tuple[int, list[int]]:
    microbatch, path = key
    return microbatch, [-number for number in path]
