"""Hidden states between the parts of a layer; each rank may have a part of the sequence."""

from __future__ import annotations

from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from smddp.modelparallel.torch.tensor.exchange import Exchange, SequenceExchange
from smddp.modelparallel.torch.tensor.module import DistributedModule
from smddp.modelparallel.torch.tensor.transformer.norm import FusedLayerNorm

__all__ = ["HiddenStatesModule"]

_Module = TypeVar("_Module", bound="HiddenStatesModule")


class HiddenStatesModule(DistributedModule):
    """A module of the family: it takes hidden states, and returns others.

    With sequence_parallel and a prescaled batch, norms, dropout and residuals work on this rank's
    part of the sequence. The outermost module of the family divides and unites the sequence, so
    code around it sees whole ones; those inside take and return parts.

    Without a prescaled batch there is nothing to divide: each rank has other examples there.

    Args:
        sequence_parallel: divide the sequence?
    """

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        divides = sequence_parallel and self.exchange.prescaled and self.exchange.size > 1
        self._sequence = SequenceExchange(self.exchange.collectives) if divides else None
        self._outermost = True

    @property
    def sequence(self) -> Exchange:
        """What exchanges hidden states: `exchange` if the sequence is not divided."""
        return self.exchange if self._sequence is None else self._sequence

    def inside(self, module: _Module) -> _Module:
        """Returns a module that takes and returns what this one has: parts, if it divides."""
        module._outermost = False
        return module

    def shortened(self, hidden: Tensor) -> Tensor:
        """Returns what this rank works on of the input, [B, S / T, H] if it divides."""
        if self._sequence is None or not self._outermost:
            return hidden
        return self._sequence.shorten(hidden)

    def lengthened(self, hidden: Tensor) -> Tensor:
        """Undoes `shortened` for the result."""
        if self._sequence is None or not self._outermost:
            return hidden
        return self._sequence.lengthen(hidden)

    def new_norm(self, wanted: bool, size: int, epsilon: float) -> FusedLayerNorm | None:
        """Returns a norm of hidden states; None if none is wanted."""
        if not wanted:
            return None
        if self._sequence is None:
            return FusedLayerNorm(size, epsilon)
        return _PartNorm(size, epsilon, self._sequence)

    def new_dropout(self, probability: float) -> nn.Dropout:
        """Returns dropout of hidden states."""
        if self._sequence is None:
            return nn.Dropout(probability)
        return _PartDropout(probability, self._sequence)

    def extra_repr(self) -> str:
        """Returns whether the sequence is divided: ranks compare it."""
        return "" if self._sequence is None else "sequence_parallel=True"


class _PartNorm(FusedLayerNorm):
    """Layer norm of a part of the sequence; its parameters get the gradients of all of it."""

    def __init__(self, size: int, epsilon: float, exchange: SequenceExchange) -> None:
        super().__init__(size, epsilon)
        self.exchange = exchange

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes the last dimension."""
        return self.normalized(input, *self.exchange.replicas(self.weight, self.bias))


class _PartDropout(nn.Dropout):
    """Dropout of a part of the sequence, which leaves out what one process leaves out there."""

    def __init__(self, probability: float, exchange: SequenceExchange) -> None:
        super().__init__(probability)
        self.exchange = exchange

    def forward(self, input: Tensor) -> Tensor:
        """Maps [B, S / T, H] to [B, S / T, H]."""
        if not self.training or self.p == 0:
            return input
        # All numbers are drawn on every rank, so generators stay equal, and a part of them is kept.
        batch, positions, *features = input.shape
        ones = input.new_ones(batch, positions * self.exchange.size, *features)
        kept = self.exchange.part(F.dropout(ones, self.p).bool())
        return input * kept * (1 / (1 - self.p) if self.p < 1 else 0)
