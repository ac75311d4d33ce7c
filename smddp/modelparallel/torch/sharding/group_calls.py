"""The calls of the process group of a sharding group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.core.errors import SMPPeerError, SMPUsageError
from smddp.modelparallel.torch.sharding.shard import ShardedParameter

__all__ = ["END", "FAILED", "GroupCalls"]

# A rank says this in place of the number of a parameter, in a slice without a plan.
END, FAILED = -1, -2


class GroupCalls:
    """What the ranks of a sharding group send each other, and the memory of what they gather.

    Attributes:
        entries: the sharded parameters.
        live: elements that are gathered, or are being gathered.
        peak: the largest value of `live` in this step.
        in_step: is this a step? Outside, a call that has failed says nothing of the next one.
        closed: are there no more calls in this step?
    """

    def __init__(self, group: dist.ProcessGroup, unit: str) -> None:
        """Begins without parameters.

        Args:
            group: the ranks that share the parameters; in a step, nothing else is sent in it.
            unit: a word for what gathers parameters, "task" or "step".
        """
        self._group, self._unit = group, unit
        self.entries: Sequence[ShardedParameter] = ()
        self.live = self.peak = 0
        # Gathers for nothing: they have to end before the step does.
        self._unused: list[tuple[Any, torch.Tensor]] = []
        self._scrap: dict[Any, torch.Tensor] = {}
        self.in_step = self.closed = False

    def begin_step(self) -> None:
        """Begins a step."""
        self.in_step, self.closed = True, False
        self.peak = self.live

    def leave_step(self) -> None:
        """Notes that what follows is outside any step."""
        self.in_step = self.closed = False

    def tensors(self) -> list[torch.Tensor]:
        """Returns the memory of gathered parameters, and of gathers for nothing."""
        held = [entry.flat for entry in self.entries if entry.flat is not None]
        return [*held, *self._scrap.values(), *(flat for _, flat in self._unused)]

    def ranks(self) -> list[int]:
        """Returns the ranks of the job that share the parameters."""
        return dist.get_process_group_ranks(self._group)

    # --- gathers ----------------------------------------------------------------------------------

    def memory(self, entry: ShardedParameter) -> torch.Tensor:
        """Returns memory for a gathered parameter, which counts as live."""
        flat = torch.empty(entry.padded, dtype=entry.shard.dtype, device=entry.shard.device)
        self.live += entry.padded
        self.peak = max(self.peak, self.live)
        return flat

    def gather(self, entry: ShardedParameter, flat: torch.Tensor) -> Any:
        """Begins to gather a parameter into memory; returns what to wait for."""
        return dist.all_gather_into_tensor(
            flat, entry.shard.detach(), group=self._group, async_op=True
        )

    def gather_for_others(self, entry: ShardedParameter) -> None:
        """Takes part in a gather that this rank does not need."""
        # Nobody reads what arrives, so all may have the same memory.
        kind = entry.shard.dtype, entry.shard.device
        memory = self._scrap.get(kind)
        if memory is None or memory.numel() < entry.padded:
            memory = torch.empty(entry.padded, dtype=kind[0], device=kind[1])
            self._scrap[kind] = memory
        flat = memory[: entry.padded]
        self._unused.append((self.gather(entry, flat), flat))

    def end_others(self) -> None:
        """Waits for the gathers that this rank does not need."""
        for work, _ in self._unused:
            work.wait()
        self._unused, self._scrap = [], {}

    # --- agreement --------------------------------------------------------------------------------

    def _said(self, number: int) -> list[int]:
        """Tells the other ranks a number; returns those of all of them."""
        device = self.entries[0].shard.device
        mine = torch.tensor([number], dtype=torch.int64, device=device)
        everybody = torch.empty(self._group.size(), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(everybody, mine, group=self._group)
        said: list[int] = everybody.tolist()
        return said

    def compare(self, number: int) -> None:
        """Tells the other ranks what comes next here.

        Raises:
            SMPPeerError: the step has failed on another rank.
            SMPUsageError: the ranks differ.
        """
        said = self._said(number)
        if all(other == number for other in said):
            return
        self.closed = self.in_step  # outside a step, the next call may be right
        ranks = self.ranks()
        if FAILED in said:
            if number == FAILED:
                return
            raise SMPPeerError(f"the step failed on rank {ranks[said.index(FAILED)]} of the job")
        other = next(place for place, value in enumerate(said) if value != number)
        raise SMPUsageError(
            "the ranks of a sharding group have to use the same parameters in the same order: rank "
            f"{ranks[self._group.rank()]} of the job {self._text(number)}, rank {ranks[other]} "
            f"{self._text(said[other])}. All of them have to make the same calls, of "
            "smp.set_activation_checkpointing, too, and control flow that depends on data must be "
            "the same; or keep these parameters whole with a larger sdp_param_persistence_threshold"
        )

    def _text(self, number: int) -> str:
        if number == END:
            return f"has ended the {self._unit}"
        return f"needs {self.entries[number].name!r}"
