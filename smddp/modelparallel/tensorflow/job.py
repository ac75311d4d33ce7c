"""`smp.init`: the configuration, the place of this rank, its groups; and messages of objects."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import smddp.numpy
from smddp.modelparallel.core.config import Configuration, compare, configure, warn_of_second
from smddp.modelparallel.core.config_keys import KEYS
from smddp.modelparallel.core.errors import (
    SMPConfigurationError,
    SMPInitializationError,
    SMPPeerError,
    SMPUsageError,
)
from smddp.modelparallel.core.failure import summary
from smddp.modelparallel.core.logs import log, make_visible
from smddp.modelparallel.core.topology import CommGroup, RankType, Topology
from smddp.tensorflow import job as base

__all__ = [
    "agree",
    "allgather",
    "at_shutdown",
    "barrier",
    "broadcast",
    "cfg",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "exchange",
    "get_dp_group",
    "get_mp_group",
    "get_pp_group",
    "get_rdp_group",
    "get_tp_group",
    "get_world_group",
    "group",
    "init",
    "instance_id",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "seconds",
    "send",
    "shutdown",
    "size",
    "together",
    "topology",
    "tp_barrier",
    "tp_rank",
    "tp_size",
]

# Features of the PyTorch side only: a job that asks for one would get other results or memory.
_OF_TORCH = (
    *("tensor_parallel_degree", "sharded_data_parallel_degree", "fp16", "fp16_params", "bf16"),
    *("shard_optimizer_state", "offload_activations", "delayed_parameter_initialization"),
    *("prescaled_batch", "load_partition", "partition_file"),
)
_WORD, _DATA = 1, 2  # tags


class _Job:
    def __init__(self, config: Configuration, topology: Topology) -> None:
        self.cfg, self.topology = config, topology
        world = base.group()
        self.groups: dict[str, Any] = {"world": world}
        for kind in ("pp", "dp"):
            self.groups[kind] = world.split(topology.members(kind))
        self.groups["mp"], self.groups["rdp"] = self.groups["pp"], self.groups["dp"]
        # Tasks of a step send in another group than scripts, so that tags do not meet.
        self.groups["channel"] = world.split(topology.members("pp"))
        base.groups.extend(self.groups[kind] for kind in ("pp", "dp", "channel"))


_job: _Job | None = None
_at_shutdown: list[Callable[[], None]] = []


def _current() -> _Job:
    if _job is None:
        raise SMPInitializationError("call smp.init() first")
    return _job


def is_initialized() -> bool:
    """Returns whether `smp.init` has been called. It can be called at any time."""
    return _job is not None


def init(config: Mapping[str, Any] | None = None, timeout: float = 300.0) -> None:
    """Reads the configuration, joins the job and makes its groups.

    A second call does nothing, and warns if its configuration is another one.

    Args:
        config: keys of docs/model-parallel-reference.md; the environment variable
            SM_HP_MP_PARAMETERS overrides them.
        timeout: seconds that this rank waits for others, here, in messages and in steps. If the
            process has joined the job already, that of the first time counts.

    Raises:
        SMPConfigurationError: the configuration is wrong, or asks for a feature that only the
            PyTorch side has.
        SMPInitializationError: the number of ranks does not fit it, or ranks have different
            configurations.
    """
    global _job
    if _job is not None:
        warn_of_second(config, _job.cfg)
        return
    if not base.is_initialized():
        base.join(timeout)
    try:
        config_found = configure(config, os.environ, base.rank() == 0, _refuse_torch)
        topology = Topology(
            *(base.rank(), base.size(), base.local_rank(), base.local_size()),
            *(config_found.pipeline_parallel_degree, 1, config_found.placement_strategy),
        )
        if topology.rdp_size > 1 and not (config_found.horovod or config_found.ddp):
            raise SMPInitializationError(
                f"{topology.size} ranks make {topology.rdp_size} replicas of {topology.pp_size} "
                "partition(s); data parallelism needs horovod: True in the configuration."
            )
        error = None
    except (SMPConfigurationError, SMPInitializationError) as wrong:
        error = wrong
    # All ranks raise: the others would wait for this one until their deadline.
    answers = _gathered(base.group(), error or config_found.as_dict())
    if error is not None:
        raise error
    compare(answers)
    _job = _Job(config_found, topology)
    if topology.rank == 0:
        make_visible()
        log.info(
            "smp: %d ranks = %d replica(s) x %d partition(s); %d microbatches, %s pipeline",
            *(topology.size, topology.rdp_size, topology.pp_size),
            *(config_found.microbatches, config_found.pipeline),
        )


def _refuse_torch(given: Mapping[str, Any]) -> None:
    for key in KEYS:
        if key.name in _OF_TORCH and given.get(key.name, key.default) != key.default:
            raise SMPConfigurationError(
                f"{key.name} is for PyTorch: model parallelism for TensorFlow does not have it. "
                "Remove it from the configuration."
            )


def at_shutdown(function: Callable[[], None]) -> None:
    """Calls a function once, in the next `shutdown`."""
    _at_shutdown.append(function)


def shutdown() -> None:
    """Leaves the groups of smp; the process stays in the job. It is optional, at its end."""
    global _job
    if _job is None:
        return
    job, _job = _job, None
    with contextlib.ExitStack() as stack:  # an error of one does not keep the others
        for kind in ("pp", "dp", "channel"):
            stack.callback(_leave, job.groups[kind])
        for function in _at_shutdown:
            stack.callback(function)
        _at_shutdown.clear()


def _leave(one: smddp.numpy.Group) -> None:
    if one in base.groups:  # else the process has left the job before
        base.groups.remove(one)
    one.leave()


def cfg() -> Configuration:
    """Returns the configuration in force."""
    return _current().cfg


def seconds() -> float:
    """Returns how long this rank waits for others."""
    return base.timeout()


def topology() -> Topology:
    """Returns the place of this rank in the job."""
    return _current().topology


def group(kind: str) -> smddp.numpy.Group:
    """Returns this rank's group: "world", "pp", "mp", "dp", "rdp" or "channel"."""
    found: smddp.numpy.Group = _current().groups[kind]
    return found


def rank() -> int:
    """Returns the number of this process in the job."""
    return topology().rank


def size() -> int:
    """Returns the number of processes in the job."""
    return topology().size


def local_rank() -> int:
    """Returns the number of this process among those of its host."""
    return topology().local_rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return topology().local_size


def instance_id() -> int:
    """Returns the number of this host."""
    return rank() // local_size()


def pp_rank() -> int:
    """Returns the partition of this rank."""
    return topology().rank_in("pp")


def pp_size() -> int:
    """Returns the number of partitions."""
    return topology().pp_size


def dp_rank() -> int:
    """Returns the number of this rank's replica of the model."""
    return topology().rank_in("dp")


def dp_size() -> int:
    """Returns the number of replicas of the model."""
    return topology().size_of("dp")


def tp_rank() -> int:
    """Returns 0: there is no tensor parallelism."""
    return topology().rank_in("tp")


def tp_size() -> int:
    """Returns 1: there is no tensor parallelism."""
    return topology().tp_size


# Without tensor parallelism, the ranks of a replica are its pipeline.
mp_rank, mp_size = pp_rank, pp_size
rdp_rank, rdp_size = dp_rank, dp_size


def get_pp_group() -> list[int]:
    """Returns the ranks of the job that hold this rank's replica of the model."""
    return list(topology().members("pp"))


get_mp_group = get_pp_group


def get_dp_group() -> list[int]:
    """Returns the ranks of the job that hold the same partition as this one."""
    return list(topology().members("dp"))


get_rdp_group = get_dp_group


def get_tp_group() -> list[int]:
    """Returns the rank of this process alone: there is no tensor parallelism."""
    return list(topology().members("tp"))


def get_world_group() -> list[int]:
    """Returns all ranks of the job."""
    return list(range(size()))


# --- messages of objects --------------------------------------------------------------------------


def _bytes_of(obj: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)


def _gathered(members: smddp.numpy.Group, obj: Any) -> list[Any]:
    mine = _bytes_of(obj)
    sizes = members.allgather(np.array([mine.size]))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: mine.size] = mine
    parts = members.allgather(padded)
    return [
        pickle.loads(part[: int(count[0])].tobytes())
        for part, count in zip(parts, sizes, strict=True)
    ]


def exchange(kind: str, obj: Any) -> list[Any]:
    """Returns the objects of all ranks of a group; see `group`."""
    return _gathered(group(kind), obj)


def agree(error: BaseException | None, what: str) -> None:
    """Raises on all ranks of the job if one has failed in `what`; all ranks call it.

    Raises:
        SMPPeerError: another rank has failed, or is gone. On a rank with an error, that.
    """
    try:
        answers = exchange("world", None if error is None else summary(error))
    except Exception as lost:
        raise error or SMPPeerError(f"{what} was not ended by all ranks: {lost}") from None
    if error is not None:
        raise error
    for other, answer in enumerate(answers):
        if answer is not None:
            raise SMPPeerError(f"{what} has failed on rank {other}: {answer}")


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Runs a context on all ranks of the job; if one fails, all raise; see `agree`."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
    agree(error, what)


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Returns the objects of all ranks of a group, in the order of their ranks."""
    return [obj] if group is CommGroup.TP_GROUP else exchange(group.value, obj)


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits until all ranks of a group have called it."""
    if group is not CommGroup.TP_GROUP:
        _current().groups[group.value].barrier()


def mp_barrier() -> None:
    """Waits for the ranks of this replica."""
    barrier(CommGroup.MP_GROUP)


pp_barrier = mp_barrier


def dp_barrier() -> None:
    """Waits for the ranks with the same partition."""
    barrier(CommGroup.DP_GROUP)


rdp_barrier = dp_barrier


def tp_barrier() -> None:
    """Returns at once: there is no tensor parallelism."""
    barrier(CommGroup.TP_GROUP)


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Sends an object to a rank, which calls `recv_from`.

    Raises:
        SMPUsageError: to this rank itself.
        SMPInitializationError: there is no such rank.
    """
    _send(obj, [topology().world_rank(dest_rank, rank_type.value)])


def broadcast(obj: Any, group: CommGroup) -> None:
    """Sends an object to all others of a group; each of those calls `recv_from`."""
    _send(obj, [other for other in topology().members(group.value) if other != rank()])


def _send(obj: Any, ranks: list[int]) -> None:
    if rank() in ranks:
        raise SMPUsageError(f"rank {rank()} cannot send to itself")
    data, world, works = _bytes_of(obj), group("world"), []
    for other in ranks:
        works.append(world.send(np.array([data.size]), other, tag=_WORD, wait=False))
        works.append(world.send(data, other, tag=_DATA, wait=False))
    for work in works:
        work.wait()


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Returns the next object that a rank sends or broadcasts to this one.

    Raises:
        SMPUsageError: from this rank itself.
        SMPInitializationError: there is no such rank.
    """
    source = topology().world_rank(src_rank, rank_type.value)
    if source == rank():
        raise SMPUsageError(f"rank {source} cannot receive from itself")
    world = group("world")
    length = world.receive(np.zeros(1, np.int64), source, tag=_WORD)
    data = world.receive(np.empty(int(length[0]), np.uint8), source, tag=_DATA)
    return pickle.loads(data.tobytes())
