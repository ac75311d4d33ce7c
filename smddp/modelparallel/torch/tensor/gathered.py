"""Linear layers that do not keep their input, if it was gathered, but gather it again.

The input of a divided layer has all positions of every sequence, although the rank that gathers it
has a part of them only. The weight's gradient needs it again. To keep it would cost as much memory
as the layer saves elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["linear", "note_source"]

# Attribute of gathered tensors: this rank's part, and a `_Again`. A tensor that comes from another
# partition, or from a checkpoint's arguments, has none; then it is kept.
_ATTRIBUTE = "_smp_source"


class _Again:
    """Gathers one tensor again, once for all layers that have read it.

    A layer's turn in the backward pass is the same on all ranks, and so are the calls.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor]) -> None:
        self._gather = gather
        self._readers = self._left = 0
        self._whole: Tensor | None = None

    def add_reader(self) -> None:
        """Notes that a layer will need the tensor in the backward pass."""
        self._readers += 1

    def __call__(self, part: Tensor) -> Tensor:
        """Returns the gathered tensor, and forgets it after the last layer.

        Args:
            part: of this rank.
        """
        if self._whole is None:
            self._whole, self._left = self._gather(part), self._readers
        whole = self._whole
        self._left -= 1
        if self._left == 0:
            self._whole = None
        return whole


def note_source(whole: Tensor, part: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """Lets `linear` keep a part in place of a gathered tensor.

    Args:
        whole: the gathered tensor.
        part: of this rank.
        gather: makes the values of the first from those of the second, on all ranks.

    Returns:
        The gathered tensor.
    """
    setattr(whole, _ATTRIBUTE, (part.detach(), _Again(gather)))
    return whole


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Does what `torch.nn.functional.linear` does, and keeps a gathered x as this rank's part."""
    source = getattr(x, _ATTRIBUTE, None)
    if source is None:
        return F.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias, *source)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, part: Tensor, again: _Again
    ) -> Tensor:
        """Returns the result of the layer."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, part)
        ctx.again, ctx.x_dtype = again, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if ctx.needs_input_grad[1]:
            again.add_reader()
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the gradients of x, weight and bias."""
        if gradient is None:
            return (None,) * 5
        weight, part = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        # With autocast the layer computes in the dtype of its result.
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ weight.to(gradient.dtype)).to(ctx.x_dtype)
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            whole = ctx.again(part).to(gradient.dtype)
            of_weight = (rows.T @ whole.flatten(0, -2)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).to(ctx.bias_dtype)
        return of_x, of_weight, of_bias, None, None
