"""Counts the microbatches of a step: which may begin, and which wait before their backward pass."""

from __future__ import annotations

import threading

from smddp.modelparallel.core.baton import Baton, Ticket

__all__ = ["Progress"]


class Progress:
    """How far the microbatches of one step are, on the rank that runs the body.

    A microbatch is *active* from its beginning to its end. In the simple pipeline one that reaches
    its backward pass waits until all active microbatches have reached it.
    """

    def __init__(self, baton: Baton, microbatches: int, active: int, simple: bool) -> None:
        """Begins none yet.

        Args:
            baton: that of the rank.
            microbatches: of the step.
            active: at most so many are active at a time.
            simple: the pipeline.
        """
        self._baton = baton
        self._microbatches, self._active, self._simple = microbatches, active, simple
        self._lock = threading.Lock()
        self._started = self._ended = 0
        self._in_forward = 0  # active microbatches that have not reached their backward pass
        # Microbatches of the simple pipeline wait for these before their backward pass.
        self._parked: list[Ticket] = []
        self._reached_backward: set[int] = set()

    def start_more(self) -> list[int]:
        """Returns the microbatches that may begin now; they count as begun."""
        with self._lock:
            numbers = []
            while self._started < self._microbatches and self._started - self._ended < self._active:
                numbers.append(self._started)
                self._started += 1
                self._in_forward += 1
        return numbers

    def has_reached_backward(self, microbatch: int) -> bool:
        """Returns whether a microbatch has reached its backward pass."""
        return microbatch in self._reached_backward

    def reach_backward(self, microbatch: int) -> Ticket | None:
        """Counts a forward pass as done.

        Returns:
            What the microbatch has to wait for before its backward pass; None if for nothing.
        """
        if microbatch in self._reached_backward:
            return None
        self._reached_backward.add(microbatch)
        ticket = Ticket()
        with self._lock:
            self._in_forward -= 1
            if self._simple:
                self._parked.append(ticket)
        if not self._simple:
            return None
        self.release()
        return ticket

    def release(self) -> None:
        """Lets parked microbatches go on once all active ones have reached their backward pass."""
        with self._lock:
            if self._simple and self._in_forward > 0:
                return
            parked, self._parked = self._parked, []
        for ticket in parked:
            self._baton.complete(ticket)

    def end(self, microbatch: int) -> bool:
        """Counts a microbatch as ended; returns whether it was the last one."""
        with self._lock:
            if microbatch not in self._reached_backward:
                self._in_forward -= 1
            self._ended += 1
            return self._ended == self._microbatches
