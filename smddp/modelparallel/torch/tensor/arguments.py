"""Checks of arguments that several classes of `smp.nn` have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from smddp.modelparallel.core.errors import SMPUsageError

__all__ = ["check_arguments"]


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_int(value) and value > 0


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_probability(value: Any) -> bool:
    return isinstance(value, Real) and 0 <= float(value) <= 1


def _is_deviation(value: Any) -> bool:
    return isinstance(value, Real) and float(value) >= 0


# Description of a kind of argument -> a check, and the names of these arguments.
_KINDS: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "a positive integer": (
        _is_size,
        (
            *("in_features", "out_features", "num_embeddings", "embedding_dim"),
            *("num_layers", "num_attention_heads", "attention_head_size", "hidden_size"),
            *("intermediate_size", "vocab_size", "num_positions", "causal_mask_size"),
            *("window_size", "rotary_dim", "alibi_bias_max"),
        ),
    ),
    "an integer that is not negative": (_is_count, ("num_token_types", "layer_idx")),
    "a number from 0 to 1": (
        _is_probability,
        ("attention_dropout_prob", "hidden_dropout_prob", "embedding_dropout_prob"),
    ),
    "a number that is not negative": (_is_deviation, ("initializer_range", "layernorm_epsilon")),
}
# None is their default.
_MAY_BE_NONE = (
    *("causal_mask_size", "window_size", "rotary_dim", "layer_idx"),
    *("embedding_dropout_prob", "initializer_range"),
)


def check_arguments(owner: str, given: Mapping[str, Any]) -> None:
    """Checks sizes, probabilities and norms.

    Args:
        owner: the class that has the arguments.
        given: values by names; others than those of arguments are ignored.

    Raises:
        SMPUsageError: one is wrong.
    """
    for what, (is_right, names) in _KINDS.items():
        for name in names:
            if name not in given:
                continue
            value = given[name]
            # window_size may have an entry for each layer.
            entries = value if name == "window_size" and isinstance(value, Sequence) else [value]
            if not all(
                is_right(entry) or (entry is None and name in _MAY_BE_NONE) for entry in entries
            ):
                raise SMPUsageError(f"{owner}: {name}={value!r} must be {what}")
    if not given.get("pre_layernorm", True) and not given.get("post_layernorm", True):
        raise SMPUsageError(f"{owner}: set pre_layernorm or post_layernorm (or both) to True")
