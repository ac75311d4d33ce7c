"""The interface of versions 1.0 to 1.3, which scripts import as `dist`; deprecated."""

from smddp.torch.dataparallel import (
    ReduceOp,
    all_gather,
    all_reduce,
    all_to_all_single,
    announce_deprecation,
    barrier,
    broadcast,
    get_local_rank,
    get_rank,
    get_world_size,
    group,
    init_process_group,
    is_available,
    is_initialized,
)
from smdistributed.dataparallel.torch import torch_smddp  # noqa: F401, as in later versions

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
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

announce_deprecation()
