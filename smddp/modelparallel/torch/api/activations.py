"""Activation checkpoints: `smp.set_activation_checkpointing`, and functions that call a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.activations.region import Region, layer_arguments
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.model.activation_checkpoints import group_size
from smddp.modelparallel.torch.model.runtime import ModelRuntime

__all__ = ["checkpoint", "checkpoint_sequential", "set_activation_checkpointing"]


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Lets the backward pass compute the activations of a module again, in place of keeping them.

    Of each call of the module, only the arguments are kept. All ranks have to call this, after
    `smp.DistributedModel` and outside a step. It holds as long as the model; another call for the
    same module replaces it. Without gradients it has no effect.

    A module may change its buffers, its arguments in place, and what objects among its arguments
    hold. If other code changes an argument after the call, a tensor inside such an object in place,
    or a buffer that the module has only read, before the backward pass, an error says so. With
    layers a and b on rank 0 and c, d and e on rank 1, "group_3" makes two groups, {a, b} and {c, d,
    e}.

    Args:
        module: of the model. All of it has to live on one rank; see below. Of an nn.Sequential,
            only each layer has to: a group of layers ends where the next one lives on another rank.
        preserve_rng_state: draw the same random numbers when activations are computed again. False
            saves little, and makes gradients wrong with dropout.
        pack_args_as_tuple: for an nn.Sequential only; accepted, without effect: a layer gets the
            result of the layer before it as one argument, also a tuple.
        strategy: for an nn.Sequential only: how many layers one checkpoint covers: "each" for one,
            "contiguous" for all, "group_2" for two, "group_3" for three, and so on.

    Raises:
        SMPUsageError: there is no smp.DistributedModel yet, the module is not of the model, an
            argument does not fit it, or the call is inside a step.
        SMPPartitionError: the script divides the model itself (`auto_partition: False`), and the
            module lives on several ranks. If the model is not divided yet, the first step fails. If
            smp divides the model, it logs a warning, and keeps the activations of that module.
    """
    call = "smp.set_activation_checkpointing"
    if state.in_step:
        raise SMPUsageError(f"{call} cannot be called inside a step")
    model = state.current_model()
    if model is None:
        raise SMPUsageError(f"create smp.DistributedModel before {call}")
    if module is model or module is model.module:
        module = model.get_module()
    model.runtime.checkpoints.mark(module, preserve_rng_state, strategy, pack_args_as_tuple)


def checkpoint(
    module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """Calls a module with activation checkpointing, for this call only.

    Args:
        module: to call. As for `set_activation_checkpointing`, if it is of the model; another one,
            such as a container made for this call, is computed again on the rank that calls it.
        args: positional arguments: any nested values.
        preserve_rng_state: draw the same random numbers the second time.
        kwargs: named arguments.

    Returns:
        What the module returns.

    Raises:
        SMPUsageError: it is not a module.
        SMPPartitionError: see `set_activation_checkpointing`.
    """
    _check_kind(module, nn.Module, "checkpoint")
    if state.tracing:
        return module(*args, **kwargs)
    runtime = _runtime_of(module)
    if runtime is None:
        region = Region(f"a {type(module).__name__}", [module])
        return region.call(module, args, kwargs, preserve_rng_state)
    number = runtime.executor.modules.number_of(module)
    assert number is not None
    if not runtime.checkpoints.allows(number):
        return module(*args, **kwargs)
    return runtime.model.routing.call_recomputed(number, args, kwargs, preserve_rng_state)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Runs the layers of an nn.Sequential with activation checkpointing.

    Args:
        sequential_module: the sequence; see `checkpoint`.
        input: of the first layer.
        strategy: as for `set_activation_checkpointing`.
        preserve_rng_state: draw the same random numbers the second time.
        pack_args_as_tuple: pass a tuple to a layer as one argument. Without it, its elements are
            the arguments, if the layer takes so many.

    Returns:
        What the last layer returns.

    Raises:
        SMPUsageError: it is not an nn.Sequential, or there is no such strategy.
        SMPPartitionError: see `set_activation_checkpointing`.
    """
    _check_kind(sequential_module, nn.Sequential, "checkpoint_sequential")
    layers = list(sequential_module)
    size = group_size(strategy, len(layers), "checkpoint_sequential")
    spread = not pack_args_as_tuple
    runtime = None if state.tracing else _runtime_of(sequential_module)
    if runtime is not None:
        return runtime.checkpoints.run_sequence(
            sequential_module, input, size, spread, preserve_rng_state
        )

    def run(group: Sequence[nn.Module], value: Any) -> Any:
        for layer in group:
            value = layer(*layer_arguments(layer, value, spread))
        return value

    if state.tracing:
        return run(layers, input)
    for begin in range(0, len(layers), size):
        group = layers[begin : begin + size]
        region = Region("layers of an nn.Sequential", group)
        input = region.call(run, (group, input), {}, preserve_rng_state)
    return input


def _check_kind(module: Any, kind: type, call: str) -> None:
    if not isinstance(module, kind):
        raise SMPUsageError(
            f"patches.checkpoint.{call} takes a torch.nn.{kind.__name__}, not a "
            f"{type(module).__name__}. For a function, use torch.utils.checkpoint"
        )


def _runtime_of(module: nn.Module) -> ModelRuntime | None:
    """Returns the runtime of the model that a module belongs to; None if it is not of the model."""
    model = state.current_model()
    if model is None:
        return None
    runtime: ModelRuntime = model.runtime
    return None if runtime.executor.modules.number_of(module) is None else runtime
