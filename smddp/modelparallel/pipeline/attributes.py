"""Warns of attributes that code of a step sets on modules of other ranks, which do not see that."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

__all__ = ["Attributes"]

_PLAIN = (bool, int, float, str, type(None))


class Attributes:
    """The settings of all modules when a step begins: numbers, texts, and which modules are inside.

    A module may be given a number that it uses in its forward method, or get another module inside
    it, by code that runs where it does not live.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Notes them."""
        self._modules = modules
        self._before = [_settings(module) for module in modules]

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


def _settings(module: nn.Module) -> dict[str, Any]:
    own = vars(module)
    found = {
        name: value
        for name, value in own.items()
        if type(value) in _PLAIN and name != "training" and not name.startswith("_")
    }
    return found | {name: id(inside) for name, inside in own["_modules"].items()}
