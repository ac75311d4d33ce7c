"""The order in which the ranks of a sharding group gather parameters.

A gather is a collective call, so all ranks of the group have to make the same ones in the same
order. In the first step of a step function nobody knows this order. So before each gather the ranks
tell each other which parameter comes next, and raise the same error if they differ. The order is
the *plan* of later steps: they exchange nothing, and gather the next parameters ahead.

A rank that leaves the plan, because its step fails or its control flow has changed, makes the rest
of the planned gathers at the end of its step, so that no other rank waits for it. If the plan was
wrong, the step ends in Redo on all replicas, and is run again without one.

With several partitions the order of the tasks of a rank depends on timing, although it is the same
on all ranks of the group (pipeline/order.py). So there are no plans.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from smddp.modelparallel.common.errors import SMPPeerError, SMPUsageError
from smddp.modelparallel.pipeline.failure import PlanChangedError
from smddp.modelparallel.sharding.shard import ShardedParameter

__all__ = ["Gathers"]

# What a rank says in place of the number of a parameter, in a step without a plan.
_END, _FAILED = -1, -2
# So many gathers may be under way for code that has not asked for them yet.
_AHEAD = 2
# If the order of a step function has changed this often, its steps have no plan from then on,
# because each change means that a step runs twice.
_MAX_CHANGES = 2


class _Planned(NamedTuple):
    """One gather of a plan.

    Attributes:
        number: of the parameter.
        kept: it is the first gather since the parameter was freed. So the parameter can be kept in
            place of being freed, and nothing is sent.
    """

    number: int
    kept: bool


class Gathers:
    """Gathers the parameters of a sharding group.

    Attributes:
        live: elements that are gathered, or are being gathered.
        peak: the largest value of `live` in this step.
        planned: does this step have a plan?
    """

    def __init__(self, group: dist.ProcessGroup, limit: int, plans: bool) -> None:
        """Begins without parameters.

        Args:
            group: the ranks that share the parameters; nothing else is sent in it.
            limit: no parameter is gathered ahead if `live` would exceed this.
            plans: do steps of one kind gather in one order?
        """
        self._group, self._limit, self._makes_plans = group, limit, plans
        self.entries: Sequence[ShardedParameter] = ()
        self.live = self.peak = 0
        # By step function and whether gradients are on.
        self._plans: dict[Any, list[_Planned]] = {}
        self._changes: collections.Counter[Any] = collections.Counter()
        self._key: Any = None
        self._reset(None)

    def _reset(self, plan: list[_Planned] | None) -> None:
        self._plan = plan
        self._order: list[_Planned] = []  # what this step has asked for
        self._freed: set[int] = set()  # numbers of parameters that were freed since the last gather
        self._issued = 0  # the first gather of the plan that has not begun
        # Gathers that have begun and that nobody has asked for: place in the plan -> (work, memory)
        self._under_way: dict[int, tuple[Any, torch.Tensor]] = {}
        self._closed = False  # no more gathers in this step
        self._left_plan = False

    @property
    def planned(self) -> bool:
        """Whether this step has a plan."""
        return self._plan is not None

    def tensors(self) -> list[torch.Tensor]:
        """Returns the memory of the parameters that are gathered, or are being gathered."""
        held = [entry.flat for entry in self.entries if entry.flat is not None]
        return [*held, *(flat for _, flat in self._under_way.values())]

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self, key: Any, again: bool) -> None:
        """Begins a step.

        Args:
            key: names what runs: steps of one key gather the same parameters in the same order.
            again: the step has ended in Redo; it runs without a plan.
        """
        if again:
            self._plans.pop(key, None)
            self._changes[key] += 1
        self._key = key
        self._reset(self._plans.get(key))
        self.peak = self.live

    def end_step(self, failed: bool) -> bool:
        """Ends the gathers of a step; frees all parameters.

        Args:
            failed: the step has failed on this rank, or has to be run again.

        Returns:
            Whether the step has to be run again, because the plan was wrong.

        Raises:
            SMPPeerError: the step has failed on another rank of the group.
            SMPUsageError: another rank gathers more parameters, or code has changed one.
        """
        redo = False
        changed: list[ShardedParameter] = []
        try:
            if self._plan is not None:
                redo = self._left_plan
                self._finish_plan(self._plan)
            elif not self._closed:
                self._closed = True
                self._compare(_FAILED if failed else _END)
        finally:
            for entry in self.entries:
                entry.holds, entry.in_backward = 0, False
                if entry.flat is not None and entry.hide():
                    changed.append(entry)
            self.live = 0
        if changed:
            raise changed[0].change_error()
        return redo

    def accept(self) -> None:
        """Makes the order of this step the plan of the next ones; it has succeeded everywhere."""
        if self._makes_plans and self._plan is None and self._changes[self._key] < _MAX_CHANGES:
            self._plans[self._key] = self._order

    def leave_step(self) -> None:
        """Forgets the step: what follows is outside any."""
        self._key = None
        self._reset(None)

    def _finish_plan(self, plan: list[_Planned]) -> None:
        """Takes part in the planned gathers that are left."""
        works = [work for work, _ in self._under_way.values()]
        self._under_way.clear()
        rest = [self.entries[one.number] for one in plan[self._issued :] if not one.kept]
        if rest:
            # Nobody reads what arrives, so all may have the same memory.
            kinds = {(e.shard.dtype, e.shard.device) for e in rest}
            largest = max(entry.padded for entry in rest)
            memory = {kind: torch.empty(largest, dtype=kind[0], device=kind[1]) for kind in kinds}
            for entry in rest:
                flat = memory[entry.shard.dtype, entry.shard.device][: entry.padded]
                works.append(self._gather(entry, flat))
        for work in works:
            work.wait()
        self._issued = len(plan)

    # --- one parameter ----------------------------------------------------------------------------

    def hold(self, entry: ShardedParameter) -> None:
        """Gathers a parameter, unless it is gathered already; see `Gatherer`.

        Raises:
            PlanChangedError: the plan says something else.
            SMPPeerError: the step has failed on another rank.
            SMPUsageError: other ranks gather another parameter.
        """
        if not entry.holds:
            entry.show(self._obtained(entry))
        entry.holds += 1
        self._gather_ahead()

    def release(self, entry: ShardedParameter) -> None:
        """Ends one `hold`; see `Gatherer`.

        Raises:
            SMPUsageError: code has changed the parameter.
        """
        if not entry.holds:  # the step has ended meanwhile
            return
        entry.holds -= 1
        if entry.holds:
            return
        flat = entry.flat
        assert flat is not None
        changed = entry.hide()
        self._freed.add(entry.number)
        plan, place = self._plan, len(self._order)
        if plan is not None and place < len(plan) and plan[place] == (entry.number, True):
            # No gather of the plan has begun beyond this one, because the parameter was held.
            assert self._issued == place
            self._under_way[place] = (_Done(), flat)
            self._issued += 1
        else:
            self.live -= entry.padded
        self._gather_ahead()
        if changed:
            raise entry.change_error()

    def _obtained(self, entry: ShardedParameter) -> torch.Tensor:
        """Returns the memory of a parameter, with its values."""
        plan, place = self._plan, len(self._order)
        this = _Planned(entry.number, entry.number in self._freed)
        self._freed.clear()
        if plan is None:
            if self._closed:
                raise SMPPeerError("the step has failed on another rank of the sharding group")
            self._compare(entry.number)
            self._order.append(this)
            flat = self._memory(entry)
            self._gather(entry, flat).wait()
            return flat
        if self._left_plan or place >= len(plan) or plan[place] != this:
            self._left_plan = True
            raise PlanChangedError(
                f"parameter {entry.name!r} is needed in another order than in the last step"
            )
        self._order.append(this)
        if place == self._issued:
            self._begin(entry)
        work, flat = self._under_way.pop(place)
        work.wait()
        return flat

    def _begin(self, entry: ShardedParameter) -> None:
        """Begins the next gather of the plan."""
        flat = self._memory(entry)
        self._under_way[self._issued] = (self._gather(entry, flat), flat)
        self._issued += 1

    def _gather_ahead(self) -> None:
        plan = self._plan
        if plan is None or self._left_plan:
            return
        while self._issued < len(plan) and len(self._under_way) < _AHEAD:
            entry = self.entries[plan[self._issued].number]
            coming = {plan[place].number for place in self._under_way}
            if entry.holds or entry.number in coming or self.live + entry.padded > self._limit:
                return
            self._begin(entry)

    def _memory(self, entry: ShardedParameter) -> torch.Tensor:
        self.live += entry.padded
        self.peak = max(self.peak, self.live)
        return torch.empty(entry.padded, dtype=entry.shard.dtype, device=entry.shard.device)

    def _gather(self, entry: ShardedParameter, flat: torch.Tensor) -> Any:
        return dist.all_gather_into_tensor(
            flat, entry.shard.detach(), group=self._group, async_op=True
        )

    def _compare(self, number: int) -> None:
        """Tells the other ranks what comes next here.

        Raises:
            SMPPeerError: the step has failed on another rank.
            SMPUsageError: the ranks differ.
        """
        device = self.entries[0].shard.device
        mine = torch.tensor([number], dtype=torch.int64, device=device)
        everybody = torch.empty(self._group.size(), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(everybody, mine, group=self._group)
        said = everybody.tolist()
        if all(other == number for other in said):
            return
        self._closed = self._key is not None  # outside a step, the next call may be right
        ranks = dist.get_process_group_ranks(self._group)
        if _FAILED in said:
            if number == _FAILED:
                return
            raise SMPPeerError(
                "the step failed on another replica of the model, on rank "
                f"{ranks[said.index(_FAILED)]} of the job"
            )
        other = next(place for place, value in enumerate(said) if value != number)
        raise SMPUsageError(
            "the ranks of a sharding group have to use the same parameters in the same order: rank "
            f"{ranks[self._group.rank()]} of the job {self._said(number)}, rank {ranks[other]} "
            f"{self._said(said[other])}. Control flow that depends on data must be the same on all "
            "of them; or keep these parameters whole with a larger sdp_param_persistence_threshold"
        )

    def _said(self, number: int) -> str:
        if number == _END:
            return "has ended the step"
        return f"needs {self.entries[number].name!r}"


class _Done:
    """The work of a gather that was not necessary."""

    def wait(self) -> None:
        """Returns at once."""
