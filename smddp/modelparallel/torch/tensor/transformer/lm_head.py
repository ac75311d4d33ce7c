"""A whole language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.tensor.arguments import check_arguments
from smddp.modelparallel.torch.tensor.transformer.divided import (
    IGNORED,
    Vocabulary,
    initializer,
)
from smddp.modelparallel.torch.tensor.transformer.layers import DistributedTransformer
from smddp.modelparallel.torch.tensor.transformer.options import (
    additive,
    arguments_of,
    at_least_fp32,
    check_ids,
    check_mask,
    unpack,
)
from smddp.modelparallel.torch.tensor.transformer.sequence import HiddenStatesModule

__all__ = ["DistributedTransformerLMHead"]

_OWNER = "DistributedTransformerLMHead"
_BEGIN = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_SELF = (*_BEGIN, "labels")
_CROSS = (*_BEGIN, "cross_states", "cross_mask", "labels")


class DistributedTransformerLMHead(HiddenStatesModule):
    """Embeddings, a transformer, and logits or a loss of a language model.

    With post_layernorm alone, the sum of the embeddings is normalized; with pre_layernorm alone,
    the output of the last layer; with both, the transformer normalizes both.

    Args:
        num_layers: see `DistributedTransformer`, as for all that is not described here.
        vocab_size: number of tokens.
        num_positions: number of positions that have a vector; with rotary_dim or use_alibi, none
            has one.
        hidden_dropout_prob: probability with which a feature is set to 0 before residuals.
        num_token_types: how many types of tokens have a vector; 0 for none.
        add_lm_head: return logits or a loss? Otherwise it returns hidden states.
        embedding_dropout_prob: probability with which a feature of the embeddings is set to 0; None
            for that of hidden_dropout_prob.
        tie_word_embeddings: does the head have the weights of the word embeddings?
        lm_head_bias: does the head add a bias to logits? Needs tie_word_embeddings=False.
        distribute_embedding: divide the vocabulary over ranks, for word embeddings and head?
            Otherwise each rank has all of it. With a loss, this needs less memory and time.
        return_logits: with labels, return (loss, logits), and not the loss alone?

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
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        embedding_dropout_prob: float | None = None,
        tie_word_embeddings: bool = True,
        lm_head_bias: bool = False,
        distribute_embedding: bool = False,
        return_logits: bool = False,
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
        given = dict(locals())
        check_arguments(_OWNER, given)
        if lm_head_bias and tie_word_embeddings:
            raise SMPUsageError(f"{_OWNER}: lm_head_bias needs tie_word_embeddings=False")
        super().__init__(sequence_parallel)
        fill = initializer(initializer_range, use_normal_initialization, zero_init)
        # As DistributedEmbedding. The standard deviation of torch, 1, would give a head with the
        # same weights much too large logits.
        fill_embedding = initializer(initializer_range, True, zero_init)

        def embedding(count: int) -> nn.Embedding:
            result = nn.Embedding(count, hidden_size)
            with torch.no_grad():
                fill_embedding(result.weight)
            return result

        self.word_embedding: Vocabulary | nn.Embedding
        self.lm_head: Vocabulary | nn.Linear | None = None
        apart = add_lm_head and not tie_word_embeddings
        if distribute_embedding:
            self.word_embedding = Vocabulary(_OWNER, vocab_size, hidden_size, False, fill_embedding)
            if apart:
                self.lm_head = Vocabulary(_OWNER, vocab_size, hidden_size, lm_head_bias, fill)
        else:
            self.word_embedding = embedding(vocab_size)
            if apart:
                self.lm_head = nn.Linear(hidden_size, vocab_size, lm_head_bias)
                if zero_init or use_normal_initialization:
                    with torch.no_grad():
                        fill(self.lm_head.weight)
        positions = rotary_dim is None and not use_alibi
        self.position_embedding = embedding(num_positions) if positions else None
        self.token_type_embedding = embedding(num_token_types) if num_token_types else None
        one = pre_layernorm != post_layernorm
        self.layernorm = self.new_norm(one, hidden_size, layernorm_epsilon)
        self.dropout = self.new_dropout(
            hidden_dropout_prob if embedding_dropout_prob is None else embedding_dropout_prob
        )
        self.transformer = self.inside(
            DistributedTransformer(**arguments_of(DistributedTransformer, given))
        )
        self.pre_layernorm, self.add_lm_head = pre_layernorm, add_lm_head
        self.add_cross_attention, self.return_logits = add_cross_attention, return_logits
        self.causal, self.rotary = causal_mask_size is not None, rotary_dim is not None

    def forward(self, inputs: tuple[Tensor | None, ...] | None = None, **named: Any) -> Any:
        """Computes hidden states, logits, or a loss, of this rank's examples.

        Args:
            inputs: (input_ids, attention_mask, token_type_ids, position_ids, labels), or with
                add_cross_attention (input_ids, attention_mask, token_type_ids, position_ids,
                cross_states, cross_mask, labels). Ids and labels are [B, S], types and positions
                also [1, S]; masks are [B, S], with 1 where a token is masked; cross_states are
                [B, S2, H]. All but input_ids may be None. If cross_states is None or missing with
                its mask, there is no cross-attention. Positions without a label, as in padding,
                have the label -100.
            named: must be empty.

        Returns:
            Without labels the logits [B, S, vocab_size], or the hidden states [B, S, H] if there is
            no head. With labels the mean cross entropy, or with return_logits a pair (loss,
            logits). With a causal mask the label of a position is the token itself: the prediction
            at each position is compared to the label of the next one.

        Raises:
            SMPUsageError: the inputs are others.
        """
        forms = (_CROSS, _SELF) if self.add_cross_attention else (_SELF,)
        ids, mask, types, positions, *cross, labels = unpack(_OWNER, inputs, named, *forms)
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            found = list(ids.shape) if isinstance(ids, Tensor) else ids
            raise SMPUsageError(f"{_OWNER}: input_ids has to be [B, S]; it is {found}")
        if labels is not None and not self.add_lm_head:
            raise SMPUsageError(f"{_OWNER}: labels need add_lm_head=True")
        shape = tuple(ids.shape)
        check_ids(_OWNER, "input_ids", ids, shape)
        check_ids(_OWNER, "token_type_ids", types, shape)
        check_ids(_OWNER, "position_ids", positions, shape, real=self.rotary)
        check_ids(_OWNER, "labels", labels, shape, whole=True)
        masked = "[B, S], with 1 for a masked token"
        check_mask(_OWNER, "attention_mask", mask, shape, masked)
        hidden = self._embedded(ids, types, positions)
        others = [_score_mask(mask, hidden.dtype)]
        if cross:
            states, cross_mask = cross
            if states is not None:
                check_mask(_OWNER, "cross_mask", cross_mask, tuple(states.shape[:2]), masked)
            others = [states, *others, _score_mask(cross_mask, hidden.dtype)]
        if self.rotary and positions is not None:
            others.append(positions)
        hidden = self.transformer((hidden, *others))[0]
        if self.layernorm is not None and self.pre_layernorm:
            hidden = self.layernorm(hidden)
        if not self.add_lm_head:
            return self.lengthened(hidden)
        if labels is not None and self.causal:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return self._head(hidden, labels)

    def _embedded(self, ids: Tensor, types: Tensor | None, positions: Tensor | None) -> Tensor:
        hidden: Tensor = self.word_embedding(ids)
        if self.position_embedding is not None:
            count = self.position_embedding.num_embeddings
            if positions is None:
                if ids.shape[1] > count:
                    raise SMPUsageError(
                        f"{_OWNER}: the sequence has {ids.shape[1]} positions, more than "
                        f"num_positions={count}"
                    )
                positions = torch.arange(ids.shape[1], device=ids.device)[None]
            hidden = hidden + self.position_embedding(positions)
        elif positions is not None and not self.rotary:
            raise SMPUsageError(
                f"{_OWNER}: positions are counted from 0 with use_alibi; pass None for position_ids"
            )
        if self.token_type_embedding is not None:
            types = torch.zeros_like(ids) if types is None else types
            hidden = hidden + self.token_type_embedding(types)
        elif types is not None:
            raise SMPUsageError(f"{_OWNER}: token_type_ids need num_token_types")
        hidden = self.shortened(hidden)
        if self.layernorm is not None and not self.pre_layernorm:
            hidden = self.layernorm(hidden)
        result: Tensor = self.dropout(hidden)
        return result

    def _head(self, hidden: Tensor, labels: Tensor | None) -> Any:
        head = self.word_embedding if self.lm_head is None else self.lm_head
        if not isinstance(head, Vocabulary):
            hidden = self.lengthened(hidden)
            logits = F.linear(hidden, head.weight, getattr(head, "bias", None))
            if labels is None:
                return logits
            loss = F.cross_entropy(
                at_least_fp32(logits).flatten(0, -2), labels.flatten(), ignore_index=IGNORED
            )
            return (loss, logits) if self.return_logits else loss
        parts = head.logits(self.sequence.gather(hidden))
        if labels is None:
            return self.exchange.unite(parts)
        loss = head.cross_entropy(parts, labels)
        return (loss, self.exchange.unite(parts)) if self.return_logits else loss


def _score_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns a mask [B, S] with 1 for masked as one to add to scores, [B, 1, 1, S]."""
    return None if mask is None else additive(mask[:, None, None, :], dtype)
