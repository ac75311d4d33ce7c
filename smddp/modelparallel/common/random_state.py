"""The state of torch's random generators, to restore it later."""

from __future__ import annotations

from typing import Any

import torch

from smddp.modelparallel.common import device

__all__ = ["RandomState", "module_that_draws"]


class RandomState:
    """The state of torch's default generators, of the CPU and the current device, when it is made.

    The device is that of the accelerator, if this process uses one.
    """

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._module = module_that_draws()
        self._there = None if self._module is None else self._module.get_rng_state()

    def restore(self) -> None:
        """Gives the generators that state again."""
        torch.set_rng_state(self._cpu)
        if self._module is not None:
            self._module.set_rng_state(self._there)


def module_that_draws() -> Any | None:
    """Returns torch's module of the accelerator if this process uses it, and it has generators."""
    module = device.module()
    return module if hasattr(module, "get_rng_state") else None
