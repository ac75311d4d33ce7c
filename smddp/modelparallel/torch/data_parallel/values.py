"""Gives all replicas the parameters and buffers of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from smddp._torch_internals import broadcast_coalesced
from smddp.modelparallel.torch.common.buffers import Buffers, without_repeats
from smddp.modelparallel.torch.data_parallel.holders import Holders, Ranks

__all__ = ["ReplicaValues"]

_MESSAGE = 250 * 2**20  # bytes of a message


class ReplicaValues:
    """What has the same values on all replicas."""

    def __init__(self, holders: Holders, broadcast_buffers: bool) -> None:
        """Begins without values, as before the model is divided.

        Args:
            holders: knows the replicas of each parameter.
            broadcast_buffers: make buffers equal in every step with gradients.
        """
        self._holders, self._broadcast_buffers = holders, broadcast_buffers
        self._parameters: list[nn.Parameter] = []
        self._buffers: Buffers | None = None

    def adopt(self, parameters: Sequence[nn.Parameter], buffers: Buffers) -> None:
        """Keeps the parameters and buffers of this rank, but not shards; makes them equal."""
        self._parameters = [p for p in parameters if not self._holders.is_shard(p)]
        self._buffers = buffers
        if self._holders.everybody.size > 1:
            self.copy(0)

    def copy(self, source: int) -> None:
        """Gives all replicas the parameters and buffers of one; all have to call it.

        Args:
            source: that replica.
        """
        divided = [p for p in self._parameters if self._holders.is_divided(p)]
        whole = [p for p in self._parameters if not self._holders.is_divided(p)]
        _broadcast(self._holders.everybody, [*whole, *self._tensors()], source)
        if divided and self._holders.divided is not None:
            # `join` is refused with tensor parallelism, so the first replica is the source.
            _broadcast(self._holders.divided, divided, 0)

    def copy_buffers(self, source: int) -> None:
        """Gives all replicas the buffers of one at the begin of a step, if so configured."""
        if self._broadcast_buffers:
            _broadcast(self._holders.everybody, self._tensors(), source)

    def _tensors(self) -> list[torch.Tensor]:
        return self._buffers.tensors() if self._buffers is not None else []


def _broadcast(ranks: Ranks, tensors: Sequence[torch.Tensor], source: int) -> None:
    # There are many small tensors, which travel in few large messages.
    if tensors and ranks.size > 1:
        detached = [without_repeats(tensor.detach()) for tensor in tensors]
        broadcast_coalesced(ranks.group, detached, _MESSAGE, source)
