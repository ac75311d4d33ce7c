"""What GPT-J and GPT-Neo share."""

from __future__ import annotations

from typing import Any

from smddp.modelparallel.torch.tensor.huggingface import layers
from smddp.modelparallel.torch.tensor.huggingface.hooks import (
    Hooks,
    causal_output,
    check_returned,
    check_tied,
    masked,
    states_output,
    take,
)
from smddp.modelparallel.torch.tensor.huggingface.translation import Rule
from smddp.modelparallel.torch.tensor.transformer.lm_head import DistributedTransformerLMHead

__all__ = ["forward_hook", "hooks", "rules"]


def rules(names: dict[str, str]) -> list[Rule]:
    """Returns rules for tensors of layers, by name in Hugging Face's layer."""
    return [
        Rule("transformer.wte.weight", ("word_embedding.weight",)),
        Rule("transformer.ln_f.{kind}", ("layernorm.{kind}",)),
        *(
            Rule(
                f"transformer.h.{{i}}.{theirs}.{{kind}}",
                (f"transformer.seq_layers.{{i}}.{own}.{{kind}}",),
            )
            for theirs, own in names.items()
        ),
    ]


def forward_hook(given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Maps the named arguments of the forward methods."""
    ids, mask, types, positions, labels = take(
        given,
        "the model",
        *("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"),
    )
    return ((ids, masked(mask), types, positions, labels),), {}


def hooks(module: str, name: str, model: str, layer: str, init: Any) -> tuple[Hooks, ...]:
    """Returns those of a language model, of its inner model, and of its layers.

    Args:
        module: where the classes are.
        name: of the language model's class.
        model: name of the inner model's class.
        layer: name of the layer's class.
        init: maps a configuration to arguments.
    """

    def of_head(config: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        check_returned(config)
        arguments = {**init(config), "add_lm_head": True, "return_logits": True}
        if "tie_word_embeddings" not in arguments:
            check_tied(config)
        return (), arguments

    def of_model(config: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        check_returned(config)
        return (), {
            **init(config),
            "add_lm_head": False,
            "tie_word_embeddings": True,
            "lm_head_bias": False,
        }

    kind = DistributedTransformerLMHead
    return (
        Hooks(module, name, kind, of_head, forward_hook, causal_output),
        Hooks(module, model, kind, of_model, forward_hook, states_output, "transformer."),
        layers.hooks(module, layer, init, "transformer.h.0.", "transformer.seq_layers.0."),
    )
