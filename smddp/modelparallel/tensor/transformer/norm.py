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
        if self.weight is None or self.weight.dtype == input.dtype:
            return super().forward(input)
        weight, dtype = self.weight.to(input.dtype), self.weight.dtype
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps).to(dtype)
