"""What code of a step sets as attributes of modules.

Modules of other ranks do not see what is set here. Modules of this rank may keep tensors in their
attributes from one call to the next, such as the state of a recurrent layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["Attributes", "tensors_of"]

_PLAIN = (bool, int, float, str, type(None))


class Attributes:
    """The attributes of all modules when a step begins.

    Of settings, which are numbers, texts and the modules inside: a module may be given one by code
    that runs where the module does not live. And of tensors.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Notes them."""
        self._modules = modules
        self._before = [_settings(module) for module in modules]
        self._tensors = [tensors_of(vars(module)) for module in modules]

    def keepers(self) -> set[int]:
        """Returns the numbers of the modules that have put tensors into their attributes."""
        found = set()
        for number, (module, before) in enumerate(zip(self._modules, self._tensors, strict=True)):
            now = tensors_of(vars(module))
            if now.keys() != before.keys() or any(now[name] is not before[name] for name in now):
                found.add(number)
        return found

    def warn(self, names: Sequence[str], owners: Sequence[int | None], rank: int) -> None:
        """Warns of the first one that has another value now, and is of a module elsewhere.

        Args:
            names: of the modules.
            owners: of the modules.
            rank: of this process in the pipeline.
        """
        for module, before, name, owner in zip(
            self._modules, self._before, names, owners, strict=True
        ):
            if owner in (None, rank):
                continue
            now = _settings(module)
            if now == before:
                continue
            changed = sorted(
                key for key in before.keys() | now.keys() if before.get(key) != now.get(key)
            )
            warnings.warn(
                f"code of rank {rank} of the pipeline has set {', '.join(map(repr, changed))} of "
                f"module {name!r} in the step. The module runs on rank {owner}, which does not see "
                "that, and its results may be others than in one process. Set attributes and "
                "modules before the step, on all ranks, or in the module's own forward method",
                stacklevel=2,
            )
            return


def tensors_of(attributes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors among the attributes of a module; not its parameters and buffers."""
    return {name: one for name, one in attributes.items() if isinstance(one, torch.Tensor)}


def _settings(module: nn.Module) -> dict[str, Any]:
    own = vars(module)
    found = {
        name: value
        for name, value in own.items()
        if type(value) in _PLAIN and name != "training" and not name.startswith("_")
    }
    return found | {name: id(inside) for name, inside in own["_modules"].items()}
