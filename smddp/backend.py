"""The one place where backend "smddp" is registered with torch.distributed."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smddp._environment import complete_environment

if TYPE_CHECKING:
    from smddp._C import ProcessGroup

__all__ = ["BACKEND_NAME", "GroupOptions", "register_backend"]

BACKEND_NAME = "smddp"


@dataclasses.dataclass(frozen=True)
class GroupOptions:
    """What one group has instead of a setting: `new_group(pg_options=GroupOptions(...))`.

    All ranks of the group have to give the same options.
    """

    algorithm: str = ""
    """Instead of SMDDP_ALGORITHM, such as "allreduce=ring"; empty: what that says."""

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, str):
            raise TypeError(
                f'smddp.GroupOptions: algorithm is text such as "allreduce=ring", or "", but got '
                f"{self.algorithm!r}"
            )


def register_backend() -> None:
    """Registers "smddp" for CPU and CUDA tensors. Idempotent; loads nothing compiled."""
    if not dist.is_available() or BACKEND_NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(
        BACKEND_NAME, _create_process_group, extended_api=True, devices=["cpu", "cuda"]
    )
    # DDP asks its process group for the memory of its gradient buckets, unless told not to. It
    # reads the variable when a model is wrapped; a value that the user has set stays.
    if os.environ.get("SMDDP_COMM_MEMORY", "1") not in ("0", "false", "off"):
        os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")


def _create_process_group(options: Any, group_options: Any) -> ProcessGroup:
    """Creates one rank of a group; c10d calls it in init_process_group() and new_group()."""
    from smddp import _load

    module = _load.load()
    _warn_of_misspelt_settings(module)
    complete_environment(options.group_rank, options.group_size)
    _leave_at_exit(module)
    timeout = options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    algorithm = _algorithm_of(group_options)
    store, rank, size = options.store, options.group_rank, options.group_size
    arguments = (store, rank, size, timeout, str(options.group_id), algorithm)
    peer = _gpu_peer()
    _pin_device()
    if peer is None:
        group: ProcessGroup = module.ProcessGroup(*arguments)
        return group
    return module.GpuProcessGroup(*arguments, *peer)  # type: ignore[no-any-return]


def _algorithm_of(group_options: Any) -> str:
    """Returns what a group asks for in pg_options.

    Raises:
        TypeError: they are none that any backend has.
    """
    if isinstance(group_options, GroupOptions):
        return group_options.algorithm
    from torch._C._distributed_c10d import Backend as C10dBackend

    # A group may have another backend for other devices, and torch gives all of them the same.
    if group_options is None or isinstance(group_options, C10dBackend.Options):
        return ""
    raise TypeError(
        f'pg_options of backend "{BACKEND_NAME}" are smddp.GroupOptions, for example '
        f'smddp.GroupOptions(algorithm="allreduce=ring"), but got {group_options!r}'
    )


def _gpu_peer() -> tuple[str, Any, Any, str] | None:
    """Returns how the module reaches GPUs and NCCL.

    That is device type, names of GPUs, maker of a peer, file of the CUDA part.

    None on machines without a GPU. Asks the driver's management library, so that CUDA stays as it
    is until the script uses it.
    """
    from smddp import _load

    if torch.cuda.device_count() == 0:
        return None
    make_peer = _nccl_group if dist.is_nccl_available() else None
    return "cuda", _gpu_name, make_peer, _load.cuda_part()


@functools.cache
def _pin_device() -> None:
    """Lets "cuda" mean the GPU of this rank's number on its node, where the script chose none.

    Scripts of the original library need no torch.cuda.set_device(), which comes after this and
    wins. A script that has used CUDA before has a current device, which stays. Once per process,
    and when CUDA is first used, as it may not be yet.
    """
    local, count = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if not local.isdigit() or count < 2:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    index = int(local) % count
    # As torch's own seeds wait for CUDA.
    torch.cuda._lazy_call(lambda: torch.cuda.set_device(index))  # type: ignore[no-untyped-call]


def _gpu_name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Makes one rank of an NCCL group; it connects at its first call."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


@functools.cache
def _warn_of_misspelt_settings(module: Any) -> None:
    """One warning per node and variable: all ranks of a node usually have the same environment."""
    names = [name for name in os.environ if name.startswith("SMDDP_")]
    if names and os.environ.get("LOCAL_RANK", "0") == "0":
        # What suggests a name takes longer to import than all else here.
        from smddp.env import misspelt

        for sentence in misspelt(os.environ, [row["name"] for row in module.settings()]):
            warnings.warn(f"smddp: {sentence}", stacklevel=2)


_leaving = False


def _leave_at_exit(module: Any) -> None:
    """Leaves all groups when the interpreter ends, also without destroy_process_group()."""
    global _leaving
    if _leaving:
        return
    _leaving = True
    owner = os.getpid()

    def leave() -> None:
        # A forked child runs the handlers it inherited; the groups are its parent's.
        if os.getpid() == owner:
            module.shutdown()

    atexit.register(leave)
