"""The device on which a rank computes: of the accelerator that torch has found, of any type."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smddp._torch_internals import has_compatible_type, swap_tensor_impl, without_hooks

__all__ = ["current", "kind", "module", "put", "replace", "use"]


def kind() -> str:
    """Returns the type of this machine's accelerator, such as "cuda"; "cpu" if there is none."""
    there = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if there is None else there.type


def current() -> torch.device:
    """Returns the device of this thread: the current one of the accelerator, else the CPU."""
    here = kind()
    if here == "cpu":
        return torch.device("cpu")
    return torch.device(here, torch.accelerator.current_device_index())


def use(device: torch.device) -> None:
    """Makes `device` that of the calling thread: a new thread has the first of an accelerator."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def module() -> Any | None:
    """Returns torch's module of the accelerator, as torch.cuda; None if this process uses none."""
    there = torch.accelerator.current_accelerator()
    if there is None:
        return None
    found = torch.get_device_module(there)
    # False without a device, too; `is_available` takes much longer.
    return found if getattr(found, "is_initialized", found.is_available)() else None


def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a tensor other memory, on any device; the object stays.

    Args:
        tensor: a leaf.
        value: of its dtype.
    """
    if has_compatible_type(tensor, value):
        tensor.data = value
    else:  # one of them is on a device that is no part of torch itself
        replace(tensor, value)


def replace(tensor: torch.Tensor, value: Any) -> None:
    """Makes a tensor object another tensor; it keeps its class, attributes and hooks.

    Args:
        tensor: a leaf; a delayed one, too.
        value: of its dtype.
    """
    # Not torch.utils.swap_tensors: recurrent layers have weak references to their parameters.
    requires_grad, grad_dtype = tensor.requires_grad, None
    if tensor.is_leaf and requires_grad:
        grad_dtype = tensor.grad_dtype
    with without_hooks(tensor):
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad)
        else:
            value = value.detach().requires_grad_(requires_grad)
        swap_tensor_impl(tensor, value)
        if grad_dtype is not None and grad_dtype != tensor.dtype:
            tensor.grad_dtype = grad_dtype
