"""Decides where each module lives: as a checkpoint, a file or the script says, or automatically."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

from torch import nn

from smddp.modelparallel.core.config import Configuration
from smddp.modelparallel.core.errors import SMPPartitionError
from smddp.modelparallel.core.solver import divide_exactly, divide_tree
from smddp.modelparallel.torch.common.files import write
from smddp.modelparallel.torch.partition.manual import has_state, manual_owners
from smddp.modelparallel.torch.partition.placement import (
    Decision,
    Placement,
    costs_by_size,
    shared_buffers,
)
from smddp.modelparallel.torch.partition.trace import Trace, trace_model
from smddp.modelparallel.torch.partition.units import Units
from smddp.modelparallel.torch.pipeline.modules import Modules

__all__ = ["decide", "decide_and_report"]

log = logging.getLogger("smddp.modelparallel")


def decide_and_report(
    cfg: Configuration,
    root: nn.Module,
    modules: Modules,
    placement: Placement,
    args: Any,
    kwargs: Any,
    times: bool,
) -> Decision:
    """Does what `decide` does; saves the decision as configured, and logs it.

    Only one rank of the job calls it. Arguments and errors are those of `decide`.
    """
    begun = time.monotonic()
    decision = decide(cfg, root, modules, placement, args, kwargs, times)
    if not decision.costs:  # by hand, or from a file of an older version: nothing was traced
        decision = dataclasses.replace(decision, costs=costs_by_size(modules.by_number))
    shared = shared_buffers(modules, decision.owners)
    decision = dataclasses.replace(decision, shared=shared)
    log.info("smp: the division took %.1f s", time.monotonic() - begun)
    _save(cfg, decision)
    _report(decision, cfg.pipeline_parallel_degree)
    return decision


def decide(
    cfg: Configuration,
    root: nn.Module,
    modules: Modules,
    placement: Placement,
    args: Any,
    kwargs: Any,
    times: bool,
) -> Decision:
    """Decides where each module lives.

    Args:
        cfg: the configuration.
        root: the model; all of it is on this rank.
        modules: its modules.
        placement: has the pins of `set_partition`, and the decision of a checkpoint. A decision of
            a checkpoint or a file is taken as it is, without the pins.
        args: of the model's first call.
        kwargs: of the model's first call.
        times: measure the time of modules on real data, in place of counting operations.

    Raises:
        SMPPartitionError: the model cannot be divided as asked.
    """
    saved = placement.from_checkpoint
    if saved is not None and saved.fits(modules.names, cfg.pipeline_parallel_degree):
        return saved
    if cfg.load_partition:
        return _load(cfg.partition_file, cfg.pipeline_parallel_degree, modules)
    if not cfg.auto_partition:
        owners = manual_owners(root, modules, placement.pins, cfg.default_partition)
        return Decision(list(modules.names), owners)
    if cfg.skip_tracing:
        trace = Trace(len(modules.by_number), "parameters only")
    else:
        log.info(
            "smp: tracing %d modules, to divide the %d of them that have parameters or buffers",
            *(len(modules.by_number), sum(map(has_state, modules.by_number))),
        )
        trace = trace_model(root, args, kwargs, times)
    units = Units(modules, trace, cfg.memory_weight if cfg.use_times else 1.0)
    parts = cfg.pipeline_parallel_degree
    starts = divide_exactly(units.costs, units.cuts, parts)
    owners = units.owners(starts)
    method = f"exact, traced with {trace.how}"
    if cfg.partitioner == "tree":
        by_tree = divide_tree(units.tree(), parts)
        owners = _consistent(units, by_tree, modules)
        method = f"d'Hondt tree cut, traced with {trace.how}"
    _apply_pins(owners, modules, placement)
    return Decision(
        list(modules.names),
        owners,
        units.costs_of_modules(),
        units.bytes_across(owners),
        method,
    )


def _consistent(units: Units, by_tree: dict[int, int], modules: Modules) -> list[int | None]:
    """Returns owners in which every module is where the first module of its unit is."""
    first_of_unit: dict[int, int] = {}
    owners: list[int | None] = []
    for number, module in enumerate(modules.by_number):
        unit = units.unit_of(number)
        first_of_unit.setdefault(unit, by_tree.get(units.first_module(unit), 0))
        keep = has_state(module) or number == 0
        has_parts = any(has_state(child) for child in module.children())
        part = by_tree.get(number, 0) if has_parts else first_of_unit[unit]
        owners.append(part if keep else None)
    return owners


def _apply_pins(owners: list[int | None], modules: Modules, placement: Placement) -> None:
    """Changes the owners to those that `set_partition` has asked for."""
    for number, part in sorted(placement.pins.items()):
        for module in modules.by_number[number].modules():
            inner = modules.number_of(module)
            assert inner is not None
            if owners[inner] is not None:
                owners[inner] = part


def _load(file: str, parts: int, modules: Modules) -> Decision:
    try:
        decision = Decision.from_dict(json.loads(Path(file).read_text()))
    except FileNotFoundError:
        raise SMPPartitionError(f"load_partition: there is no file {file}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise SMPPartitionError(f"load_partition: {file} holds no decision: {error}") from None
    if decision.parts > parts:
        raise SMPPartitionError(
            f"load_partition: {file} divides the model into {decision.parts} partitions, the "
            f"configuration asks for {parts}"
        )
    decision.check(modules.names)
    return decision


def _save(cfg: Configuration, decision: Decision) -> None:
    if cfg.partition_file and not cfg.load_partition:
        file = Path(cfg.partition_file)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(decision.as_dict(), indent=1)
        write(file, lambda stream: stream.write(text.encode()))


def _report(decision: Decision, parts: int) -> None:
    lines = [f"Partition assignments: ({decision.method})"]
    for part in range(parts):
        mine = _outermost(decision, part)
        share = f"{100 * decision.share(part):.0f} % of the cost"
        lines.append(f"  partition {part}, {share}: {', '.join(mine) or 'nothing'}")
    log.info("%s", "\n".join(lines))


def _outermost(decision: Decision, part: int) -> list[str]:
    """Returns the modules of a partition whose enclosing module is in another one."""
    owner_of = dict(zip(decision.names, decision.owners, strict=True))
    found = []
    for name, owner in owner_of.items():
        parent = name.rpartition(".")[0] or "model"
        if owner == part and (name == "model" or owner_of.get(parent) != part):
            found.append(name)
    return found
