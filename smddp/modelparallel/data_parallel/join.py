"""Replicas with different numbers of batches: those that have no more shadow the others' steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from smddp.modelparallel.common.errors import SMPUsageError

__all__ = ["Join"]


class Replicas(Protocol):
    """What the count needs of data parallelism."""

    group: dist.ProcessGroup
    size: int
    parameters: list[nn.Parameter]

    def shadow_step(self, source: int) -> None:
        """Takes part in a step of the others, with zeros and the buffers of one of them."""

    def synchronise(self, source: int) -> None:
        """Takes parameters and buffers from a replica."""


class Join:
    """Who is active, on one rank.

    Inside the context every step begins with the question which is the first active replica. Who
    leaves the body goes on answering as inactive and takes part in the reductions with zeros, until
    nobody is active; gradients are divided by the number of replicas all the same, as in
    DistributedDataParallel. Then parameters and buffers are taken from a replica that has made the
    most steps.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._inside = False
        self._steps = 0

    def begin_step(self) -> int:
        """Says that this replica is active; for every step with gradients.

        Returns:
            The first active replica: its buffers are those of all in this step.
        """
        if not self._inside:
            return 0
        self._steps += 1
        return self._first(active=True)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """See the class.

        Raises:
            SMPUsageError: this replica has made no step, and so has no partition.
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
        self._replicas.synchronise(self._most_advanced())

    def _first(self, active: bool) -> int:
        """Returns the first active replica; the number of replicas if there is none."""
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
