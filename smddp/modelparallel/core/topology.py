"""The place of each rank: in its pipeline, its tensor-parallel group and among replicas.

This is arithmetic only; nothing here communicates.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable

from smddp.modelparallel.core.errors import SMPInitializationError

__all__ = ["CommGroup", "RankType", "Topology"]


class CommGroup(enum.Enum):
    """The kinds of groups of ranks; every rank belongs to one group of each kind."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    TP_GROUP = "tp"
    PP_GROUP = "pp"
    RDP_GROUP = "rdp"


class RankType(enum.Enum):
    """The kind of group in which a rank is numbered."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    TP_RANK = "tp"
    PP_RANK = "pp"
    RDP_RANK = "rdp"


# Which coordinates the members of a group share. mp is pp x tp, dp is tp x rdp.
_SHARED = {
    "world": (),
    "mp": ("D",),
    "dp": ("P",),
    "tp": ("P", "D"),
    "pp": ("T", "D"),
    "rdp": ("P", "T"),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """The groups of all ranks, and the place of this rank in them.

    Attributes:
        rank: of this process in the job.
        size: number of processes in the job.
        local_rank: of this process on its host.
        local_size: number of processes on this host.
        pp_size: number of partitions of the model.
        tp_size: number of ranks in a tensor-parallel group.
        letters: a permutation of the letters D (data), P (pipeline) and T (tensor); the rightmost
            letter varies fastest over ranks. With DPT, 2 partitions and 4 ranks, ranks 0 and 1 are
            one pipeline.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    pp_size: int
    tp_size: int
    letters: str

    def __post_init__(self) -> None:
        if self.size % (self.pp_size * self.tp_size):
            raise SMPInitializationError(
                f"{self.size} rank{'s' * (self.size != 1)} cannot be divided into pipelines of "
                f"{self.pp_size} partitions"
                + (f" x {self.tp_size} tensor parallel ranks" if self.tp_size > 1 else "")
                + f": start {self.pp_size * self.tp_size} ranks, or a multiple of that."
            )

    @property
    def rdp_size(self) -> int:
        """The number of ranks of an `rdp` group."""
        return self.size // (self.pp_size * self.tp_size)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns {"D": rdp rank, "P": pp rank, "T": tp rank} of a rank of the job."""
        extents = {"D": self.rdp_size, "P": self.pp_size, "T": self.tp_size}
        place = {}
        for letter in reversed(self.letters):
            rank, place[letter] = divmod(rank, extents[letter])
        return place

    @functools.cache  # noqa: B019  one instance lives as long as the process
    def members(self, kind: str, rank: int | None = None) -> tuple[int, ...]:
        """Returns a rank's group of a kind, as ascending ranks of the job.

        Args:
            kind: a value of CommGroup, such as "pp".
            rank: of the job; this one if None.
        """
        shared = _SHARED[kind]
        mine = self.coordinates(self.rank if rank is None else rank)
        return tuple(
            other
            for other in range(self.size)
            if all(self.coordinates(other)[letter] == mine[letter] for letter in shared)
        )

    def groups(self, kind: str) -> list[tuple[int, ...]]:
        """Returns all groups of a kind, in the same order on every rank."""
        return sorted({self.members(kind, rank) for rank in range(self.size)})

    def in_blocks(self, kind: str, degree: int) -> list[tuple[int, ...]]:
        """Returns the groups of a kind, each divided into blocks of consecutive rdp ranks.

        They are in the same order on every rank. With "rdp" these are sharding groups, and with
        "dp" those together with the tp groups of their ranks.

        Args:
            kind: "rdp" or "dp".
            degree: so many rdp ranks are a block; divides the size of the rdp groups.
        """
        return self._divided(kind, lambda replica: replica // degree)

    def across_blocks(self, kind: str, degree: int) -> list[tuple[int, ...]]:
        """Returns the groups of a kind, each divided by the place in the blocks of `in_blocks`."""
        return self._divided(kind, lambda replica: replica % degree)

    def _divided(self, kind: str, key: Callable[[int], int]) -> list[tuple[int, ...]]:
        found: dict[tuple[int, int], list[int]] = {}
        for number, members in enumerate(self.groups(kind)):
            for rank in members:
                place = number, key(self.coordinates(rank)["D"])
                found.setdefault(place, []).append(rank)
        return [tuple(found[place]) for place in sorted(found)]

    def rank_in(self, kind: str) -> int:
        """Returns the position of this rank in its group of a kind."""
        return self.members(kind).index(self.rank)

    def size_of(self, kind: str) -> int:
        """Returns the size of the groups of a kind."""
        return len(self.members(kind))

    def world_rank(self, rank: int, kind: str) -> int:
        """Returns the rank in the job of a member of one of this rank's groups.

        Raises:
            SMPInitializationError: the group has no such member.
        """
        members = self.members(kind)
        if not 0 <= rank < len(members):
            raise SMPInitializationError(
                f"there is no rank {rank} in the {kind} group of {len(members)}"
            )
        return members[rank]
