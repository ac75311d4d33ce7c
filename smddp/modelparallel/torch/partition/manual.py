"""The partition that a script asks for, by `smp.partition` and `set_partition`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from smddp.modelparallel.torch.common.creation import PARTITION
from smddp.modelparallel.torch.pipeline.modules import Modules

__all__ = ["has_state", "manual_owners"]


def has_state(module: nn.Module) -> bool:
    """Says whether a module, or one inside it, has parameters or buffers."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def manual_owners(
    root: nn.Module, modules: Modules, pins: Mapping[int, int], default: int
) -> list[int | None]:
    """Returns the owner of each module, by number; None for modules without state.

    A pin is the partition that `set_partition` has asked for a module. It holds for everything
    inside the module, except for what has a pin of its own. A module without a pin goes to the
    partition of the `smp.partition` context in which it was created.

    Args:
        root: the model.
        modules: its modules.
        pins: partitions by module number, as `set_partition` has asked.
        default: the partition of the other modules.
    """
    owners: list[int | None] = [default] * len(modules.by_number)
    seen: set[int] = set()

    def walk(module: nn.Module, pinned: int | None) -> None:
        number = modules.number_of(module)
        assert number is not None
        if number in seen:
            return
        seen.add(number)
        if number in pins:
            pinned = inherited = pins[number]
        else:
            inherited = pinned if pinned is not None else module.__dict__.get(PARTITION, default)
        owners[number] = inherited if has_state(module) else None
        for child in module.children():
            walk(child, pinned)

    walk(root, None)
    if owners[0] is None:
        owners[0] = default
    return owners
