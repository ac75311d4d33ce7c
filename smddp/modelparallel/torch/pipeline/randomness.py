"""Random numbers that do not depend on how the model is divided.

Every microbatch begins with a seed of its own. When code calls a module that may draw random
numbers (or that has such a module inside), one number is drawn from the caller's generator. It is
the seed of the generators while the module runs. This is done for every call, wherever the module
lives, so dropout is the same for any number of partitions. A call to another rank carries that
number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from smddp.modelparallel.torch.common.random_state import RandomState, module_that_draws
from smddp.torch import _C

__all__ = ["draw_seed", "may_draw", "mix", "seed_all", "seeded"]

_RANDOM_CLASSES = (
    *(getattr(nn, name) for name in nn.modules.dropout.__all__),
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MultiheadAttention,
    nn.RNNBase,
)
_MASK = (1 << 62) - 1


def may_draw(module: nn.Module) -> bool:
    """Says whether a module's forward may use random numbers, judged by the classes inside it.

    The classes of torch.nn are known. Any other class may, unless it has itself, not by
    inheritance, the attribute `draws_random_numbers`, and that is False.
    """
    return any(
        isinstance(part, _RANDOM_CLASSES)
        or vars(type(part)).get(
            "draws_random_numbers", not type(part).__module__.startswith("torch.nn.")
        )
        for part in module.modules()
    )


def mix(seed: int, number: int) -> int:
    """Returns a seed that depends on both arguments (the finalizer of splitmix64)."""
    value = (seed + (number + 1) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (value ^ (value >> 31)) & _MASK


def draw_seed() -> int:
    """Draws a number from 0 to 2**62 - 2 from torch's default generator of the CPU."""
    return _C.random_number(_MASK)


def seed_all(seed: int) -> None:
    """Seeds the default generators of the CPU and of the current device of the accelerator."""
    torch.default_generator.manual_seed(seed)
    module = module_that_draws()
    if module is not None:
        module.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the generators for the code inside, and restores them afterwards."""
    before = RandomState()
    seed_all(seed)
    try:
        yield
    finally:
        before.restore()
