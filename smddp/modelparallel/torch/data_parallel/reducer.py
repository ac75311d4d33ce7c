"""Data parallelism around the pipeline: gradients of replicas are averaged, bucket by bucket.

A bucket is reduced as soon as all its sums are final, while the pipeline still works on others.
All replicas reduce the same buckets in the same order in every step with gradients, even if a step
fails on one of them; so a failed step leaves the process group usable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from smddp._torch_internals import execution_engine, graph_task
from smddp.modelparallel.core.failure import Redo, summary
from smddp.modelparallel.torch.common.buffers import Buffers
from smddp.modelparallel.torch.data_parallel.buckets import Buckets
from smddp.modelparallel.torch.data_parallel.gradient_sum import GradientSum
from smddp.modelparallel.torch.data_parallel.holders import Holders, Ranks
from smddp.modelparallel.torch.data_parallel.join import Join
from smddp.modelparallel.torch.data_parallel.replicas import tell_replicas
from smddp.modelparallel.torch.data_parallel.values import ReplicaValues

__all__ = ["DataParallel"]


class DataParallel:
    """Turns the sums of a step into gradients that are equal on all replicas.

    With sharded parameters, every step needs all replicas, so all of them learn at its end whether
    it has failed on any.

    Attributes:
        group, size: the replicas of this rank's partition.
        overlap: begin to reduce before the step ends.
        parameters: what gets a gradient on this rank: parameters, and shards of parameters.
        holders: which ranks have a parameter.
        buckets: reduce gradients.
        values: what all replicas have in common.
        join: replicas with different numbers of batches.
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
        self.parameters: list[nn.Parameter] = []
        self.holders = Holders(Ranks(group, size))
        self.buckets = Buckets(self.holders, bucket_cap_mb * 2**20, views)
        self.values = ReplicaValues(self.holders, broadcast_buffers)
        self.join = Join(self)
        self._passes = passes
        self._local: list[nn.Parameter] = []  # what gets a gradient once it is trained
        self._old: dict[nn.Parameter, torch.Tensor | None] = {}  # gradients from before the step
        self._divisor = 1
        self._with_gradients = False
        self._steps = 0  # steps with gradients so far
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
        shards = self.holders.shards
        self._local = list(parameters) if shards is None else shards.divide(parameters, device)
        self.note_trained()
        self.values.adopt(self._local, buffers)
        # With several partitions, `begin_step` of the first step did not know the parameters yet.
        self._put_aside()

    def note_trained(self) -> None:
        """Gives gradients from now on to parameters that require them; not during a step.

        A parameter that was trained before and is frozen now keeps its place, and gets none.
        """
        trained = set(self.parameters)
        self.parameters = [p for p in self._local if p.requires_grad or p in trained]
        if self.size > 1:
            self.buckets.make(self.parameters)

    def tensors(self) -> list[torch.Tensor]:
        """Returns the gradients of this rank, and the buckets in which they are reduced."""
        gradients = [*self._old.values(), *(parameter.grad for parameter in self.parameters)]
        return [*self.buckets.tensors(), *(one for one in gradients if one is not None)]

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
        self.buckets.renew()
        self._sums, self._divisor = sums, divisor
        if source is not None:
            self.values.copy_buffers(source)
        self._put_aside()

    def _put_aside(self) -> None:
        self._old = {}
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            # A view would change with its bucket, also if this step fails or is run again.
            if self.buckets.views and gradient is not None:
                gradient = gradient.clone()
            self._old[parameter] = gradient
        self.buckets.hook_failure = None
        self.buckets.prepare()

    def expect_gradients(self) -> None:
        """Lets a failed step end as one with gradients: on other ranks it may have been one.

        They reduce gradients at its end, and so tell each other that it has failed.
        """
        self._with_gradients = True

    def final(self, parameter: nn.Parameter) -> None:
        """Notes that a parameter's sum is final; begins to reduce the buckets that are complete."""
        if self.overlap and self._reduces() and parameter in self.buckets:
            self.buckets.ready(parameter, self._total)

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
        failed = failure or self.buckets.hook_failure is not None
        if self._with_gradients and not failed and not redo:
            self._steps += 1
        self._old = {}
        for parameter, total in totals.items():
            parameter.grad = total
        if redo:
            raise Redo
        if self.buckets.hook_failure is not None and not failure:
            raise self.buckets.hook_failure

    def put_back(self) -> None:
        """Sets the gradients to those from before the step, if it has put them aside."""
        old, self._old = self._old, {}
        for parameter, gradient in old.items():
            parameter.grad = gradient

    def _tells(self) -> bool:
        """Says whether the replicas tell each other at the end of this step how it went."""
        return self.holders.shards is not None or self._reduces()

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
        hooked = self.buckets.hook is not None and self.size > 1
        if hooked or self._divisor == 1:
            return gradient
        return gradient / self._divisor if gradient.is_sparse else gradient.div_(self._divisor)

    def _reduce(
        self, failure: str, redo: bool
    ) -> tuple[dict[nn.Parameter, torch.Tensor | None], bool]:
        """Reduces all sums; returns the gradients, and whether to run the step again."""
        reduced = self._over_replicas((lambda _: None) if failure or redo else self._total)
        if self.buckets.hook_failure is not None:
            failure = failure or summary(self.buckets.hook_failure)
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
            self.buckets.prepare()
            for parameter, addition in self._over_replicas(self._late).items():
                if addition is not None:
                    before = reduced[parameter]
                    reduced[parameter] = addition if before is None else before + addition
        return self._of_used(reduced, used_somewhere), False

    def _over_replicas(
        self, source: Callable[[nn.Parameter], torch.Tensor | None]
    ) -> dict[nn.Parameter, torch.Tensor | None]:
        """Returns what `source` gives for each parameter, reduced over replicas if this step does.

        Args:
            source: returns a gradient of this replica; called in the same order on all replicas.
        """
        if not self._reduces():
            return {parameter: source(parameter) for parameter in self.parameters}
        self.buckets.launch(source)
        alone = {p: source(p) for p in self.parameters if p not in self.buckets}
        return {**alone, **self.buckets.collected()}

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
        self._outside, self.buckets.hook_failure = False, None
        self._steps += 1
        if self._steps % self._passes:
            return
        self.buckets.renew()
        self.buckets.prepare()
        self.buckets.launch(lambda parameter: parameter.grad)
        reduced = {parameter: parameter.grad for parameter in self.parameters}
        reduced.update(self.buckets.collected())
        if self.buckets.hook_failure is not None:
            raise self.buckets.hook_failure
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
