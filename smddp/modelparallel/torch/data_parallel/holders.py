"""Which ranks have a parameter of this rank, and which average its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Holders", "Ranks", "Shards"]


class Ranks(NamedTuple):
    """Ranks over which a gradient is averaged.

    Attributes:
        group: of these ranks.
        size: of the group.
    """

    group: dist.ProcessGroup
    size: int


class Shards(Protocol):
    """Parameters that are divided over replicas; see the folder `sharding`."""

    def divide(
        self, parameters: Sequence[nn.Parameter], device: torch.device
    ) -> list[nn.Parameter]:
        """Divides parameters, with the values of the first replica.

        Args:
            parameters: of this rank.
            device: of what this rank keeps.

        Returns:
            For each parameter what gets a gradient: its shard, or itself.
        """

    def reducers(self, parameter: nn.Parameter) -> Ranks | None:
        """Returns the ranks with the same shard; None if the parameter is not a shard."""


class Holders:
    """Knows the replicas of each parameter of this rank.

    Attributes:
        everybody: the replicas of this rank's partition.
        divided: the ranks that have the same part of a parameter that is divided over
            tensor-parallel ranks; None without tensor parallelism. The other parameters are equal
            on all ranks of `everybody`.
        is_divided: says whether a parameter is divided so.
        shards: divides parameters over replicas; None if all are whole.
    """

    def __init__(self, everybody: Ranks) -> None:
        self.everybody = everybody
        self.divided: Ranks | None = None
        self.is_divided: Callable[[nn.Parameter], bool] = lambda _: False
        self.shards: Shards | None = None

    def of(self, parameter: nn.Parameter) -> Ranks:
        """Returns the ranks that have the values of a parameter, or one shard of them each."""
        if self.divided is not None and self.is_divided(parameter):
            return self.divided
        return self.everybody

    def is_shard(self, parameter: nn.Parameter) -> bool:
        """Says whether a parameter is the shard of one."""
        return self.shards is not None and self.shards.reducers(parameter) is not None

    def reducers(self, parameter: nn.Parameter) -> Ranks:
        """Returns the ranks over which the gradient of a parameter or a shard is reduced."""
        of_shard = None if self.shards is None else self.shards.reducers(parameter)
        return self.of(parameter) if of_shard is None else of_shard
