"""Training in half precision, as `fp16` and `bf16` in the configuration ask for it.

The model computes in half precision. The optimizer works on *master weights*: copies in fp32, which
stand in its groups in place of the parameters (stand_ins.py). Losses are multiplied by a scale
before their backward pass, and gradients are divided by it when they are copied to the masters. If
a gradient is infinite, all ranks that hold a part of the model skip the optimizer's step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smddp.modelparallel.common.structure import map_tensors
from smddp.modelparallel.job.state import state

__all__ = ["HALF", "convert", "half_precision", "to_float", "to_half"]

HALF = (torch.float16, torch.bfloat16)


def half_precision() -> torch.dtype | None:
    """Returns the dtype that the configuration asks for; None for full precision."""
    if state.cfg.fp16:
        return torch.float16
    return torch.bfloat16 if state.cfg.bf16 else None


def convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Converts a model's floating-point parameters and buffers to a dtype.

    Batch norms are converted to fp32, because their statistics need it.
    """
    for part in module.modules():
        norm = isinstance(part, nn.modules.batchnorm._BatchNorm)
        own = torch.float32 if norm else dtype
        for parameter in part._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(own)
                if state.cfg._fp32_grad_accumulation:
                    parameter.grad_dtype = torch.float32
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(own)


def to_half(value: Any, dtype: torch.dtype) -> Any:
    """Returns a nested value with its fp32 tensors converted to a dtype; for arguments."""
    return map_tensors(lambda t: t.to(dtype) if t.dtype == torch.float32 else t, value)


def to_float(value: Any) -> Any:
    """Returns a nested value with its half-precision tensors converted to fp32; for results."""
    return map_tensors(lambda t: t.float() if t.dtype in HALF else t, value)
