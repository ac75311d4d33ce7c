"""The attention of a transformer layer, with its heads divided over ranks."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.tensor.arguments import check_arguments
from smddp.modelparallel.torch.tensor.transformer.divided import (
    Contracting,
    Expanding,
    initializer,
)
from smddp.modelparallel.torch.tensor.transformer.feed_forward import add_residual
from smddp.modelparallel.torch.tensor.transformer.flash import alibi, visible
from smddp.modelparallel.torch.tensor.transformer.options import (
    MASKED,
    at_least_fp32,
    check_divides,
    check_ids,
    check_mask,
    unpack,
)
from smddp.modelparallel.torch.tensor.transformer.sequence import HiddenStatesModule

__all__ = ["DistributedAttentionLayer"]

_OWNER = "DistributedAttentionLayer"


class DistributedAttentionLayer(HiddenStatesModule):
    """Self-attention or cross-attention, with norm, dropout and residual.

    Each rank computes some of the heads, for the examples of all ranks.

    Args:
        num_attention_heads: of all ranks; a multiple of the tensor-parallel degree.
        attention_head_size: features of a head.
        hidden_size: features of input and output.
        attention_dropout_prob: probability with which an attention weight is set to 0. Each rank
            draws for its own heads, so the numbers depend on the tensor-parallel degree.
        hidden_dropout_prob: probability with which a feature is set to 0 before the residual.
        layernorm_epsilon: is added to variances.
        initializer_range: standard deviation of weights with use_normal_initialization.
        use_normal_initialization: draw weights from a normal distribution? By default they are
            drawn as by torch.nn.Linear.
        cross_attention: do keys and values come from other states?
        causal_mask_size: the largest length of a sequence, whose positions see those before them
            and themselves only; None lets them see all. Self-attention only.
        pre_layernorm: normalize what is attended to? The residual is not normalized.
        post_layernorm: normalize the sum?
        query_key_value_bias: add biases to queries, keys and values?
        dense_bias: add a bias to the result?
        rotary_dim: features of each head that are rotated by its position, in pairs of neighbours,
            as in GPT-J; None rotates none.
        window_size: how many positions a causal position sees; None for all.
        layer_idx: the number of the layer, from 0, for the next option and query_key_layer_scaling.
        scale_attn_weights: divide scores by the square root of attention_head_size?
        scale_attn_by_inverse_layer_idx: divide scores by layer_idx + 1, too?
        query_key_layer_scaling: divide scores by layer_idx + 1, and multiply them again in fp32?
            The result is the same; scores in fp16 do not overflow.
        attention_in_fp32: compute scores and sums in fp32?
        fp32_residual_addition: see `DistributedTransformerOutputLayer`.
        flash_attention: do not store the weights of attention; query_key_layer_scaling has no
            effect then.
        triton_flash_attention: accepted.
        use_alibi: add biases that fall with the distance of positions? Self-attention only.
        alibi_bias_max: exponent of their smallest slope.
        fused_softmax: accepted.
        fused_dropout: accepted.
        zero_init: see `DistributedTransformerOutputLayer`.
        sequence_parallel: with a prescaled batch, give each rank a part of the sequence for norm,
            dropout and residual? Input and result are whole. See the guide, "Sequence parallelism".

    Raises:
        SMPUsageError: an argument is wrong.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        query_key_value_bias: bool = True,
        dense_bias: bool = True,
        rotary_dim: int | None = None,
        window_size: int | None = None,
        layer_idx: int | None = None,
        scale_attn_weights: bool = True,
        scale_attn_by_inverse_layer_idx: bool = False,
        query_key_layer_scaling: bool = False,
        attention_in_fp32: bool = False,
        fp32_residual_addition: bool = False,
        flash_attention: bool = True,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
        alibi_bias_max: int = 8,
        fused_softmax: bool = True,
        fused_dropout: bool = False,
        zero_init: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        check_arguments(_OWNER, locals())
        super().__init__(sequence_parallel)
        check_divides(_OWNER, "num_attention_heads", num_attention_heads, self.exchange.size)
        if cross_attention and (causal_mask_size is not None or use_alibi or rotary_dim):
            raise SMPUsageError(
                f"{_OWNER}: causal_mask_size, use_alibi and rotary_dim are for self-attention; "
                "leave them out with cross_attention=True"
            )
        if rotary_dim is not None and (rotary_dim % 2 or rotary_dim > attention_head_size):
            raise SMPUsageError(
                f"{_OWNER}: rotary_dim={rotary_dim} must be even, and at most attention_head_size="
                f"{attention_head_size}"
            )
        if window_size is not None and causal_mask_size is None:
            raise SMPUsageError(f"{_OWNER}: window_size={window_size} needs causal_mask_size")
        if layer_idx is None and (scale_attn_by_inverse_layer_idx or query_key_layer_scaling):
            raise SMPUsageError(
                f"{_OWNER}: scale_attn_by_inverse_layer_idx and query_key_layer_scaling need "
                "layer_idx"
            )
        self.num_attention_heads, self.attention_head_size = (
            num_attention_heads,
            attention_head_size,
        )
        self.cross_attention, self.causal_mask_size = cross_attention, causal_mask_size
        self.rotary_dim, self.window_size = rotary_dim, window_size
        self.use_alibi, self.alibi_bias_max = use_alibi, alibi_bias_max
        self.attention_in_fp32 = attention_in_fp32
        self.fp32_residual_addition = fp32_residual_addition
        self.flash_attention = flash_attention
        self.scale = 1 / math.sqrt(attention_head_size) if scale_attn_weights else 1.0
        self.divisor = 1
        if layer_idx is not None:
            self.scale /= layer_idx + 1 if scale_attn_by_inverse_layer_idx else 1
            self.divisor = layer_idx + 1 if query_key_layer_scaling else 1

        features = num_attention_heads * attention_head_size
        fill = initializer(initializer_range, use_normal_initialization, zero_init)
        self.query = Expanding(_OWNER, hidden_size, features, query_key_value_bias, fill)
        self.key = Expanding(_OWNER, hidden_size, features, query_key_value_bias, fill)
        self.value = Expanding(_OWNER, hidden_size, features, query_key_value_bias, fill)
        self.dense = Contracting(_OWNER, features, hidden_size, dense_bias, fill, self.sequence)
        self.attention_dropout_prob = attention_dropout_prob
        self.dropout = self.new_dropout(hidden_dropout_prob)
        self.pre_layernorm = self.new_norm(pre_layernorm, hidden_size, layernorm_epsilon)
        self.layernorm = self.new_norm(post_layernorm, hidden_size, layernorm_epsilon)

    def forward(
        self,
        inputs: tuple[Tensor | None, ...] | None = None,
        positions: Tensor | None = None,
        **named: Any,
    ) -> Tensor:
        """Attends.

        Args:
            inputs: (hidden_states, attention_mask), or with cross_attention (hidden_states,
                cross_states, cross_mask). States are this rank's [B, S, H]; masks are added to the
                scores, [B, 1, 1, S] or [B, 1, S, S], and may be None. What is less than -1e4
                counts as -1e4.
            positions: the numbers by which rotary_dim rotates, [B, S] or [1, S]; None counts
                from 0.
            named: must be empty.

        Returns:
            Tensor [B, S, H].

        Raises:
            SMPUsageError: the inputs are others, or the sequence is longer than causal_mask_size.
        """
        if self.cross_attention:
            hidden, states, mask = unpack(
                _OWNER, inputs, named, ("hidden_states", "cross_states", "cross_mask")
            )
            if states is None:
                raise SMPUsageError(f"{_OWNER}: cross attention needs cross_states, not None")
            states = self.exchange.gather(states)
        else:
            (hidden, mask), states = (
                unpack(_OWNER, inputs, named, ("hidden_states", "attention_mask")),
                None,
            )
        hidden = self.shortened(hidden)
        everything = self.sequence.gather(self.normalized(hidden))
        y = self.attended(everything, everything if states is None else states, mask, positions)
        y = add_residual(hidden, y, self.fp32_residual_addition)
        return self.lengthened(y if self.layernorm is None else self.layernorm(y))

    def normalized(self, hidden: Tensor) -> Tensor:
        """Returns what queries are made of."""
        return hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)

    def attended(
        self,
        everything: Tensor,
        states: Tensor,
        mask: Tensor | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Returns the result without residual and norm.

        Args:
            everything: of which queries are made, of all examples, [T * B, S, H].
            states: of which keys and values are made, of all examples.
            mask: of this rank's examples, see `forward`.
            positions: of this rank's examples, see `forward`.
        """
        batch = len(everything) // (1 if self.exchange.prescaled else self.exchange.size)
        check_mask(
            _OWNER,
            "cross_mask" if self.cross_attention else "attention_mask",
            mask,
            (batch, 1, everything.shape[1], states.shape[1]),
            "[B, 1, 1 or queries, keys], and is added to the scores",
            added=True,
        )
        query = self._heads(self.query(everything))
        key, value = self._heads(self.key(states)), self._heads(self.value(states))
        if self.rotary_dim is not None:
            if positions is not None:
                check_ids(_OWNER, "positions", positions, (batch, everything.shape[1]), real=True)
                positions = self.exchange.gather(positions.expand(batch, -1))
            query, key = (_rotated(x, self.rotary_dim, positions) for x in (query, key))
        if mask is not None:
            mask = self.exchange.gather(mask.expand(batch, -1, -1, -1))
        # [T * B, heads / T, S, d]
        weighted = self._weighted(query, key, value, mask)
        y: Tensor = self.dropout(self.dense(weighted.transpose(1, 2).flatten(2)))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.attention_head_size).transpose(1, 2)

    def _weighted(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        dtype = value.dtype
        if self.attention_in_fp32:
            query, key, value = (at_least_fp32(x) for x in (query, key, value))
        bias, causal = self._bias(query, key, mask)
        dropout = self.attention_dropout_prob if self.training else 0.0
        with self._own_numbers(dropout):
            if self.flash_attention:
                y = F.scaled_dot_product_attention(
                    *(query, key, value, bias, dropout), is_causal=causal, scale=self.scale
                )
            else:
                y = self._explicit(query, key, value, bias, causal, dropout)
        return y.to(dtype)

    def _explicit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        causal: bool,
        dropout: float,
    ) -> Tensor:
        """Computes all weights of attention."""
        scores = (query * (self.scale / self.divisor)) @ key.transpose(-1, -2)
        if self.divisor != 1:
            scores = at_least_fp32(scores) * self.divisor
        if causal:
            seen = visible(query.shape[-2], key.shape[-2], None, scores.device)
            scores = scores.masked_fill(~seen, -math.inf)
        if bias is not None:
            scores = scores + bias
        weights = at_least_fp32(scores).softmax(-1).to(value.dtype)
        return F.dropout(weights, dropout) @ value

    def _bias(self, query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor | None, bool]:
        """Returns what to add to the scores, and whether they still need a causal mask."""
        queries, keys, causal = query.shape[-2], key.shape[-2], self.causal_mask_size is not None
        if self.causal_mask_size is not None and queries > self.causal_mask_size:
            raise SMPUsageError(
                f"{_OWNER}: the sequence has {queries} positions, more than causal_mask_size="
                f"{self.causal_mask_size}"
            )
        bias = None
        if mask is not None:
            bias = mask.to(query.dtype).clamp(min=MASKED)
        if self.use_alibi:
            heads = query.shape[1]
            distances = alibi(
                self.num_attention_heads,
                heads * self.exchange.rank,
                heads,
                queries,
                keys,
                self.alibi_bias_max,
                query,
            )
            bias = distances if bias is None else bias + distances
        if causal and (bias is not None or self.window_size is not None):
            seen = visible(queries, keys, self.window_size, query.device)
            if bias is None:
                bias = query.new_zeros(1, 1, queries, keys)
            bias, causal = bias.masked_fill(~seen, -math.inf), False
        return bias, causal

    def _own_numbers(self, dropout: float) -> contextlib.AbstractContextManager[Any]:
        """Lets ranks draw different numbers for their heads, and the same ones afterwards."""
        return self.own_random_numbers() if dropout else contextlib.nullcontext()


def _rotated(x: Tensor, count: int, positions: Tensor | None) -> Tensor:
    """Rotates pairs of the first features of [B, heads, S, d] by angles that grow with [B, S]."""
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)[None]
    exponents = torch.arange(0, count, 2, dtype=torch.int64, device=x.device) / count
    angles = positions[:, None, :, None].float() * (1.0 / 10000**exponents)  # [B, 1, S, count / 2]
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    even, odd = x[..., :count:2], x[..., 1:count:2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((turned, x[..., count:]), -1)
