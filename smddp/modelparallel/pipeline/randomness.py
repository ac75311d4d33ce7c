"""Random numbers that do not depend on how the model is divided.

Every microbatch begins with a seed of its own. A module that may draw random numbers (or has such a
module inside) draws one number from the stream of its caller and uses it as the seed of a stream of
its own. That is done for every call, wherever the module lives, so dropout is the same for any
number of partitions; and what a call on another rank needs to know is one number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from smddp import _C

__all__ = ["RandomState", "draw_seed", "may_draw", "mix", "stream"]

_RANDOM_CLASSES = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MultiheadAttention,
    nn.RNNBase,
)
_MASK = (1 << 62) - 1


def may_draw(module: nn.Module) -> bool:
    """Says whether a module's forward may use random numbers, as far as its class tells.

    Classes of torch.nn are known; of any other class nobody knows.
    """
    return any(
        isinstance(part, _RANDOM_CLASSES) or not type(part).__module__.startswith("torch.nn.")
        for part in module.modules()
    )


def mix(seed: int, number: int) -> int:
    """Returns a seed that depends on both arguments (the finalizer of splitmix64)."""
    value = (seed + (number + 1) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (value ^ (value >> 31)) & _MASK


def draw_seed() -> int:
    """Takes one number from the current stream."""
    return _C.random_number(_MASK)


class RandomState:
    """The state of the generators of this process, to be put back later."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if _uses_cuda() else None

    def restore(self) -> None:
        """Puts the generators back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def seed_all(seed: int) -> None:
    """Begins a stream on this rank's devices."""
    torch.default_generator.manual_seed(seed)
    if _uses_cuda():
        torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def stream(seed: int | None) -> Iterator[None]:
    """Runs a call in a stream of its own; with None, in the current one."""
    if seed is None:
        yield
        return
    before = RandomState()
    seed_all(seed)
    try:
        yield
    finally:
        before.restore()


def _uses_cuda() -> bool:
    # False where there is none; asking for that takes much longer.
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call,no-any-return]
