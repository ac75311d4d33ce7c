"""Replicas with different numbers of batches: one that has no more takes part with zeros."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.data_parallel.values import ReplicaValues

__all__ = ["Join"]


class Replicas(Protocol):
    """What `Join` needs of `DataParallel`.

    Attributes:
        group, size: the replicas of this rank's partition.
        parameters: those of this rank that get gradients; none before the model is divided.
        values: what all replicas have in common.
    """

    group: dist.ProcessGroup
    size: int
    parameters: list[nn.Parameter]
    values: ReplicaValues

    def shadow_step(self, source: int) -> None:
        """Takes part in a step of the others with zeros, and with the buffers of `source`."""


class Join:
    """Knows which replicas are active, that is, still have batches.

    Inside the context every step begins with a reduction that finds the first active replica. A
    replica that leaves the context is inactive: it goes on with these reductions, and takes part in
    those of the gradients with zeros, until no replica is active. Gradients are divided by the
    number of all replicas, as in DistributedDataParallel. In the end all replicas copy the
    parameters and buffers of one that has run the most steps.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._inside = False
        self._steps = 0

    def begin_step(self) -> int:
        """Says that this replica is active; called in every step with gradients.

        Returns:
            The first active replica, whose buffers all others copy in this step.
        """
        if not self._inside:
            return 0
        self._steps += 1
        return self._first(active=True)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Returns the context that the class describes.

        Raises:
            SMPUsageError: this replica has run no step, so its model is not divided yet.
        """
        self._inside, self._steps = True, 0
        try:
            yield
        finally:
            self._inside = False
        if self._replicas.size == 1:
            return
        if not self._replicas.parameters and not self._steps:
            raise SMPUsageError("join() needs at least one batch on every replica")
        while (first := self._first(active=False)) < self._replicas.size:
            self._replicas.shadow_step(first)
        self._replicas.values.copy(self._most_advanced())

    def _first(self, active: bool) -> int:
        """Returns the first active replica; if none is active, the number of replicas."""
        group, size = self._replicas.group, self._replicas.size
        first = torch.tensor([dist.get_rank(group) if active else size])
        if size > 1:
            dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
        return int(first)

    def _most_advanced(self) -> int:
        group, size = self._replicas.group, self._replicas.size
        mine = torch.tensor([self._steps * size + dist.get_rank(group)])
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=group)
        return int(mine) % size
