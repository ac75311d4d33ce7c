"""Sends picklable objects between ranks; `smp.send` and its companions are built on it.

All calls are synchronous: a sender goes on when the object has been received.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.topology import CommGroup, RankType
from smddp.modelparallel.torch.job.state import State

__all__ = ["Messenger"]

# The tags of two kinds of messages: data, and single integers ("words"). The sender sends the
# number of bytes as a word; the receiver, when it calls recv_from, answers with the word _READY;
# then the sender sends the data.
_DATA, _WORD = 1, 2
_READY = -1
# Also if the script has called torch.set_default_device.
_HOST = "cpu"


class Messenger:
    """Sends and receives objects for one rank.

    `send`, `broadcast` and `recv_from` use a process group of their own, `Groups.messages`;
    `allgather` and `barrier` use the group that they are called for. The functions of the same
    names in api/messaging.py say which errors they raise.
    """

    def __init__(self, state: State) -> None:
        self._topology = state.topology
        self._messages = state.groups.messages
        self._groups = state.groups

    def send(self, obj: Any, dest_rank: int, rank_type: RankType) -> None:
        """Sends an object to a rank; returns when it has been received."""
        self._send("send", [self._rank("send", dest_rank, rank_type)], obj)

    def broadcast(self, obj: Any, group: CommGroup) -> None:
        """Sends an object to all others of a group; each of those calls `recv_from`."""
        members = self._topology.members(_kind("broadcast", group))
        others = [rank for rank in members if rank != self._me]
        self._send("broadcast", others, obj)

    def recv_from(self, src_rank: int, rank_type: RankType) -> Any:
        """Returns the next object that a rank sends or broadcasts to this one."""
        source = self._rank("recv_from", src_rank, rank_type)
        if source == self._me:
            raise SMPUsageError(f"rank {source} cannot receive from itself")
        data = torch.empty(self._hear(source), dtype=torch.uint8, device=_HOST)
        ready = self._say(source, _READY)
        self._messages.recv([data], source, _DATA).wait()
        ready.wait()
        return _unpack(data)

    def allgather(self, obj: Any, group: CommGroup) -> list[Any]:
        """Returns the objects of all ranks of a group, in the order of their ranks."""
        kind = _kind("allgather", group)
        process_group = self._groups.of(kind)
        mine = _pack(obj)
        count = len(self._topology.members(kind))
        sizes = [torch.zeros(1, dtype=torch.int64, device=_HOST) for _ in range(count)]
        size = torch.tensor([mine.numel()], device=_HOST)
        dist.all_gather(sizes, size, group=process_group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=_HOST)
        padded[: mine.numel()] = mine
        parts = [torch.zeros_like(padded) for _ in range(count)]
        dist.all_gather(parts, padded, group=process_group)
        return [_unpack(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def barrier(self, group: CommGroup) -> None:
        """Waits until all ranks of a group have called it."""
        kind = _kind("barrier", group)
        if len(self._topology.members(kind)) > 1:
            dist.barrier(group=self._groups.of(kind))

    @property
    def _me(self) -> int:
        return self._topology.rank

    def _rank(self, call: str, rank: Any, rank_type: Any) -> int:
        """Returns the rank in the job of a rank of a kind of groups."""
        kind = _kind(call, rank_type)
        if not isinstance(rank, int):
            raise SMPUsageError(f"smp.{call} takes the number of a rank, not {rank!r}")
        return self._topology.world_rank(rank, kind)

    def _send(self, call: str, ranks: list[int], obj: Any) -> None:
        if self._me in ranks:
            raise SMPUsageError(f"rank {self._me} cannot send to itself")
        data = _pack(obj)
        works = [self._say(rank, data.numel()) for rank in ranks]
        for rank in ranks:
            # An announcement came in place of the answer: both ranks send, and would wait for ever.
            if self._hear(rank) != _READY:
                raise SMPUsageError(
                    f"smp.{call}: rank {self._me} sends to rank {rank}, which sends to rank "
                    f"{self._me} and does not receive. Only the sender calls broadcast or send; "
                    f"each other rank calls recv_from({self._me}, smp.WORLD_RANK)"
                )
            works.append(self._messages.send([data], rank, _DATA))
        for work in works:
            work.wait()

    def _say(self, rank: int, word: int) -> dist.Work:
        return self._messages.send([torch.tensor([word], device=_HOST)], rank, _WORD)

    def _hear(self, rank: int) -> int:
        word = torch.zeros(1, dtype=torch.int64, device=_HOST)
        self._messages.recv([word], rank, _WORD).wait()
        return int(word)


def _kind(call: str, given: Any) -> str:
    """Returns the kind of groups that an argument of a script means."""
    if not isinstance(given, CommGroup | RankType):
        raise SMPUsageError(
            f"smp.{call} takes a kind of groups such as smp.DP_GROUP, or of ranks such as "
            f"smp.DP_RANK, not {given!r}"
        )
    kind: str = given.value
    return kind


class _OnHost(pickle.Pickler):
    """Pickles tensors of a device as host tensors: the receiver may not have that device."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented


def _pack(obj: Any) -> torch.Tensor:
    stream = io.BytesIO()
    _OnHost(stream, pickle.HIGHEST_PROTOCOL).dump(obj)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def _unpack(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy())  # type: ignore[arg-type]
