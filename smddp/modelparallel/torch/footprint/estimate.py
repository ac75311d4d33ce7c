"""Predicts the memory of ranks from shapes, a profile and a configuration; pure computation.

A step is predicted in three *moments*: the first step with gradients, in which smp does not
know yet how often a parameter gets a gradient; later steps; and `optimizer.step`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from smddp.modelparallel.torch.activations.offload import SMALL
from smddp.modelparallel.torch.footprint.profile import Profile
from smddp.modelparallel.torch.optimizer.shards import EXCHANGE, assign_to_lightest
from smddp.modelparallel.torch.pipeline.step import under_way_at
from smddp.modelparallel.torch.sharding.rules import (
    PREFETCHED,
    count_prefetched,
    gradient_buckets,
    is_large,
    part_of,
)

__all__ = [
    "FIRST",
    "KINDS",
    "LATER",
    "UPDATE",
    "Bytes",
    "Choices",
    "Facts",
    "Parameter",
    "estimate",
    "parts_of",
]

FIRST, LATER, UPDATE = "first step", "step", "optimizer.step"
KINDS = ("parameters", "gathered", "gradients", "optimizer", "buffers", "activations")

Array = Any


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes of a rank, by kind.

    Attributes:
        parameters: those that live on the rank, or their shards.
        gathered: whole parameters, with sharded data parallelism, while modules run.
        gradients: sums over microbatches, gradients that wait to be added or reduced, and the
            buckets in which replicas reduce them.
        optimizer: what the optimizer keeps, main parameters included.
        buffers: of the model.
        activations: all other tensors: what autograd keeps for the backward pass, and what lives
            only while an operation runs. None if that is not known.
    """

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int | None = 0

    @property
    def total(self) -> int:
        """Returns the sum; without activations if they are not known."""
        return sum(getattr(self, kind) or 0 for kind in KINDS)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What decides about the memory that one parameter needs.

    Attributes:
        module: the number of the first module that has it.
        numel: its elements.
        size, gradient, main: bytes of an element, of its gradient, and of its main parameter; the
            last is 0 if there is none.
        state: bytes of what the optimizer keeps for all elements of the whole parameter.
        scalars: bytes of what else it keeps for the parameter.
        trains: does it get a gradient?
        stepped: does an optimizer step it?
        divisible: can it be divided over replicas?
        split: does the model have only a part of it, because it is divided over tensor-parallel
            ranks? `numel` is that of the part.
    """

    module: int
    numel: int
    size: int
    gradient: int
    main: int
    state: int
    scalars: int
    trains: bool
    stepped: bool
    divisible: bool
    split: bool = False


@dataclasses.dataclass(frozen=True)
class Facts:
    """A model and its optimizer.

    Attributes:
        parameters: in the order of `root.parameters()`.
        own: by module, the numbers of its own parameters.
        buffers: by module, bytes of its own buffers.
        temporary: how many copies of all that it steps an optimizer makes at once.
        profile: of a microbatch; None if the arguments of the model are not known.
    """

    parameters: Sequence[Parameter]
    own: Sequence[Sequence[int]]
    buffers: Sequence[int]
    temporary: float
    profile: Profile | None


@dataclasses.dataclass(frozen=True)
class Choices:
    """What a script can choose.

    Attributes:
        owners: by module, its partition; None for one that runs where its input is.
        partitions, replicas: their numbers.
        tensor: how many tensor-parallel ranks there are; they count as replicas, too.
        prescaled: `prescaled_batch`.
        microbatches: of a step.
        active: how many of them may be active.
        simple: does the pipeline run all forward passes first?
        shard_optimizer_state, offload: as in the configuration.
        degree: of sharded data parallelism.
        threshold, limit, bucket: `sdp_param_persistence_threshold`, `sdp_max_live_parameters` and
            `sdp_reduce_bucket_size`.
        horizon: `activation_loading_horizon`.
        half: is there half precision, so that the optimizer gets copies of gradients?
        views: are gradients views of the buckets in which replicas reduce them?
        checkpoints: groups of modules that are computed again together.
    """

    owners: Sequence[int | None]
    partitions: int
    replicas: int
    microbatches: int
    active: int
    simple: bool
    shard_optimizer_state: bool
    offload: bool
    degree: int
    threshold: int
    limit: int
    bucket: int
    horizon: int
    half: bool
    views: bool
    checkpoints: Sequence[tuple[int, ...]] = ()
    tensor: int = 1
    prescaled: bool = False

    @property
    def copies(self) -> int:
        """The ranks that have the same part of every parameter."""
        return self.replicas // self.tensor

    def divides(self, parameter: Parameter) -> bool:
        """Says whether a parameter is divided over replicas."""
        large = parameter.divisible and is_large(parameter.numel, self.threshold)
        return self.degree > 1 and large

    def under_way(self, part: int) -> int:
        """Returns how many microbatches may wait for their backward pass in a partition."""
        if self.partitions == 1:
            return 1
        most = self.active if self.simple else under_way_at(self.active, part)
        return min(self.microbatches, most)


class _Regions:
    """The calls of a profile that are computed again together.

    Attributes:
        of: by visit, the number of its region; -1 for none.
        taken: by region, the numbers of the storages that it keeps.
        begins: by region, the tick at which it is called.
        again: by region, the ticks of its backward pass, in which it has what autograd saves.
        part: by region, where it runs.
    """

    def __init__(self, profile: Profile, choices: Choices, parts: Sequence[int]) -> None:
        group_of = {m: (n, p) for n, g in enumerate(choices.checkpoints) for p, m in enumerate(g)}
        self.of = [-1] * len(profile.visits)
        self.taken: list[list[int]] = []
        self.begins: list[int] = []
        self.part: list[int] = []
        # By the visit around it and the group: the region, if the last layer has not come yet.
        open_groups: dict[tuple[int, int], int] = {}
        for number, visit in enumerate(profile.visits[1:], 1):
            if self.of[visit.parent] >= 0:
                self.of[number] = self.of[visit.parent]
            elif visit.module in group_of:
                group, place = group_of[visit.module]
                region = open_groups.get((visit.parent, group))
                if region is None or place == 0:
                    region = open_groups[visit.parent, group] = len(self.taken)
                    self.taken.append(profile.taken[number])
                    self.begins.append(profile.spans[number][0])
                    self.part.append(parts[number])
                self.of[number] = region
        ticks = np.array(self.of)[np.array(profile.at[profile.turn :], dtype=int)]
        self.again = []
        for region in range(len(self.taken)):
            found = np.flatnonzero(ticks == region) + profile.turn
            end = len(profile.at)
            self.again.append((int(found[0]), int(found[-1]) + 1) if len(found) else (end, end))


class _Activations:
    """The activations of one microbatch on one rank, tick by tick.

    Attributes:
        always: what is in memory for each microbatch that is under way.
        movable: arguments of checkpointed calls, of which offloading leaves some only.
    """

    def __init__(self, profile: Profile, choices: Choices, parts: Sequence[int], part: int) -> None:
        count = len(profile.at)
        regions = _Regions(profile, choices, parts)
        at = np.array(parts)[np.array(profile.at, dtype=int)]
        always, movable = np.zeros(count + 1), np.zeros(count + 1)

        def add(curve: Array, size: int, begin: int, end: int) -> None:
            if end > begin:
                curve[begin] += size
                curve[end] -= size

        mine = [region for region, where in enumerate(regions.part) if where == part]
        arguments = {number for region in mine for number in regions.taken[region]}
        counted: set[int] = set()
        for number, storage in enumerate(profile.storages):
            if storage.saved:
                visits = [visit for visit in storage.saved if parts[visit] == part]
                inside = {regions.of[visit] for visit in visits}
                if -1 in inside:
                    add(always, storage.size, storage.begin, storage.end)
                    counted.add(number)
                    continue
                if number in arguments:
                    continue  # counted below
                begin = min((regions.again[r][0] for r in inside), default=storage.end)
                if begin < storage.end:
                    add(always, storage.size, max(begin, storage.begin), storage.end)
                continue
            # Where it was made, until it goes to another rank; and there as long as code runs.
            life = at[storage.begin : max(storage.end, storage.begin + 1)]
            home = parts[storage.visit]
            found = np.flatnonzero(life != home if home == part else life == part)
            if home == part:
                end = storage.begin + int(found[0]) if len(found) else storage.end
                add(always, storage.size, storage.begin, end)
            elif len(found):
                begin, last = storage.begin + int(found[0]), storage.begin + int(found[-1])
                add(always, storage.size, begin, last + 1)
        near = choices.horizon
        for place, region in enumerate(mine):
            for number in regions.taken[region]:
                storage = profile.storages[number]
                if number in counted:
                    continue
                counted.add(number)
                moves = choices.offload and storage.size >= SMALL
                begin = max(regions.begins[region], storage.begin)
                end = max(regions.again[region][1], min(storage.end, count))
                if not moves:
                    add(always, storage.size, begin, end)
                elif choices.partitions > 1:
                    add(movable, storage.size, begin, end)
                elif place + near + 1 < len(mine):
                    later = mine[place + near + 1]
                    add(always, storage.size, begin, regions.begins[later])
                    add(always, storage.size, regions.again[later][1], end)
                else:
                    add(always, storage.size, begin, end)
        self.always = np.cumsum(always)[:count]
        self.movable = np.cumsum(movable)[:count]
        self._elsewhere = np.flatnonzero(at[:count] != part)

    def kept(self, others: int, horizon: int) -> float:
        """Returns what microbatches keep while they wait for other ranks.

        Args:
            others: how many, besides the one that runs.
            horizon: the arguments of so many of them are in memory.
        """
        if not len(self._elsewhere):
            return 0.0
        always, movable = self.always[self._elsewhere], self.movable[self._elsewhere]
        tick = int((always + movable).argmax())
        return float(others * always[tick] + min(others, horizon) * movable[tick])


def estimate(facts: Facts, choices: Choices, part: int, replica: int) -> dict[str, Bytes]:
    """Returns what a rank needs at the peak of each moment.

    Args:
        facts: of the model.
        choices: of the script.
        part: the partition.
        replica: only `shard_optimizer_state` makes a difference between replicas.
    """
    return _Rank(facts, choices, part, replica).moments()


class _Rank:
    """Predicts one rank."""

    def __init__(self, facts: Facts, choices: Choices, part: int, replica: int) -> None:
        self._facts, self._choices, self._part = facts, choices, part
        owners = choices.owners
        self._mine = [
            number for number, p in enumerate(facts.parameters) if (owners[p.module] or 0) == part
        ]
        self._stepped = self._stepped_here(replica)

    def _stepped_here(self, replica: int) -> set[int]:
        """Returns the parameters that this rank steps."""
        parameters, choices = self._facts.parameters, self._choices
        stepped = [n for n in self._mine if parameters[n].stepped]
        if not choices.shard_optimizer_state:
            return set(stepped)
        stepped.sort(key=lambda n: -parameters[n].numel)
        owners: dict[int, int] = {}
        sizes = [parameters[n].numel for n in stepped]
        assign_to_lightest(stepped, sizes, [0] * choices.copies, owners)
        return {number for number, owner in owners.items() if owner == replica}

    def _elements(self, number: int) -> int:
        """Returns the elements of a parameter that this rank keeps."""
        parameter, degree = self._facts.parameters[number], self._choices.degree
        return part_of(parameter.numel, degree) if self._divided(number) else parameter.numel

    def _padded(self, number: int) -> int:
        """Returns the elements of a sharded parameter when it is gathered."""
        return self._elements(number) * self._choices.degree

    def _divided(self, number: int) -> bool:
        return self._choices.divides(self._facts.parameters[number])

    def _is_reduced(self, number: int) -> bool:
        """Says whether the gradient goes into a bucket; see `Ranks` in data_parallel/holders.py."""
        choices = self._choices
        shards = choices.degree if self._divided(number) else 1
        if self._facts.parameters[number].split:
            return choices.copies > shards or not choices.prescaled
        return choices.replicas > shards

    def moments(self) -> dict[str, Bytes]:
        """Returns the prediction."""
        facts, choices = self._facts, self._choices
        ps = facts.parameters
        weights = sum(self._elements(n) * ps[n].size for n in self._mine)
        state = sum(
            self._elements(n) * ps[n].main
            + ps[n].state * self._elements(n) // max(ps[n].numel, 1)
            + ps[n].scalars
            for n in self._stepped
        )
        trained = [n for n in self._mine if ps[n].trains]
        sums = sum(self._elements(n) * ps[n].gradient for n in trained)
        buckets = sum(self._elements(n) * ps[n].gradient for n in trained if self._is_reduced(n))
        buffers = sum(
            size
            for module, size in enumerate(facts.buffers)
            if (choices.owners[module] or 0) == self._part
        )
        if choices.partitions > 1 or choices.degree > 1:
            buffers *= 2  # a step that is run again restores them
        fixed = Bytes(weights, 0, buckets, state, buffers, None)
        found = {}
        # The optimizer makes its state in its first step; main parameters are there before.
        mains = sum(self._elements(n) * ps[n].main for n in self._stepped)
        found[FIRST] = self._in_step(dataclasses.replace(fixed, optimizer=mains), sums, True)
        found[LATER] = self._in_step(fixed, sums, False)
        found[UPDATE] = self._in_update(fixed, trained, sums)
        return found

    # --- optimizer.step ---------------------------------------------------------------------------

    def _in_update(self, fixed: Bytes, trained: list[int], sums: int) -> Bytes:
        facts, choices = self._facts, self._choices
        ps = facts.parameters
        # With views, gradients have no memory besides the buckets.
        gradients = max(sums, fixed.gradients) if choices.views else sums + fixed.gradients
        if choices.half:
            # fp32 copies, also of what other replicas step.
            gradients += sum(self._elements(n) * 4 for n in trained if ps[n].stepped)
        work = {n: self._elements(n) * (ps[n].main or ps[n].size) for n in self._stepped}
        temporary = facts.temporary * sum(work.values()) + max(work.values(), default=0)
        # Adam steps a parameter with two temporary tensors, while one of the last is still there.
        sizes = [work[n] for n in sorted(work)]
        pairs = itertools.pairwise([0, *sizes])
        temporary = max([temporary, *(before + 2 * size for before, size in pairs)])
        if choices.shard_optimizer_state:
            largest = max((ps[n].numel * ps[n].size for n in self._mine), default=0)
            whole = sum(ps[n].numel * ps[n].size for n in self._mine if ps[n].stepped)
            share = -(-whole // choices.copies)
            temporary = max(temporary, min(max(share, largest), EXCHANGE))
        return dataclasses.replace(fixed, gradients=gradients, activations=int(temporary))

    # --- a step -----------------------------------------------------------------------------------

    def _in_step(self, fixed: Bytes, sums: int, first: bool) -> Bytes:
        facts, choices, part = self._facts, self._choices, self._part
        profile = facts.profile
        if profile is None:
            gathered = max((self._whole(n) for n in self._mine if self._divided(n)), default=0)
            return dataclasses.replace(
                fixed, gathered=gathered, gradients=fixed.gradients + sums, activations=None
            )
        parts = parts_of(profile, choices.owners)
        one = _Activations(profile, choices, parts, part)
        running = one.always + one.movable
        whole, shards, pending, arriving = self._gradients(profile)
        gathered = self._gathered(profile, parts, prefetches=not first)
        microbatches, batch = choices.microbatches, 0
        if part == 0:
            batch = profile.given * microbatches
        under_way = 1 if first or choices.partitions == 1 else choices.under_way(part)
        cases = []
        late = np.arange(len(running)) >= profile.turn
        if microbatches == 1 or under_way == microbatches:
            # The first backward pass: the sums grow from nothing, unless they are of shards.
            before = one.kept(under_way - 1, choices.horizon)
            cases.append((running + before, whole + shards + pending))
        if microbatches > 1:
            before = one.kept(under_way - 1, choices.horizon)
            if under_way == microbatches:
                before = one.kept(max(under_way - 2, 0), choices.horizon)
            full = np.full(len(running), float(sums))
            added = whole if first else 0.0
            curve = running + before
            if under_way == microbatches:
                curve = np.where(late, curve, 0.0)
            cases.append((curve, full + pending + arriving + added))
        best = fixed
        peak = -1.0
        for activations, gradients in cases:
            if not len(activations):
                continue
            total = activations + gradients + gathered
            tick = int(total.argmax())
            if total[tick] > peak:
                peak = total[tick]
                best = dataclasses.replace(
                    fixed,
                    gathered=int(gathered[tick]),
                    gradients=fixed.gradients + int(gradients[tick]),
                    activations=int(activations[tick]) + batch,
                )
        if peak < 0:
            return dataclasses.replace(fixed, gradients=fixed.gradients + sums, activations=batch)
        return best

    def _whole(self, number: int) -> int:
        """Returns the bytes of a sharded parameter when it is gathered."""
        return self._padded(number) * self._facts.parameters[number].size

    def _gradients(self, profile: Profile) -> tuple[Array, Array, Array, Array]:
        """Returns the gradients of one microbatch, tick by tick.

        Returns:
            Those of whole parameters; sums of shards; what waits for a bucket to be complete, or is
            sent; and what arrives for shards, which becomes their sum in the first microbatch.
        """
        ps, last = self._facts.parameters, len(profile.at)
        whole, mine = np.zeros(last + 1), set(self._mine)
        arrived: dict[int, int] = {}
        for tick, key in profile.gradients:
            if key in mine and self._divided(key):
                arrived[key] = min(tick, last - 1)
            elif key in mine:
                whole[min(tick, last)] += ps[key].numel * ps[key].gradient
        shards, pending, sent, arriving = (np.zeros(last + 1) for _ in range(4))
        end, launched = max(arrived.values(), default=0), 0
        for bucket in self._buckets():
            launched = max([launched, *(arrived.get(number, end) for number in bucket)])
            for number in bucket:
                pending[arrived.get(number, end)] += self._padded_gradient(number)
                pending[launched + 1] -= self._padded_gradient(number)
            total = sum(map(self._padded_gradient, bucket))
            part = total // self._choices.degree
            # A bucket sends a copy, except for one of a single parameter.
            copy = total if len(bucket) > 1 else 0
            # A bucket frees its gradients before the next one is launched, so the largest counts.
            sent[launched] = max(sent[launched], copy)
            arriving[launched] = max(arriving[launched], part)
            shards[launched] += part
        whole, shards, pending = map(np.cumsum, (whole, shards, pending))
        return whole[:last], shards[:last], (pending + sent)[:last], arriving[:last]

    def _padded_gradient(self, number: int) -> int:
        """Returns the bytes of the whole gradient of a sharded parameter."""
        return self._padded(number) * self._facts.parameters[number].gradient

    def _buckets(self) -> list[list[int]]:
        """Returns the buckets in which gradients of sharded parameters are reduced."""
        ps = self._facts.parameters
        trained = [n for n in self._mine if self._divided(n) and ps[n].trains]
        return gradient_buckets(
            trained,
            lambda n: (ps[n].gradient, ps[n].split),
            self._padded,
            self._choices.bucket,
        )

    def _gathered(self, profile: Profile, parts: Sequence[int], prefetches: bool) -> Array:
        """Returns the bytes of gathered parameters, tick by tick."""
        facts, choices, part = self._facts, self._choices, self._part
        count = len(profile.at)
        if choices.degree == 1:
            return np.zeros(count)
        # The parameters that the module of a visit gathers; the order in which visits gather.
        own = [
            [n for n in facts.own[v.module] if self._divided(n)] if v.module >= 0 else []
            for v in profile.visits
        ]
        order = [
            (visit, n) for visit in range(len(own)) for n in own[visit] if parts[visit] == part
        ]
        places = np.searchsorted([visit for visit, _ in order], np.arange(len(own)))

        def size(visit: int, forward: bool) -> int:
            around = [v for v in profile.around(visit) if parts[v] == part] if forward else [visit]
            held = {n for v in around for n in own[v]}
            place = int(places[visit])
            more = order[place + len(own[visit]) :] if forward else order[:place][::-1]
            if prefetches:
                coming = [(self._padded(n), n in held) for _, n in more[:PREFETCHED]]
                count = count_prefetched(coming, sum(map(self._padded, held)), choices.limit)
                held.update(n for _, n in more[:count])
            return sum(self._whole(n) for n in held)

        sizes: dict[tuple[int, bool], int] = {}
        result = np.zeros(count)
        for tick, visit in enumerate(profile.at):
            key = visit, tick < profile.turn
            if parts[visit] == part:
                if key not in sizes:
                    sizes[key] = size(*key)
                result[tick] = sizes[key]
        return result


def parts_of(profile: Profile, owners: Sequence[int | None]) -> list[int]:
    """Returns the partition in which each visit of a profile runs."""
    parts: list[int] = [0]
    last = 0
    for visit in profile.visits[1:]:
        owner = owners[visit.module]
        last = last if owner is None else owner
        parts.append(last)
    return parts
