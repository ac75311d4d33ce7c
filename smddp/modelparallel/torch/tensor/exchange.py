"""Exchanges of activations among the ranks of a tensor-parallel group, with their gradients.

Every rank of a group of T has its own batch, B examples, unless the batch is prescaled: then all
have the same one. A layer whose parameters are divided computes on all examples of the group, with
its part of the parameters. So activations change between two forms:

* own: the examples of this rank, with all features, [B, ..., H];
* all: the examples of all ranks in the order of ranks, [T * B, ..., H], or with a part of the
  features, [T * B, ..., H / T]. With a prescaled batch "all" is [B, ..., H] and [B, ..., H / T].

| method | before | after | gradient |
| --- | --- | --- | --- |
| `gather` | own | all | summed over ranks, back to own |
| `reduce` | all, a term of a sum over ranks | own, summed | all |
| `divide` | own | all, with a part of the features | own, with all features |
| `unite` | all, with a part of the features | own, with all features | all, with a part |

The gradient of a divided parameter is that of the sum of all ranks' losses; `Gradients` makes it
that of their mean. With a prescaled batch all ranks compute the same loss; it is counted once.

With a prescaled batch the hidden states of a transformer may be divided, too, between its divided
layers (`SequenceExchange`). There "own" is a part of each sequence, [B, S / T, ...], and "all" is
[B, S, ...], as the other modules of a model have it. Two more methods go from one to the other:

| method | before | after | gradient |
| --- | --- | --- | --- |
| `shorten` | all, the same on each rank | own | all, the same on each rank |
| `lengthen` | own | all, the same on each rank | own |

Compare the operators f and g of Megatron-LM (https://arxiv.org/abs/1909.08053, section 3), for one
batch, and section 4.2 of https://arxiv.org/abs/2111.05972 for a batch per rank. For parts of
sequences see section 4.2.2 of https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smddp._torch_internals import FAKE_TENSORS
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.job.collectives import Collectives
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.tensor.gathered import note_source

__all__ = ["Exchange", "SequenceExchange"]


class Exchange:
    """Exchanges activations in one tensor-parallel group.

    All ranks of the group have to make the same calls in the same order, with tensors of one shape
    and dtype, and the backward passes as well. Sums are made in the dtype of the tensors.

    Tensors of torch's FakeTensorMode change their shape only; nothing is sent.

    Attributes:
        collectives: makes the calls in the group.
        rank: of this process in the group.
        size: of the group.
        prescaled: do all ranks have the same batch?
    """

    def __init__(self, collectives: Collectives, prescaled: bool) -> None:
        self.collectives, self.prescaled = collectives, prescaled
        self.rank, self.size = collectives.group.rank(), collectives.group.size()

    @classmethod
    def of_job(cls) -> Exchange:
        """Returns that of this rank's tp group, as configured.

        Raises:
            SMPInitializationError: `smp.init` has not been called.
        """
        return cls(state.groups.exchange, state.cfg.prescaled_batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        """Returns itself: it does not change, and a process group cannot be copied."""
        return self

    def __reduce__(self) -> Any:
        """Lets modules pickle; the copy exchanges in the job that loads it."""
        return self.of_job, ()

    def gather(self, x: Tensor) -> Tensor:
        """Returns the examples of all ranks, [B, ...] -> [T * B, ...]; [B, ...] if prescaled."""
        if self.prescaled:
            return self._apply(x, _same, self._all_reduce)
        return self._apply(x, self._all_gather, self._reduce_scatter)

    def reduce(self, x: Tensor) -> Tensor:
        """Sums over ranks, and returns this rank's examples, [T * B, ...] -> [B, ...]."""
        if self.prescaled:
            return self._apply(x, self._all_reduce, _same)
        return self._apply(x, self._reduce_scatter, self._all_gather)

    def divide(self, x: Tensor) -> Tensor:
        """Returns a part of the features of all examples, [B, ..., H] -> [T * B, ..., H / T]."""
        if self.prescaled:
            return self._apply(x, self._part, self._all_parts)
        return self._apply(x, self._to_parts, self._from_parts)

    def unite(self, x: Tensor) -> Tensor:
        """Returns all features of this rank's examples, [T * B, ..., H / T] -> [B, ..., H]."""
        if self.prescaled:
            return self._apply(x, self._all_parts, self._part)
        return self._apply(x, self._from_parts, self._to_parts)

    def sum(self, x: Tensor) -> Tensor:
        """Sums terms over ranks, on all of them; every rank uses the sum for the same examples."""
        return self._apply(x, self._all_reduce, _same)

    def replicas(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Returns parameters that are whole, for own states: as they are."""
        return parameters

    def maximum(self, x: Tensor) -> Tensor:
        """Returns the largest value of each element over ranks, without a gradient."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            self._make("maximum", x, x)
        return x

    def _apply(
        self, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        if self.size == 1:
            return x
        result: Tensor = _Exchanged.apply(x, forward, backward)
        return result

    # The methods below work on values, without gradients.

    def _make(self, kind: str, result: Tensor, x: Tensor) -> None:
        if not isinstance(x, FAKE_TENSORS):
            self.collectives.make(kind, result, x.contiguous())

    def _all_gather(self, x: Tensor) -> Tensor:
        result = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._make("all_gather", result, x)
        return result

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        result = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        self._make("reduce_scatter", result, x)
        return result

    def _all_reduce(self, x: Tensor) -> Tensor:
        result = x.clone(memory_format=torch.contiguous_format)
        self._make("sum", result, result)
        return result

    def _part(self, x: Tensor) -> Tensor:
        return x.chunk(self.size, -1)[self.rank].clone(memory_format=torch.contiguous_format)

    def _all_parts(self, x: Tensor) -> Tensor:
        gathered = self._all_gather(x.unsqueeze(0))  # [T, B, ..., H / T]
        return gathered.movedim(0, -2).flatten(-2)

    def _to_parts(self, x: Tensor) -> Tensor:
        parts = x.reshape(*x.shape[:-1], self.size, x.shape[-1] // self.size)
        parts = parts.movedim(-2, 0)  # [T, B, ..., H / T]
        return self._all_to_all(parts).flatten(0, 1)

    def _from_parts(self, x: Tensor) -> Tensor:
        parts = x.reshape(self.size, x.shape[0] // self.size, *x.shape[1:])
        received = self._all_to_all(parts)  # [T, B, ..., H / T]
        return received.movedim(0, -2).flatten(-2)

    def _all_to_all(self, x: Tensor) -> Tensor:
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._make("all_to_all", result, x)
        return result


class SequenceExchange(Exchange):
    """Exchanges hidden states of which each rank has an equal part of every sequence.

    All ranks have the same batch. Rank i has the i-th part of the positions, in dimension 1.
    Features are not divided, so there is no `divide` and no `unite`.

    Args:
        collectives: see `Exchange`.
    """

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives, prescaled=True)

    @classmethod
    def of_job(cls) -> SequenceExchange:
        """Returns that of this rank's tp group; see `Exchange.of_job`."""
        return cls(state.groups.exchange)

    def gather(self, x: Tensor) -> Tensor:
        """Returns whole sequences, [B, S / T, ...] -> [B, S, ...], for divided parameters.

        `gathered.linear` keeps x in place of the result for the backward pass.
        """
        return note_source(self._apply(x, self.whole, self._sum_of_part), x, self.whole)

    def reduce(self, x: Tensor) -> Tensor:
        """Sums over ranks, and returns this rank's part, [B, S, ...] -> [B, S / T, ...]."""
        return self._apply(x, self._sum_of_part, self.whole)

    def shorten(self, hidden: Tensor) -> Tensor:
        """Returns this rank's part, [B, S, ...] -> [B, S / T, ...].

        Raises:
            SMPUsageError: the number of ranks does not divide S. As all ranks have the same batch,
                all of them raise.
        """
        if hidden.shape[1] % self.size:
            raise SMPUsageError(
                f"sequence_parallel=True: a sequence of {hidden.shape[1]} positions cannot be "
                f"divided over {self.size} tensor-parallel ranks; pad it to a multiple of "
                f"{self.size}"
            )
        return self._apply(hidden, self.part, self.whole)

    def lengthen(self, hidden: Tensor) -> Tensor:
        """Returns whole sequences, [B, S / T, ...] -> [B, S, ...], for parameters that are whole.

        Every rank goes on with all of them, in the same way.
        """
        return self._apply(hidden, self.whole, self.part)

    def replicas(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Returns parameters that are whole, and are used on this rank's part of sequences.

        Their gradients are summed over ranks, in one call: each rank gets those of whole sequences,
        as of other parameters that are whole.

        Args:
            parameters: of one shape and dtype.
        """
        return self._apply(torch.stack(parameters), _same, self._all_reduce).unbind()

    # Values, without gradients.

    def part(self, x: Tensor) -> Tensor:
        """Returns a copy of this rank's part of whole sequences."""
        return x.chunk(self.size, 1)[self.rank].clone(memory_format=torch.contiguous_format)

    def whole(self, x: Tensor) -> Tensor:
        """Returns whole sequences."""
        return self._all_gather(x.unsqueeze(0)).movedim(0, 1).flatten(1, 2)  # from [T, B, S / T]

    def _sum_of_part(self, x: Tensor) -> Tensor:
        parts = torch.stack(x.chunk(self.size, 1))  # [T, B, S / T, ...]
        return self._reduce_scatter(parts).squeeze(0)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


class _Exchanged(torch.autograd.Function):
    """Applies a function of values, and another one to the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Returns the values after the exchange."""
        ctx.of_gradient = backward
        # Without a gradient on any rank there is nothing to exchange: parameters keep None.
        ctx.set_materialize_grads(False)
        return forward(x)

    @staticmethod
    @once_differentiable  # autograd does not see what other ranks do with the gradient
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Returns the gradient of x; None if there is none."""
        (gradient,) = gradients
        return None if gradient is None else ctx.of_gradient(gradient), None, None
