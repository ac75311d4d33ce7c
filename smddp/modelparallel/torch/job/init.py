"""`smp.init` and `smp.shutdown`: the beginning and the end of what `state` holds."""

from __future__ import annotations

import atexit
import itertools
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from smddp._torch_internals import default_store, undo
from smddp.launch.environment import complete_from_launcher
from smddp.launch.rendezvous import UNKNOWN_HOST, complete_rendezvous
from smddp.modelparallel.core.config import (
    Configuration,
    compare,
    configure,
    port_of,
    warn_of_second,
)
from smddp.modelparallel.core.errors import SMPConfigurationError, SMPError, SMPInitializationError
from smddp.modelparallel.core.failure import summary
from smddp.modelparallel.core.logs import log, make_visible
from smddp.modelparallel.core.topology import Topology
from smddp.modelparallel.torch.job.groups import Groups, NextNames
from smddp.modelparallel.torch.job.meeting import decided
from smddp.modelparallel.torch.job.state import state

__all__ = ["init", "is_initialized", "shutdown"]

# The store for the default process group, until that is made. It outlives a failed `smp.init`:
# another rank may already be in the next one.
_unused: list[distributed_c10d.Store] = []
# Numbers the default process groups that smp makes; they are the same on all ranks.
_numbers = itertools.count()
# What rank 0 answers if ranks have made groups that not all of them are in.
_UNLIKE = "unlike"


def is_initialized() -> bool:
    """Returns whether `smp.init` has been called. It can be called at any time."""
    return state.initialized


def init(config: Mapping[str, Any] | None = None) -> None:
    """Reads the configuration, initialises torch.distributed, and makes the process groups.

    Every rank has to call it before anything else of smp. A second call does nothing, and
    warns if its configuration is another one.

    Args:
        config: the keys of `smddp.modelparallel.core.config_keys`; the environment variable
            SM_HP_MP_PARAMETERS overrides them.

    Raises:
        SMPConfigurationError: the configuration is wrong, on this rank or another.
        SMPInitializationError: the number of ranks does not fit it, ranks have different
            configurations, another rank has failed, or nothing says where rank 0 is.
        SMPPeerError: another rank has not called it within 30 minutes, or the timeout of the
            script's process group.

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
    cfg, topology, alike = _agreed(config, rank, size)
    owns = not dist.is_initialized()
    if owns:
        _bring_up(cfg, rank, size)
    degree = cfg.sharded_data_parallel_degree
    groups = Groups(topology, degree, _order_groups(cfg, topology), alike)
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


def _agreed(
    config: Mapping[str, Any] | None, rank: int, size: int
) -> tuple[Configuration, Topology, bool]:
    """Returns what the configuration says; raises on all ranks if that of one is wrong or another.

    There is no process group yet, in which the others would wait for a rank that has raised.

    Returns:
        The configuration, the place of this rank, and whether all ranks have the same
        `NextNames.hashed`.
    """
    found = wrong = None
    try:
        found = _configured(config, rank, size)
        mine: dict[str, Any] = {"values": found[0].as_dict(), "next": NextNames.now()}
    except Exception as error:
        wrong = error
        mine = {"error": _plain(error)}
    text = json.dumps(mine, default=repr, skipkeys=True)
    heard = decided("smp.init", text, _compared, _store(config, rank, size), rank, size)
    if found is None or heard not in ("", _UNLIKE):
        raise wrong or _error(json.loads(heard))
    return *found, not heard


def _compared(told: list[str]) -> str:
    """Returns the error of all ranks from what each of them tells; without one "" or `_UNLIKE`."""
    answers = [json.loads(text) for text in told]
    try:
        compare([one.get("values") or _error(one["error"]) for one in answers])
        numbered, hashed = map(set, zip(*(one["next"] for one in answers), strict=True))
        if len(numbered) > 1:
            raise SMPInitializationError(
                "some ranks have made more process groups than others, by new_group(..., "
                "use_local_synchronization=True); torch would give the next one different names, "
                "and ranks would wait for each other: make these groups after smp.init"
            )
    except SMPError as error:
        return json.dumps(_plain(error))
    return _UNLIKE if len(hashed) > 1 or None in hashed else ""


def _plain(error: Exception) -> list[str]:
    """Returns class and text of an error. No pickle: others may be able to write to the store."""
    known = isinstance(error, SMPError)
    return [type(error).__name__, str(error)] if known else ["", summary(error)]


def _error(plain: list[str]) -> SMPError:
    kinds = {kind.__name__: kind for kind in (SMPConfigurationError, SMPInitializationError)}
    return kinds.get(plain[0], SMPInitializationError)(plain[1])


def _configured(
    config: Mapping[str, Any] | None, rank: int, size: int
) -> tuple[Configuration, Topology]:
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
    return cfg, topology


def _store(config: Mapping[str, Any] | None, rank: int, size: int) -> distributed_c10d.Store:
    """Returns the store of the default process group, or that with which to make it.

    Raises:
        SMPInitializationError: nothing says where rank 0 is.
    """
    if dist.is_initialized():
        known: distributed_c10d.Store = default_store()
        return known
    if not _unused:
        environ = os.environ
        environ.setdefault("RANK", str(rank))
        environ.setdefault("WORLD_SIZE", str(size))
        port = None if "MASTER_PORT" in environ else port_of(config, environ)
        if not complete_rendezvous(port):
            raise SMPInitializationError(UNKNOWN_HOST)
        store, *_ = next(rendezvous("env://", timeout=dist.default_pg_timeout))
        store.set_timeout(dist.default_pg_timeout)
        _unused.append(store)
    return _unused[0]


def _bring_up(cfg: Configuration, rank: int, size: int) -> None:
    """Makes the default process group of torch.distributed."""
    backend = {"auto": "smddp"}.get(cfg.ddp_dist_backend, cfg.ddp_dist_backend)
    if backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"
    elif backend == "smddp":
        from smddp.torch import functions  # noqa: F401  registers the backend
    # The server of an earlier store lives on if something of the script still refers to a group,
    # such as a model, and torch finds it again by its port. Groups must not find keys of others
    # with their names: gloo would wait for addresses that are gone.
    store = distributed_c10d.PrefixStore(f"smp{next(_numbers)}", _unused.pop())
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    if torch.accelerator.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())


def shutdown() -> None:
    """Releases the process groups, and puts back what smp has replaced in torch.

    It is called automatically when the process ends.
    """
    if not state.initialized:
        return
    owns = state.owns_default_group
    state.close()
    state.groups.close()
    state.clear()
    undo("smp")
    if owns and dist.is_initialized():
        dist.destroy_process_group()
    atexit.unregister(shutdown)
