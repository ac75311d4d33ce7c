"""Converts modules to half precision."""

from __future__ import annotations

import torch
from torch import nn

from smddp._torch_internals import BatchNorm

__all__ = ["convert"]


def convert(module: nn.Module, dtype: torch.dtype, fp32_gradients: bool) -> None:
    """Converts a module's floating-point parameters and buffers to a dtype.

    Batch norms are converted to fp32, because their statistics need it.

    Args:
        module: with everything inside it.
        dtype: a floating-point one.
        fp32_gradients: let gradients of the parameters be in fp32, whatever `dtype` is.
    """
    for part in module.modules():
        norm = isinstance(part, BatchNorm)
        own = torch.float32 if norm else dtype
        for parameter in part._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(own)
                if fp32_gradients:
                    parameter.grad_dtype = torch.float32
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(own)
