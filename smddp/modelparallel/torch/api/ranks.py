"""The place of this process in the job: the rank functions and groups that scripts call.

All of them raise SMPInitializationError before `smp.init`. `get_…_group` returns the group that
this process belongs to, as ascending ranks of the job; `get_…_process_group` returns the same group
for calls of torch.distributed, and raises SMPUsageError without `ddp` in the configuration.
"""

from __future__ import annotations

import torch.distributed as dist

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.job.state import state

__all__ = [
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_group",
    "get_world_process_group",
    "instance_id",
    "local_rank",
    "local_size",
    "mp_rank",
    "mp_size",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "size",
    "tp_rank",
    "tp_size",
]


def rank() -> int:
    """Returns the rank of this process in the job."""
    return state.topology.rank


def size() -> int:
    """Returns the number of processes in the job."""
    return state.topology.size


def local_rank() -> int:
    """Returns the rank of this process among those on its host."""
    return state.topology.local_rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return state.topology.local_size


def instance_id() -> int:
    """Returns the number of this host in the job, from 0.

    It is right only if all hosts have the same number of processes.
    """
    return state.topology.rank // state.topology.local_size


def pp_rank() -> int:
    """Returns the partition that lives on this rank, from 0: its rank in the pipeline."""
    return state.topology.rank_in("pp")


def pp_size() -> int:
    """Returns the number of partitions."""
    return state.topology.size_of("pp")


def tp_rank() -> int:
    """Returns the rank of this process in its tensor-parallel group."""
    return state.topology.rank_in("tp")


def tp_size() -> int:
    """Returns the number of ranks in a tensor-parallel group."""
    return state.topology.size_of("tp")


def rdp_rank() -> int:
    """Returns the rank of this process in its `rdp` group.

    It is the same as `dp_rank()` unless tensor_parallel_degree is more than 1.
    """
    return state.topology.rank_in("rdp")


def rdp_size() -> int:
    """Returns the number of ranks of an `rdp` group.

    It is the same as `dp_size()` unless tensor_parallel_degree is more than 1.
    """
    return state.topology.size_of("rdp")


def mp_rank() -> int:
    """Returns the rank of this process in its `mp` group (pp x tp)."""
    return state.topology.rank_in("mp")


def mp_size() -> int:
    """Returns the number of ranks of an `mp` group (pp x tp)."""
    return state.topology.size_of("mp")


def dp_rank() -> int:
    """Returns the rank of this process among those that train on different data."""
    return state.topology.rank_in("dp")


def dp_size() -> int:
    """Returns the number of ranks that train on different data."""
    return state.topology.size_of("dp")


def get_world_group() -> list[int]:
    """Returns all ranks of the job."""
    return list(state.topology.members("world"))


def get_mp_group() -> list[int]:
    """Returns the ranks of this `mp` group."""
    return list(state.topology.members("mp"))


def get_dp_group() -> list[int]:
    """Returns the ranks that train on different data and hold the same partition."""
    return list(state.topology.members("dp"))


def get_tp_group() -> list[int]:
    """Returns the ranks of this tensor-parallel group."""
    return list(state.topology.members("tp"))


def get_pp_group() -> list[int]:
    """Returns the ranks of this pipeline."""
    return list(state.topology.members("pp"))


def get_rdp_group() -> list[int]:
    """Returns the ranks of this `rdp` group.

    It is the same as `get_dp_group()` unless tensor_parallel_degree is more than 1.
    """
    return list(state.topology.members("rdp"))


def _process_group(kind: str) -> dist.ProcessGroup:
    if not state.cfg.ddp:
        raise SMPUsageError(
            f"smp.get_{kind}_process_group() needs ddp: True in the smp configuration"
        )
    return state.groups.of(kind)


def get_world_process_group() -> dist.ProcessGroup:
    """Returns the process group of all ranks."""
    return _process_group("world")


def get_mp_process_group() -> dist.ProcessGroup:
    """Returns the process group of `get_mp_group`."""
    return _process_group("mp")


def get_dp_process_group() -> dist.ProcessGroup:
    """Returns the process group of `get_dp_group`."""
    return _process_group("dp")


def get_tp_process_group() -> dist.ProcessGroup:
    """Returns the process group of `get_tp_group`."""
    return _process_group("tp")


def get_pp_process_group() -> dist.ProcessGroup:
    """Returns the process group of `get_pp_group`."""
    return _process_group("pp")


def get_rdp_process_group() -> dist.ProcessGroup:
    """Returns the process group of `get_rdp_group`."""
    return _process_group("rdp")
