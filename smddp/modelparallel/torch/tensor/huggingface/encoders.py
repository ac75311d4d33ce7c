"""What BERT and RoBERTa share: their encoder is divided, embeddings and heads are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.tensor.huggingface import layers
from smddp.modelparallel.torch.tensor.huggingface.hooks import (
    Hooks,
    check_attention,
    check_returned,
    score_mask,
    states_output,
    take,
)
from smddp.modelparallel.torch.tensor.huggingface.translation import Rule, Translation
from smddp.modelparallel.torch.tensor.transformer.layers import DistributedTransformer

__all__ = ["hooks", "to_hf", "to_smp"]

_HF, _SMP = "{prefix}layer.{i}.", "{prefix}seq_layers.{i}."


def _attention(hf: str, smp: str) -> list[Rule]:
    inner = [
        *((f"self.{name}", name) for name in ("query", "key", "value")),
        *(("output.dense", "dense"), ("output.LayerNorm", "layernorm")),
    ]
    return [
        Rule(f"{_HF}{hf}.{theirs}.{{kind}}", (f"{_SMP}{smp}.{own}.{{kind}}",))
        for theirs, own in inner
    ]


_TRANSLATION = Translation(
    [
        *_attention("attention", "attention"),
        *_attention("crossattention", "cross_attention"),
        Rule(f"{_HF}intermediate.dense.{{kind}}", (f"{_SMP}output.dense1.{{kind}}",)),
        Rule(f"{_HF}output.dense.{{kind}}", (f"{_SMP}output.dense2.{{kind}}",)),
        Rule(f"{_HF}output.LayerNorm.{{kind}}", (f"{_SMP}output.layernorm.{{kind}}",)),
    ]
)


def to_hf(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """Returns Hugging Face's state dict for that of a model with a divided encoder.

    Args:
        state_dict: with whole tensors.
        max_seq_len: accepted; there are no buffers of causal masks.
    """
    return _TRANSLATION.to_hf(state_dict)


def to_smp(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """Returns the state dict of a model with a divided encoder for Hugging Face's.

    Args:
        state_dict: of any model with such an encoder.
        max_seq_len: accepted.
    """
    return _TRANSLATION.to_smp(state_dict)


def _arguments(config: Any) -> dict[str, Any]:
    kind = getattr(config, "position_embedding_type", "absolute")  # old releases have others
    if kind != "absolute":
        raise SMPUsageError(
            f"{type(config).__name__}: position_embedding_type={kind!r} changes the attention of "
            'layers, and those that are divided only have "absolute"'
        )
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings if config.is_decoder else None,
        "add_cross_attention": config.add_cross_attention,
        "pre_layernorm": False,
        "post_layernorm": True,
    }


def init_hook(config: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Maps the arguments of an encoder."""
    check_attention(config)
    check_returned(config)
    return (), _arguments(config)


def forward_hook(given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Maps the named arguments of an encoder's forward method."""
    hidden, mask, states, states_mask, _ = take(
        given,
        "the encoder",
        *("hidden_states", "attention_mask", "encoder_hidden_states", "encoder_attention_mask"),
        "position_ids",  # the embeddings hold them
    )
    mask = score_mask(mask, hidden, hidden.shape[1])
    if states is None:
        return ((hidden, mask),), {}
    return ((hidden, states, mask, score_mask(states_mask, hidden, states.shape[1])),), {}


def return_hook(returned: Any) -> Any:
    """Maps the tuple of `DistributedTransformer`."""
    return states_output(returned[0])


def hooks(module: str, name: str, layer: str) -> tuple[Hooks, ...]:
    """Returns those of an encoder and of its layers.

    Args:
        module: where the classes are.
        name: of the encoder's class.
        layer: name of the layer's class.
    """
    return (
        Hooks(module, name, DistributedTransformer, init_hook, forward_hook, return_hook),
        layers.hooks(module, layer, _arguments, "layer.0.", "seq_layers.0."),
    )
