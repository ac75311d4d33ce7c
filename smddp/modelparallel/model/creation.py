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
    """Sets the dtype of parameters and buffers of the modules that are created inside.

    Other arguments concern tensor parallelism and have no effect.

    Args:
        tensor_parallelism: must be False.
        dtype: a floating-point dtype; torch's default if None.

    Raises:
        SMPUsageError: the dtype is not a floating-point one, or tensor_parallelism is True.
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
