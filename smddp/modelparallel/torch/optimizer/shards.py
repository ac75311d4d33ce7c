"""The state of an optimizer, divided over the replicas of a partition.

With `shard_optimizer_state` in the configuration, each parameter has one replica that *steps* it:
only there it has state, and a main parameter with fp16. The gradients are the same on all
replicas. After the optimizer's step, each replica sends the parameters that it has stepped to the
others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smddp._torch_internals import broadcast_coalesced
from smddp.modelparallel.core.errors import SMPPeerError, SMPUsageError
from smddp.modelparallel.torch.delayed.life import memory_of
from smddp.modelparallel.torch.job.state import state

__all__ = ["EXCHANGE", "SHARD", "Shards", "assign_to_lightest", "check_complete"]

# Key of a state dict that holds a part of the state: the number of the part, and how many there
# are.
SHARD = "_smp_optimizer_shard"

EXCHANGE = 2**25  # bytes that are sent at once


def assign_to_lightest(
    keys: Sequence[Any], sizes: Sequence[int], loads: list[int], owners: dict[Any, int]
) -> None:
    """Gives each parameter to the replica with the fewest elements.

    Args:
        keys: of the parameters; those of one memory have one key, and one replica steps them.
        sizes: their elements; the largest come first.
        loads: the elements of each replica so far; changed.
        owners: the replica of each key; changed.
    """
    for key, size in zip(keys, sizes, strict=True):
        lightest = min(range(len(loads)), key=loads.__getitem__)
        loads[owners.setdefault(key, lightest)] += size


class Shards:
    """Which replica steps which parameter of one optimizer.

    Attributes:
        rank, size: of the replicas of this rank's partition.
        group: their process group.
    """

    def __init__(self) -> None:
        topology = state.topology
        self.rank, self.size = topology.rank_in("rdp"), topology.size_of("rdp")
        self.group = state.groups.of_steps("rdp")
        self._device = torch.device("cpu")
        self._owners: dict[int, int] = {}  # by id of the parameter
        self._by_memory: dict[Any, int] = {}
        self._parameters: list[list[nn.Parameter]] = [[] for _ in range(self.size)]
        self._loads = [0] * self.size
        # The lists of the groups, while these hold only what this rank steps.
        self._whole: list[list[Any]] | None = None

    def assign(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        """Gives those of the parameters that are new to the replicas, balanced by elements.

        All replicas have to call it with the same parameters in the same order.

        Args:
            parameters: of the model; all of them live on this rank.
            device: where they are.
        """
        self._device = device
        new = {id(p): p for p in parameters if id(p) not in self._owners}
        largest_first = sorted(new.values(), key=lambda parameter: -parameter.numel())
        memories = list(map(memory_of, largest_first))
        sizes = [parameter.numel() for parameter in largest_first]
        assign_to_lightest(memories, sizes, self._loads, self._by_memory)
        for parameter, memory in zip(largest_first, memories, strict=True):
            owner = self._owners[id(parameter)] = self._by_memory[memory]
            self._parameters[owner].append(parameter)

    def steps(self, parameter: Any) -> bool:
        """Says whether this rank steps a parameter; True for one that was not assigned."""
        return self._owners.get(id(parameter), self.rank) == self.rank

    @contextlib.contextmanager
    def only_own(self, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
        """In this context the groups of the optimizer hold only what this rank steps.

        Main parameters are not assigned: only the rank that steps a parameter has one.
        """
        before = [group["params"] for group in groups]
        self._whole = before
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = [p for p in parameters if self.steps(p)]
        try:
            yield
        finally:
            self._whole = None
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters

    def all_parameters(self, groups: Sequence[dict[str, Any]]) -> list[Any]:
        """Returns the parameters of all groups, in `only_own` those that others step, too."""
        whole = self._whole
        lists = [group["params"] for group in groups] if whole is None else whole
        return [parameter for parameters in lists for parameter in parameters]

    @contextlib.contextmanager
    def whole(self, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
        """In this context, inside `only_own`, the groups are complete; for code of the script."""
        whole, self._whole = self._whole, None
        own = [group["params"] for group in groups]
        for group, parameters in zip(groups, whole or own, strict=True):
            group["params"] = parameters
        try:
            yield
        finally:
            self._whole = whole
            for group, parameters in zip(groups, own, strict=True):
                group["params"] = parameters

    def exchange(self, failure: BaseException | None) -> None:
        """Gives all replicas the parameters that each has stepped; all of them have to call it.

        Args:
            failure: the error that the step has raised here; None if it has not.

        Raises:
            SMPPeerError: the step has failed on another replica, or one has not called it within
                the timeout of the process group.
            BaseException: `failure`, if there is one.
        """
        failed = torch.tensor([failure is not None], dtype=torch.int32, device=self._device)
        try:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
            if not failed:
                for owner, parameters in enumerate(self._parameters):
                    self._broadcast([p.detach() for p in parameters if _may_step(p)], owner)
        except RuntimeError as error:
            if failure is not None:
                raise failure from None
            raise SMPPeerError(
                "optimizer.step: with shard_optimizer_state, all replicas have to call it, at the "
                f"same point of the script, and one did not answer ({error})"
            ) from error
        if failure is not None:
            raise failure
        if failed:
            raise SMPPeerError(
                "optimizer.step failed on another replica of this partition; its error is in the "
                "output of that rank. The parameters that it steps are as before"
            )

    def _broadcast(self, tensors: list[torch.Tensor], owner: int) -> None:
        if tensors:
            broadcast_coalesced(self.group, tensors, EXCHANGE, owner)


def _may_step(parameter: nn.Parameter) -> bool:
    """Says whether an optimizer may change a parameter: not one that is frozen.

    It steps one that a script has frozen since the last backward pass, whose gradient is there.
    """
    return parameter.requires_grad or parameter.grad is not None


def check_complete(parts: Sequence[Mapping[str, Any]]) -> None:
    """Checks that there are all parts of a state that was divided over replicas.

    Args:
        parts: state dicts; those that are not parts count for nothing.

    Raises:
        SMPUsageError: one is missing.
    """
    found = {tuple(part[SHARD]) for part in parts if SHARD in part}
    for size in {size for _, size in found}:
        missing = [number for number in range(size) if (number, size) not in found]
        if missing:
            raise SMPUsageError(
                f"the state of the optimizer was divided over {size} replicas, and its parts "
                f"{', '.join(map(str, missing))} were not given: load it with as many replicas, or "
                "from a checkpoint of smp.save_checkpoint, with smp.resume_from_checkpoint"
            )
