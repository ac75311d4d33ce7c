"""`smp.tensor_parallelism` and `smp.set_tensor_parallelism`: which modules are to be divided."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common.creation import each_new_module
from smddp.modelparallel.torch.job.state import state

__all__ = ["mark_of", "set_tensor_parallelism", "tensor_parallelism"]

# Attribute of modules: the options of the distributed modules; None if they are to stay whole. A
# copy of a module has it, too.
_ATTRIBUTE = "_smp_tensor_parallelism"


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **tensor_parallel_config: Any) -> Iterator[None]:
    """Returns a context; modules that are made inside are divided over tensor-parallel ranks.

    It may come before smp.init. The innermost context counts. smp.DistributedModel replaces the
    outermost supported modules by distributed ones, with new weights, also with
    tensor_parallel_degree 1.

    Args:
        enabled: False lets modules stay whole.
        tensor_parallel_config: arguments of the distributed modules; each takes those that it
            knows.
    """
    options = dict(tensor_parallel_config) if enabled else None
    with each_new_module(lambda module: module.__dict__.__setitem__(_ATTRIBUTE, options)):
        yield


def set_tensor_parallelism(
    module: nn.Module, enabled: bool = True, **tensor_parallel_config: Any
) -> None:
    """Says whether a module, and everything inside it, is to be divided.

    It has to be called before smp.DistributedModel. The last call counts.

    Args:
        module: of the model.
        enabled: False lets it stay whole.
        tensor_parallel_config: as for `tensor_parallelism`.

    Raises:
        SMPUsageError: it is no module, or belongs to a smp.DistributedModel already.
    """
    if not isinstance(module, nn.Module):
        raise SMPUsageError(
            f"smp.set_tensor_parallelism takes a module, not {type(module).__name__}"
        )
    model = state.current_model()
    if model is not None and any(part is module for part in model.modules()):
        raise SMPUsageError(
            "smp.set_tensor_parallelism has to be called before smp.DistributedModel, which "
            f"replaces the marked modules: this {type(module).__name__} belongs to one already"
        )
    for part in module.modules():
        part.__dict__[_ATTRIBUTE] = dict(tensor_parallel_config) if enabled else None


def mark_of(module: nn.Module) -> dict[str, Any] | None:
    """Returns the options with which a module is to be divided; None if it is to stay whole."""
    mark: dict[str, Any] | None = vars(module).get(_ATTRIBUTE)
    return mark
