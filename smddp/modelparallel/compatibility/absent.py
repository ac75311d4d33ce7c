"""Functions of features that this version does not have.

With the feature turned off, these functions have no effect. With the feature turned on, they raise.
`tp_register` and `tp_register_with_module` have no switch, and never have an effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from torch import nn

from smddp.modelparallel.common.errors import SMPUsageError

__all__ = [
    "refuse_tensor_parallelism",
    "set_tensor_parallelism",
    "tensor_parallelism",
    "tp_register",
    "tp_register_with_module",
]

_Class = TypeVar("_Class", bound=type)


def refuse_tensor_parallelism(call: str) -> NoReturn:
    """Raises the error of a call that would have to divide modules.

    Args:
        call: the call of the script, without "smp."; for the error text.

    Raises:
        SMPUsageError: always.
    """
    raise SMPUsageError(
        f"smp.{call}: no module is divided over tensor-parallel ranks in this version; leave it "
        "out, or turn it off"
    )


def tensor_parallelism(
    enabled: bool = True, **tensor_parallel_config: Any
) -> contextlib.AbstractContextManager[None]:
    """Returns a context without effect.

    Args:
        enabled: must be False.
        tensor_parallel_config: accepted.

    Raises:
        SMPUsageError: enabled is True; modules made inside would have to be divided.
    """
    if enabled:
        refuse_tensor_parallelism("tensor_parallelism()")
    return contextlib.nullcontext()


def set_tensor_parallelism(
    module: nn.Module, enabled: bool = True, **tensor_parallel_config: Any
) -> None:
    """Does nothing: the module stays as it is.

    Args:
        module: any.
        enabled: must be False.
        tensor_parallel_config: accepted.

    Raises:
        SMPUsageError: enabled is True; the module would have to be divided.
    """
    if enabled:
        refuse_tensor_parallelism(f"set_tensor_parallelism({type(module).__name__})")


def tp_register(
    dist_module: type,
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
) -> Callable[[_Class], _Class]:
    """Returns a decorator that returns the class unchanged; `dist_module` never replaces it.

    The hooks are accepted, and never called.
    """
    return lambda module_cls: module_cls


def tp_register_with_module(
    module_cls: type,
    dist_module: type,
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
) -> None:
    """Does nothing: `dist_module` never replaces `module_cls`, and the hooks are never called."""
