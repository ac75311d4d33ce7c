"""Data parallelism around the pipeline: gradients of replicas are averaged, bucket by bucket.

A bucket is reduced as soon as all its sums are final, while the pipeline still works on others.
All replicas reduce the same buckets in the same order in every step with gradients, even if a step
fails on one of them; so a failed step leaves the process group usable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from smddp._torch_internals import broadcast_coalesced, execution_engine, graph_task
from smddp.modelparallel.core.failure import Redo, summary
from smddp.modelparallel.torch.common.buffers import Buffers, without_repeats
from smddp.modelparallel.torch.data_parallel.gradient_sum import GradientSum
from smddp.modelparallel.torch.data_parallel.join import Join
from smddp.modelparallel.torch.data_parallel.replicas import tell_replicas

__all__ = ["Bucket", "DataParallel", "Ranks", "Shards"]

_BROADCAST = 250 * 2**20  # bytes of a message


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
        return all(
            (p.grad_dtype or p.dtype) == buffer.dtype and p.device == buffer.device
            for p in self._parameters
        )

    def is_last(self) -> bool:
        """Says whether it is the last bucket of the step."""
        return self._last


class DataParallel:
    """Turns the sums of a step into gradients that are equal on all replicas.

    Attributes:
        group, size: the replicas of this rank's partition.
        overlap: begin to reduce before the step ends.
        hook: reduces a bucket in place of the all-reduce; returns a future of the reduced tensor.
        hook_failure: the first error of the hook in this step, or in this backward pass outside
            steps; None if there is none.
        lost: the first error of the reductions themselves; None if there was none. Replicas may
            then have ended the step in different ways.
        parameters: what gets a gradient on this rank: parameters, and shards of parameters.
        views: are gradients views of the buckets?
        join: replicas with different numbers of batches.
        divided: the ranks that have the same part of a parameter that is divided over
            tensor-parallel ranks; None without tensor parallelism. The other parameters are equal
            on all ranks of `group`.
        is_divided: says whether a parameter is divided so.
        shards: divides parameters over replicas; None if all are whole. With it, every step needs
            all replicas, so all of them learn at its end whether it has failed on any.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        size: int,
        bucket_cap_mb: float,
        passes: int,
        overlap: bool,
        broadcast_buffers: bool,
        views: bool,
    ) -> None:
        """Begins without parameters.

        Args:
            group: the replicas of this rank's partition.
            size: of the group.
            bucket_cap_mb: size of a bucket in MiB.
            passes: the number of steps whose gradients are added before they are reduced.
            overlap: see the class.
            broadcast_buffers: make buffers equal on all replicas in every step with gradients.
            views: let gradients be views of the buckets; otherwise they are copies.
        """
        self.group, self.size = group, size
        self.overlap = overlap
        self.hook: Callable[[Any], Any] | None = None
        self.shards: Shards | None = None
        self.divided: Ranks | None = None
        self.is_divided: Callable[[nn.Parameter], bool] = lambda _: False
        self.parameters: list[nn.Parameter] = []
        self._cap = bucket_cap_mb * 2**20
        self._passes = passes
        self._broadcast_buffers = broadcast_buffers
        self.views = views
        self._buffers: Buffers | None = None
        self._all_parameters: list[nn.Parameter] = []
        self._local: list[nn.Parameter] = []  # what gets a gradient once it is trained
        self.join = Join(self)
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._old: dict[nn.Parameter, torch.Tensor | None] = {}  # gradients from before the step
        self._divisor = 1
        self._with_gradients = False
        self._steps = 0  # steps with gradients so far
        self._next = 0  # the first bucket that is not launched yet
        self.hook_failure: Exception | None = None
        # Will `_reduce_outside` run when the backward pass ends?
        self._outside = False

    def adopt(
        self, parameters: Sequence[nn.Parameter], buffers: Buffers, device: torch.device
    ) -> None:
        """Keeps the parameters and buffers of this rank; makes them equal on all replicas.

        Args:
            parameters: of this rank.
            buffers: of this rank.
            device: where they are.
        """
        self._buffers = buffers
        local = list(parameters)
        if self.shards is not None:
            local = self.shards.divide(parameters, device)
        self._all_parameters = [p for p in local if not self._is_shard(p)]
        self._local = local
        self.note_trained()
        if self.size > 1:
            self.synchronise(0)
        # With several partitions, `begin_step` of the first step did not know the parameters yet.
        self._put_aside()

    def note_trained(self) -> None:
        """Gives gradients from now on to parameters that require them; not during a step.

        A parameter that was trained before and is frozen now keeps its place, and gets none.
        """
        trained = set(self.parameters)
        self.parameters = [p for p in self._local if p.requires_grad or p in trained]
        if self.size > 1:
            self._make_buckets()

    def tensors(self) -> list[torch.Tensor]:
        """Returns the gradients of this rank, and the buckets in which they are reduced."""
        gradients = [*self._old.values(), *(parameter.grad for parameter in self.parameters)]
        buckets = [bucket.buffer() for bucket in self._buckets]
        return [*buckets, *(gradient for gradient in gradients if gradient is not None)]

    def _make_buckets(self) -> None:
        # Backward passes reach the last layers first. Sums of shards are final at the end of the
        # step, so their buckets come last.
        groups: list[tuple[list[nn.Parameter], Ranks]] = []
        room: dict[Any, float] = {}
        open_group: dict[Any, list[nn.Parameter]] = {}
        backwards = self.parameters[::-1]
        whole = [parameter for parameter in backwards if not self._is_shard(parameter)]
        for parameter in (*whole, *filter(self._is_shard, backwards)):
            dtype = parameter.grad_dtype or parameter.dtype
            ranks = self._ranks_of(parameter)
            kind = (dtype, parameter.device, self._is_shard(parameter), ranks)
            size = parameter.numel() * dtype.itemsize
            if ranks.size == 1:
                continue
            if kind not in open_group or room[kind] < size:
                open_group[kind] = []
                groups.append((open_group[kind], ranks))
                room[kind] = self._cap
            open_group[kind].append(parameter)
            room[kind] -= size
        last = len(groups) - 1
        self._buckets = [
            Bucket(i, group, i == last, ranks) for i, (group, ranks) in enumerate(groups)
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters()}

    def _renew_buckets(self) -> None:
        """Makes buckets again if the script has given parameters another dtype or device."""
        if not all(bucket.fits() for bucket in self._buckets):
            self._make_buckets()

    def _ranks_of(self, parameter: nn.Parameter) -> Ranks:
        """Returns the ranks over which the gradient of a parameter or a shard is reduced."""
        of_shard = None if self.shards is None else self.shards.reducers(parameter)
        return self.holders(parameter) if of_shard is None else of_shard

    def holders(self, parameter: nn.Parameter) -> Ranks:
        """Returns the ranks that have the values of a parameter, or one shard of them each."""
        if self.divided is not None and self.is_divided(parameter):
            return self.divided
        return Ranks(self.group, self.size)

    def _is_shard(self, parameter: nn.Parameter) -> bool:
        return self.shards is not None and self.shards.reducers(parameter) is not None

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self, sums: GradientSum, divisor: int, again: bool = False) -> None:
        """Puts the present gradients aside; makes buffers equal on all replicas, as configured.

        Args:
            sums: adds up the gradients of the step.
            divisor: by which the sums are divided: the number of microbatches, or 1.
            again: the step is run for the second time, after `end_step` has raised Redo.
        """
        self._with_gradients = torch.is_grad_enabled()
        # The other replicas run the step again only if they had to hear of it.
        together = not again or self._tells()
        source = self.join.begin_step() if self._with_gradients and together else None
        self._begin(sums, divisor, source)

    def _begin(self, sums: GradientSum, divisor: int, source: int | None) -> None:
        """Begins a step; with the buffers of another replica, if a source is given."""
        self._renew_buckets()
        self._sums, self._divisor = sums, divisor
        if source is not None and self._broadcast_buffers and self.size > 1:
            self._broadcast(self._tensors(), source)
        self._put_aside()

    def _put_aside(self) -> None:
        self._old = {}
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            # A view would change with its bucket, also if this step fails or is run again.
            if self.views and gradient is not None:
                gradient = gradient.clone()
            self._old[parameter] = gradient
        self.hook_failure = None
        self._prepare()

    def _prepare(self) -> None:
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters())

    def expect_gradients(self) -> None:
        """Lets a failed step end as one with gradients: on other ranks it may have been one.

        They reduce gradients at its end, and so tell each other that it has failed.
        """
        self._with_gradients = True

    def final(self, parameter: nn.Parameter) -> None:
        """Notes that a parameter's sum is final; begins to reduce the buckets that are complete."""
        if not (self.overlap and self._reduces() and parameter in self._bucket_of):
            return
        self._bucket_of[parameter].missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch(self._buckets[self._next], self._total)
            self._next += 1

    def end_step(self, failure: str = "", redo: bool = False, alone: bool = False) -> None:
        """Sets the gradients.

        Args:
            failure: why the step failed on this replica, for the others; empty if it has not.
            redo: does this replica have to run the step again?
            alone: the step has failed because a rank is lost, and nobody waits for this one.

        Raises:
            Redo: this replica or another has to run the step again; so all of them do.
            SMPPeerError: the step failed on another replica; gradients are as before it.
            Exception: the hook has failed here; gradients are as before the step.
        """
        succeeded = not (failure or redo)
        try:
            if alone or not self._tells():
                totals = {p: self._own(p) if succeeded else self._old[p] for p in self.parameters}
            else:
                totals, redo = self._reduce(failure, redo)
        except BaseException:
            self.put_back()
            raise
        failed = failure or self.hook_failure is not None
        if self._with_gradients and not failed and not redo:
            self._steps += 1
        self._old = {}
        for parameter, total in totals.items():
            parameter.grad = total
        if redo:
            raise Redo
        if self.hook_failure is not None and not failure:
            raise self.hook_failure

    def put_back(self) -> None:
        """Sets the gradients to those from before the step, if it has put them aside."""
        old, self._old = self._old, {}
        for parameter, gradient in old.items():
            parameter.grad = gradient

    def _tells(self) -> bool:
        """Says whether the replicas tell each other at the end of this step how it went."""
        return self.shards is not None or self._reduces()

    def _reduces(self) -> bool:
        return self.size > 1 and self._with_gradients and (self._steps + 1) % self._passes == 0

    def _total(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Takes a sum; returns this replica's gradient, with the one from before the step."""
        gradient = self._sums.take(parameter)
        old = self._old[parameter]
        if gradient is None:
            return old
        gradient = self._averaged(gradient)
        if old is None:
            return gradient
        if gradient.is_sparse or old.is_sparse or gradient.dtype != old.dtype:
            return old + gradient
        return gradient.add_(old)  # the memory of `old` is the script's

    def _own(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns what `_total` returns and the late additions; for steps that do not reduce."""
        total, late = self._total(parameter), self._late(parameter)
        if late is None:
            return total
        assert total is not None, "a late contribution without an earlier one"
        return total + late

    def _averaged(self, gradient: torch.Tensor) -> torch.Tensor:
        """Makes a sum the mean over the microbatches, in place; not if a hook will divide it."""
        hooked = self.hook is not None and self.size > 1
        if hooked or self._divisor == 1:
            return gradient
        return gradient / self._divisor if gradient.is_sparse else gradient.div_(self._divisor)

    def _reduce(
        self, failure: str, redo: bool
    ) -> tuple[dict[nn.Parameter, torch.Tensor | None], bool]:
        """Reduces all sums; returns the gradients, and whether to run the step again."""
        source = (lambda _: None) if failure or redo else self._total
        reduced = self._over_replicas(source, self._next)
        if self.hook_failure is not None:
            failure = failure or summary(self.hook_failure)
        # The flags: has the step failed here, has it to be run again, are there late additions,
        # and which parameters were used.
        used = [self._sums.used(p) or self._old[p] is not None for p in self.parameters]
        failed, again, late, *used_somewhere = self._anywhere(
            [bool(failure), redo, self._sums.any_late, *used]
        )
        if again and not failed:
            return dict(self._old), True
        if failed:
            tell_replicas(self.group, failure)
            return dict(self._old), False
        if late:
            self._prepare()
            for parameter, addition in self._over_replicas(self._late, 0).items():
                if addition is not None:
                    before = reduced[parameter]
                    reduced[parameter] = addition if before is None else before + addition
        return self._of_used(reduced, used_somewhere), False

    def _over_replicas(
        self, source: Callable[[nn.Parameter], torch.Tensor | None], first: int
    ) -> dict[nn.Parameter, torch.Tensor | None]:
        """Returns what `source` gives for each parameter, reduced over replicas if this step does.

        Args:
            source: returns a gradient of this replica; called in the same order on all replicas.
            first: the first bucket that has not been launched.
        """
        if not self._reduces():
            return {parameter: source(parameter) for parameter in self.parameters}
        for bucket in self._buckets[first:]:
            self._launch(bucket, source)
        alone = [p for p in self.parameters if p not in self._bucket_of]
        return {**{parameter: source(parameter) for parameter in alone}, **self._collected()}

    def _anywhere(self, flags: Sequence[bool]) -> list[int]:
        """Returns for each flag whether it is set on any replica."""
        tensor = torch.tensor(flags, dtype=torch.int32)
        tensor = tensor.to(self.parameters[0].device) if self.parameters else tensor
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        found: list[int] = tensor.tolist()
        return found

    def _of_used(
        self, reduced: Mapping[nn.Parameter, torch.Tensor | None], used: Sequence[int]
    ) -> dict[nn.Parameter, torch.Tensor | None]:
        """Returns the gradients; None for each parameter that no replica has used."""
        return {
            parameter: reduced[parameter] if use else None
            for parameter, use in zip(self.parameters, used, strict=True)
        }

    def _late(self, parameter: nn.Parameter) -> torch.Tensor | None:
        gradient = self._sums.late(parameter)
        return None if gradient is None else self._averaged(gradient)

    def _launch(
        self, bucket: Bucket, source: Callable[[nn.Parameter], torch.Tensor | None]
    ) -> None:
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

    def _collected(self) -> dict[nn.Parameter, torch.Tensor]:
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

    # --- without a step: one partition, loss.backward() -------------------------------------------

    def begin_outside(self) -> None:
        """Notes a call of the model outside any step: a backward pass before it has ended."""
        # If it has failed, `_reduce_outside` has not run. But a checkpoint of torch may call the
        # model in a backward pass that is under way.
        if graph_task() == -1:
            self._outside = False

    def outside_step(self, parameter: nn.Parameter) -> None:
        """Notes a gradient outside any step; all are reduced when that backward pass ends."""
        if self.size == 1 or self._outside:
            return
        self._outside = True
        execution_engine.queue_callback(self._reduce_outside)

    def _reduce_outside(self) -> None:
        self._outside, self.hook_failure = False, None
        self._steps += 1
        if self._steps % self._passes:
            return
        self._renew_buckets()
        for bucket in self._buckets:
            self._launch(bucket, lambda parameter: parameter.grad)
        reduced = {parameter: parameter.grad for parameter in self.parameters}
        reduced.update(self._collected())
        if self.hook_failure is not None:
            raise self.hook_failure
        used = self._anywhere([parameter.grad is not None for parameter in self.parameters])
        for parameter, gradient in self._of_used(reduced, used).items():
            parameter.grad = gradient

    # --- replicas with fewer batches; see join.py -------------------------------------------------

    def shadow_step(self, source: int) -> None:
        """Takes part in a step of the others without a batch, with the buffers of `source`.

        Args:
            source: the replica whose buffers all copy in this step.
        """
        sums = GradientSum()
        sums.begin(1)
        self._with_gradients = True
        self._begin(sums, 1, source)
        # After a Redo the others run the step again, which is one more to take part in.
        with contextlib.suppress(Redo):
            self.end_step()

    def synchronise(self, source: int) -> None:
        """Gives all replicas the parameters and buffers of one; all have to call it.

        Args:
            source: that replica.
        """
        divided = [p for p in self._all_parameters if self.is_divided(p)]
        whole = [p for p in self._all_parameters if not self.is_divided(p)]
        self._broadcast([*whole, *self._tensors()], source)
        if divided and self.divided is not None:
            # `join` is refused with tensor parallelism, so the first replica is the source.
            self._broadcast_over(self.divided.group, divided, 0)

    def _tensors(self) -> list[torch.Tensor]:
        """Returns the buffers of this rank; none before the model is divided."""
        return self._buffers.tensors() if self._buffers is not None else []

    def _broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        self._broadcast_over(self.group, tensors, source)

    def _broadcast_over(
        self, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], source: int
    ) -> None:
        # There are many small tensors, which travel in few large messages.
        if tensors and group.size() > 1:
            detached = [without_repeats(tensor.detach()) for tensor in tensors]
            broadcast_coalesced(group, detached, _BROADCAST, source)
