"""The one place where backend "smddp" is registered with torch.distributed.

`import torch` runs it wherever smddp is installed, so it imports nothing of the package smddp.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from smddp_launch import is_bare_rank, prepare_rendezvous

__all__ = ["BACKEND_NAME", "names_smddp", "register_backend"]

BACKEND_NAME = "smddp"


def register_backend(create: Callable[[Any, Any], Any]) -> None:
    """Registers "smddp" for CPU and CUDA tensors; does nothing if it is registered.

    Args:
        create: creates one rank of a group, from its options and those of the script.
    """
    import torch.distributed as dist

    if not dist.is_available() or BACKEND_NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(BACKEND_NAME, create, extended_api=True, devices=["cpu", "cuda"])
    if is_bare_rank():
        _find_ranks_when_asked(dist)


def _find_ranks_when_asked(dist: Any) -> None:
    """Lets `init_process_group("smddp")` find ranks that mpirun or srun started.

    The function reads torch's variables before it creates the group, and has no hook before that:
    so it is replaced, in processes where it would miss a variable. With another backend it does
    what it did.
    """
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(TypeError):  # of wrong arguments; torch says so itself
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            if names_smddp(given.get("backend")) and _reads_environment(given):
                prepare_rendezvous(given.get("rank", -1), given.get("world_size", -1))
        return original(*args, **kwargs)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


def _reads_environment(given: Mapping[str, Any]) -> bool:
    """Returns whether `init_process_group` reads the place of rank 0 in the environment."""
    return given.get("store") is None and given.get("init_method") in (None, "env://")


def names_smddp(backend: Any) -> bool:
    """Returns whether a text such as "smddp" or "cpu:smddp,cuda:nccl" names this backend."""
    parts = str(backend).lower().split(",")
    return any(part.rpartition(":")[2].strip() == BACKEND_NAME for part in parts)
