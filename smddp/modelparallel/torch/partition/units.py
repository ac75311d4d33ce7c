"""Makes a sequence of a module tree and its trace; the solver divides the sequence.

The sequence has one *unit* for each module that has parameters or buffers ("state") but no child
with state, in the order of first calls. A module with such children belongs to its first unit: its
own code runs there, and its own cost counts there. Modules that share a parameter, or use one of
another module directly, are merged into one unit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from smddp.modelparallel.core.solver import Node
from smddp.modelparallel.torch.delayed.life import memory_of
from smddp.modelparallel.torch.partition.manual import has_state
from smddp.modelparallel.torch.partition.placement import own_bytes
from smddp.modelparallel.torch.partition.trace import Trace
from smddp.modelparallel.torch.pipeline.modules import Modules

__all__ = ["Units"]

_NETWORK = 1e9  # bytes per second; compare the rates in trace.py
# The cost of a detour, as a share of the whole: if values return to the caller at a border before
# they go on, a microbatch waits twice there, and the pipeline gets longer.
_DETOUR = 0.05


@dataclasses.dataclass
class _Module:
    memory: float
    seconds: float
    children: list[int]
    first: int  # position of its first call
    # These three are of its first call; see `Visit`.
    taken: int = 0
    given: int = 0
    direct: bool = False
    cost: float = 0.0


class Units:
    """The sequence of units.

    Attributes:
        costs: per unit, as a share of the whole model; their sum is 1.
        cuts: per unit, the cost of a border before it, in the same measure.
        cut_bytes: per unit, the bytes that cross a border before it, per microbatch and direction.
    """

    def __init__(self, modules: Modules, trace: Trace, memory_weight: float) -> None:
        self._modules = modules
        self._records = _records(modules, trace)
        self._weigh(memory_weight)
        order: list[int] = []
        # By module: the modules around it, outermost first.
        self._enclosing: dict[int, list[int]] = {}
        # By module: its first leaf. A leaf is a module that has no child with state.
        self._leaf: dict[int, int] = {}
        self._walk(0, [], order)
        groups = self._merged(trace, order)
        self._groups = groups
        self._unit_of = {number: unit for unit, group in enumerate(groups) for number in group}
        self.costs = [0.0] * len(groups)
        for number in range(len(modules.by_number)):
            self.costs[self._unit_of[self._leaf_of(number)]] += self._records[number].cost
        self.cuts = [0.0] * len(groups)
        self.cut_bytes = [0.0] * len(groups)
        for unit, group in enumerate(groups):
            if unit > 0:
                self.cut_bytes[unit], detours = self._border(group[0])
                seconds = self.cut_bytes[unit] / _NETWORK
                self.cuts[unit] = (1 - memory_weight) * seconds / self._total_seconds
                self.cuts[unit] += _DETOUR * detours

    def owners(self, starts: list[int]) -> list[int | None]:
        """Returns the owner of each module, by number; None for those that have none.

        Args:
            starts: the first unit of each part.
        """
        part_of_unit = []
        part = -1
        for unit in range(len(self.costs)):
            part += part + 1 < len(starts) and starts[part + 1] == unit
            part_of_unit.append(part)
        return [
            part_of_unit[self._unit_of[self._leaf_of(number)]]
            if has_state(module) or not number
            else None
            for number, module in enumerate(self._modules.by_number)
        ]

    def bytes_across(self, owners: Sequence[int | None]) -> float:
        """Returns the bytes that cross borders, per microbatch and direction, with these owners."""
        own = [owners[self.first_module(unit)] for unit in range(len(self.costs))]
        borders = [unit for unit in range(1, len(own)) if own[unit] != own[unit - 1]]
        return sum(self.cut_bytes[unit] for unit in borders)

    def unit_of(self, number: int) -> int:
        """Returns the unit of a module."""
        return self._unit_of[self._leaf_of(number)]

    def first_module(self, unit: int) -> int:
        """Returns the first module of a unit."""
        return self._groups[unit][0]

    def tree(self) -> Node:
        """Returns the module tree with its costs, for `divide_tree`."""
        return self._node(0)

    def costs_of_modules(self) -> list[dict[str, float]]:
        """Returns bytes, seconds and cost of each module, without those of the modules inside it.

        A module without state counts for the module with which it runs.
        """
        found = [{"bytes": 0.0, "seconds": 0.0, "cost": 0.0} for _ in self._records]
        for number, record in enumerate(self._records):
            stays = number == 0 or has_state(self._modules.by_number[number])
            costs = found[number if stays else self._leaf_of(number)]
            costs["bytes"] += record.memory
            costs["seconds"] += record.seconds
            costs["cost"] += record.cost
        return found

    def _node(self, number: int) -> Node:
        record = self._records[number]
        return Node(number, record.cost, [self._node(child) for child in record.children])

    def _weigh(self, weight: float) -> None:
        memory = sum(record.memory for record in self._records) or 1.0
        self._total_seconds = sum(record.seconds for record in self._records) or 1.0
        timed = any(record.seconds for record in self._records)
        for record in self._records:
            share = record.memory / memory
            time = record.seconds / self._total_seconds if timed else share
            record.cost = weight * share + (1 - weight) * time

    def _walk(self, number: int, around: list[int], order: list[int]) -> None:
        """Appends the modules without children with state to `order`."""
        record = self._records[number]
        stateful = [c for c in record.children if has_state(self._modules.by_number[c])]
        self._enclosing[number] = around
        if not stateful:
            order.append(number)
            self._leaf[number] = number
            for child in record.children:
                self._adopt(child, number)
            return
        for child in stateful:
            self._walk(child, [*around, number], order)
        self._leaf[number] = self._leaf[stateful[0]]
        # A module without state runs where its input is: with the module before it.
        before = stateful[0]
        for child in record.children:
            if child in self._leaf:
                before = child
            else:
                self._adopt(child, self._last_of(before))

    def _adopt(self, number: int, leaf: int) -> None:
        self._leaf[number] = leaf
        for child in self._records[number].children:
            self._adopt(child, leaf)

    def _last_of(self, number: int) -> int:
        stateful = [
            c for c in self._records[number].children if has_state(self._modules.by_number[c])
        ]
        return self._last_of(stateful[-1]) if stateful else self._leaf[number]

    def _leaf_of(self, number: int) -> int:
        # A module at several places in the tree counts for the first of them.
        return self._leaf.get(number, self._leaf[0])

    def _merged(self, trace: Trace, order: list[int]) -> list[list[int]]:
        """Returns the units: groups of leaves that stay together, by their first member."""
        group_of = {leaf: leaf for leaf in order}

        def find(leaf: int) -> int:
            while group_of[leaf] != leaf:
                leaf = group_of[leaf]
            return leaf

        place = {leaf: position for position, leaf in enumerate(order)}
        pairs = list(trace.uses)
        holder: dict[Any, int] = {}
        for number, module in enumerate(self._modules.by_number):
            for parameter in module._parameters.values():
                if parameter is not None:
                    pairs.append((holder.setdefault(memory_of(parameter), number), number))
        for one, other in pairs:
            ends = sorted(
                (find(self._leaf_of(one)), find(self._leaf_of(other))), key=place.__getitem__
            )
            group_of[ends[1]] = ends[0]
        groups: dict[int, list[int]] = {}
        for leaf in order:
            groups.setdefault(find(leaf), []).append(leaf)
        return list(groups.values())

    def _border(self, leaf: int) -> tuple[float, int]:
        """Returns how many bytes cross a border before a leaf, and the number of detours."""
        # The outermost module that begins with this leaf is the one whose call crosses the border.
        chain = [*self._enclosing[leaf], leaf]
        crossing = next(m for m in chain if self._leaf[m] == leaf or m == leaf)
        around = chain[: chain.index(crossing)]
        record = self._records[crossing]
        moved = float(record.taken + (0 if record.direct else record.given))
        # If a border is inside a module, the values return to its owner before they go on.
        moved += sum(self._records[number].given for number in around[1:])
        inside = [number for number in around[1:] if self._leaf[number] != self._leaf[around[0]]]
        return moved, len(inside) + (not record.direct)


def _records(modules: Modules, trace: Trace) -> list[_Module]:
    kept = own_bytes(modules.by_number)
    records = [
        _Module(kept[number] + trace.activations[number], trace.seconds[number], [], -1)
        for number in range(len(modules.by_number))
    ]
    for position, visit in enumerate(trace.visits):
        record = records[visit.module]
        if record.first < 0:
            record.first = position
            record.taken, record.given, record.direct = visit.taken, visit.given, visit.direct
    listed: set[int] = {0}
    for number, module in enumerate(modules.by_number):
        last = -1
        places: list[tuple[float, int]] = []
        for child in module.children():
            index = modules.number_of(child)
            assert index is not None
            if index in listed:
                continue
            listed.add(index)
            # A module that was never called stays behind the child before it.
            last = records[index].first if records[index].first >= 0 else last
            places.append((last, index))
        records[number].children = [index for _, index in sorted(places, key=lambda p: p[0])]
    return records
