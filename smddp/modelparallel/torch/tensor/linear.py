"""A linear layer whose weight is divided over the ranks of a tp group."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.tensor.arguments import check_arguments
from smddp.modelparallel.torch.tensor.exchange import Exchange
from smddp.modelparallel.torch.tensor.module import DistributedModule, Division

__all__ = ["DistributedLinear"]


class DistributedLinear(DistributedModule):
    """Does what `torch.nn.Linear` does; each rank has the weights of a part of the input features.

    The bias is a replica.

    Args:
        in_features: of the whole layer; the number of ranks has to divide it.
        out_features: of the whole layer.
        bias: add a bias.
        device: torch's default if None.
        dtype: torch's default if None.
        initializer_range: standard deviation of normally distributed weights, with a bias of
            zeros; None for the distribution of `torch.nn.Linear`.
        exchange: see `DistributedModule`.

    Raises:
        SMPUsageError: the number of ranks does not divide in_features, or an argument is wrong.
    """

    # As nn.Linear. So dropout in a model is that of the model before modules were replaced.
    draws_random_numbers = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        initializer_range: float | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        check_arguments("DistributedLinear", locals())
        super().__init__(exchange)
        self.in_features, self.out_features = in_features, out_features
        set_weight, set_bias = _initializers(in_features, initializer_range)
        shape = (out_features, in_features)
        self.weight = self.new_parameter("weight", shape, set_weight, Division(1), device, dtype)
        self.bias: nn.Parameter | None
        if not bias:
            self.register_parameter("bias", None)
        else:
            self.bias = self.new_parameter("bias", shape[:1], set_bias, None, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Returns this rank's examples, [B, ..., in_features] -> [B, ..., out_features].

        Raises:
            SMPUsageError: the input has another number of features.
        """
        # A tensor of one dimension is one example.
        examples = input if input.dim() > 1 else input.unsqueeze(0)
        if examples.shape[-1] != self.in_features:
            raise SMPUsageError(
                f"DistributedLinear has {self.in_features} input features, and its input has "
                f"{list(input.shape)}"
            )
        part = self.exchange.divide(examples)
        result = self.exchange.reduce(nn.functional.linear(part, self.weight))
        if self.bias is not None:
            result = result + self.bias.to(result.dtype)  # under autocast that of the product
        return result if input.dim() > 1 else result.squeeze(0)

    def extra_repr(self) -> str:
        """Returns the arguments, for `repr`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, ranks={self.exchange.size}"
        )


def _initializers(
    in_features: int, initializer_range: float | None
) -> tuple[Callable[[Tensor], object], Callable[[Tensor], object]]:
    if initializer_range is not None:
        deviation = initializer_range
        return lambda w: nn.init.normal_(w, 0.0, deviation), nn.init.zeros_
    bound = 1 / math.sqrt(in_features)
    return (
        lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)),
        lambda b: nn.init.uniform_(b, -bound, bound),
    )
