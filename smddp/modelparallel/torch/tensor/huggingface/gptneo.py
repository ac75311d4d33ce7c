"""GPT-Neo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smddp.modelparallel.torch.tensor.huggingface.causal import hooks, rules
from smddp.modelparallel.torch.tensor.huggingface.hooks import Architecture
from smddp.modelparallel.torch.tensor.huggingface.translation import Rule, Translation

__all__ = [
    "ARCHITECTURE",
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
]

_TRANSLATION = Translation(
    [
        Rule("transformer.wpe.weight", ("position_embedding.weight",)),
        *rules(
            {
                "ln_1": "attention.pre_layernorm",
                "ln_2": "output.pre_layernorm",
                "attn.attention.q_proj": "attention.query",
                "attn.attention.k_proj": "attention.key",
                "attn.attention.v_proj": "attention.value",
                "attn.attention.out_proj": "attention.dense",
                "mlp.c_fc": "output.dense1",
                "mlp.c_proj": "output.dense2",
            }
        ),
    ],
    dropped=tuple(f"transformer.h.{{i}}.attn.attention.{name}" for name in ("bias", "masked_bias")),
    tied=(("lm_head.weight", "transformer.wte.weight"),),
)


def translate_state_dict_to_hf_gptneo(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Returns the state dict of GPTNeoForCausalLM for that of the divided model.

    Args:
        state_dict: with whole tensors.
        max_seq_len: accepted. Masks of GPT-Neo depend on its configuration, too; its constructor
            makes them, and loading does not need them.
    """
    return _TRANSLATION.to_hf(state_dict)


def translate_hf_state_dict_to_smdistributed_gptneo(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Returns the state dict of the divided model for that of GPTNeoForCausalLM.

    Args:
        state_dict: with or without buffers of causal masks, which are left out.
        max_seq_len: accepted.

    Raises:
        SMPUsageError: the head does not have the weights of the word embeddings.
    """
    return _TRANSLATION.to_smp(state_dict)


def _arguments(config: Any) -> dict[str, Any]:
    windows = [config.window_size if kind == "local" else None for kind in config.attention_layers]
    return {
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "attention_head_size": config.hidden_size // config.num_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.resid_dropout,
        "embedding_dropout_prob": config.embed_dropout,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "window_size": windows,
        "pre_layernorm": True,
        "post_layernorm": False,
        "query_key_value_bias": False,
        "scale_attn_weights": False,
        "attention_in_fp32": True,
    }


ARCHITECTURE = Architecture(
    hooks(
        *("transformers.models.gpt_neo.modeling_gpt_neo", "GPTNeoForCausalLM", "GPTNeoModel"),
        *("GPTNeoBlock", _arguments),
    ),
    translate_state_dict_to_hf_gptneo,
    translate_hf_state_dict_to_smdistributed_gptneo,
)
