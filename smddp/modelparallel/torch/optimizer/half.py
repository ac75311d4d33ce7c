"""Training in half precision, as `fp16` and `bf16` in the configuration ask for it.

The model computes in half precision. The optimizer works on *main parameters*: copies in fp32,
which stand in its groups in place of the parameters (main_parameters.py). Losses are multiplied by
a scale before their backward pass, and gradients are divided by it when they are copied to these.
If a gradient is infinite, all ranks that hold a part of the model skip the optimizer's step.
"""

from __future__ import annotations

from typing import Any

import torch

from smddp.modelparallel.torch.common.structure import map_tensors, tensors_in
from smddp.modelparallel.torch.job.state import state

__all__ = ["HALF", "half_precision", "to_float", "to_half"]

HALF = (torch.float16, torch.bfloat16)


def half_precision() -> torch.dtype | None:
    """Returns the dtype that the configuration asks for; None for full precision."""
    if state.cfg.fp16:
        return torch.float16
    return torch.bfloat16 if state.cfg.bf16 else None


def to_half(value: Any, dtype: torch.dtype) -> Any:
    """Returns an argument with its fp32 tensors converted to a dtype; itself if it has none.

    The model may change a list that it gets, for its caller.
    """
    if all(tensor.dtype != torch.float32 for tensor in tensors_in(value)):
        return value
    return map_tensors(lambda t: t.to(dtype) if t.dtype == torch.float32 else t, value)


def to_float(value: Any) -> Any:
    """Returns a nested value with its half-precision tensors converted to fp32; for results."""
    return map_tensors(lambda t: t.float() if t.dtype in HALF else t, value)
