"""The partition that a script asks for, by `smp.partition` and `set_partition`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from smddp.modelparallel.partition.context import ATTRIBUTE
from smddp.modelparallel.pipeline.modules import Modules

__all__ = ["has_state", "manual_owners"]


def has_state(module: nn.Module) -> bool:
    """Has a module, or one inside it, parameters or buffers?"""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def manual_owners(
    root: nn.Module, modules: Modules, pins: Mapping[int, int], default: int
) -> list[int | None]:
    """Returns the owner of each module.

    A pin holds for what is inside a module, too, down to the next pin. Created inside a
    `smp.partition` counts as a pin of that module.
    """
    owners: list[int | None] = [default] * len(modules.list)
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
            inherited = pinned if pinned is not None else module.__dict__.get(ATTRIBUTE, default)
        owners[number] = inherited if has_state(module) else None
        for child in module.children():
            walk(child, pinned)

    walk(root, None)
    if owners[0] is None:
        owners[0] = default
    return owners
