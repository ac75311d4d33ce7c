"""A transformer layer, and a stack of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.tensor.arguments import check_arguments
from smddp.modelparallel.torch.tensor.transformer.attention import DistributedAttentionLayer
from smddp.modelparallel.torch.tensor.transformer.feed_forward import (
    DistributedTransformerOutputLayer,
    FeedForward,
    add_residual,
)
from smddp.modelparallel.torch.tensor.transformer.options import arguments_of, unpack
from smddp.modelparallel.torch.tensor.transformer.sequence import HiddenStatesModule

__all__ = ["DistributedTransformer", "DistributedTransformerLayer"]

_SELF = ("hidden_states", "attention_mask")
_CROSS = ("hidden_states", "cross_states", "attention_mask", "cross_mask")
# Positions may follow. They are in the tuple because layers pass it on to each other.
_FORMS = (_SELF, (*_SELF, "positions"))
_FORMS_OF_CROSS = (_CROSS, (*_CROSS, "positions"), *_FORMS)


class DistributedTransformerLayer(HiddenStatesModule):
    """Attention, cross-attention if there is one, and the feed-forward part.

    Args:
        num_attention_heads: see `DistributedAttentionLayer`, as for all that is not described here.
        attention_head_size: see there.
        hidden_size: see there.
        intermediate_size: see `DistributedTransformerOutputLayer`.
        attention_dropout_prob: see `DistributedAttentionLayer`.
        hidden_dropout_prob: see there.
        activation: see `DistributedTransformerOutputLayer`.
        layernorm_epsilon: is added to variances.
        initializer_range: see `DistributedAttentionLayer`.
        use_normal_initialization: see there.
        causal_mask_size: see there; not for the cross-attention.
        add_cross_attention: add it, after the self-attention?
        pre_layernorm: normalize the input of each part?
        post_layernorm: normalize the output of each part?
        parallel_attn_output: let attention and feed-forward part read the same normalized input,
            and add both to the residual, as in GPT-J? Needs pre_layernorm alone.
        use_alibi: see `DistributedAttentionLayer`; not for the cross-attention.
        sequence_parallel: see `DistributedAttentionLayer`.

    Raises:
        SMPUsageError: an argument is wrong.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        query_key_value_bias: bool = True,
        dense_bias: bool = True,
        parallel_attn_output: bool = False,
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
        fused_bias_gelu: bool = False,
        fused_dropout: bool = False,
        zero_init: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        given = dict(locals())
        owner = "DistributedTransformerLayer"
        check_arguments(owner, given)
        alone = pre_layernorm and not post_layernorm and not add_cross_attention
        if parallel_attn_output and not alone:
            raise SMPUsageError(
                f"{owner}: parallel_attn_output needs pre_layernorm=True, post_layernorm=False and "
                "add_cross_attention=False"
            )
        super().__init__(sequence_parallel)
        self.attention = self.inside(
            DistributedAttentionLayer(**arguments_of(DistributedAttentionLayer, given))
        )
        self.cross_attention: DistributedAttentionLayer | None = None
        if add_cross_attention:
            of_self = dict.fromkeys(("causal_mask_size", "rotary_dim", "window_size"))
            changed = {**given, **of_self, "use_alibi": False, "cross_attention": True}
            self.cross_attention = self.inside(
                DistributedAttentionLayer(**arguments_of(DistributedAttentionLayer, changed))
            )
        kind = FeedForward if parallel_attn_output else DistributedTransformerOutputLayer
        self.output = self.inside(kind(**arguments_of(kind, given)))
        self.parallel_attn_output = parallel_attn_output
        self.fp32_residual_addition = fp32_residual_addition

    def forward(
        self, inputs: tuple[Tensor | None, ...] | None = None, **named: Any
    ) -> tuple[Any, ...]:
        """Computes the layer.

        Args:
            inputs: (hidden_states, attention_mask), or with add_cross_attention (hidden_states,
                cross_states, attention_mask, cross_mask). States are this rank's [B, S, H], masks
                are added to the scores, [B, 1, 1, S] or [B, 1, S, S], and may be None. If
                cross_states is None or missing with its mask, there is no cross-attention. The
                positions of `DistributedAttentionLayer` may follow.
            named: must be empty.

        Returns:
            The same tuple, with other hidden_states.

        Raises:
            SMPUsageError: the inputs are others.
        """
        forms = _FORMS if self.cross_attention is None else _FORMS_OF_CROSS
        hidden, *others = unpack("DistributedTransformerLayer", inputs, named, *forms)
        states, mask, cross_mask = others[:3] if len(others) > 2 else (None, others[0], None)
        positions = others[-1] if len(others) % 2 == 0 else None
        hidden = self.shortened(hidden)
        if self.parallel_attn_output:
            return (self.lengthened(self._parallel(hidden, mask, positions)), *others)
        hidden = self.attention((hidden, mask), positions)
        if self.cross_attention is not None and states is not None:
            hidden = self.cross_attention((hidden, states, cross_mask))
        return (self.lengthened(self.output(hidden)), *others)

    def _parallel(self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        everything = self.sequence.gather(self.attention.normalized(hidden))
        y = self.attention.attended(everything, everything, mask, positions)
        y = y + self.output.transformed(everything)
        return add_residual(hidden, y, self.fp32_residual_addition)


class DistributedTransformer(HiddenStatesModule):
    """A stack of transformer layers.

    With pre_layernorm and post_layernorm both, the input of the first layer and the output of the
    last one are normalized, too.

    Args:
        num_layers: how many layers.
        window_size: that of all layers, or a sequence with that of each layer; None for all
            positions. See `DistributedAttentionLayer`.
        num_attention_heads: see `DistributedTransformerLayer`, as for all others.

    Attributes:
        seq_layers: the layers, a torch.nn.Sequential.

    Raises:
        SMPUsageError: an argument is wrong.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        query_key_value_bias: bool = True,
        dense_bias: bool = True,
        parallel_attn_output: bool = False,
        rotary_dim: int | None = None,
        window_size: int | Sequence[int | None] | None = None,
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
        fused_bias_gelu: bool = False,
        fused_dropout: bool = False,
        zero_init: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        owner = "DistributedTransformer"
        check_arguments(owner, locals())
        given = arguments_of(DistributedTransformerLayer, dict(locals()))
        windows = window_size if isinstance(window_size, Sequence) else [window_size] * num_layers
        if len(windows) != num_layers:
            raise SMPUsageError(
                f"{owner}: window_size has {len(windows)} entries for num_layers={num_layers}"
            )
        super().__init__(sequence_parallel)
        self.seq_layers = nn.Sequential(
            *[
                self.inside(
                    DistributedTransformerLayer(**{**given, "layer_idx": i, "window_size": window})
                )
                for i, window in enumerate(windows)
            ]
        )
        both = pre_layernorm and post_layernorm
        self.add_cross_attention = add_cross_attention
        self.input_layernorm = self.new_norm(both, hidden_size, layernorm_epsilon)
        self.output_layernorm = self.new_norm(both, hidden_size, layernorm_epsilon)

    def forward(
        self, inputs: tuple[Tensor | None, ...] | None = None, **named: Any
    ) -> tuple[Any, ...]:
        """Computes all layers; takes and returns the tuple of `DistributedTransformerLayer`."""
        forms = _FORMS_OF_CROSS if self.add_cross_attention else _FORMS
        hidden, *others = unpack("DistributedTransformer", inputs, named, *forms)
        hidden = self.shortened(hidden)
        if self.input_layernorm is not None:
            hidden = self.input_layernorm(hidden)
        hidden, *others = self.seq_layers((hidden, *others))
        if self.output_layernorm is not None:
            hidden = self.output_layernorm(hidden)
        return (self.lengthened(hidden), *others)
