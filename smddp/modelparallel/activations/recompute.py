"""Activation checkpoints, with the names and arguments of the original library.

torch.utils.checkpoint works in a divided model, too. But around a module on another rank, only a
re-entrant checkpoint frees the activations there: its first run is one without gradients. The
functions here choose the re-entrant variant where it is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from smddp.modelparallel.common.errors import SMPUsageError
from smddp.modelparallel.common.structure import flatten, rebuild

__all__ = ["checkpoint", "checkpoint_sequential"]


def checkpoint(
    module: Callable[..., Any], *args: Any, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """Calls a module without keeping its activations; the backward pass computes them again.

    Args:
        module: to call.
        args: positional arguments: any nested values. Gradients go to the tensors in them.
        preserve_rng_state: draw the same random numbers the second time.
        kwargs: named arguments.

    Returns:
        What the module returns.
    """
    tensors: list[torch.Tensor] = []
    objects: list[Any] = []
    structure = flatten((args, kwargs), tensors, objects)
    returned: list[Any] = []

    def run(*again: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positional, named = rebuild(structure, again, objects)
        results: list[torch.Tensor] = []
        others: list[Any] = []
        returned[:] = flatten(module(*positional, **named), results, others), others
        return tuple(results)

    results = torch_checkpoint(
        run,
        *tensors,
        # A re-entrant checkpoint gives parameters gradients only if an input requires one.
        use_reentrant=any(tensor.requires_grad for tensor in tensors),
        preserve_rng_state=preserve_rng_state,
    )
    return rebuild(returned[0], results, returned[1])


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Runs the modules of a sequence with checkpoints.

    Args:
        sequential_module: the sequence.
        input: of the first module.
        strategy: how many modules one checkpoint covers: "each" for one, "contiguous" for all,
            "group_2" for two, "group_3" for three, and so on.
        preserve_rng_state: draw the same random numbers the second time.
        pack_args_as_tuple: pass a tuple to a module as one argument, not as several.

    Returns:
        What the last module returns.

    Raises:
        SMPUsageError: the strategy is not one of those.
    """
    layers = list(sequential_module)
    for begin in range(0, len(layers), size := _group_size(strategy, len(layers))):
        run = _Run(layers[begin : begin + size], pack_args_as_tuple)
        spread = isinstance(input, tuple) and not pack_args_as_tuple
        args = input if spread else (input,)
        input = checkpoint(run, *args, preserve_rng_state=preserve_rng_state)
    return input


def _group_size(strategy: str, count: int) -> int:
    if strategy == "each":
        return 1
    if strategy == "contiguous":
        return max(count, 1)
    kind, _, number = strategy.partition("_")
    if kind == "group" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise SMPUsageError(
        f"checkpoint_sequential: strategy must be 'each', 'contiguous' or 'group_' and a number, "
        f"not {strategy!r}"
    )


class _Run:
    """Runs some modules of a sequence. It is not an nn.Module: it does not belong to the model."""

    def __init__(self, layers: Sequence[nn.Module], packed: bool) -> None:
        self._layers, self._packed = layers, packed

    def __call__(self, *args: Any) -> Any:
        value: Any = args if len(args) > 1 else args[0]
        for layer in self._layers:
            spread = isinstance(value, tuple) and not self._packed
            value = layer(*value) if spread else layer(value)
        return value
