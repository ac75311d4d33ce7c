"""The gradients of sharded parameters: whole on each rank, then summed over the group in shards.

The sum over the group is made for each microbatch when its backward pass has ended, bucket by
bucket in a fixed order; so the ranks need not agree on which parameters have gradients. Each rank
keeps its part of every sum, and adds those of the microbatches in their order.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smddp.modelparallel.torch.data_parallel.gradient_sum import GradientSum
from smddp.modelparallel.torch.sharding.rules import gradient_buckets
from smddp.modelparallel.torch.sharding.shard import ShardedParameter
from smddp.modelparallel.torch.tensor.division import division_of

__all__ = ["ShardedSum"]


class _Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        entries: the parameters; their gradients have one dtype and device.
    """

    def __init__(self, entries: Sequence[ShardedParameter]) -> None:
        self.entries = list(entries)
        self.dtype = entries[0].shard.grad_dtype or entries[0].shard.dtype
        self.device = entries[0].shard.device
        self.part = sum(entry.shard.numel() for entry in entries)  # elements of a rank
        self.degree = entries[0].degree

    def zeros(self) -> torch.Tensor:
        """Returns memory for gradients as one tensor: the parts of rank 0, those of rank 1, etc."""
        return torch.zeros(self.degree * self.part, dtype=self.dtype, device=self.device)

    def fill(self, sent: torch.Tensor, gradients: dict[int, torch.Tensor]) -> None:
        """Copies gradients into what `zeros` has returned.

        Args:
            sent: to change.
            gradients: of this bucket's parameters, by number; a missing one counts as zeros.
        """
        parts = sent.view(self.degree, self.part)
        begin = 0
        for entry in self.entries:
            size = entry.shard.numel()
            if entry.number in gradients:
                flat = entry.flattened(_dense(gradients[entry.number]))
                parts[:, begin : begin + size].copy_(flat.view(self.degree, size))
            begin += size

    def pieces(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Returns the parts of the parameters in a tensor of this rank's part of the bucket."""
        sizes = [entry.shard.numel() for entry in self.entries]
        return list(part.split(sizes))  # type: ignore[no-untyped-call]


class ShardedSum(GradientSum):
    """The sums of one step on one rank, where some parameters are divided over ranks.

    The contributions of a divided parameter are whole gradients; its sum is that of its shard, the
    mean over the ranks of the group. All other parameters are as in `GradientSum`.
    """

    def __init__(
        self, final: Callable[[nn.Parameter], None] | None, group: dist.ProcessGroup, cap: int
    ) -> None:
        """Begins without gradients, and without divided parameters.

        Args:
            final: as for GradientSum; it is not called with shards.
            group: of the ranks that share the parameters; in a step, nothing else is sent in it.
            cap: the elements of a bucket. A larger parameter is a bucket of its own.
        """
        super().__init__(final)
        self._group, self._cap = group, cap
        self._whole = GradientSum(each=self._complete)
        self._entries: dict[int, ShardedParameter] = {}  # by id of the parameter
        self._by_shard: dict[int, ShardedParameter] = {}  # by id of the shard
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, int] = {}  # by number of the parameter
        self._count = 0
        self._forget()

    def adopt(self, entries: Sequence[ShardedParameter]) -> None:
        """Sums the gradients of these parameters over the group from now on."""
        self._entries = {id(entry.parameter): entry for entry in entries}
        self._by_shard = {id(entry.shard): entry for entry in entries}
        trained = [entry for entry in entries if entry.shard.requires_grad]
        self._buckets = [
            _Bucket(some)
            for some in gradient_buckets(trained, _kind, lambda entry: entry.padded, self._cap)
        ]
        self._bucket_of = {
            entry.number: place
            for place, bucket in enumerate(self._buckets)
            for entry in bucket.entries
        }

    def _forget(self) -> None:
        # The next to be reduced: a microbatch, and the place of a bucket.
        self._next = (0, 0)
        # Whole gradients that wait for their bucket, by microbatch and bucket, then by parameter.
        self._waiting: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        self._over: set[int] = set()  # microbatches that give no more gradients
        # (work, bucket, what is sent, what arrives)
        self._works: collections.deque[tuple[Any, _Bucket, torch.Tensor, torch.Tensor]]
        self._works = collections.deque()
        self._next_sent: list[torch.Tensor] = []  # what the next reduction sends and gets
        self._totals: dict[int, torch.Tensor] = {}  # by number of the parameter

    # --- as in GradientSum ------------------------------------------------------------------------

    def begin(self, microbatches: int, guess: int = 0) -> None:
        """Begins a step; the guess is of divided parameters, whose gradients are larger here."""
        super().begin(microbatches)
        self._whole.begin(microbatches, guess)
        self._forget()
        self._count = microbatches if torch.is_grad_enabled() else 0

    def add(
        self,
        parameter: nn.Parameter,
        microbatch: int,
        gradient: torch.Tensor,
        path: tuple[int, ...] = (),
    ) -> None:
        """Takes one contribution; see `GradientSum.add`."""
        if id(parameter) in self._entries:
            self._whole.add(parameter, microbatch, gradient, path)
            self._reduce()
        else:
            super().add(parameter, microbatch, gradient, path)

    def end_microbatch(self, microbatch: int) -> None:
        """Notes that a microbatch contributes no more."""
        super().end_microbatch(microbatch)
        self._whole.end_microbatch(microbatch)
        self._over.add(microbatch)
        self._reduce()

    def end(self) -> None:
        """Ends the step: all contributions have been made."""
        super().end()
        self._whole.end()

    def release(self) -> None:
        """Frees what is left of a step."""
        super().release()
        self._whole.release()
        self._forget()

    def take(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the sum of a parameter or a shard, and forgets it."""
        entry = self._by_shard.get(id(parameter))
        return super().take(parameter) if entry is None else self._totals.pop(entry.number, None)

    def used(self, parameter: nn.Parameter) -> bool:
        """Says whether a parameter, or the one of a shard, has a sum here, or had one."""
        entry = self._by_shard.get(id(parameter))
        if entry is None:
            return super().used(parameter)
        return self._whole.used(entry.parameter)

    def late(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the sum of the late contributions; for a shard, all ranks have to call it."""
        entry = self._by_shard.get(id(parameter))
        if entry is None:
            return super().late(parameter)
        gradient = self._whole.late(entry.parameter)
        bucket = _Bucket([entry])
        sent = bucket.zeros()
        bucket.fill(sent, {} if gradient is None else {entry.number: gradient})
        part = torch.empty(bucket.part, dtype=bucket.dtype, device=bucket.device)
        dist.reduce_scatter_tensor(part, sent.div_(bucket.degree), group=self._group)
        return part

    @property
    def any_late(self) -> bool:
        """Says whether any parameter has late contributions."""
        return super().any_late or self._whole.any_late

    @property
    def knows_counts(self) -> bool:
        """Whether an earlier step tells how often parameters contribute."""
        return super().knows_counts or self._whole.knows_counts

    def tensors(self) -> list[torch.Tensor]:
        """Returns the gradients that it keeps now, whole ones and shards."""
        waiting = [gradient for some in self._waiting.values() for gradient in some.values()]
        works = [tensor for _, _, sent, part in self._works for tensor in (sent, part)]
        return [
            *(*super().tensors(), *self._whole.tensors(), *waiting, *works),
            *self._totals.values(),
            *self._next_sent,
        ]

    # --- the sums over the group ------------------------------------------------------------------

    def _complete(self, parameter: nn.Parameter, microbatch: int, gradient: torch.Tensor) -> None:
        """Takes the whole gradient of a microbatch.

        It reduces nothing yet. `_whole` may be about to give those of later microbatches, too, of
        this parameter and of others: they have waited for this one, perhaps longer than their
        microbatch has lasted.
        """
        number = self._entries[id(parameter)].number
        place = microbatch, self._bucket_of[number]
        assert place >= self._next, "a gradient comes after its bucket was reduced"
        self._waiting.setdefault(place, {})[number] = gradient
        self.add_completed()

    def _reduce(self) -> None:
        """Begins to reduce the buckets that are complete, in their order."""
        while self._next[0] < self._count and self._buckets:
            microbatch, place = self._next
            bucket = self._buckets[place]
            waiting = self._waiting.get(self._next, {})
            if microbatch not in self._over and len(waiting) < len(bucket.entries):
                return
            self._launch(bucket, waiting)
            self._waiting.pop(self._next, None)
            last = place + 1 == len(self._buckets)
            self._next = (microbatch + 1, 0) if last else (microbatch, place + 1)

    def _launch(self, bucket: _Bucket, gradients: dict[int, torch.Tensor]) -> None:
        self.add_completed()  # frees memory
        if len(bucket.entries) == 1 and gradients:
            (gradient,) = gradients.values()
            sent = bucket.entries[0].flattened(_dense(gradient)).contiguous()
        else:
            sent = bucket.zeros()
            self._next_sent.append(sent)
            bucket.fill(sent, gradients)
        part = torch.empty(bucket.part, dtype=bucket.dtype, device=bucket.device)
        self._next_sent.append(part)
        # Divided before: the sum may be too large for float16, the mean is not.
        sent.div_(bucket.degree)
        work = dist.reduce_scatter_tensor(part, sent, group=self._group, async_op=True)
        self._works.append((work, bucket, sent, part))
        self._next_sent.clear()

    def add_completed(self) -> None:
        """Adds the results of the reductions that have ended, and frees what was sent.

        It waits for none before the end of the step: until then the other ranks may wait for a
        gather that this one does not make, because its control flow is another.
        """
        while self._works and self._works[0][0].is_completed():
            self._add_first()

    def _add_first(self) -> None:
        """Adds the result of the oldest reduction to the sums, and frees what was sent."""
        work, bucket, _, part = self._works[0]
        work.wait()
        self._works.popleft()
        for entry, piece in zip(bucket.entries, bucket.pieces(part), strict=True):
            total = self._totals.get(entry.number)
            self._totals[entry.number] = piece if total is None else total.add_(piece)

    def flush(self) -> None:
        """Begins to reduce all that is left of the step; what this rank lacks counts as zeros.

        Every rank reduces every bucket of every microbatch, also if its step has failed. It does
        not wait for the others, which may wait for gathers first; `finish` does.
        """
        self._over.update(range(self._count))
        self._reduce()

    def finish(self) -> None:
        """Waits for all sums over the group."""
        while self._works:
            self._add_first()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _kind(entry: ShardedParameter) -> Any:
    """Returns what the parameters of a bucket have in common.

    Other ranks have the same shard of a parameter that is divided over tensor-parallel ranks. If
    its sum were in one tensor with others, which are copied to reduce them over more ranks, it
    would keep their memory.
    """
    split = division_of(entry.parameter) is not None
    return entry.shard.grad_dtype or entry.shard.dtype, entry.shard.device, split
