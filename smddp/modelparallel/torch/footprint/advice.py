"""Proposes what to change in a configuration so that each rank needs less memory."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.solver import divide_exactly
from smddp.modelparallel.torch.footprint.estimate import Choices, Facts, estimate
from smddp.modelparallel.torch.footprint.profile import Profile
from smddp.modelparallel.torch.partition.trace import Trace
from smddp.modelparallel.torch.partition.units import Units
from smddp.modelparallel.torch.pipeline.modules import Modules

__all__ = ["Proposal", "bytes_of", "most_needed", "proposals"]

_UNITS = {
    **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}


def bytes_of(limit: Any) -> int:
    """Returns a memory limit in bytes.

    Args:
        limit: bytes as a number, or a number with a unit, such as "16 GB" or "15.5 GiB".

    Raises:
        SMPUsageError: it is neither, or not positive.
    """
    if isinstance(limit, str):
        found = re.fullmatch(r"\s*([-+]?[0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", limit.lower())
        unit = _UNITS.get((found[2] or "b") if found else "")
        try:
            number = float(found[1]) if found and unit else math.nan
        except ValueError:
            number = math.nan
    else:
        unit = 1
        usable = isinstance(limit, int | float) and not isinstance(limit, bool)
        number = float(limit) if usable else math.nan
    if unit is None or not math.isfinite(number):
        raise SMPUsageError(
            f"memory must be a number of bytes, or a text with one of the units B, KB, MB, GB, TB, "
            f"KiB, MiB, GiB and TiB, such as '16 GB', not {limit!r}"
        )
    if number * unit < 1:
        raise SMPUsageError(f"memory must be positive, not {limit!r}")
    return int(number * unit)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What to change.

    Attributes:
        keys: of the configuration.
        modules: the name of the list of modules that get activation checkpointing; "" for none.
        choices: after the change.
        cost: proposals with less cost come first.
    """

    keys: dict[str, Any]
    modules: str
    choices: Choices
    cost: float


def most_needed(facts: Facts, choices: Choices) -> int:
    """Returns the bytes that the rank needs that needs most."""
    replicas = range(choices.copies) if choices.shard_optimizer_state else [0]
    return max(
        one.total
        for part in range(choices.partitions)
        for replica in replicas
        for one in estimate(facts, choices, part, replica).values()
    )


def proposals(
    facts: Facts, choices: Choices, modules: Modules, weight: float, default_active: bool
) -> list[Proposal]:
    """Returns all changes that can be combined, the cheapest first.

    Cheap is what takes little time: dividing the optimizer's state; then activation checkpointing,
    sharded data parallelism, more partitions, and offloading.

    Args:
        facts: of the model.
        choices: those in force.
        modules: of the model.
        weight: `memory_weight`.
        default_active: does `active_microbatches` follow from the number of partitions?
    """
    found: list[Proposal] = []
    blocks = () if choices.checkpoints else _repeated(facts.profile, modules)
    for cost, keys, divided in _divisions(facts, choices, modules, weight, default_active):
        for more, sharding, sharded in _shardings(facts, divided):
            options: list[tuple[bool, bool]] = [(False, False)]
            options += [(True, False)] if blocks else []
            options += [(True, True)] if (blocks or choices.checkpoints) else []
            for checkpoint, offload in options:
                if offload and choices.offload:
                    continue
                name, groups = "", sharded.checkpoints
                if checkpoint and blocks:
                    name, numbers = blocks
                    groups = tuple((n,) for n in numbers if _together(modules, n, sharded.owners))
                changed = dataclasses.replace(
                    sharded, checkpoints=groups, offload=offload or choices.offload
                )
                all_keys = {
                    **keys,
                    **sharding,
                    **({"offload_activations": True} if offload else {}),
                }
                price = cost + more + 2 * bool(name) + 1000 * offload
                found.append(Proposal(all_keys, name, changed, price))
    return sorted((one for one in found if one.cost), key=lambda one: one.cost)


def _divisions(
    facts: Facts, choices: Choices, modules: Modules, weight: float, default_active: bool
) -> Iterator[tuple[float, dict[str, Any], Choices]]:
    """Yields the present number of partitions, and larger ones: cost, keys and choices."""
    yield 0.0, {}, choices
    count, ranks = choices.partitions * 2, choices.partitions * choices.replicas
    trace = Trace(len(modules.by_number), "parameters only")
    if facts.profile is not None:
        trace = facts.profile.trace(len(modules.by_number))
    units = Units(modules, trace, weight)
    while count <= min(ranks, len(units.costs)):
        replicas = ranks // count
        # The ranks of a sharding group have one tensor-parallel rank.
        if ranks % count == 0 and replicas % (choices.degree * choices.tensor) == 0:
            active = choices.active
            if default_active:
                active = max(count + 2, choices.microbatches if choices.simple else 0)
            owners = units.owners(divide_exactly(units.costs, units.cuts, count))
            keys = {"pipeline_parallel_degree": count}
            divided = dataclasses.replace(
                choices, owners=owners, partitions=count, replicas=replicas, active=active
            )
            alone = choices.shard_optimizer_state and divided.copies == 1
            if not alone:
                yield 100 * math.log2(count / choices.partitions), keys, divided
        count *= 2


def _shardings(facts: Facts, choices: Choices) -> Iterator[tuple[float, dict[str, Any], Choices]]:
    """Yields ways to divide what replicas keep twice: cost, keys and choices."""
    yield 0.0, {}, choices
    if choices.degree > 1:
        yield from _in_small_parts(facts, choices, {})
        return
    if choices.copies == 1:
        return
    off: dict[str, Any] = {}
    if choices.shard_optimizer_state:
        off["shard_optimizer_state"] = False
    else:
        whole = dataclasses.replace(choices, shard_optimizer_state=True)
        yield 1.0, {"shard_optimizer_state": True}, whole
    for degree in range(2, choices.copies + 1):
        if choices.copies % degree == 0:
            keys = {**off, "sharded_data_parallel_degree": degree}
            sharded = dataclasses.replace(choices, degree=degree, shard_optimizer_state=False)
            cost = 4 + 10 * math.log2(degree)
            yield cost, keys, sharded
            for more, others, small in _in_small_parts(facts, sharded, keys):
                yield cost + more, others, small


def _in_small_parts(
    facts: Facts, choices: Choices, keys: dict[str, Any]
) -> Iterator[tuple[float, dict[str, Any], Choices]]:
    """Yields sharding that also divides small parameters, and sums gradients early."""
    here = sum(parameter.numel for parameter in facts.parameters) // choices.partitions
    changed = {}
    # For example, with 120,000 elements in a partition: buckets of 6,000, parameters from 100.
    for key, now, most, share in (
        ("sdp_reduce_bucket_size", choices.bucket, 5_000_000, 20),
        ("sdp_param_persistence_threshold", choices.threshold, 100_000, 1000),
    ):
        size = min(most, max(here // share, 1))
        size -= size % 10 ** (len(str(size)) - 1)  # one digit, and zeros
        if size < now:
            changed[key] = size
    if changed:
        small = dataclasses.replace(
            choices,
            bucket=changed.get("sdp_reduce_bucket_size", choices.bucket),
            threshold=changed.get("sdp_param_persistence_threshold", choices.threshold),
        )
        yield 0.5, {**keys, **changed}, small


def _together(modules: Modules, number: int, owners: Sequence[int | None]) -> bool:
    """Says whether a module lives on one rank, with everything inside it."""
    inside = [modules.number_of(part) for part in modules.by_number[number].modules()]
    return len({owners[n] for n in inside if n is not None} - {None}) <= 1


def _repeated(profile: Profile | None, modules: Modules) -> tuple[str, list[int]] | tuple[()]:
    """Returns the name and the members of the list of modules that keeps most activations."""
    if profile is None:
        return ()
    kept = [0] * len(modules.by_number)
    for storage in profile.storages:
        inside = {
            profile.visits[around].module
            for visit in storage.saved
            for around in profile.around(visit)
        }
        for number in inside - {-1}:
            kept[number] += storage.size
    best: tuple[int, str, list[int]] = 0, "", []
    for number, module in enumerate(modules.by_number):
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        members = [n for n in (modules.number_of(child) for child in module) if n is not None]
        size = sum(kept[n] for n in members)
        if size > best[0]:
            best = size, modules.names[number], members
    return best[1:] if best[0] else ()
