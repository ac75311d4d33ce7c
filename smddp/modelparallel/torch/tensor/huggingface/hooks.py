"""What the hooks of all architectures share.

`transformers` is not imported before a model of it exists: smddp does not need it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.job.state import state as job
from smddp.modelparallel.torch.tensor.transformer.layers import DistributedTransformerLayer
from smddp.modelparallel.torch.tensor.transformer.options import additive

__all__ = [
    "Architecture",
    "Hooks",
    "bound",
    "causal_output",
    "check_attention",
    "check_returned",
    "check_tied",
    "masked",
    "score_mask",
    "states_output",
    "take",
]

# Arguments that do not change the results.
_IGNORED = {"use_cache", "cache_position"}
# Arguments that choose what is returned, and the one value that is allowed.
_RETURNED = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}


class Hooks(NamedTuple):
    """A class of transformers, and what takes its place.

    Attributes:
        module: where the class is.
        name: of the class.
        dist_module: the class that takes its place.
        init: maps the arguments of its constructor to those of dist_module.
        forward: maps the named arguments of its forward method to those of dist_module's.
        returned: maps what that returns to what the class returns; if it is a layer, gets the class
            and returns what does so.
        prefix: begins the names of its tensors in the state that the architecture translates.
        own_prefix: begins them after the translation.
    """

    module: str
    name: str
    dist_module: type
    init: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    forward: Callable[[dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    returned: Callable[..., Any]
    prefix: str = ""
    own_prefix: str = ""

    @property
    def of_layer(self) -> bool:
        """Returns whether the class is a layer: its arguments are a configuration and a number."""
        return self.dist_module is DistributedTransformerLayer

    def arguments(self) -> tuple[Any, ...]:
        """Returns the class, what takes its place, and hooks of both methods and the result.

        Imports the class.

        Raises:
            AttributeError: this release of transformers does not have the class.
            ImportError: transformers is not installed.
        """
        module_cls = getattr(importlib.import_module(self.module), self.name)
        return (
            module_cls,
            self.dist_module,
            self.init,
            bound(module_cls, self.forward),
            self.returned(module_cls) if self.of_layer else self.returned,
        )


class Architecture(NamedTuple):
    """What is known of an architecture.

    Attributes:
        hooks: of its classes.
        to_hf: translates a state dict to Hugging Face's names.
        to_smp: translates one from them.
    """

    hooks: tuple[Hooks, ...]
    to_hf: Callable[..., dict[str, Any]]
    to_smp: Callable[..., dict[str, Any]]

    def translations(
        self, hooks: Hooks, place: str
    ) -> tuple[Callable[..., dict[str, Any]], Callable[..., dict[str, Any]]]:
        """Returns `to_hf` and `to_smp` for the state of a model with one divided module.

        Args:
            hooks: of the class of the module.
            place: the name of the module in the model; empty if it is the model.
        """
        begin = f"{place}." if place else ""

        def inside(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
            return {
                f"{prefix}{name.removeprefix(begin)}": value
                for name, value in state.items()
                if name.startswith(begin)
            }

        def placed(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
            others = {name: value for name, value in state.items() if not name.startswith(begin)}
            return {**others, **{f"{begin}{name}": value for name, value in own.items()}}

        def to_hf(state: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
            given = inside(state, hooks.own_prefix)
            own = {
                # Names that no rule changes are Hugging Face's already.
                name.removeprefix(hooks.own_prefix if name in given else hooks.prefix): value
                for name, value in self.to_hf(given, max_seq_len).items()
                # A module without a head does not have what belongs to a language model only.
                if name.startswith(hooks.prefix) or name in given
            }
            return placed(state, own)

        def to_smp(state: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
            given = inside(state, hooks.prefix)
            own = {
                # Names that no rule changes are the module's own already.
                name.removeprefix(hooks.prefix if name in given else hooks.own_prefix): value
                for name, value in self.to_smp(given, max_seq_len).items()
            }
            return placed(state, own)

        return to_hf, to_smp


def bound(module_cls: type, forward: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Returns a hook with the signature of the class's forward method, without self.

    The method has other arguments in other releases of transformers. The hook hands those that are
    given to `forward`, by name.
    """
    signature = inspect.signature(module_cls.forward)  # type: ignore[attr-defined]
    own = signature.replace(parameters=list(signature.parameters.values())[1:])

    def hook(*args: Any, **kwargs: Any) -> Any:
        return forward(dict(_given(own.bind(*args, **kwargs), own)))

    hook.__signature__ = own  # type: ignore[attr-defined]
    return hook


def take(given: dict[str, Any], owner: str, *names: str) -> list[Any]:
    """Returns some arguments, None for those that are missing.

    Raises:
        SMPUsageError: another one is given.
    """
    for name, value in given.items():
        # Releases before 5 pass a head_mask of one None for each layer.
        absent = value is None or (
            isinstance(value, list) and not any(v is not None for v in value)
        )
        if name in _RETURNED:
            if value not in (None, _RETURNED[name]):
                raise SMPUsageError(
                    f"{owner} is divided over tensor-parallel ranks, and then takes no "
                    f"{name}={value}: leave it out, or call it with {name}={_RETURNED[name]}"
                )
        elif name not in names and not absent and name not in _IGNORED:
            raise SMPUsageError(
                f"{owner} is divided over tensor-parallel ranks, and then takes no argument {name}"
            )
    return [given.get(name) for name in names]


def masked(attention_mask: Tensor | None) -> Tensor | None:
    """Returns a mask [B, S] with 1 for masked, of Hugging Face's with 1 for not masked."""
    return None if attention_mask is None else 1 - attention_mask.to(torch.long)


def check_attention(config: Any) -> None:
    """Checks that a model makes masks that a part of it can use that is divided.

    Raises:
        SMPUsageError: it does not.
    """
    kind = getattr(config, "_attn_implementation", None)
    if kind not in (None, "eager", "sdpa"):
        raise SMPUsageError(
            f"{type(config).__name__}: a model with attn_implementation={kind!r} makes masks that "
            'layers that are divided cannot use; choose "sdpa" or "eager"'
        )


def check_returned(config: Any) -> None:
    """Checks that a model returns what one returns that is divided as a whole.

    Raises:
        SMPUsageError: it returns attention weights or states of layers, too, or a tuple.
    """
    for name, value in _RETURNED.items():
        if getattr(config, name, value) != value:
            raise SMPUsageError(
                f"{type(config).__name__}: {name}={not value}, which a model does not return that "
                "is divided as a whole"
            )


def check_tied(config: Any) -> None:
    """Checks that the head of a language model has the weights of its word embeddings.

    Raises:
        SMPUsageError: it has weights of its own.
    """
    if not config.tie_word_embeddings:
        raise SMPUsageError(
            f"{type(config).__name__}: tie_word_embeddings=False, and the head has the weights of "
            "the word embeddings if all of the model is divided"
        )


def score_mask(attention_mask: Tensor | None, hidden: Tensor, keys: int) -> Tensor | None:
    """Returns a mask to add to scores.

    Args:
        attention_mask: of four dimensions, such a one, or True for seen; or None.
        hidden: the states that attend, [B, S, H].
        keys: the number of positions that they attend to.
    """
    mask = attention_mask
    if mask is not None:
        mask = additive(~mask, hidden.dtype) if mask.dtype == torch.bool else mask.to(hidden.dtype)
    if job.cfg.prescaled_batch or job.topology.tp_size == 1:
        return mask
    # A model passes None if no token of its rank's batch is masked, but ranks exchange their masks.
    if mask is None:
        mask = hidden.new_zeros(1, 1, 1, 1)
    return mask.expand(-1, -1, hidden.shape[1], keys)


def causal_output(returned: Any) -> Any:
    """Returns the result of a language model as Hugging Face's class."""
    outputs = importlib.import_module("transformers.modeling_outputs")
    if isinstance(returned, tuple):
        return outputs.CausalLMOutputWithCrossAttentions(loss=returned[0], logits=returned[1])
    if not returned.dim():
        return outputs.CausalLMOutputWithCrossAttentions(loss=returned)
    return outputs.CausalLMOutputWithCrossAttentions(logits=returned)


def states_output(returned: Any) -> Any:
    """Returns hidden states as Hugging Face's class."""
    outputs = importlib.import_module("transformers.modeling_outputs")
    return outputs.BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=returned)


def _given(
    arguments: inspect.BoundArguments, signature: inspect.Signature
) -> Iterator[tuple[str, Any]]:
    """Yields names and values of the arguments that are given, and have an effect."""
    for name, value in arguments.arguments.items():
        if name == "deprecated_arguments":  # position_ids of GPT-J in old releases
            continue
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value
