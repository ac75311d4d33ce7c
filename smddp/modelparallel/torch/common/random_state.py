"""The state of random generators, to restore it later."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from smddp.modelparallel.torch.common import device

__all__ = ["PythonRandomState", "RandomState", "module_that_draws"]


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


class PythonRandomState:
    """The state of the generators of Python and of numpy, if that is imported."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        self._of_numpy = None if self._numpy is None else self._numpy.get_state()

    def restore(self) -> None:
        """Gives the generators that state again."""
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.set_state(self._of_numpy)


def module_that_draws() -> Any | None:
    """Returns torch's module of the accelerator if this process uses it, and it has generators."""
    module = device.module()
    return module if hasattr(module, "get_rng_state") else None
