"""Decides on which rank each layer of a model lives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from smddp.modelparallel.core.config import Configuration
from smddp.modelparallel.core.errors import SMPPartitionError
from smddp.modelparallel.core.logs import log
from smddp.modelparallel.core.solver import divide_exactly
from smddp.modelparallel.tensorflow import layers
from smddp.modelparallel.tensorflow.trace import Trace, handle_of

__all__ = [
    "Division",
    "Model",
    "changed_by_body",
    "check_members",
    "check_reads",
    "decide",
    "report",
    "used_by_code",
]

# Estimates for the partitioner; only their ratio counts.
_OPERATIONS, _NETWORK = 5e9, 1e9  # multiplications and bytes per second
_STATES = 4  # a weight, its gradient, and two values of an optimizer


@dataclasses.dataclass(frozen=True)
class Division:
    """Where the layers live.

    Attributes:
        names: of the layers, in the order of `layers.tree`.
        owners: their ranks in the pipeline; None for a layer without weights, which runs where it
            is called.
    """

    names: list[str]
    owners: list[int | None]


class Model:
    """The layers of a model, once all have been built.

    Attributes:
        layers: in the order of `layers.tree`; number 0 is the model.
        numbers: of the layers, by id.
        names: one for each layer.
        own: the weights of each layer without those of the layers in it.
        has_weights: has the layer any, in it too?
        inner: numbers of the layers directly in each layer.
    """

    def __init__(self, root: Any) -> None:
        self.layers = layers.tree(root)
        self.numbers = {id(layer): number for number, layer in enumerate(self.layers)}
        self.inner = [
            [self.numbers[id(child)] for child in layers.children(layer)] for layer in self.layers
        ]
        self.own = [layers.own_weights(layer) for layer in self.layers]
        self.has_weights = [bool(layer.weights) for layer in self.layers]
        outer = {inner: number for number, found in enumerate(self.inner) for inner in found}
        self.names: list[str] = []
        for number, layer in enumerate(self.layers):
            above = outer.get(number)
            prefix = f"{self.names[above]}/" if above is not None and above < number else ""
            self.names.append(f"{prefix}{layer.name}")
        self.outer = outer

    def outline(self) -> list[Any]:
        """Returns what has to be the same on all ranks."""
        return [
            (type(layer).__name__, [tuple(weight.shape) for weight in own])
            for layer, own in zip(self.layers, self.own, strict=True)
        ]

    def home(self, stack: tuple[Any, ...]) -> int:
        """Returns the number of the layer on whose rank the code of the innermost layer runs."""
        for layer in reversed(stack):
            number = self.numbers.get(id(layer))
            if number is not None and self.has_weights[number]:
                return number
        return 0


def decide(cfg: Configuration, model: Model, found: Trace) -> Division:
    """Returns where each layer lives; the same on all ranks with the same model.

    Raises:
        SMPPartitionError: the model cannot be divided as asked.
    """
    parts = cfg.pipeline_parallel_degree
    if parts == 1:
        owners: list[int | None] = [0] * len(model.layers)
    elif cfg.auto_partition:
        owners = _automatic(cfg, model, found, parts)
    else:
        owners = _by_hand(cfg, model)
    division = Division(model.names, owners)
    check_reads(model, division, found)
    return division


def check_members(model: Model, found: Trace) -> None:
    """Checks that the layers with weights that a step calls belong to the model.

    Raises:
        SMPPartitionError: one does not.
    """
    for layer in found.called:
        if id(layer) not in model.numbers and layer.weights:
            raise SMPPartitionError(
                f"the step calls layer {layer.name!r}, which belongs to no partition: it is no "
                f"part of the smp.DistributedModel {model.layers[0].name!r}. Make it an attribute "
                "of the model."
            )


def _first_units(model: Model, position: dict[int, int]) -> list[int | None]:
    """Returns for each layer its unit: itself, or that of the first layer in it with weights."""
    units: list[int | None] = [None] * len(model.layers)

    def unit_of(number: int) -> int | None:
        if not model.has_weights[number] or units[number] is not None:
            return units[number]
        inner = [child for child in model.inner[number] if model.has_weights[child]]
        inner.sort(key=lambda child: position.get(child, len(position)))
        units[number] = unit_of(inner[0]) if inner else number
        for child in inner[1:]:
            unit_of(child)
        return units[number]

    unit_of(0)
    return units


def _automatic(cfg: Configuration, model: Model, found: Trace, parts: int) -> list[int | None]:
    position: dict[int, int] = {}
    for layer in found.called:
        if (number := model.numbers.get(id(layer))) is not None:
            position[number] = len(position)
    units = _first_units(model, position)
    sequence = sorted(
        {unit for unit in units if unit is not None},
        key=lambda unit: position.get(unit, len(position)),
    )
    place = {unit: index for index, unit in enumerate(sequence)}
    # The units that have to be together: each points to an earlier one, or to itself.
    joined = list(range(len(sequence)))

    def first_of(index: int) -> int:
        while joined[index] != index:
            index = joined[index]
        return index

    def join(one: int, other: int) -> None:
        one, other = first_of(one), first_of(other)
        joined[max(one, other)] = min(one, other)

    def index_of(number: int) -> int:
        unit = units[number]
        # The model's own code, and that of the step, run on rank 0.
        return 0 if number == 0 or unit is None else place[unit]

    holders: dict[int, int] = {}
    for number, own in enumerate(model.own):
        for weight in own:
            holder = holders.setdefault(handle_of(weight), index_of(number))
            join(holder, index_of(number))
    for handle, stack in found.reads:
        if handle in holders:
            join(holders[handle], index_of(model.home(stack)))
    for number, layer in enumerate(model.layers):
        # The step adds `model.losses` on rank 0, so layers that contribute to it have to be there.
        if model.has_weights[number] and (
            getattr(layer, "activity_regularizer", None) is not None or _adds_losses(layer)
        ):
            join(0, index_of(number))
    memory, seconds = np.zeros(len(sequence)), np.zeros(len(sequence))
    crossing = np.zeros(len(sequence))
    for number, own in enumerate(model.own):
        index = first_of(index_of(number))
        layer = model.layers[number]
        elements = found.elements.get(id(layer), 0)
        results = found.size.get(id(layer), 0)
        for weight in own:
            count = int(np.prod(weight.shape))
            memory[index] += _STATES * count * 4
            if len(weight.shape) > 1:
                seconds[index] += elements * count / weight.shape[-1] / _OPERATIONS
        if own:
            memory[index] += results
            crossing[index] = results
    kept = [index for index in range(len(sequence)) if first_of(index) == index]
    if len(kept) < parts:
        raise SMPPartitionError(
            f"the model cannot be divided into {parts} partitions: it has {len(kept)} group(s) of "
            "layers with weights that can be on different ranks. Layers that share weights, whose "
            "weights other code reads, or that add losses, have to be together."
        )
    weight = cfg.memory_weight if cfg.use_times and seconds.sum() > 0 else 1.0
    total = seconds.sum() or 1.0
    costs = weight * memory / memory.sum() + (1 - weight) * seconds / total
    cuts = [0.0, *(crossing[index] / _NETWORK / total * (1 - weight) for index in kept[:-1])]
    starts = divide_exactly([float(costs[index]) for index in kept], cuts, parts)
    part_of = {
        index: sum(start <= order for start in starts) - 1 for order, index in enumerate(kept)
    }
    owners: list[int | None] = [
        None if unit is None else part_of[first_of(place[unit])] for unit in units
    ]
    owners[0] = 0
    return owners


def _adds_losses(layer: Any) -> bool:
    return bool(layer.__dict__.get("_losses"))


def _by_hand(cfg: Configuration, model: Model) -> list[int | None]:
    owners: list[int | None] = []
    for number, layer in enumerate(model.layers):
        mark, at = layers.mark_of(layer), number
        while mark is None and at in model.outer:
            at = model.outer[at]
            mark = layers.mark_of(model.layers[at]) if at else None
        owner = cfg.default_partition if mark is None else mark
        owners.append(owner if model.has_weights[number] else None)
        if owner and model.has_weights[number] and _adds_losses(layer):
            raise SMPPartitionError(
                f"layer {model.names[number]!r} adds losses, so it has to be on partition 0, where "
                f"the step's function runs, and not on {owner}"
            )
    owners[0] = 0
    empty = set(range(cfg.pipeline_parallel_degree)) - set(owners[1:])
    if empty:
        raise SMPPartitionError(
            f"partition {min(empty)} gets no layer with weights: put some there by "
            f"`with smp.partition({min(empty)}):`, or set auto_partition to True"
        )
    return owners


def used_by_code(model: Model, found: Trace) -> list[Any]:
    """Returns the handles of variables, not of the model, that code uses."""
    weights = {handle_of(weight) for own in model.own for weight in own}
    return [one for one in found.used if id(one) not in weights and _has_values(one)]


def changed_by_body(model: Model, division: Division, found: Trace, used: list[Any]) -> list[Any]:
    """Returns those of `used_by_code` that code on rank 0 may assign to, such as those of metrics.

    They are in the same order on all ranks. Layers that live on rank 0 run there as the body does.
    """
    numbers = {id(handle) for handle in used}
    return list(
        {
            id(handle): handle
            for handle, stack in found.changed
            if id(handle) in numbers and division.owners[model.home(stack)] == 0
        }.values()
    )


def _has_values(handle: Any) -> bool:
    """Returns whether a handle is that of a variable, and not of a table or an iterator."""
    data = getattr(handle, "_handle_data", None)
    return data is not None and data.is_set


def check_reads(model: Model, division: Division, found: Trace) -> None:
    """Checks that the weights that code uses are on its rank.

    Raises:
        SMPPartitionError: they are not.
    """
    holders: dict[int, int] = {}
    for number, own in enumerate(model.own):
        for weight in own:
            first = holders.setdefault(handle_of(weight), number)
            _check_same(model, division, first, number, weight)
    for handle, stack in found.reads:
        if handle in holders:
            _check_same(model, division, holders[handle], model.home(stack), None)


def _check_same(model: Model, division: Division, one: int, other: int, weight: Any) -> None:
    first, second = division.owners[one], division.owners[other]
    if first != second:
        what = "uses a weight of" if weight is None else "shares a weight with"
        raise SMPPartitionError(
            f"layer {model.names[other]!r} on partition {second} {what} layer "
            f"{model.names[one]!r} on partition {first}: they have to be on one partition"
        )


def report(division: Division, model: Model, parts: int) -> None:
    """Logs which layers each partition has."""
    lines = ["Partition assignments:"]
    for part in range(parts):
        mine = [
            name
            for number, name in enumerate(model.names)
            if division.owners[number] == part and model.own[number]
        ]
        lines.append(f"  partition {part}: {', '.join(mine) or 'nothing'}")
    log.info("%s", "\n".join(lines))
