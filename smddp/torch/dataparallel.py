"""The PyTorch interface of versions 1.0 to 1.3 of the original library, over torch.distributed.

Scripts of that time import `smdistributed.dataparallel.torch.distributed` in place of
`torch.distributed`. Its functions are those of torch with fewer arguments, on the group of all
ranks; its DistributedDataParallel is torch's.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from smddp._registration import BACKEND_NAME
from smddp.launch.environment import complete_environment, complete_from_launcher
from smddp.torch import functions  # noqa: F401, registers the backend

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "announce_deprecation",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
]

_DEPRECATED = (
    "smdistributed.dataparallel.torch.dist is deprecated from v1.4.0+ on. Replace it by these two "
    "lines:\n"
    "    import smdistributed.dataparallel.torch.torch_smddp\n"
    "    torch.distributed.init_process_group(backend='smddp')\n"
    "and by torch.nn.parallel.DistributedDataParallel."
)


class _World:
    """The only group of this interface."""

    def __repr__(self) -> str:
        return "group.WORLD"


class group:  # noqa: N801, the original's name
    """Has the group of all ranks, `group.WORLD`."""

    WORLD = _World()


class ReduceOp:
    """The reduce operations; AVERAGE is what torch calls AVG.

    The values are torch's, so the functions take those, too.
    """

    SUM = dist.ReduceOp.SUM
    AVERAGE = dist.ReduceOp.AVG
    MIN = dist.ReduceOp.MIN
    MAX = dist.ReduceOp.MAX


@functools.cache
def announce_deprecation() -> None:
    """Prints once that the interface is deprecated, on one rank of each node.

    The category is FutureWarning, because Python hides a DeprecationWarning outside __main__.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # A module of smdistributed calls this function; the line shown is that which imports it.
        warnings.warn(_DEPRECATED, FutureWarning, stacklevel=3)


def _require_world(given: object) -> None:
    """Refuses groups other than that of all ranks, as the original did.

    Raises:
        ValueError: it is another one.
    """
    if given is group.WORLD or given is None:
        return
    if dist.is_initialized() and given is dist.group.WORLD:
        return
    raise ValueError(
        f"smdistributed.dataparallel.torch.distributed has one group, group.WORLD, but got "
        f"{given!r}: for other groups use torch.distributed"
    )


def is_available() -> bool:
    """Returns whether a launcher has started this process as a rank of a job."""
    complete_from_launcher()
    return dist.is_available() and "RANK" in os.environ and "WORLD_SIZE" in os.environ


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Creates the group of all ranks; the other calls need it.

    Args:
        args: ignored, as in the original.
        kwargs: ignored, too.

    Raises:
        ValueError: this process is not a rank of a job, or the group exists.
    """
    if not is_available():
        raise ValueError(
            "this process is not a rank of a job: start the script with smddprun -n 4 train.py, "
            "torchrun, mpirun or srun"
        )
    dist.init_process_group(BACKEND_NAME)


def is_initialized() -> bool:
    """Returns whether init_process_group() has been called."""
    return dist.is_available() and dist.is_initialized()


def get_world_size(group: object = group.WORLD) -> int:
    """Returns the number of ranks of the job."""
    _require_world(group)
    return dist.get_world_size()


def get_rank(group: object = group.WORLD) -> int:
    """Returns the number of this rank in the job."""
    _require_world(group)
    return dist.get_rank()


def get_local_rank() -> int:
    """Returns the number of this rank on its node; torch.distributed has no such function.

    Raises:
        ValueError: init_process_group() has not been called.
    """
    # Raises that. The variable is set when a group of smddp is made, but this may be another one.
    complete_environment(dist.get_rank(), dist.get_world_size())
    return int(os.environ["SMDATAPARALLEL_LOCAL_RANK"])


def all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: object = group.WORLD,
    async_op: bool = False,
) -> dist.Work | None:
    """Makes a tensor the reduction of those of all ranks, the same bits everywhere.

    Args:
        tensor: is changed in place.
        op: one of ReduceOp.
        group: `group.WORLD`.
        async_op: whether to return at once.

    Returns:
        With async_op a handle to wait for, else None.
    """
    _require_world(group)
    return dist.all_reduce(tensor, op, async_op=async_op)


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: object = group.WORLD, async_op: bool = False
) -> dist.Work | None:
    """Copies the tensor of rank `src` to all ranks; see all_reduce()."""
    _require_world(group)
    return dist.broadcast(tensor, src, async_op=async_op)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: object = group.WORLD,
    async_op: bool = False,
) -> dist.Work | None:
    """Fills a list, which has a tensor for each rank, with those of all; see all_reduce()."""
    _require_world(group)
    return dist.all_gather(tensor_list, tensor, async_op=async_op)


def all_to_all_single(
    output_t: torch.Tensor,
    input_t: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: object = group.WORLD,
    async_op: bool = False,
) -> dist.Work | None:
    """Sends each rank its part of `input_t`; see torch.distributed.all_to_all_single()."""
    _require_world(group)
    return dist.all_to_all_single(
        output_t, input_t, output_split_sizes, input_split_sizes, async_op=async_op
    )


def barrier(group: object = group.WORLD, async_op: bool = False) -> dist.Work | None:
    """Waits until all ranks have called it."""
    _require_world(group)
    return dist.barrier(async_op=async_op)


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with the arguments of the original.

    The original asked for `broadcast_buffers=False`, because it could not do the other. Here both
    values mean what they mean in torch. For a model on the CPU, `device_ids` and `output_device`
    are ignored, so that a script for GPUs needs no change there.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        broadcast_buffers: bool = True,
        process_group: object = None,
        bucket_cap_mb: float | None = None,
    ) -> None:
        _require_world(process_group)
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        with warnings.catch_warnings():
            # From torch 2.15 on. Scripts for this interface have no other argument to use.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
            super().__init__(
                module,
                device_ids=device_ids,
                output_device=output_device,
                broadcast_buffers=broadcast_buffers,
                bucket_cap_mb=bucket_cap_mb,
            )
