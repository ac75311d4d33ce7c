"""`smp.model_creation`: the context in which a script makes its model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.delayed.context import delay_param_initialization
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.tensor import marks

__all__ = ["model_creation"]


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False,
    dtype: torch.dtype | None = None,
    **tensor_parallel_config: Any,
) -> Iterator[None]:
    """Sets the dtype of parameters and buffers of the modules that are created inside.

    With `delayed_parameter_initialization` in the configuration it also does what
    `smp.delay_param_initialization` does.

    Args:
        tensor_parallelism: divide the modules over tensor-parallel ranks, as
            `smp.tensor_parallelism` does.
        dtype: a floating-point dtype; torch's default if None.
        tensor_parallel_config: the options of modules that are divided over tensor-parallel ranks,
            such as `zero_init` and `flash_attention`; without tensor parallelism they have no
            effect.

    Raises:
        SMPUsageError: the dtype is not a floating-point one.
    """
    floating = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    if not floating:
        raise SMPUsageError(f"smp.model_creation(dtype={dtype}): not a floating-point type")
    before = torch.get_default_dtype()
    torch.set_default_dtype(before if dtype is None else dtype)
    try:
        with contextlib.ExitStack() as stack:
            if tensor_parallelism:
                stack.enter_context(marks.tensor_parallelism(**tensor_parallel_config))
            if state.initialized and state.cfg.delayed_parameter_initialization:
                stack.enter_context(delay_param_initialization())
            yield
    finally:
        torch.set_default_dtype(before)
