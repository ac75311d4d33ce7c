"""Leaving the job: a rank that can take part in no more steps lets nobody wait for it."""

from __future__ import annotations

import threading
from typing import Protocol

from smddp.modelparallel.core.errors import SMPPeerError
from smddp.modelparallel.core.failure import summary
from smddp.modelparallel.torch.common.lost import tells_of_loss

__all__ = ["AbortGroups", "Departure"]


class AbortGroups(Protocol):
    """Ends process groups; see `Groups.abort`."""

    def __call__(self, reason: str, lost: bool, /) -> None:
        """Ends those of steps, and with `lost` those for other calls, too."""


class Departure:
    """Whether this rank has left, and why. Each rank that tries a group that has ended leaves, too.

    See docs/model-parallel-design.md. Any thread may call the methods.

    Attributes:
        reason: why this rank takes part in no more steps; empty if it does.
    """

    def __init__(self, abort: AbortGroups) -> None:
        """Stays.

        Args:
            abort: ends process groups.
        """
        self._abort = abort
        self.reason = ""
        self._lock = threading.Lock()
        # Has this rank ended the groups of steps? And all groups of smp, because a rank was lost?
        self._ended_groups = self._all_ended = False

    def check(self) -> None:
        """Raises SMPPeerError if this rank has left; called before each step."""
        if self.reason:
            raise SMPPeerError(f"this rank has left the job in an earlier step: {self.reason}")

    def leave(self, error: BaseException) -> None:
        """Notes that this rank leaves.

        Args:
            error: why.
        """
        self.reason = self.reason or summary(error)

    def end_groups(self, error: BaseException) -> None:
        """Ends the process groups: no rank waits for this one any more, nor this one for others.

        Args:
            error: why.
        """
        lost = tells_of_loss(error)
        with self._lock:
            news = not self._ended_groups or (lost and not self._all_ended)
            self._ended_groups = True
            self._all_ended |= lost
        if news:
            self._abort(self.reason, lost)
