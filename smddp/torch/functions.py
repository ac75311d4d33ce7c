"""What the package smddp has for scripts that use torch. Importing this registers the backend.

It raises an ImportError where smddp was not built for the installed torch.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from smddp._registration import BACKEND_NAME, register_backend
from smddp._torch_internals import default_group
from smddp.torch import _load
from smddp.torch.backend import GroupOptions, backend_of, create_process_group
from smddp.torch.errors import (
    AbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InternalError,
    PeerLostError,
    ResourceError,
    TransportError,
)

if TYPE_CHECKING:
    from smddp.torch._C import AlgorithmUse, ProcessGroup

__all__ = [
    "AbortedError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "GroupOptions",
    "InternalError",
    "PeerLostError",
    "ResourceError",
    "TransportError",
    "describe",
    "empty",
    "statistics",
]

_load.check()
register_backend(create_process_group)


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns an uninitialised CPU tensor in communication memory.

    The ranks of a node reduce such tensors in place, without copies. Ordinary tensors are copied
    through small staging slots in shared memory. Use this function for tensors that are
    communicated many times.

    Args:
        size: the shape, as for `torch.empty`: integers, or one sequence of integers.
        dtype: the dtype; None means torch's default dtype.

    Returns:
        A contiguous tensor. If there is no communication memory, it lies in ordinary memory; the
        first such tensor of a process causes a warning.

    Example:
        >>> smddp.empty(2, 3).shape
        torch.Size([2, 3])
    """
    shape: list[int] = []
    for extent in size:
        try:
            shape.append(operator.index(extent))  # type: ignore[arg-type]
        except TypeError:
            shape.extend(extent)  # type: ignore[arg-type]
    tensor: torch.Tensor = _load.load().empty(shape, dtype or torch.get_default_dtype())
    return tensor


def _backend_of(group: dist.ProcessGroup | None) -> ProcessGroup:
    group = group or default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this rank is not in the group")
    backend: Any = None
    with contextlib.suppress(RuntimeError):  # there is none for CPU tensors
        backend = backend_of(group, "cpu")
    if not hasattr(backend, "statistics"):
        raise ValueError(f'the group does not use backend "{BACKEND_NAME}" for CPU tensors')
    return cast("ProcessGroup", backend)


def statistics(group: dist.ProcessGroup | None = None) -> dict[str, AlgorithmUse]:
    """Returns what this rank has run on a group so far.

    The result has one entry for each algorithm that ran. Its key is the collective and the
    algorithm, such as "allreduce/direct" (`smddp plan list` prints all of them). All
    numbers count from the creation of the group, and for this rank only:

    * `calls`: operations that the algorithm ran. A call of torch.distributed is one operation,
      fused or not. A call with a list of tensors, or with blocks of different sizes, may be one
      operation per tensor or block.
    * `bytes`: the sum of the sizes of these operations. The size of allreduce, reduce and broadcast
      is that of the tensor; the size of a collective with one block per rank is that of one block.
    * `memory_bytes`: bytes that this rank's processor read in copies and reductions, staging
      included. Divide it by `bytes` to see how often each byte was read.
    * `fabric_bytes`: bytes that this rank sent to other nodes, without headers; 0 on one node.
    * `zero_copy`: those of `calls` in which the ranks of the node read and wrote one another's
      tensors directly and staged nothing. That needs tensors from `smddp.empty`, or DDP's buckets.

    Send and receive are not counted, nor are calls that run in NCCL or in the memory of one GPU.

    Args:
        group: the group; None means the default group.

    Raises:
        ValueError: the group does not use smddp for CPU tensors, or this rank is not in it.

    Example:
        >>> dist.all_reduce(torch.ones(4))
        >>> smddp.statistics()["allreduce/one_shot"]["bytes"]
        16
    """
    return _backend_of(group).statistics()


def describe(group: dist.ProcessGroup | None = None) -> str:
    """Returns the layout of a group and the choices made for it, in one line.

    The line names the nodes, the number of operations that may run at the same time, what decides
    which algorithm a call uses (statistics() tells which algorithms ran) and, with several nodes,
    the network and the reason for choosing it.

    Args:
        group: the group; None means the default group.

    Raises:
        ValueError: the group does not use smddp for CPU tensors, or this rank is not in it.

    Example:
        >>> print(smddp.describe())
        group "0": rank 0 of 1, 1 node (1 rank), ...; algorithms by the built-in table
    """
    return _backend_of(group).describe()
