"""`smp.model_creation`: the context in which a script makes its model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from smddp.modelparallel.common.errors import SMPUsageError
from smddp.modelparallel.compatibility.absent import refuse_tensor_parallelism

__all__ = ["model_creation"]


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **_: Any
) -> Iterator[None]:
    """Gives the parameters and buffers of modules created inside a dtype.

    Other arguments are about tensor parallelism, and without effect.

    Args:
        tensor_parallelism: must be off.
        dtype: a floating-point type; torch's default if None.

    Raises:
        SMPUsageError: the dtype is none for parameters, or tensor parallelism is asked for.
    """
    if tensor_parallelism:
        refuse_tensor_parallelism("model_creation(tensor_parallelism=True)")
    if dtype is None:
        yield
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise SMPUsageError(f"smp.model_creation(dtype={dtype}): not a floating-point type")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
