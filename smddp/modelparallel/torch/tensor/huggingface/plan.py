"""The tp_plan that a model of transformers ships: which of its linear layers are divided in pairs.

A plan maps names of modules, with `*` for numbers, to styles. A `colwise` layer computes a part of
its output features, with which a `rowwise` layer of the same parent goes on. So the pair exchanges
activations twice, where two layers that are divided each for itself exchange them four times.

The code between the layers takes the size of the batch from their input, so all ranks need the same
batch there: prescaled_batch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from smddp.modelparallel.torch.tensor.marks import mark_of
from smddp.modelparallel.torch.tensor.registry import Registration
from smddp.modelparallel.torch.tensor.transformer.divided import Contracting, Expanding, initializer

__all__ = ["planned"]

_COLUMNS, _ROWS = "colwise", "rowwise"


class Columns(Expanding):
    """An `Expanding` layer that takes the examples of this rank."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, ..., in_features] to [B, ..., out_features / T], with a prescaled batch."""
        return super().forward(self.exchange.gather(x))


def _registration(kind: type[nn.Module]) -> Registration:
    def init(
        in_features: int, out_features: int, bias: bool, device: Any, dtype: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        fill = initializer(0.0, False, False)
        return (kind.__name__, in_features, out_features, bias, fill), {}

    return Registration(kind, init)


_BY_STYLE = {_COLUMNS: _registration(Columns), _ROWS: _registration(Contracting)}


def planned(root: nn.Module, size: int, say: Callable[[str], None]) -> dict[int, Registration]:
    """Returns what takes the place of linear layers by the plans inside a model, by their ids.

    The layers of a parent are in it only if they can all be divided, and if the parent has no other
    parameters, which would be used with a part of the features.

    Args:
        root: the model.
        size: of the tp groups.
        say: is called with the reason if a parent's layers are not divided in pairs.
    """
    found: dict[int, Registration] = {}
    uses = Counter(id(p) for module in root.modules() for p in module._parameters.values())
    seen: set[nn.Module] = set()
    for model in root.modules():
        for name, parent, styles in _parents(model):
            if parent in seen:  # a model inside a model has a plan of its own
                continue
            seen.add(parent)
            reason = _obstacle(parent, styles, size, uses)
            if reason:
                say(f"the layers of {name!r} are not divided by the plan of the model: {reason}")
                continue
            found |= {id(getattr(parent, own)): _BY_STYLE[style] for own, style in styles.items()}
    return found


def _parents(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
    """Yields names and modules with a pair of layers in the plan, and the styles of all of them."""
    plan = getattr(model, "_tp_plan", None)
    if not isinstance(plan, dict):
        return
    for name, parent in model.named_modules():
        styles = {
            own: plan[key]
            for own, _ in parent.named_children()
            if (key := re.sub(r"(?<![^.])\d+(?![^.])", "*", f"{name}.{own}")) in plan
        }
        if {_COLUMNS, _ROWS} <= set(styles.values()):
            yield name, parent, styles


def _obstacle(parent: nn.Module, styles: dict[str, str], size: int, uses: Counter[int]) -> str:
    """Says why layers cannot be divided in pairs; nothing if they can."""
    layers = {own: getattr(parent, own) for own in styles}
    others = [own for own, style in styles.items() if style not in _BY_STYLE]
    if others:
        return f"{others[0]} has the style {styles[others[0]]!r}"
    for own, layer in layers.items():
        if type(layer) is not nn.Linear or mark_of(layer) is None:
            return f"{own} is not a marked nn.Linear"
        columns = styles[own] == _COLUMNS
        features = layer.out_features if columns else layer.in_features
        unit = size * (getattr(parent, "head_dim", None) or 1)
        if features % unit:
            return f"{features} features of {own} cannot be divided into multiples of {unit}"
        if any(uses[id(parameter)] > 1 for parameter in layer.parameters()):
            return f"{own} shares a parameter with another module"
    inside = {id(p) for layer in layers.values() for p in layer.parameters()}
    for name, parameter in parent.named_parameters():
        if id(parameter) not in inside:
            return f"its parameter {name} is not in the plan"
    return ""
