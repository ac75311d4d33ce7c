"""The order in which the ranks of a sharding group gather parameters.

A gather is a collective call, so all ranks of the group have to make the same ones in the same
order. What a task does from where it begins or goes on to where it waits or ends is a *slice*. All
ranks of the group run the same slices in the same order: with several partitions because the leader
of their order group decides it (pipeline/order.py); with one partition the whole step is one slice.
So the order of gathers follows from the order of slices, and from what each slice gathers.

Nobody knows that of a slice which runs for the first time. So before each gather the ranks tell
each other which parameter comes next, and raise the same error if they differ. What it has gathered
is its *plan* in later steps: then the ranks exchange nothing, and gather ahead what comes next in
this slice, in those that the leader has announced, and in the one that it expects after them.

A plan says what a task asks for, not what is missing. Another task that waits may hold the same
parameter, which depends on timing; then it is gathered for nothing.

A rank that leaves a plan, because its step fails or its control flow has changed, makes the rest
of the planned gathers of all slices at the end of its step, so that no other rank waits for it. If
a plan was wrong, the step ends in Redo on all replicas, and is run again without plans.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from smddp.modelparallel.core.errors import SMPError, SMPPeerError, SMPUsageError
from smddp.modelparallel.core.failure import PlanChangedError
from smddp.modelparallel.core.order import Decision
from smddp.modelparallel.torch.sharding.shard import ShardedParameter

__all__ = ["Gathers"]

# A rank says this in place of the number of a parameter, in a slice without a plan.
_END, _FAILED = -1, -2
# So many gathers may be under way for code that has not asked for them yet.
_AHEAD = 2
# If the plans of a step function have been wrong this often, its steps have none from then on,
# because each time a step runs twice.
_MAX_CHANGES = 2


class _Planned(NamedTuple):
    """One gather of a plan.

    Attributes:
        number: of the parameter.
        kept: it is the first gather since the task has freed the parameter. So the parameter can be
            kept in place of being freed, and nothing is sent.
    """

    number: int
    kept: bool


class _Slice:
    """A slice of a task, in this step.

    Attributes:
        key: names it: the same slice has the same key in each step.
        plan: the gathers of the last step; None if they are not known.
        order: what it has asked for.
        freed: numbers of parameters that it has freed since it has last asked for one.
        issued: the first gather of the plan that has not begun.
        under_way: gathers that have begun and that it has not asked for: place in the plan ->
            (work, memory); no memory if another task holds the parameter.
        ended: without a plan: has it asked for its last parameter, on all ranks?
    """

    def __init__(self, key: Any, plan: list[_Planned] | None) -> None:
        self.key, self.plan = key, plan
        self.order: list[_Planned] = []
        self.freed: set[int] = set()
        self.issued = 0
        self.under_way: dict[int, tuple[Any, torch.Tensor | None]] = {}
        self.ended = False


class _Turn(NamedTuple):
    """When the gathers of a slice begin: all of them, or the first ones because it is expected.

    Attributes:
        slice: whose gathers they are.
        until: how many gathers of its plan have begun after this turn; None for all.
    """

    slice: _Slice
    until: int | None


class Gathers:
    """Gathers the parameters of a sharding group. It is a `SliceObserver`.

    The thread that runs a task calls `hold`, `release` and `ended`; the other methods of a
    `SliceObserver` may be called by any thread.

    Attributes:
        live: elements that are gathered, or are being gathered.
        peak: the largest value of `live` in this step.
        ahead: how many gathers of this step had begun before they were asked for.
        left_plan: was a plan wrong in this step?
    """

    def __init__(self, group: dist.ProcessGroup, limit: int, ordered: bool, timeout: float) -> None:
        """Begins without parameters.

        Args:
            group: the ranks that share the parameters; in a step, nothing else is sent in it.
            limit: no parameter is gathered ahead if `live` would exceed this.
            ordered: does an order group say which slices run? Otherwise a step is one slice.
            timeout: seconds to wait at the end of a failed step for what the leader says.
        """
        self._group, self._limit = group, limit
        self._ordered, self._timeout = ordered, timeout
        self.entries: Sequence[ShardedParameter] = ()
        self.live = self.peak = self.ahead = 0
        # By step function and whether gradients are on, then by key of a slice.
        self._plans: dict[Any, dict[Any, list[_Planned]]] = {}
        self._changes: collections.Counter[Any] = collections.Counter()
        self._news = threading.Condition()  # of decisions
        self._key: Any = None
        self._reset({})

    def _reset(self, plans: dict[Any, list[_Planned]]) -> None:
        self._step_plans = plans
        # (decision, is it only expected?) in their order.
        self._decisions: list[tuple[Any, bool]] = []
        self._over = not self._ordered  # will there be no more decisions?
        self._begun = 0  # how many decisions belong to slices that have begun
        self._turns: list[_Turn] = []  # of the decisions that have been read
        self._names: collections.Counter[Any] = collections.Counter()
        self._tasks: list[Any] = []  # keys of the tasks that have begun
        self._parts: collections.Counter[int] = collections.Counter()  # slices, by number of a task
        # Slices that have not been decided, and whose first gathers have had their turn, by key.
        self._expected: dict[Any, _Slice] = {}
        self._current: _Slice | None = None
        self._next = 0  # the first turn whose gathers have not all begun
        # Gathers for nothing: they have to end before the step does.
        self._unused: list[tuple[Any, torch.Tensor]] = []
        self._scrap: dict[Any, torch.Tensor] = {}
        self._closed = False  # no more gathers in this step
        self._stopped = False  # no more requests of this rank
        self.left_plan = False

    def tensors(self) -> list[torch.Tensor]:
        """Returns the memory of the parameters that are gathered, or are being gathered."""
        held = [entry.flat for entry in self.entries if entry.flat is not None]
        slices = {id(turn.slice): turn.slice for turn in self._turns}.values()
        coming = [flat for one in slices for _, flat in one.under_way.values()]
        coming += [*self._scrap.values(), *(flat for _, flat in self._unused)]
        return [*held, *(flat for flat in coming if flat is not None)]

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
        self.peak, self.ahead = self.live, 0
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
            self._current, self._closed = None, True
            for entry in self.entries:
                entry.holds = 0
                if entry.flat is not None and entry.hide():
                    changed.append(entry)
            self.live = 0
        if changed:
            raise changed[0].change_error()
        return self.left_plan

    def accept(self) -> None:
        """Makes what this step has gathered the plans of the next ones; it has succeeded."""
        if self._changes[self._key] < _MAX_CHANGES:
            slices = [turn.slice for turn in self._turns if turn.until is None]
            self._plans[self._key] = {
                one.key: one.order if one.plan is None else one.plan for one in slices
            }

    def leave_step(self) -> None:
        """Forgets the step: what follows is outside any."""
        self._key = None
        self._reset({})

    def _finish(self, failed: bool) -> None:
        """Takes part in the gathers of this step that are left."""
        try:
            while not self._closed:
                one = self._due()
                if one is not None:
                    self._begin(one, used=False)
                elif self._next < len(self._decisions):
                    # It has no plan. With an order group, only a failure leaves such a slice.
                    self._compare(_FAILED if failed or self._ordered else _END)
                    self._turns[self._next].slice.ended = True
                elif not self._await_news():
                    break
        finally:
            works = [work for turn in self._turns for work, _ in turn.slice.under_way.values()]
            for work in (*works, *(work for work, _ in self._unused)):
                work.wait()
            self._unused, self._scrap = [], {}

    def _await_news(self) -> bool:
        """Waits for another decision of the leader; returns False if there are no more.

        Raises:
            SMPPeerError: the leader has not ended its step in time.
        """
        deadline = time.monotonic() + self._timeout
        with self._news:
            while self._next == len(self._decisions) and not self._over:
                if not self._news.wait(deadline - time.monotonic()):
                    raise SMPPeerError(
                        "the rank that leads the order of tasks has not ended its step within "
                        f"{self._timeout:g} s"
                    )
            return self._next < len(self._decisions)

    # --- which slices run; see `SliceObserver` ----------------------------------------------------

    def decided(self, decision: Decision, at_once: bool = False, expected: bool = False) -> None:
        """Notes that a slice will run after those before it; or is expected to do so soon."""
        with self._news:
            place = self._begun if at_once else len(self._decisions)
            self._decisions.insert(place, (decision, expected))
            self._news.notify()

    def over(self) -> None:
        """Notes that nothing more is decided in this step."""
        with self._news:
            self._over = True
            self._news.notify()

    def stopped(self) -> None:
        """Notes that the step has failed here: tasks get no more parameters."""
        self._stopped = True

    def begun(self) -> None:
        """Notes that the next slice runs now."""
        while self._decisions[self._begun][1]:
            self._begun += 1
        self._current = self._turn(self._begun).slice
        self._begun += 1

    def ended(self) -> None:
        """Ends the slice that runs.

        Raises:
            SMPPeerError: the step has failed on another rank of the group.
            SMPUsageError: another rank needs another parameter in this slice.
        """
        one, self._current = self._current, None
        if one is None or self._stopped or self._closed:
            return
        if one.plan is None:
            if self.entries:
                self._begin_earlier()
                self._compare(_END)
            one.ended = True
        else:
            # Other ranks may have used what this one has not.
            self._begin_earlier()
            while one.issued < len(one.plan):
                self._begin(one, used=False)
        self._gather_ahead()

    def _turn(self, place: int) -> _Turn:
        """Returns the turn of a decision; reads those before it first."""
        while len(self._turns) <= place:
            decision, expected = self._decisions[len(self._turns)]
            self._turns.append(self._expect(decision) if expected else self._read(decision))
        return self._turns[place]

    def _read(self, decision: Decision) -> _Turn:
        if not isinstance(decision, int):
            number = len(self._tasks)
            # Several tasks may have one name; see `TaskName`.
            self._tasks.append((decision, self._names[decision]))
            self._names[decision] += 1
        else:
            number = decision
        key = self._tasks[number], self._parts[number]
        self._parts[number] += 1
        one = self._expected.pop(key, None)
        return _Turn(one or _Slice(key, self._step_plans.get(key)), None)

    def _expect(self, decision: Decision) -> _Turn:
        if isinstance(decision, int):
            key = self._tasks[decision], self._parts[decision]
        else:
            key = (decision, self._names[decision]), 0
        one = _Slice(key, self._step_plans.get(key))
        # All ranks count alike, whatever is live there now. If a slice that was expected before has
        # not come yet, nothing more is gathered ahead.
        count = size = 0
        for planned in (one.plan or [])[:_AHEAD] if not self._expected else []:
            size += self.entries[planned.number].padded
            if planned.kept or size > self._limit:
                break
            count += 1
        if count:
            self._expected[key] = one
        return _Turn(one, count)

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
                entry.show(self._agreed(one, entry))
        else:
            flat = self._planned(one, one.plan, entry)
            if not entry.holds:
                assert flat is not None
                entry.show(flat)
            elif flat is not None:
                self.live -= entry.padded
        entry.holds += 1
        self._gather_ahead()

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
        changed = entry.hide() if not entry.holds else False
        kept = False
        if one is not None:
            one.freed.add(entry.number)
            place = len(one.order)
            if one.plan is not None and place < len(one.plan):
                kept = one.plan[place] == (entry.number, True)
        if kept and one is not None:
            # No gather of the plan has begun beyond this one: see `_gather_ahead`.
            assert one.issued == place
            one.under_way[place] = (_Done(), None if entry.holds else flat)
            one.issued += 1
        elif not entry.holds:
            self.live -= entry.padded
        self._gather_ahead()
        if changed:
            raise entry.change_error()

    @staticmethod
    def _request(one: _Slice, entry: ShardedParameter) -> _Planned:
        this = _Planned(entry.number, entry.number in one.freed)
        one.freed.clear()
        return this

    def _agreed(self, one: _Slice | None, entry: ShardedParameter) -> torch.Tensor:
        """Gathers a parameter after all ranks have said that it comes next."""
        if self._closed or self._stopped:
            raise SMPPeerError("the step has failed on another rank of the sharding group")
        if one is not None:
            self._begin_earlier()
        # Before the others hear that this rank takes part.
        flat = self._memory(entry)
        try:
            self._compare(entry.number)
            self._gather(entry, flat).wait()
        except RuntimeError as error:
            self.live -= entry.padded
            if self._key is not None or isinstance(error, SMPError):
                raise
            ranks = ", ".join(map(str, dist.get_process_group_ranks(self._group)))
            raise SMPPeerError(
                f"parameter {entry.name!r} is needed outside a step: the ranks {ranks} of the job, "
                "which share it, have to make this call of the model, or of its state_dict, all of "
                f"them or none ({error})"
            ) from error
        return flat

    def _planned(
        self, one: _Slice, plan: list[_Planned], entry: ShardedParameter
    ) -> torch.Tensor | None:
        """Returns the memory of a parameter, with its values; see `_Slice.under_way`."""
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
            self._gather_ahead()
        work, flat = one.under_way.pop(place)
        work.wait()
        return flat

    # --- the order of gathers ---------------------------------------------------------------------

    def _due(self) -> _Slice | None:
        """Returns whose gather is next; None if that is not known, or a slice without a plan."""
        while self._next < len(self._decisions):
            one, until = self._turn(self._next)
            if one.plan is None:
                if until is None and not one.ended:
                    return None
            elif one.issued < (len(one.plan) if until is None else until):
                return one
            self._next += 1
        return None

    def _begin_earlier(self) -> None:
        """Begins the gathers that come before those of the slice that runs."""
        while (due := self._due()) is not None and self._next < self._begun - 1:
            self._begin(due)

    def _gather_ahead(self) -> None:
        if self.left_plan or self._stopped or self._closed:
            return
        while True:
            one = self._due()
            if one is None:
                return
            assert one.plan is not None
            number, kept = one.plan[one.issued]
            entry = self.entries[number]
            near = self._turns[max(self._begun - 1, 0) : self._next + 1]
            coming = [
                one.plan[place].number
                for one in dict.fromkeys(turn.slice for turn in near)
                if one.plan is not None
                for place in one.under_way
            ]
            if kept or entry.holds or number in coming or len(coming) >= _AHEAD:
                return
            if self.live + entry.padded > self._limit:
                return
            self._begin(one)
            self.ahead += 1

    def _begin(self, one: _Slice, used: bool = True) -> None:
        """Begins the next gather of a plan.

        Args:
            one: whose plan.
            used: may this rank ask for it?
        """
        assert one.plan is not None
        number, kept = one.plan[one.issued]
        entry = self.entries[number]
        if kept:
            pass  # Nothing is sent. If this rank has left the plan, it does not ask for it either.
        elif used:
            flat = self._memory(entry)
            one.under_way[one.issued] = (self._gather(entry, flat), flat)
        else:
            # Nobody reads what arrives, so all may have the same memory.
            kind = entry.shard.dtype, entry.shard.device
            memory = self._scrap.get(kind)
            if memory is None or memory.numel() < entry.padded:
                memory = torch.empty(entry.padded, dtype=kind[0], device=kind[1])
                self._scrap[kind] = memory
            flat = memory[: entry.padded]
            self._unused.append((self._gather(entry, flat), flat))
        # Last: if there was no memory, the others wait for this gather, and `_finish` begins it.
        one.issued += 1

    def _memory(self, entry: ShardedParameter) -> torch.Tensor:
        flat = torch.empty(entry.padded, dtype=entry.shard.dtype, device=entry.shard.device)
        self.live += entry.padded
        self.peak = max(self.peak, self.live)
        return flat

    # --- what is sent -----------------------------------------------------------------------------

    def _gather(self, entry: ShardedParameter, flat: torch.Tensor) -> Any:
        return dist.all_gather_into_tensor(
            flat, entry.shard.detach(), group=self._group, async_op=True
        )

    def _said(self, number: int) -> list[int]:
        """Tells the other ranks a number; returns those of all of them."""
        device = self.entries[0].shard.device
        mine = torch.tensor([number], dtype=torch.int64, device=device)
        everybody = torch.empty(self._group.size(), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(everybody, mine, group=self._group)
        said: list[int] = everybody.tolist()
        return said

    def _compare(self, number: int) -> None:
        """Tells the other ranks what comes next here.

        Raises:
            SMPPeerError: the step has failed on another rank.
            SMPUsageError: the ranks differ.
        """
        said = self._said(number)
        if all(other == number for other in said):
            return
        self._closed = self._key is not None  # outside a step, the next call may be right
        ranks = dist.get_process_group_ranks(self._group)
        if _FAILED in said:
            if number == _FAILED:
                return
            raise SMPPeerError(f"the step failed on rank {ranks[said.index(_FAILED)]} of the job")
        other = next(place for place, value in enumerate(said) if value != number)
        raise SMPUsageError(
            "the ranks of a sharding group have to use the same parameters in the same order: rank "
            f"{ranks[self._group.rank()]} of the job {self._text(number)}, rank {ranks[other]} "
            f"{self._text(said[other])}. All of them have to make the same calls, of "
            "smp.set_activation_checkpointing, too, and control flow that depends on data must be "
            "the same; or keep these parameters whole with a larger sdp_param_persistence_threshold"
        )

    def _text(self, number: int) -> str:
        if number == _END:
            return f"has ended the {'task' if self._ordered else 'step'}"
        return f"needs {self.entries[number].name!r}"


class _Done:
    """The work of a gather that was not necessary."""

    def wait(self) -> None:
        """Returns at once."""
