"""Registers `strategy="smddp"` with Lightning; nothing of Lightning is loaded before.

    import lightning
    import smddp.lightning

    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="smddp")

It means `DDPStrategy(process_group_backend="smddp")`, in the Trainer and in Fabric. A script has to
import this module, because Lightning looks for callbacks in entry points, but not for strategies.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from smddp._registration import BACKEND_NAME

__all__ = ["register_strategies"]

# Lightning is published as two packages with the same code, whose registries are apart. In each,
# the Trainer's strategies and those of Fabric: module, and the registry's name in it.
_PACKAGES = (
    (("lightning.pytorch.strategies", "StrategyRegistry"),
     ("lightning.fabric.strategies", "STRATEGY_REGISTRY")),
    (("pytorch_lightning.strategies", "StrategyRegistry"),
     ("lightning_fabric.strategies", "STRATEGY_REGISTRY")),
)  # fmt: skip


def _found(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def _register(module: str, registry: str) -> None:
    strategies: Any = importlib.import_module(module)
    known = getattr(strategies, registry)
    if BACKEND_NAME not in known:
        known.register(
            BACKEND_NAME,
            strategies.DDPStrategy,
            description=f"DDP strategy with `process_group_backend` '{BACKEND_NAME}'",
            process_group_backend=BACKEND_NAME,
        )


def register_strategies() -> None:
    """Registers the strategy "smddp" with each package of Lightning; importing this module does so.

    A package that the script has imported already is enough: the other one would take seconds to
    import, and is left out. If it has imported none, all that are installed get the strategy.

    Raises:
        ImportError: Lightning is not installed.
    """
    every = [each for package in _PACKAGES for each in package]
    installed = [each for each in every if _found(each[0])]
    if not installed:
        raise ImportError(
            "smddp.lightning needs Lightning, which is not installed: pip install lightning"
        )
    imported = [each for each in installed if each[0].partition(".")[0] in sys.modules]
    for module, registry in imported or installed:
        _register(module, registry)


register_strategies()
