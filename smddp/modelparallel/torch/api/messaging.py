"""Messages of any picklable object between ranks: send, recv_from, broadcast, allgather, barrier.

All calls are synchronous: a sender goes on when the object has been received. If another rank does
not make its call, they raise RuntimeError when the timeout of the process group is over.
"""

from __future__ import annotations

from typing import Any

from smddp.modelparallel.core.topology import CommGroup, RankType
from smddp.modelparallel.torch.job.messenger import Messenger
from smddp.modelparallel.torch.job.state import state

__all__ = [
    "allgather",
    "barrier",
    "broadcast",
    "dp_barrier",
    "mp_barrier",
    "pp_barrier",
    "rdp_barrier",
    "recv_from",
    "send",
    "tp_barrier",
]


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Sends an object to a rank; returns when it has been received.

    Args:
        obj: anything that pickles. Tensors of a device arrive as tensors of the host.
        dest_rank: who calls `recv_from`.
        rank_type: the kind of group in which `dest_rank` is a rank; smp.WORLD_RANK for the job.

    Raises:
        SMPUsageError: it is this rank itself, or that rank sends to this one instead of receiving.
        SMPInitializationError: there is no such rank, or `smp.init` has not been called.
    """
    Messenger(state).send(obj, dest_rank, rank_type)


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Returns the next object that a rank sends or broadcasts to this one.

    Args:
        src_rank: the sender.
        rank_type: the kind of group in which `src_rank` is a rank; smp.WORLD_RANK for the job.

    Raises:
        SMPUsageError: it is this rank itself.
        SMPInitializationError: there is no such rank, or `smp.init` has not been called.
    """
    return Messenger(state).recv_from(src_rank, rank_type)


def broadcast(obj: Any, group: CommGroup) -> None:
    """Sends an object to the other ranks of a group; each of those calls `recv_from`.

    Args:
        obj: anything that pickles.
        group: such as smp.DP_GROUP; only the sender calls `broadcast`.

    Raises:
        SMPUsageError: another rank of the group sends to this one instead of receiving.
        SMPInitializationError: `smp.init` has not been called.
    """
    Messenger(state).broadcast(obj, group)


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Returns the objects of all ranks of a group, in the order of their ranks.

    All ranks of the group have to call it.

    Args:
        obj: anything that pickles. Tensors of a device arrive as tensors of the host.
        group: such as smp.DP_GROUP.

    Raises:
        SMPInitializationError: `smp.init` has not been called.
    """
    return Messenger(state).allgather(obj, group)


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits until all ranks of a group have called it.

    Args:
        group: such as smp.DP_GROUP; all ranks of the job by default.

    Raises:
        SMPInitializationError: `smp.init` has not been called.
    """
    Messenger(state).barrier(group)


def mp_barrier() -> None:
    """Calls `barrier(smp.MP_GROUP)`."""
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """Calls `barrier(smp.DP_GROUP)`."""
    barrier(CommGroup.DP_GROUP)


def pp_barrier() -> None:
    """Calls `barrier(smp.PP_GROUP)`."""
    barrier(CommGroup.PP_GROUP)


def tp_barrier() -> None:
    """Calls `barrier(smp.TP_GROUP)`."""
    barrier(CommGroup.TP_GROUP)


def rdp_barrier() -> None:
    """Calls `barrier(smp.RDP_GROUP)`."""
    barrier(CommGroup.RDP_GROUP)
