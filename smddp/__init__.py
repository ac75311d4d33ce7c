"""smddp: collective communication for PyTorch, as the c10d backend "smddp".

Importing it registers the backend; where torch autoloads backends not even that is needed::

    torch.distributed.init_process_group(backend="smddp")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from smddp import _load
from smddp._environment import complete_from_launcher
from smddp.backend import BACKEND_NAME, GroupOptions, register_backend
from smddp.errors import (
    AbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InternalError,
    PeerLostError,
    ResourceError,
    TransportError,
)

if TYPE_CHECKING:
    from smddp._C import AlgorithmUse, ProcessGroup

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
complete_from_launcher()
register_backend()


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns an uninitialised CPU tensor in communication memory.

    The ranks of a node reduce such tensors where they lie; ordinary ones are staged through small
    shared slots. Use it for tensors that are communicated again and again.

    Args:
        size: the shape, as for `torch.empty`.
        dtype: torch's default dtype if None.

    Returns:
        A contiguous tensor; an ordinary one, with one warning, when there is no such memory.
    """
    shape: list[int] = []
    for extent in size:
        shape.extend([extent] if isinstance(extent, int) else extent)
    tensor: torch.Tensor = _load.load().empty(shape, dtype or torch.get_default_dtype())
    return tensor


def _backend_of(group: dist.ProcessGroup | None) -> ProcessGroup:
    group = group or dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    if not hasattr(backend, "statistics"):
        raise ValueError(f'the group does not use backend "{BACKEND_NAME}" for CPU tensors')
    return cast("ProcessGroup", backend)


def statistics(group: dist.ProcessGroup | None = None) -> dict[str, AlgorithmUse]:
    """Returns what this rank has run on a group so far (None: the default group).

    One entry for each algorithm that ran, named after collective and algorithm: "allreduce/direct"
    (`python -m smddp.plan list` prints all of them). All numbers count from the start of the group
    and are this rank's only:

    * `calls`: operations that the algorithm served. A call of torch.distributed is one, fused or
      not; with a list of tensors, or of blocks of different sizes, it may be one for each.
    * `bytes`: the size of those operations' vectors. That is the tensor of allreduce, reduce and
      broadcast; of collectives with a block for each rank it is one block.
    * `memory_bytes`: bytes that the processor of this rank read in copies and reductions, staging
      included. Divided by `bytes`: how often each byte was touched.
    * `fabric_bytes`: bytes that this rank sent to other nodes, headers apart; 0 on one node.
    * `zero_copy`: calls, of `calls`, in which the ranks of the node read and wrote one another's
      tensors where they lie and staged nothing, as they can in memory of `smddp.empty` and of
      DDP's buckets.

    Send and receive are not in it, nor what goes by NCCL or through the memory of one GPU.
    """
    return _backend_of(group).statistics()


def describe(group: dist.ProcessGroup | None = None) -> str:
    """Returns the layout of a group and what was chosen for it, in one line (None: the default).

    That is: its nodes, how many operations may run at a time, what decides on the algorithm of a
    call (statistics() says which ones that were), and between nodes the network and why that one.
    """
    return _backend_of(group).describe()
