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
    tensor_parallel_degree 1. They keep requires_grad of each parameter, the partition, and delayed
    initialization. All ranks of a group have to divide the same modules in the same way, and to
    freeze the same parameters: smp.DistributedModel compares them.

    A module stays whole in these cases, with a line in the log of rank 0 except in the last one;
    the modules inside it are then looked at:

    - a module outside it uses one of its parameters, or a module inside it that has parameters;
    - it or a module inside it has hooks of the forward or backward pass, or one of its parameters
      has hooks; or a script has given it a `forward` in place of that of its class;
    - the degree does not divide a size that is divided: `in_features` of nn.Linear, `embedding_dim`
      of nn.Embedding, heads and `intermediate_size` of a transformer;
    - what would take its place has no such option, as `max_norm` and `sparse` of nn.Embedding; an
      `init_hook` of a script may raise SMPUsageError, too;
    - some of its parameters are frozen, and what would take its place has none of that name;
    - its class only inherits from a known one.

    Args:
        enabled: False lets modules stay whole.
        tensor_parallel_config: arguments of the distributed modules; each takes those that it
            knows. If none knows one, the log of rank 0 warns.
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
