"""Buckets: gradients that are reduced over replicas together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from smddp.modelparallel.torch.data_parallel.holders import Holders, Ranks

__all__ = ["Bucket", "Buckets", "divided_into_buckets"]

_Item = TypeVar("_Item")
# Returns this replica's gradient of a parameter.
_Source = Callable[[nn.Parameter], torch.Tensor | None]


def divided_into_buckets(
    items: Iterable[_Item],
    kind_of: Callable[[_Item], Hashable],
    size_of: Callable[[_Item], float],
    cap: float,
) -> list[list[_Item]]:
    """Returns what belongs to each bucket; a bucket has items of one kind, in their order.

    Args:
        items: in the order in which they become ready.
        kind_of: returns what the items of a bucket have in common.
        size_of: returns the bytes of an item.
        cap: bytes of a bucket; one item may be larger.
    """
    buckets: list[list[_Item]] = []
    room: dict[Hashable, float] = {}
    open_bucket: dict[Hashable, list[_Item]] = {}
    for item in items:
        kind, size = kind_of(item), size_of(item)
        if kind not in open_bucket or room[kind] < size:
            open_bucket[kind], room[kind] = [], cap
            buckets.append(open_bucket[kind])
        open_bucket[kind].append(item)
        room[kind] -= size
    return buckets


class Bucket:
    """Gradients that are reduced together; communication hooks get one at a time.

    It has the methods of `torch.distributed.GradBucket`.

    Attributes:
        ranks: those that reduce it.
        missing: how many of its parameters have no final sum yet.
        work: what to wait for, a `Work` or the future of a hook; None when that is done.
    """

    def __init__(
        self, index: int, parameters: Sequence[nn.Parameter], last: bool, ranks: Ranks
    ) -> None:
        self._index, self._last = index, last
        self.ranks = ranks
        self._parameters = list(parameters)
        first = self._parameters[0]
        size = sum(parameter.numel() for parameter in self._parameters)
        dtype = first.grad_dtype or first.dtype
        self._buffer = torch.zeros(size, dtype=dtype, device=first.device)
        self.missing = 0
        self.work: Any = None

    def index(self) -> int:
        """Returns its number; buckets are reduced in this order."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Returns the gradients of all parameters, as one tensor of one dimension.

        Its dtype is the `grad_dtype` of the parameters, or theirs if that is None. All parameters
        of a bucket have the same one, and lie on the same device.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the gradients by a tensor of the same shape, dtype and device."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients in the shapes of their parameters."""
        pieces = self._buffer.split([parameter.numel() for parameter in self._parameters])  # type: ignore[no-untyped-call]
        return [
            piece.view(parameter.shape)
            for piece, parameter in zip(pieces, self._parameters, strict=True)
        ]

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters."""
        return self._parameters

    def fits(self) -> bool:
        """Says whether the parameters have the dtype and the device that they had before."""
        buffer = self._buffer
        return all(_form(p) == (buffer.dtype, buffer.device) for p in self._parameters)

    def is_last(self) -> bool:
        """Says whether it is the last bucket of the step."""
        return self._last


class Buckets:
    """The buckets of this rank, and which of them are being reduced.

    Attributes:
        hook: reduces a bucket in place of the all-reduce; returns a future of the reduced tensor.
        hook_failure: the first error of the hook in this step, or in this backward pass outside
            steps; None if there is none.
        views: are gradients views of the buckets?
    """

    def __init__(self, holders: Holders, cap: float, views: bool) -> None:
        """Begins without buckets.

        Args:
            holders: knows the replicas of each parameter.
            cap: bytes of a bucket.
            views: see the class.
        """
        self.views = views
        self.hook: Callable[[Any], Any] | None = None
        self.hook_failure: Exception | None = None
        self._holders, self._cap = holders, cap
        self._parameters: list[nn.Parameter] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._next = 0  # the first bucket that is not launched yet

    def make(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes buckets for parameters, but those that only this rank has.

        Backward passes reach the last layers first. Sums of shards are final at the end of the
        step, so their buckets come last.
        """
        self._parameters = list(parameters)
        shared = [p for p in self._parameters[::-1] if self._holders.reducers(p).size > 1]
        groups = divided_into_buckets(
            sorted(shared, key=self._holders.is_shard),
            lambda p: (*_form(p), self._holders.is_shard(p), self._holders.reducers(p)),
            lambda p: p.numel() * _form(p)[0].itemsize,
            self._cap,
        )
        last = len(groups) - 1
        self._buckets = [
            Bucket(i, group, i == last, self._holders.reducers(group[0]))
            for i, group in enumerate(groups)
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters()}

    def renew(self) -> None:
        """Makes buckets again if the script has given parameters another dtype or device."""
        if not all(bucket.fits() for bucket in self._buckets):
            self.make(self._parameters)

    def prepare(self) -> None:
        """Begins to reduce: no bucket is launched yet."""
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters())

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._bucket_of

    def tensors(self) -> list[torch.Tensor]:
        """Returns the memory of the buckets."""
        return [bucket.buffer() for bucket in self._buckets]

    def ready(self, parameter: nn.Parameter, source: _Source) -> None:
        """Notes that a gradient is complete; launches the buckets whose turn has come.

        Args:
            parameter: whose gradient.
            source: returns gradients of this replica.
        """
        self._bucket_of[parameter].missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch(self._buckets[self._next], source)
            self._next += 1

    def launch(self, source: _Source) -> None:
        """Launches all buckets that are not launched yet; all replicas have the same order."""
        for bucket in self._buckets[self._next :]:
            self._launch(bucket, source)

    def _launch(self, bucket: Bucket, source: _Source) -> None:
        for parameter, place in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient = source(parameter)
            if gradient is None:
                place.zero_()
            elif gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if self.hook is not None:
            # The other replicas go on to the next bucket, and then ask how the step went.
            try:
                bucket.work = self.hook(bucket)
            except Exception as error:
                self.hook_failure = self.hook_failure or error
        else:
            # Divided before, as DDP does: the sum may be too large for float16, the mean is not.
            bucket.buffer().div_(bucket.ranks.size)
            bucket.work = dist.all_reduce(bucket.buffer(), group=bucket.ranks.group, async_op=True)

    def collected(self) -> dict[nn.Parameter, torch.Tensor]:
        """Waits for all buckets; returns the reduced gradient of each parameter.

        That is the mean over replicas, or what the hook returned; nothing if it has failed.
        """
        found: dict[nn.Parameter, torch.Tensor] = {}
        for bucket in self._buckets:
            work, bucket.work = bucket.work, None
            if self.hook is not None:
                try:
                    self._take_from_hook(bucket, work)
                except Exception as error:
                    self.hook_failure = self.hook_failure or error
                    continue
            else:
                work.wait()
            pieces = bucket.gradients()
            for parameter, piece in zip(bucket.parameters(), pieces, strict=True):
                found[parameter] = piece if self.views else piece.clone()
        return found

    @staticmethod
    def _take_from_hook(bucket: Bucket, future: Any) -> None:
        """Waits for what the hook returned for a bucket, and copies it there."""
        result = future.wait()
        flat = result[0] if isinstance(result, list | tuple) else result
        if flat is not bucket.buffer():
            bucket.buffer().copy_(flat.view(-1))


def _form(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    """Returns dtype and device of the gradient of a parameter."""
    return parameter.grad_dtype or parameter.dtype, parameter.device
