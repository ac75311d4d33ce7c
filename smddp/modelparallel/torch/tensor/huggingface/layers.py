"""Layers that are divided one by one: the model around them is not, or only in part."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.tensor.huggingface.hooks import (
    Hooks,
    check_attention,
    score_mask,
    take,
)
from smddp.modelparallel.torch.tensor.transformer.layers import DistributedTransformerLayer
from smddp.modelparallel.torch.tensor.transformer.options import arguments_of

__all__ = ["forward_hook", "hooks"]

# Arguments that a layer refuses, and the argument of the model that turns each off. Releases differ
# in names.
_REFUSED = {
    **dict.fromkeys(
        ("use_cache", "cache", "past_key_values", "past_key_value", "layer_past"), "use_cache"
    ),
    "output_attentions": "output_attentions",
    "output_hidden_states": "output_hidden_states",
}


def forward_hook(given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Maps the named arguments of a layer's forward method.

    Raises:
        SMPUsageError: one of them cannot be used.
    """
    for name, value in given.items():
        if name in _REFUSED and value is not None and value is not False:
            raise SMPUsageError(
                "a layer that is divided over tensor-parallel ranks has no cache, and its states "
                f"and weights cannot be recorded, so it takes no argument {name}: call the model "
                f"with {_REFUSED[name]}=False, or set that in its configuration"
            )
    hidden, mask, states, states_mask, positions, angles = take(
        given,
        "a layer",
        *("hidden_states", "attention_mask", "encoder_hidden_states", "encoder_attention_mask"),
        *("position_ids", "position_embeddings"),  # the second has the angles for the first
    )
    if positions is None and angles is not None:
        raise SMPUsageError(
            "a layer that is divided over tensor-parallel ranks needs position_ids, not "
            "position_embeddings alone"
        )
    mask = score_mask(mask, hidden, hidden.shape[1])
    places = () if positions is None else (positions,)
    if states is None:
        return ((hidden, mask, *places),), {}
    states_mask = score_mask(states_mask, hidden, states.shape[1])
    return ((hidden, states, mask, states_mask, *places),), {}


def return_hook(module_cls: type) -> Callable[[tuple[Any, ...]], Any]:
    """Returns what maps the tuple of `DistributedTransformerLayer` to the result of a class.

    It is a tensor, or in older releases a tuple with the tensor first.
    """
    kind = inspect.signature(module_cls.forward).return_annotation  # type: ignore[attr-defined]
    if kind is Tensor:
        return lambda returned: returned[0]
    return lambda returned: (returned[0], None)


def hooks(
    module: str, name: str, arguments: Callable[[Any], dict[str, Any]], prefix: str, own_prefix: str
) -> Hooks:
    """Returns those of a layer.

    Args:
        module: where the class is.
        name: of the class.
        arguments: returns those of a transformer with such layers, for a configuration.
        prefix: see `Hooks`.
        own_prefix: see `Hooks`.
    """

    def init(config: Any, layer_idx: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        check_attention(config)
        given = arguments_of(DistributedTransformerLayer, arguments(config))
        if given.get("window_size") is not None:
            given["window_size"] = given["window_size"][layer_idx]
        return (), {**given, "layer_idx": layer_idx}

    return Hooks(
        *(module, name, DistributedTransformerLayer, init, forward_hook, return_hook),
        *(prefix, own_prefix),
    )
