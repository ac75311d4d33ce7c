"""GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smddp.modelparallel.torch.tensor.huggingface import layers
from smddp.modelparallel.torch.tensor.huggingface.hooks import (
    Architecture,
    Hooks,
    causal_output,
    check_returned,
    check_tied,
    masked,
    states_output,
    take,
)
from smddp.modelparallel.torch.tensor.huggingface.translation import (
    Rule,
    Translation,
    causal_buffers,
)
from smddp.modelparallel.torch.tensor.transformer.lm_head import DistributedTransformerLMHead

__all__ = [
    "ARCHITECTURE",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_state_dict_to_hf_gpt2",
]

_HF, _SMP = "transformer.h.{i}.", "transformer.seq_layers.{i}."
_TRANSLATION = Translation(
    [
        Rule("transformer.wte.weight", ("word_embedding.weight",)),
        Rule("transformer.wpe.weight", ("position_embedding.weight",)),
        Rule("transformer.ln_f.{kind}", ("layernorm.{kind}",)),
        Rule(f"{_HF}ln_1.{{kind}}", (f"{_SMP}attention.pre_layernorm.{{kind}}",)),
        Rule(f"{_HF}ln_2.{{kind}}", (f"{_SMP}output.pre_layernorm.{{kind}}",)),
        Rule(f"{_HF}ln_cross_attn.{{kind}}", (f"{_SMP}cross_attention.pre_layernorm.{{kind}}",)),
        Rule(
            f"{_HF}attn.c_attn.{{kind}}",
            tuple(f"{_SMP}attention.{name}.{{kind}}" for name in ("query", "key", "value")),
            transposed=True,
        ),
        Rule(f"{_HF}attn.c_proj.{{kind}}", (f"{_SMP}attention.dense.{{kind}}",), transposed=True),
        Rule(
            f"{_HF}crossattention.q_attn.{{kind}}",
            (f"{_SMP}cross_attention.query.{{kind}}",),
            transposed=True,
        ),
        Rule(
            f"{_HF}crossattention.c_attn.{{kind}}",
            tuple(f"{_SMP}cross_attention.{name}.{{kind}}" for name in ("key", "value")),
            transposed=True,
        ),
        Rule(
            f"{_HF}crossattention.c_proj.{{kind}}",
            (f"{_SMP}cross_attention.dense.{{kind}}",),
            transposed=True,
        ),
        Rule(f"{_HF}mlp.c_fc.{{kind}}", (f"{_SMP}output.dense1.{{kind}}",), transposed=True),
        Rule(f"{_HF}mlp.c_proj.{{kind}}", (f"{_SMP}output.dense2.{{kind}}",), transposed=True),
    ],
    dropped=(
        f"{_HF}attn.bias",
        f"{_HF}attn.masked_bias",
        f"{_HF}crossattention.bias",
        f"{_HF}crossattention.masked_bias",
    ),
    tied=(("lm_head.weight", "transformer.wte.weight"),),
)


def translate_state_dict_to_hf_gpt2(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Returns the state dict of GPT2LMHeadModel for that of the divided model.

    Args:
        state_dict: with whole tensors.
        max_seq_len: adds the buffers of causal masks for this length, which releases of
            transformers before 4.31 have in their states; None adds none.

    Raises:
        SMPUsageError: a part of a tensor is missing.
    """
    state = _TRANSLATION.to_hf(state_dict)
    if max_seq_len is None:
        return state

    attention = r"(?P<begin>transformer\.h\.\d+\.(attn|crossattention)\.)c_proj\.weight"
    return causal_buffers(state, attention, max_seq_len, -1e4)


def translate_hf_state_dict_to_smdistributed_gpt2(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Returns the state dict of the divided model for that of GPT2LMHeadModel.

    Args:
        state_dict: with or without buffers of causal masks, which are left out.
        max_seq_len: accepted.

    Raises:
        SMPUsageError: the head does not have the weights of the word embeddings.
    """
    return _TRANSLATION.to_smp(state_dict)


def _arguments(config: Any) -> dict[str, Any]:
    return {
        "num_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "attention_head_size": config.n_embd // config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "vocab_size": config.vocab_size,
        "num_positions": config.n_positions,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.n_positions,
        "add_cross_attention": config.add_cross_attention,
        "pre_layernorm": True,
        "post_layernorm": False,
        "scale_attn_weights": config.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "attention_in_fp32": config.reorder_and_upcast_attn,
    }


def _init(config: Any, head: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    check_returned(config)
    return (), {**_arguments(config), "add_lm_head": head, "return_logits": head}


def init_hook(config: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Maps the arguments of GPT2LMHeadModel."""
    check_tied(config)
    return _init(config, head=True)


def init_hook_of_model(config: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Maps the arguments of GPT2Model."""
    return _init(config, head=False)


def forward_hook(given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Maps the named arguments of the forward methods."""
    ids, mask, types, positions, states, states_mask, labels = take(
        given,
        "GPT-2",
        *("input_ids", "attention_mask", "token_type_ids", "position_ids"),
        *("encoder_hidden_states", "encoder_attention_mask", "labels"),
    )
    cross = () if states is None else (states, masked(states_mask))
    return ((ids, masked(mask), types, positions, *cross, labels),), {}


_MODULE = "transformers.models.gpt2.modeling_gpt2"
ARCHITECTURE = Architecture(
    (
        Hooks(
            _MODULE,
            "GPT2LMHeadModel",
            DistributedTransformerLMHead,
            init_hook,
            forward_hook,
            causal_output,
        ),
        Hooks(
            _MODULE,
            "GPT2Model",
            DistributedTransformerLMHead,
            init_hook_of_model,
            forward_hook,
            states_output,
            "transformer.",
        ),
        layers.hooks(
            *(_MODULE, "GPT2Block", _arguments, "transformer.h.0.", "transformer.seq_layers.0.")
        ),
    ),
    translate_state_dict_to_hf_gpt2,
    translate_hf_state_dict_to_smdistributed_gpt2,
)
