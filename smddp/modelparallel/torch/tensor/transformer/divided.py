"""Linear layers that are divided by the features between them, and the divided vocabulary.

An `Expanding` layer gives each rank a part of its output features, a `Contracting` one takes a part
of its input features. A pair of them needs one exchange before and one after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from smddp._torch_internals import assert_async
from smddp.modelparallel.torch.tensor.exchange import Exchange
from smddp.modelparallel.torch.tensor.gathered import linear
from smddp.modelparallel.torch.tensor.module import DistributedModule, Division
from smddp.modelparallel.torch.tensor.transformer.options import at_least_fp32, check_divides

__all__ = ["IGNORED", "Contracting", "Expanding", "Vocabulary", "initializer"]

IGNORED = -100  # the label of positions that do not count, as in torch's cross entropy

Initializer = Callable[[Tensor], Any]


def initializer(
    initializer_range: float, use_normal_initialization: bool, zero_init: bool
) -> Initializer:
    """Returns a function that fills a whole weight [out, in] in place."""

    def fill(weight: Tensor) -> None:
        if zero_init:
            weight.zero_()
        elif use_normal_initialization:
            weight.normal_(0, initializer_range)
        else:  # as torch.nn.Linear
            bound = 1 / math.sqrt(weight.shape[-1])
            weight.uniform_(-bound, bound)

    return fill


class Expanding(DistributedModule):
    """A linear layer from all features to this rank's part of the output features.

    Args:
        owner: the layer that it belongs to, for error texts.
        in_features: of the input.
        out_features: of all ranks.
        bias: add one?
        fill: sets the weights.

    Raises:
        SMPUsageError: ranks cannot have equal parts of out_features.
    """

    def __init__(
        self, owner: str, in_features: int, out_features: int, bias: bool, fill: Initializer
    ) -> None:
        super().__init__()
        check_divides(owner, "output features", out_features, self.exchange.size)
        self.weight = self.new_parameter("weight", (out_features, in_features), fill, Division(0))
        self.bias = (
            self.new_parameter("bias", (out_features,), Tensor.zero_, Division(0)) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in_features] to [..., out_features / T]."""
        return linear(x, self.weight, self.bias)


class Contracting(DistributedModule):
    """A linear layer from this rank's part of the input features to a term of the output.

    Args:
        owner: the layer that it belongs to, for error texts.
        in_features: of all ranks.
        out_features: of the output.
        bias: add one?
        fill: sets the weights.
        exchange: of the output; see `DistributedModule`.

    Raises:
        SMPUsageError: ranks cannot have equal parts of in_features.
    """

    def __init__(
        self,
        owner: str,
        in_features: int,
        out_features: int,
        bias: bool,
        fill: Initializer,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(exchange)
        check_divides(owner, "input features", in_features, self.exchange.size)
        self.weight = self.new_parameter("weight", (out_features, in_features), fill, Division(1))
        self.bias = self.new_parameter("bias", (out_features,), Tensor.zero_) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Maps all examples with a part of the features to this rank's examples, with the bias.

        [T * B, ..., in_features / T] -> [B, ..., out_features]; [B, ...] if prescaled; with a
        `SequenceExchange` [B, S, in_features / T] -> [B, S / T, out_features].
        """
        y = self.exchange.reduce(F.linear(x, self.weight))
        # The bias is whole on each rank, and is added to its own states once.
        # Under autocast the product has another dtype.
        return y if self.bias is None else y + self.exchange.replicas(self.bias)[0].to(y.dtype)


class Vocabulary(DistributedModule):
    """Vectors of a vocabulary that is divided: each rank has some of the tokens.

    Args:
        owner: the layer that it belongs to, for error texts.
        vocab_size: number of tokens of all ranks.
        hidden_size: features of a vector.
        bias: is there a number per token, for logits?
        fill: sets the weights.

    Raises:
        SMPUsageError: ranks cannot have equal parts of the vocabulary.
    """

    def __init__(
        self, owner: str, vocab_size: int, hidden_size: int, bias: bool, fill: Initializer
    ) -> None:
        super().__init__()
        check_divides(owner, "vocab_size", vocab_size, self.exchange.size)
        self.weight = self.new_parameter("weight", (vocab_size, hidden_size), fill, Division(0))
        self.bias = (
            self.new_parameter("bias", (vocab_size,), Tensor.zero_, Division(0)) if bias else None
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the vectors of this rank's examples, [B, S] -> [B, S, hidden_size]."""
        ids = self.exchange.gather(ids)
        self._check(ids, "token")
        local, mine = self._local(ids)
        return self.exchange.reduce(F.embedding(local, self.weight) * mine.unsqueeze(-1))

    def logits(self, everything: Tensor) -> Tensor:
        """Maps states of all examples to logits for this rank's tokens, [T * B, S, V / T]."""
        return linear(everything, self.weight, self.bias)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of this rank's examples.

        Args:
            logits: see above.
            labels: this rank's tokens to predict, [B, S]; -100 where none counts.
        """
        logits = at_least_fp32(logits)
        shifted = logits - self.exchange.maximum(logits.amax(-1)).unsqueeze(-1)
        everything = self.exchange.gather(labels)
        self._check(everything.where(everything != IGNORED, 0), "label")
        local, mine = self._local(everything)
        target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1) * mine
        counts = labels != IGNORED
        loss = self.exchange.reduce(shifted.exp().sum(-1)).log() - self.exchange.reduce(target)
        return (loss * counts).sum() / counts.sum()

    def _check(self, ids: Tensor, what: str) -> None:
        """Fails, on all ranks, if one is not in the vocabulary."""
        count = self.weight.shape[0] * self.exchange.size
        inside = ((ids >= 0) & (ids < count)).all()
        assert_async(inside, f"a {what} is not in the vocabulary of {count}")

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns numbers of rows of the weight, and which of them are meant (the others are 0)."""
        count = self.weight.shape[0]
        local = ids - count * self.exchange.rank
        mine = (local >= 0) & (local < count)
        return local.masked_fill(~mine, 0), mine
