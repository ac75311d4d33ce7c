"""Makes the collective calls of tasks that other ranks have begun, when a step has failed here."""

from __future__ import annotations

from typing import Any

from smddp.modelparallel.torch.common.lost import smp_errors
from smddp.modelparallel.torch.pipeline.order_group import OrderGroup
from smddp.modelparallel.torch.pipeline.step import StepCollectives

__all__ = ["LateCalls"]


class LateCalls:
    """The calls that this rank makes for tasks that do not make them any more.

    They are begun as soon as it is known who waits for them. This rank waits for them after its
    gathers: they may need a rank that waits in a gather.
    """

    def __init__(self, group: OrderGroup, collectives: StepCollectives) -> None:
        """Begins without calls.

        Args:
            group: the ranks that say which calls they have begun.
            collectives: the calls.
        """
        self._group, self._collectives = group, collectives
        self._begun: list[Any] = []

    def settle(self, failed: bool) -> None:
        """Waits for the calls of this rank's tasks; begins those of all others if it has failed.

        Args:
            failed: has the step failed?
        """
        self._collectives.settle()
        if failed:
            self._group.await_stops()
            self.begin()

    def begin(self) -> None:
        """Begins the calls that ranks had begun which have stopped, and this one has not."""
        made = self._group.stops
        ranks = self._collectives.ranks
        self._begun += self._collectives.complete(made.get(rank, ()) for rank in ranks)

    def wait(self) -> None:
        """Waits for these calls."""
        begun, self._begun = self._begun, []
        with smp_errors():
            for work, *_ in begun:
                work.wait()
