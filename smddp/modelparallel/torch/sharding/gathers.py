"""The order in which the ranks of a sharding group gather parameters.

A gather is a collective call, so all ranks of the group have to make the same ones in the same
order. What a task does from where it begins or goes on to where it waits or ends is a *slice*. All
ranks of the group run the same slices in the same order: with several partitions because the leader
of their order group decides it (core/order.py); with one partition the whole step is one slice.
So the order of gathers follows from the order of slices, and from what each slice gathers.

Nobody knows that of a slice which runs for the first time. So before each gather the ranks tell
each other which parameter comes next, and raise the same error if they differ. What it has gathered
is its *plan* in later steps: then the ranks exchange nothing, and prefetch what comes next in
this slice, in those that the leader has announced, and in the one that it expects after them.

A plan says what a task asks for, not what is missing. Another task that waits may hold the same
parameter, which depends on timing; then it is gathered for nothing.

A rank that leaves a plan, because its step fails or its control flow has changed, makes the rest
of the planned gathers of all slices at the end of its step, so that no other rank waits for it. If
a plan was wrong, the step ends in Redo on all replicas, and is run again without plans.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.core.errors import SMPError, SMPPeerError
from smddp.modelparallel.core.failure import PlanChangedError
from smddp.modelparallel.core.order import Decision
from smddp.modelparallel.torch.sharding.group_calls import END, FAILED, GroupCalls
from smddp.modelparallel.torch.sharding.rules import PREFETCHED, count_prefetched
from smddp.modelparallel.torch.sharding.shard import ShardedParameter
from smddp.modelparallel.torch.sharding.slices import Planned, Slice, Slices

__all__ = ["Gathers"]

# If the plans of a step function have been wrong this often, its steps have none from then on,
# because each time a step runs twice.
_MAX_CHANGES = 2


class Gathers:
    """Gathers the parameters of a sharding group. It is a `SliceObserver`.

    The thread that runs a task calls `hold`, `release` and `ended`; the other methods of a
    `SliceObserver` may be called by any thread.

    Attributes:
        calls: of the group; knows what is live.
        prefetched: how many gathers of this step had begun before they were asked for.
        left_plan: was a plan wrong in this step?
    """

    def __init__(self, group: dist.ProcessGroup, limit: int, ordered: bool, timeout: float) -> None:
        """Begins without parameters.

        Args:
            group: the ranks that share the parameters; in a step, nothing else is sent in it.
            limit: no parameter is prefetched if more elements would be live.
            ordered: does an order group say which slices run? Otherwise a step is one slice.
            timeout: seconds to wait at the end of a failed step for what the leader says.
        """
        self._limit, self._ordered = limit, ordered
        self.calls = GroupCalls(group, "task" if ordered else "step")
        self._slices = Slices(ordered, timeout, self._count_prefetched)
        self.prefetched = 0
        # By step function and whether gradients are on, then by key of a slice.
        self._plans: dict[Any, dict[Any, list[Planned]]] = {}
        self._changes: collections.Counter[Any] = collections.Counter()
        self._key: Any = None
        self._reset({})

    def _reset(self, plans: dict[Any, list[Planned]]) -> None:
        self._slices.reset(plans)
        self._current: Slice | None = None
        self._stopped = False  # no more requests of this rank
        self.left_plan = False

    def tensors(self) -> list[torch.Tensor]:
        """Returns the memory of the parameters that are gathered, or are being gathered."""
        coming = [flat for one in self._slices.every() for _, flat in one.under_way.values()]
        return [*self.calls.tensors(), *(flat for flat in coming if flat is not None)]

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self, key: Any, again: bool) -> None:
        """Begins a step.

        Args:
            key: names what runs: slices of one key gather the same parameters in the same order.
            again: the step has ended in Redo; it runs without plans.
        """
        if again:
            self._plans.pop(key, None)
            self._changes[key] += 1
        self._reset(self._plans.get(key, {}))
        self._key = key
        self.calls.begin_step()
        self.prefetched = 0
        if not self._ordered:
            self.decided(())
            self.begun()

    def end_step(self, failed: bool) -> bool:
        """Ends the gathers of a step; frees all parameters. No task is left.

        Args:
            failed: the step has failed on this rank, or has to be run again.

        Returns:
            Whether the step has to be run again, because a plan was wrong.

        Raises:
            SMPPeerError: the step has failed on another rank of the group.
            SMPUsageError: another rank gathers more parameters, or code has changed one.
        """
        changed: list[ShardedParameter] = []
        try:
            self._finish(failed)
        finally:
            self._current, self.calls.closed = None, True
            for entry in self.calls.entries:
                entry.holds = 0
                if entry.flat is not None and entry.reshard():
                    changed.append(entry)
            self.calls.live = 0
        if changed:
            raise changed[0].change_error()
        return self.left_plan

    def accept(self) -> None:
        """Makes what this step has gathered the plans of the next ones; it has succeeded."""
        if self._changes[self._key] < _MAX_CHANGES:
            self._plans[self._key] = {
                one.key: one.order if one.plan is None else one.plan for one in self._slices.run()
            }

    def leave_step(self) -> None:
        """Forgets the step: what follows is outside any."""
        self._key = None
        self.calls.leave_step()
        self._reset({})

    def _finish(self, failed: bool) -> None:
        """Takes part in the gathers of this step that are left."""
        try:
            while not self.calls.closed:
                one = self._slices.due()
                if one is not None:
                    self._begin(one, used=False)
                elif (one := self._slices.unplanned()) is not None:
                    # With an order group, only a failure leaves such a slice.
                    self.calls.compare(FAILED if failed or self._ordered else END)
                    one.ended = True
                elif not self._slices.await_news():
                    break
        finally:
            for one in self._slices.every():
                for work, _ in one.under_way.values():
                    work.wait()
            self.calls.end_others()

    # --- which slices run; see `SliceObserver` ----------------------------------------------------

    def decided(self, decision: Decision, at_once: bool = False, expected: bool = False) -> None:
        """Notes that a slice will run after those before it; or is expected to do so soon."""
        self._slices.decided(decision, at_once, expected)

    def over(self) -> None:
        """Notes that nothing more is decided in this step."""
        self._slices.over()

    def stopped(self) -> None:
        """Notes that the step has failed here: tasks get no more parameters."""
        self._stopped = True

    def begun(self) -> None:
        """Notes that the next slice runs now."""
        self._current = self._slices.begin()

    def ended(self) -> None:
        """Ends the slice that runs.

        Raises:
            SMPPeerError: the step has failed on another rank of the group.
            SMPUsageError: another rank needs another parameter in this slice.
        """
        one, self._current = self._current, None
        if one is None or self._stopped or self.calls.closed:
            return
        if one.plan is None:
            if self.calls.entries:
                self._begin_earlier()
                self.calls.compare(END)
            one.ended = True
        else:
            # Other ranks may have used what this one has not.
            self._begin_earlier()
            while one.issued < len(one.plan):
                self._begin(one, used=False)
        self._prefetch()

    # --- one parameter ----------------------------------------------------------------------------

    def hold(self, entry: ShardedParameter) -> None:
        """Gathers a parameter for a task that does not hold it, unless it is gathered already.

        Raises:
            PlanChangedError: the plan says something else.
            SMPPeerError: the step has failed, here or on another rank.
            SMPUsageError: other ranks gather another parameter.
        """
        one = self._current
        if one is None or one.plan is None:
            if one is not None:
                one.order.append(self._request(one, entry))
            if not entry.holds:
                entry.unshard(self._agreed(one, entry))
        else:
            flat = self._planned(one, one.plan, entry)
            if not entry.holds:
                assert flat is not None
                entry.unshard(flat)
            elif flat is not None:
                self.calls.live -= entry.padded
        entry.holds += 1
        self._prefetch()

    def release(self, entry: ShardedParameter) -> None:
        """Notes that a task no longer holds a parameter; the last one frees it.

        Raises:
            SMPUsageError: code has changed the parameter.
        """
        if not entry.holds:  # the step has ended meanwhile
            return
        entry.holds -= 1
        flat, one = entry.flat, self._current
        assert flat is not None
        changed = entry.reshard() if not entry.holds else False
        kept = False
        if one is not None:
            one.freed.add(entry.number)
            place = len(one.order)
            if one.plan is not None and place < len(one.plan):
                kept = one.plan[place] == (entry.number, True)
        if kept and one is not None:
            # No gather of the plan has begun beyond this one: see `_prefetch`.
            assert one.issued == place
            one.under_way[place] = (_Done(), None if entry.holds else flat)
            one.issued += 1
        elif not entry.holds:
            self.calls.live -= entry.padded
        self._prefetch()
        if changed:
            raise entry.change_error()

    @staticmethod
    def _request(one: Slice, entry: ShardedParameter) -> Planned:
        this = Planned(entry.number, entry.number in one.freed)
        one.freed.clear()
        return this

    def _agreed(self, one: Slice | None, entry: ShardedParameter) -> torch.Tensor:
        """Gathers a parameter after all ranks have said that it comes next."""
        if self.calls.closed or self._stopped:
            raise SMPPeerError("the step has failed on another rank of the sharding group")
        if one is not None:
            self._begin_earlier()
        # Before the others hear that this rank takes part.
        flat = self.calls.memory(entry)
        try:
            self.calls.compare(entry.number)
            self.calls.gather(entry, flat).wait()
        except RuntimeError as error:
            self.calls.live -= entry.padded
            if self.calls.in_step or isinstance(error, SMPError):
                raise
            ranks = ", ".join(map(str, self.calls.ranks()))
            raise SMPPeerError(
                f"parameter {entry.name!r} is needed outside a step: the ranks {ranks} of the job, "
                "which share it, have to make this call of the model, or of its state_dict, all of "
                f"them or none ({error})"
            ) from error
        return flat

    def _planned(
        self, one: Slice, plan: list[Planned], entry: ShardedParameter
    ) -> torch.Tensor | None:
        """Returns the memory of a parameter, with its values; see `Slice.under_way`."""
        if self._stopped:
            raise SMPPeerError("the step has failed")
        place, this = len(one.order), self._request(one, entry)
        if self.left_plan or place >= len(plan) or plan[place] != this:
            self.left_plan = True
            raise PlanChangedError(
                f"parameter {entry.name!r} is needed in another order than in the last step"
            )
        one.order.append(this)
        self._begin_earlier()  # these may be of this slice, when it was expected
        if place == one.issued:
            self._begin(one)
            self._prefetch()
        work, flat = one.under_way.pop(place)
        work.wait()
        return flat

    # --- the order of gathers ---------------------------------------------------------------------

    def _begin_earlier(self) -> None:
        """Begins the gathers that come before those of the slice that runs."""
        while (due := self._slices.due_earlier()) is not None:
            self._begin(due)

    def _count_prefetched(self, plan: list[Planned]) -> int:
        """Returns how many gathers of a plan begin when its slice is only expected.

        All ranks count alike, whatever is live there now.
        """
        coming = ((self.calls.entries[number].padded, kept) for number, kept in plan)
        return count_prefetched(coming, 0, self._limit)

    def _prefetch(self) -> None:
        if self.left_plan or self._stopped or self.calls.closed:
            return
        while True:
            one = self._slices.due()
            if one is None:
                return
            assert one.plan is not None
            number, kept = one.plan[one.issued]
            entry = self.calls.entries[number]
            coming = self._slices.coming()
            if kept or entry.holds or number in coming or len(coming) >= PREFETCHED:
                return
            if self.calls.live + entry.padded > self._limit:
                return
            self._begin(one)
            self.prefetched += 1

    def _begin(self, one: Slice, used: bool = True) -> None:
        """Begins the next gather of a plan.

        Args:
            one: whose plan.
            used: may this rank ask for it?
        """
        assert one.plan is not None
        number, kept = one.plan[one.issued]
        entry = self.calls.entries[number]
        if kept:
            pass  # Nothing is sent. If this rank has left the plan, it does not ask for it either.
        elif used:
            flat = self.calls.memory(entry)
            one.under_way[one.issued] = (self.calls.gather(entry, flat), flat)
        else:
            self.calls.gather_for_others(entry)
        # Last: if there was no memory, the others wait for this gather, and `_finish` begins it.
        one.issued += 1


class _Done:
    """The work of a gather that was not necessary."""

    def wait(self) -> None:
        """Returns at once."""
