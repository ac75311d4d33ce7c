"""Gives delayed tensors memory and values, or makes them empty; the objects stay the same."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from smddp._torch_internals import storage_address, tree_map_only
from smddp.modelparallel.torch.common.device import replace
from smddp.modelparallel.torch.common.structure import tensors_in
from smddp.modelparallel.torch.delayed.recorder import Delayed, Recorder, attributes_of_code

__all__ = [
    "become_empty",
    "come_to_life",
    "delayed",
    "is_delayed",
    "memory_of",
    "promised",
    "recorders_of",
    "settle",
    "with_values",
]


def delayed(values: Any) -> Any:
    """Returns delayed tensors with the values of real ones, which must not change.

    What is computed from them needs memory only while `with_values` or an operation on real tensors
    takes it.

    Args:
        values: any nested lists, tuples and dicts. Other objects in it stay as they are, and so do
            tensors without strides, and delayed ones.
    """
    recorder = Recorder()

    def delay(tensor: torch.Tensor) -> Any:
        plain = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)
        return recorder.delay(tensor, copy=False) if plain and not is_delayed(tensor) else tensor

    return tree_map_only(torch.Tensor, delay, values)


def promised(make: Callable[[], torch.Tensor], shape: Sequence[int], like: torch.Tensor) -> Any:
    """Returns a delayed tensor with the values of one that a function makes.

    Args:
        make: is called whenever the values are needed.
        shape: of what it returns, which is contiguous.
        like: has the dtype and device of what it returns.
    """
    meta = torch.empty(tuple(shape), dtype=like.dtype, device="meta")
    return Recorder().promise(make, meta, like.device)


def is_delayed(tensor: Any) -> bool:
    """Says whether a tensor has no memory yet."""
    return isinstance(tensor, Delayed)


def memory_of(parameter: nn.Parameter) -> Any:
    """Returns a key that is the same for parameters with the same memory, delayed or not.

    Scripts tie weights like this: `decoder.weight.data = encoder.weight.data`.
    """
    waits = is_delayed(parameter)
    plain = type(parameter) is nn.Parameter and not parameter.is_meta
    if not (waits or plain) or parameter.layout != torch.strided or not parameter.numel():
        return id(parameter)
    storage = parameter.untyped_storage()
    # A delayed tensor has no address, but its storage is a place in memory, too.
    address = storage_address(storage) if waits else storage.data_ptr()
    return address, int(parameter.storage_offset()), parameter.numel(), parameter.dtype


def _recorder(tensor: torch.Tensor) -> Recorder:
    assert isinstance(tensor, Delayed)
    mode = tensor.fake_mode
    assert isinstance(mode, Recorder)
    return mode


def come_to_life(tensor: torch.Tensor, shares: bool = True) -> None:
    """Makes a delayed tensor an ordinary one with values; others stay as they are.

    Args:
        tensor: of any kind.
        shares: let it share memory with those with which it does as a delayed tensor. Otherwise its
            memory is freed with it.
    """
    if is_delayed(tensor):
        _replace(tensor, _recorder(tensor).come_to_life(tensor, shares))


def become_empty(tensor: torch.Tensor) -> None:
    """Makes a delayed tensor an ordinary one on the device "meta"; others stay as they are."""
    if is_delayed(tensor):
        shape, strides, dtype = tensor.size(), tensor.stride(), tensor.dtype
        _replace(tensor, torch.empty_strided(shape, strides, dtype=dtype, device="meta"))


def _replace(tensor: torch.Tensor, real: Any) -> None:
    """Makes a delayed tensor an ordinary one; it keeps the attributes of code, and hooks."""
    own = attributes_of_code(tensor)
    kind = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
    replace(tensor, real)
    tensor.__class__ = kind
    tensor.__dict__.clear()
    tensor.__dict__.update(own)


def with_values(value: Any) -> Any:
    """Returns a copy with the values of a delayed tensor; anything else as it is."""
    return _recorder(value).values([value])[0] if is_delayed(value) else value


def recorders_of(tensors: Iterable[torch.Tensor]) -> set[Recorder]:
    """Returns what has recorded those tensors that are delayed."""
    return {_recorder(tensor) for tensor in tensors if is_delayed(tensor)}


def settle(recorders: Iterable[Recorder], here: Iterable[nn.Module]) -> None:
    """Ends the delay of a model whose parameters and buffers have come to life or are empty.

    Delayed tensors in other attributes of modules come to life now; any others do when code uses
    them.

    Args:
        recorders: those of the model's parameters and buffers.
        here: the modules that may run on this rank.
    """
    if not recorders:
        return
    for module in here:
        for name, value in module.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for tensor in tensors_in(value):
                    # The older functions for normed weights compute them again before each use.
                    if tensor.grad_fn is None:
                        come_to_life(tensor)
    for recorder in recorders:
        recorder.settled = True
    # Records have circles of references, and tensors of which some may still have memory.
    gc.collect()
