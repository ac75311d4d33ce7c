"""GPT-J."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.tensor.huggingface.causal import hooks, rules
from smddp.modelparallel.torch.tensor.huggingface.hooks import Architecture
from smddp.modelparallel.torch.tensor.huggingface.translation import Translation, causal_buffers

__all__ = [
    "ARCHITECTURE",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
]

_TRANSLATION = Translation(
    rules(
        {
            "ln_1": "attention.pre_layernorm",
            "attn.q_proj": "attention.query",
            "attn.k_proj": "attention.key",
            "attn.v_proj": "attention.value",
            "attn.out_proj": "attention.dense",
            "mlp.fc_in": "output.dense1",
            "mlp.fc_out": "output.dense2",
        }
    ),
    dropped=tuple(
        f"transformer.h.{{i}}.attn.{name}" for name in ("bias", "masked_bias", "embed_positions")
    ),
)


def translate_state_dict_to_hf_gptj(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Returns the state dict of GPTJForCausalLM for that of the divided model.

    Args:
        state_dict: with whole tensors.
        max_seq_len: adds the buffers of causal masks for this length, which old releases of
            transformers have in their states; None adds none.
    """
    state = _TRANSLATION.to_hf(state_dict)
    if max_seq_len is None:
        return state

    return causal_buffers(
        *(state, r"(?P<begin>transformer\.h\.\d+\.attn\.)out_proj\.weight", max_seq_len, -1e9)
    )


def translate_hf_state_dict_to_smdistributed_gptj(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Returns the state dict of the divided model for that of GPTJForCausalLM.

    Args:
        state_dict: with or without buffers, which are left out.
        max_seq_len: accepted.
    """
    return _TRANSLATION.to_smp(state_dict)


def _arguments(config: Any) -> dict[str, Any]:
    if not config.rotary_dim:
        raise SMPUsageError("GPT-J: rotary_dim of the configuration must be a positive number")
    return {
        "num_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "attention_head_size": config.n_embd // config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "vocab_size": config.vocab_size,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.n_positions,
        "rotary_dim": config.rotary_dim,
        "parallel_attn_output": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "query_key_value_bias": False,
        "dense_bias": False,
        "attention_in_fp32": True,
        "tie_word_embeddings": config.tie_word_embeddings,
        "lm_head_bias": True,
    }


ARCHITECTURE = Architecture(
    hooks(
        *("transformers.models.gptj.modeling_gptj", "GPTJForCausalLM", "GPTJModel", "GPTJBlock"),
        _arguments,
    ),
    translate_state_dict_to_hf_gptj,
    translate_hf_state_dict_to_smdistributed_gptj,
)
