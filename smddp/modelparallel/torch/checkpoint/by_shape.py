"""How entries of checkpoints of the original library are divided, which do not say it themselves.

With tensor parallelism its parts have a part of some parameters. Which dimension of a parameter is
divided shows when its shape is compared with that of the model that loads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.tensor.division import Division, division_of, form_of

__all__ = ["forms_of_model", "forms_of_optimizer"]

_Forms = list[dict[Any, Any]]


def forms_of_model(parts: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> _Forms:
    """Returns for each part the forms of the entries that are divided, for `united`.

    Args:
        parts: state dicts of the model.
        ranks: the tensor-parallel rank of each.

    Raises:
        SMPUsageError: the shape of an entry fits no division, or there is no model.
    """
    model = state.current_model()
    if model is None:
        raise SMPUsageError(
            "a checkpoint of the original library with tensor parallelism does not say how it is "
            "divided: resume from it in a job with its model"
        )
    named = model.get_module().named_parameters(remove_duplicate=False)
    return _forms(parts, ranks, {name: _whole_shape(parameter) for name, parameter in named})


def forms_of_optimizer(parts: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> _Forms:
    """Does the same for state dicts of the optimizer, whose entries are by number of parameter."""
    numbers = state.current_optimizer()._param_id_to_index()
    parameters = state.current_model().parameters()
    whole = {numbers[id(p)]: _whole_shape(p) for p in parameters if id(p) in numbers}
    return _forms([part["state"] for part in parts], ranks, whole)


def _whole_shape(parameter: torch.Tensor) -> torch.Size:
    division = division_of(parameter)
    if division is None:
        return parameter.shape
    return division.whole_shape(parameter.shape, state.topology.tp_size)


def _forms(
    parts: Sequence[Mapping[Any, Any]], ranks: Sequence[int], whole: Mapping[Any, torch.Size]
) -> _Forms:
    size = max(ranks) + 1
    found: _Forms = []
    for part, rank in zip(parts, ranks, strict=True):
        forms = {}
        for name, value in part.items():
            tensors = value.values() if isinstance(value, Mapping) else [value]
            for tensor in tensors:
                # Steps of optimizers have one element.
                if name in whole and isinstance(tensor, torch.Tensor) and tensor.dim():
                    division = _division(name, tensor.shape, whole[name], size)
                    if division is not None:
                        forms[name] = form_of(division, tensor.shape, rank, size)
        found.append(forms)
    return found


def _division(name: Any, part: torch.Size, whole: torch.Size, size: int) -> Division | None:
    """Returns how a parameter is divided; None if the part has all of it."""
    if part == whole:
        return None
    for dimension in range(len(part)):
        division = Division(dimension)
        if division.whole_shape(part, size) == whole:
            return division
    raise SMPUsageError(
        f"the entry {name!r} of the checkpoint has the shape {list(part)}, which is no part of "
        f"{list(whole)} for one of {size} tensor-parallel ranks"
    )
