"""Layer norm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FusedLayerNorm"]


class FusedLayerNorm(nn.LayerNorm):
    """Layer norm with one kernel, as `torch.nn.LayerNorm`, with the same arguments.

    The input may have another dtype than the weights, such as fp32 where a sum of residuals stays
    fp32. The arithmetic is then that of the input, and the result has the dtype of the weights.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes the last dimensions, those of `normalized_shape`."""
        return self.normalized(input, self.weight, self.bias)

    def normalized(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Does what `forward` does, with other parameters."""
        if weight is None or weight.dtype == input.dtype:
            return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        dtype, wide = weight.dtype, weight.to(input.dtype)
        bias = None if bias is None else bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, wide, bias, self.eps).to(dtype)
