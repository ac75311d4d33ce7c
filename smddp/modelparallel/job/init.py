"""`smp.init` and `smp.shutdown`: the beginning and the end of what `state` holds."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.job.groups import Groups
from smddp.modelparallel.job.state import state
from smddp_launch import UNKNOWN_HOST, complete_from_launcher, complete_rendezvous
from smddp_smp.config import Configuration, compare, configure, warn_of_second
from smddp_smp.errors import SMPInitializationError
from smddp_smp.logs import log, make_visible
from smddp_smp.topology import Topology

__all__ = ["init", "is_initialized", "shutdown"]


def is_initialized() -> bool:
    """Returns whether `smp.init` has been called. It can be called at any time."""
    return state.initialized


def init(config: Mapping[str, Any] | None = None) -> None:
    """Reads the configuration, initialises torch.distributed, and makes the process groups.

    Every rank has to call it before anything else of smp. A second call does nothing, and
    warns if its configuration is another one.

    Args:
        config: the keys of `smddp_smp.config_keys`; the environment variable
            SM_HP_MP_PARAMETERS overrides them.

    Raises:
        SMPConfigurationError: the configuration is wrong.
        SMPInitializationError: the number of ranks does not fit it, ranks have different
            configurations, or nothing says where rank 0 is.

    Example:
        >>> smp.init({"partitions": 1, "microbatches": 2})
        >>> smp.rank(), smp.size()
        (0, 1)
    """
    if state.initialized:
        warn_of_second(config, state.cfg)
        return
    complete_from_launcher()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    cfg = configure(config, os.environ, warn=rank == 0)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank % local_size)))
    topology = Topology(
        rank,
        size,
        local_rank,
        local_size,
        cfg.pipeline_parallel_degree,
        cfg.tensor_parallel_degree,
        cfg.placement_strategy,
    )
    if topology.rdp_size > 1 and not cfg.ddp:
        raise SMPInitializationError(
            f"{size} ranks make {topology.rdp_size} replicas of {topology.pp_size} partition(s); "
            "data parallelism needs ddp: True in the configuration."
        )
    if topology.rdp_size % cfg.sharded_data_parallel_degree:
        fits = size // topology.rdp_size * cfg.sharded_data_parallel_degree
        factors = {
            "pipeline_parallel_degree": topology.pp_size,
            "tensor_parallel_degree": topology.tp_size,
        }
        why = "".join(f" / {name} {degree}" for name, degree in factors.items() if degree > 1)
        raise SMPInitializationError(
            f"sharded_data_parallel_degree {cfg.sharded_data_parallel_degree} does not divide "
            f"smp.rdp_size(), which is {topology.rdp_size} ({size} ranks{why}): set it to a "
            f"divisor of that, or start a multiple of {fits} ranks"
        )
    owns = not dist.is_initialized()
    if owns:
        _bring_up(cfg, rank, size)
    _compare(cfg)
    groups = Groups(topology, cfg.sharded_data_parallel_degree, _order_groups(cfg, topology))
    state.fill(cfg, topology, groups, owns)
    atexit.register(shutdown)
    if rank == 0:
        make_visible()
        batches = "one batch" if cfg.prescaled_batch else "a batch each"
        tensor = f" x {topology.tp_size} tensor-parallel ranks with {batches}"
        log.info(
            "smp: %d ranks = %d replica(s) x %d partition(s)%s; %d microbatches, %s pipeline",
            *(size, topology.rdp_size, topology.pp_size, tensor if topology.tp_size > 1 else ""),
            *(cfg.microbatches, cfg.pipeline),
        )
        log.debug("smp: %s", cfg)


def _order_groups(cfg: Configuration, topology: Topology) -> list[tuple[int, ...]]:
    """Returns the groups of ranks that have to run their tasks in one order; empty if none have to.

    With one partition, every replica runs one microbatch after the other in any case. Ranks that
    exchange activations still have to hear at once if a step fails on one of them.
    """
    degree: int = cfg.sharded_data_parallel_degree
    if topology.pp_size == topology.tp_size == 1:
        return []
    if topology.pp_size > 1 and cfg.deterministic_server and topology.size_of("dp") > 1:
        return topology.groups("dp")
    # Tasks gather parameters, or exchange activations, which all ranks have to do in one order.
    return topology.in_blocks("dp", degree) if topology.tp_size * degree > 1 else []


def _compare(cfg: Configuration) -> None:
    """Raises on all ranks if they have different configurations."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, cfg.as_dict())
    compare(everybody)


def _bring_up(cfg: Configuration, rank: int, size: int) -> None:
    """Makes the default process group of torch.distributed.

    Raises:
        SMPInitializationError: nothing says where rank 0 is.
    """
    environ = os.environ
    environ.setdefault("RANK", str(rank))
    environ.setdefault("WORLD_SIZE", str(size))
    if not complete_rendezvous(cfg.ddp_port):
        raise SMPInitializationError(UNKNOWN_HOST)
    backend = {"auto": "smddp"}.get(cfg.ddp_dist_backend, cfg.ddp_dist_backend)
    if backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"
    elif backend == "smddp":
        import smddp  # noqa: F401  registers the backend
    dist.init_process_group(backend, rank=rank, world_size=size)
    if torch.accelerator.is_available():
        local_rank = int(environ.get("LOCAL_RANK", "0"))
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())


def shutdown() -> None:
    """Releases the process groups. It is called automatically when the process ends."""
    if not state.initialized:
        return
    owns = state.owns_default_group
    state.close()
    state.groups.close()
    state.clear()
    if owns and dist.is_initialized():
        dist.destroy_process_group()
    atexit.unregister(shutdown)
