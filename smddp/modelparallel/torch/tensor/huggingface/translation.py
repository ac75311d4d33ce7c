"""Translations of state dicts between names of Hugging Face and those of the transformer family.

Both directions keep every bit. Tensors that only change their name are not copied. Keys that no
rule names stay as they are, so a state that has been translated before is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smddp.modelparallel.core.errors import SMPUsageError

__all__ = ["Rule", "Translation", "causal_buffers"]

# In a name, {prefix} is anything, {i} the number of a layer, {kind} weight or bias.
_FIELDS = {
    "{prefix}": r"(?P<prefix>(?:.*\.)?)",
    "{i}": r"(?P<i>\d+)",
    "{kind}": r"(?P<kind>weight|bias)",
}


class Rule(NamedTuple):
    """How a tensor is called on both sides.

    Attributes:
        hf: its name in Hugging Face's state.
        smp: its name in the family's state. If there are several, the tensor has these as parts,
            side by side along its last dimension.
        transposed: is a matrix transposed on the other side, [in, out] in Hugging Face's?
    """

    hf: str
    smp: tuple[str, ...]
    transposed: bool = False


class Translation:
    """Translates in both directions.

    Args:
        rules: for all tensors whose names or forms differ.
        dropped: names of buffers that only Hugging Face's state has.
        tied: pairs of names in Hugging Face's state. Only the second is in the other state; the
            first is the same tensor.
    """

    def __init__(
        self,
        rules: list[Rule],
        dropped: tuple[str, ...] = (),
        tied: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._from_hf = [(_pattern(rule.hf), rule) for rule in rules]
        self._to_hf = [
            (_pattern(name), rule, number) for rule in rules for number, name in enumerate(rule.smp)
        ]
        self._dropped = [_pattern(name) for name in dropped]
        self._tied = tied

    def to_smp(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state of the family for one of Hugging Face.

        Raises:
            SMPUsageError: tensors that have to be the same one are not.
        """
        result: dict[str, Any] = {}
        for key, value in state.items():
            if any(pattern.fullmatch(key) for pattern in self._dropped):
                continue
            if self._is_tied(key, state):
                continue
            found = _first((pattern.fullmatch(key), rule) for pattern, rule in self._from_hf)
            if found is None:
                result[key] = value
                continue
            match, rule = found
            for name, part in zip(rule.smp, _parts(value, rule), strict=True):
                result[name.format(**match.groupdict())] = part
        return result

    def to_hf(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns Hugging Face's state for one of the family.

        Raises:
            SMPUsageError: a part of a tensor is missing.
        """
        result: dict[str, Any] = {}
        parts: dict[str, tuple[Rule, dict[int, Tensor]]] = {}
        for key, value in state.items():
            found = _first(
                (pattern.fullmatch(key), (rule, number)) for pattern, rule, number in self._to_hf
            )
            if found is None:
                result[key] = value
                continue
            match, (rule, number) = found
            name = rule.hf.format(**match.groupdict())
            result.setdefault(name, None)  # keeps the order
            parts.setdefault(name, (rule, {}))[1][number] = value
        for name, (rule, values) in parts.items():
            if len(values) != len(rule.smp):
                missing = [one for i, one in enumerate(rule.smp) if i not in values]
                raise SMPUsageError(
                    f"the state has no {' and no '.join(missing)}, which {name} is made of"
                )
            result[name] = _joined([values[i] for i in range(len(values))], rule)
        for name, source in self._tied:
            if source in result:
                result[name] = result[source]
        return result

    def _is_tied(self, key: str, state: Mapping[str, Any]) -> bool:
        source = dict(self._tied).get(key)
        if source is None or source not in state:
            return False
        if not torch.equal(state[key], state[source]):
            raise SMPUsageError(
                f"{key} and {source} have to be the same tensor, as with tie_word_embeddings; here "
                "they differ"
            )
        return True


def causal_buffers(
    state: dict[str, Any], attention: str, length: int, masked: float
) -> dict[str, Any]:
    """Adds the buffers of causal masks.

    Args:
        state: Hugging Face's; is changed, and returned.
        attention: pattern of the names of one tensor that each attention has once, with a group
            "begin" for what the names of the buffers begin with.
        length: of a sequence.
        masked: the score of what is masked.
    """
    for key in list(state):
        if (match := re.fullmatch(attention, key)) is not None:
            seen = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
            state[f"{match['begin']}bias"] = seen
            state[f"{match['begin']}masked_bias"] = torch.tensor(masked)
    return state


def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name).replace(r"\{", "{").replace(r"\}", "}")
    for field, pattern in _FIELDS.items():
        text = text.replace(field, pattern)
    return re.compile(text)


def _first(found: Any) -> Any:
    return next(((match, rest) for match, rest in found if match is not None), None)


def _parts(value: Any, rule: Rule) -> list[Any]:
    if len(rule.smp) == 1 and not rule.transposed:
        return [value]
    parts = value.chunk(len(rule.smp), -1)
    return [
        (part.t() if rule.transposed and part.dim() == 2 else part).contiguous() for part in parts
    ]


def _joined(values: list[Any], rule: Rule) -> Any:
    if len(values) == 1 and not rule.transposed:
        return values[0]
    values = [value.t() if rule.transposed and value.dim() == 2 else value for value in values]
    return torch.cat(values, -1) if len(values) > 1 else values[0].contiguous()
