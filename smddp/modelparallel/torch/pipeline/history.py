"""Whether replicas that run their tasks in one order make the same calls; found while they wait.

If a rank leaves out a module, or calls modules in another order, its replicas wait for work that it
never does: in a collective call, or for a task that does not become runnable here. So each rank
keeps a history of its step, and a rank on which nothing moves tells the other members of its order
group how far it is. Whoever has been there compares.

A *slice* is what a task does until it waits or ends. All members run the same slices in one order,
and with the same number of collective calls in each.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from smddp.modelparallel.core.failure import MODULES_NAMED
from smddp.modelparallel.torch.pipeline.method import Method
from smddp.modelparallel.torch.pipeline.step import StepCollectives

__all__ = ["History", "Point"]


class Point(NamedTuple):
    """How far a rank is in a step. It is sent as a plain tuple.

    Attributes:
        slices: how many have ended.
        calls: a checksum of the calls to other partitions in these slices, and of how they ended.
        made: how many collective calls had begun when the last of them ended.
        begun: how many have begun until now.
        order: see `StepCollectives.order_after`; after `begun` calls.
        trail: the modules that were called last, of those that the other members call, too.
        over: has the rank ended the step?
    """

    slices: int
    calls: int
    made: int
    begun: int
    order: int
    trail: tuple[str, ...]
    over: bool = False


class History:
    """What one rank has done in a step.

    The task that runs calls `called` and `slice_ended`; any thread may call `point` and `differs`.
    """

    def __init__(self, collectives: StepCollectives | None) -> None:
        """Begins without a step.

        Args:
            collectives: of the tasks; None if there are none.
        """
        self._collectives = collectives
        self.begin_step(())

    def begin_step(self, names: Sequence[str]) -> None:
        """Forgets the last step.

        Args:
            names: of the modules, by number.
        """
        self._names = names
        self._calls = 0
        self._trail: tuple[str, ...] = ()  # without collectives, which have their own
        self._ends = [(0, 0)]  # `calls` and `made` of a `Point`, by number of slices

    def called(self, module: int, method: Method) -> None:
        """Notes that a task calls a module of another partition.

        Args:
            module: its number.
            method: what the call does.
        """
        self._calls = zlib.crc32(
            b"%d %d %s;" % (module, method.use, method.name.encode()), self._calls
        )
        name = self._names[module]
        if self._collectives is not None:
            self._collectives.enter(name)
        else:
            self._trail = (*self._trail, name)[-MODULES_NAMED:]

    def slice_ended(self, waits: bool) -> None:
        """Notes that a slice has ended.

        Args:
            waits: does its task wait? Else it has ended.
        """
        self._calls = zlib.crc32(b"wait;" if waits else b"end;", self._calls)
        begun = self._collectives.begun if self._collectives is not None else 0
        self._ends.append((self._calls, begun))

    def point(self, over: bool = False) -> Point:
        """Returns how far this rank is.

        Args:
            over: has it ended the step?
        """
        slices = len(self._ends) - 1
        begun, order, trail = 0, 0, self._trail
        if self._collectives is not None:
            begun = self._collectives.begun
            order, trail = self._collectives.order_after(begun), self._collectives.trail
        return Point(slices, *self._ends[slices], begun, order, trail, over)

    def differs(self, rank: int, other: Point) -> bool:
        """Returns whether this rank has done something else than another one on its way there.

        Args:
            rank: a member of the order group, as a rank of the job.
            other: how far it is.
        """
        collectives = self._collectives
        # First, because the task goes on meanwhile.
        begun = collectives.begun if collectives is not None else 0
        has_come = other.slices < len(self._ends)
        calls, made = self._ends[other.slices] if has_come else (other.calls, other.made)
        if calls != other.calls:
            return True
        if collectives is None or rank not in collectives.ranks:
            return False
        if begun >= other.begun and collectives.order_after(other.begun) != other.order:
            return True
        if has_come:
            return made != other.made or (other.over and begun > other.begun)
        return begun > other.made  # on the way to the end of that slice
