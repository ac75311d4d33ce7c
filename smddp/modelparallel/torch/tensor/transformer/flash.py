"""Attention that does not store its matrix of weights, and the position biases of ALiBi."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smddp.modelparallel.core.errors import SMPUsageError

__all__ = ["FlashAttentionLayer", "alibi", "visible"]


def alibi(
    heads: int, first: int, count: int, queries: int, keys: int, maximum: int, like: Tensor
) -> Tensor:
    """Returns the position biases of some heads (https://arxiv.org/abs/2108.12409).

    Args:
        heads: of all ranks.
        first: the first head that is wanted.
        count: how many are wanted.
        queries: length of the sequence.
        keys: length of the sequence that is attended to.
        maximum: exponent of the smallest slope, 2 ** -maximum.
        like: a tensor of the dtype and device of the result.

    Returns:
        Tensor [1, count, queries, keys]: minus the slope of the head, times the distance.
    """
    power = 1 << (heads - 1).bit_length()
    slopes = [2 ** (-maximum * (i + 1) / power) for i in range(power)]
    if power > heads:  # as in the paper's program: every second slope first
        slopes = (slopes[1::2] + slopes[::2])[:heads]
    slope = torch.tensor(slopes[first : first + count], device=like.device)
    distance = (
        torch.arange(keys, device=like.device) - torch.arange(queries, device=like.device)[:, None]
    ).abs()
    return (-slope[:, None, None] * distance).to(like.dtype)[None]


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Returns which keys a causal query sees, [queries, keys]: the last `window` of them."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


class FlashAttentionLayer(nn.Module):
    """Attention by `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        attention_dropout_prob: probability with which an attention weight is set to 0.
        attention_head_size: features of a head; needed with scale_attention_scores.
        scale_attention_scores: divide scores by the square root of attention_head_size?
        scale_attn_by_layer_idx: divide scores by layer_idx + 1, too?
        layer_idx: number of the layer, from 0; needed with scale_attn_by_layer_idx.
        scale: factor of the scores, in place of the three arguments before.
        triton_flash_attention: use no dropout, and allow masks and use_alibi, as that kernel does.
        use_alibi: the mask has the position biases of ALiBi; needs triton_flash_attention.

    Raises:
        SMPUsageError: arguments contradict each other.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        if scale is None:
            scale = 1.0
            if scale_attention_scores:
                if attention_head_size is None:
                    raise SMPUsageError(
                        "FlashAttentionLayer: scale_attention_scores needs attention_head_size"
                    )
                scale /= math.sqrt(attention_head_size)
            if scale_attn_by_layer_idx:
                if layer_idx is None:
                    raise SMPUsageError(
                        "FlashAttentionLayer: scale_attn_by_layer_idx needs layer_idx"
                    )
                scale /= layer_idx + 1
        if use_alibi and not triton_flash_attention:
            raise SMPUsageError("FlashAttentionLayer: use_alibi needs triton_flash_attention=True")
        self.scale, self.use_alibi = scale, use_alibi
        self.attention_dropout_prob = 0.0 if triton_flash_attention else attention_dropout_prob
        self.triton_flash_attention = triton_flash_attention

    def forward(self, qkv: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Returns the weighted sums of values.

        Args:
            qkv: [B, S, 3, heads, d], queries, keys and values.
            attn_mask: is added to the scores, [B, 1, 1, S] or [B, heads, S, S]; None masks nothing.
            causal: does a position see those before it and itself only?

        Returns:
            Tensor [B, heads, S, d].

        Raises:
            SMPUsageError: qkv has another shape, or there is a mask that the layer cannot use.
        """
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise SMPUsageError(
                f"FlashAttentionLayer takes qkv [B, S, 3, heads, d], not {list(qkv.shape)}"
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            raise SMPUsageError(
                "FlashAttentionLayer: attn_mask is added to the scores, and cannot be of bool"
            )
        if attn_mask is not None and not (self.triton_flash_attention and self.use_alibi):
            raise SMPUsageError(
                "FlashAttentionLayer: attn_mask needs triton_flash_attention=True and "
                "use_alibi=True"
            )
        query, key, value = (x.transpose(1, 2) for x in qkv.unbind(2))
        if attn_mask is not None:
            attn_mask = attn_mask.to(query.dtype)
            if causal:
                length = query.shape[-2]
                seen = visible(length, length, None, query.device)
                attn_mask, causal = attn_mask.masked_fill(~seen, -math.inf), False
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=self.attention_dropout_prob if self.training else 0.0,
            is_causal=causal,
            scale=self.scale,
        )
