"""Makes whole tensors of the parts in the partial state dicts of several ranks.

The parts are shards of sharded data parallelism, or parts of tensor parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from smddp.modelparallel.torch.delayed.life import promised, with_values
from smddp.modelparallel.torch.sharding.shard import ShardedParameter
from smddp.modelparallel.torch.tensor.division import Division
from smddp.modelparallel.torch.tensor.division import form_of as form_of_part

__all__ = ["SHARDS", "form_of", "joined", "united", "without_parts"]

# Key of a partial state dict: the form of each entry that is only a part.
SHARDS = "_smp_shards"


# Key of the form of a shard: that of the parameter, if it is a part of tensor parallelism itself.
_OF = "of"


def form_of(
    parameter: torch.Tensor,
    entry: ShardedParameter | None,
    division: Division | None,
    place: tuple[int, int],
) -> dict[str, Any] | None:
    """Returns what one has to know to join a part with the others, as plain data; None of a whole.

    Args:
        parameter: of the model.
        entry: of a sharded parameter.
        division: of one that is divided over tensor-parallel ranks.
        place: rank in the tp group, and its size.
    """
    of = None if division is None else form_of_part(division, parameter.shape, *place)
    if entry is None:
        return of
    own = {"shape": list(entry.shape), "rank": entry.rank, "degree": entry.degree}
    return own if of is None else {**own, _OF: of}


def without_parts(form: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the form of a shard as if the parameter were whole; None of what is no shard."""
    return None if "dimension" in form else {key: form[key] for key in form if key != _OF}


def joined(name: Any, pieces: Sequence[tuple[Mapping[str, Any], Any]], lazily: bool = False) -> Any:
    """Joins the shards of all ranks.

    Args:
        name: of what is joined; for the error text.
        pieces: (form, value) of each rank, in any order. A value is the shard of a tensor, or a
            dict with such shards and other values, which are equal on all ranks.
        lazily: return delayed tensors for those that are joined. The shards must not change.

    Raises:
        ValueError: the shard of a rank is missing.
    """
    if _OF in pieces[0][0]:
        shards: dict[int, list[tuple[Mapping[str, Any], Any]]] = {}
        for form, value in pieces:
            shards.setdefault(form[_OF]["rank"], []).append((without_parts(form) or {}, value))
        ofs = {form[_OF]["rank"]: form[_OF] for form, _ in pieces}
        whole = [(ofs[rank], joined(name, some, lazily)) for rank, some in shards.items()]
        return joined(name, whole, lazily)
    by_rank = {form["rank"]: value for form, value in pieces}
    form = pieces[0][0]
    if sorted(by_rank) != list(range(form["degree"])):
        raise ValueError(
            f"of the {form['degree']} parts of {name!r} there are only those of ranks "
            f"{sorted(by_rank)} of their group"
        )
    values = [by_rank[rank] for rank in range(form["degree"])]
    join = _promised if lazily else _joined
    if isinstance(values[0], torch.Tensor):
        return join(values, form)
    return {
        key: join([value[key] for value in values], form) if _is_shard(first, form) else first
        for key, first in values[0].items()
    }


def united(
    parts: Iterable[Mapping[Any, Any]], forms: Iterable[Mapping[Any, Any]], lazily: bool = False
) -> dict[Any, Any]:
    """Returns one dict of those of several ranks, with whole tensors in place of shards.

    Args:
        parts: of each rank. Of a value that several ranks have whole, the first is taken.
        forms: for each rank, the forms of the entries that are shards.
        lazily: as for `joined`.
    """
    whole: dict[Any, Any] = {}
    pieces: dict[Any, list[tuple[Mapping[str, Any], Any]]] = {}
    for part, own in zip(parts, forms, strict=True):
        for name, value in part.items():
            if name in own:
                pieces.setdefault(name, []).append((own[name], value))
                whole.setdefault(name, None)  # keeps the order
            else:
                whole.setdefault(name, value)
    for name, found in pieces.items():
        whole[name] = joined(name, found, lazily)
    return whole


def _is_shard(value: Any, form: Mapping[str, Any]) -> bool:
    if "dimension" in form:
        return isinstance(value, torch.Tensor) and list(value.shape) == list(form["shape"])
    size = -(-math.prod(form["shape"]) // form["degree"])
    return isinstance(value, torch.Tensor) and value.shape == (size,)


def _promised(shards: Sequence[torch.Tensor], form: Mapping[str, Any]) -> Any:
    shape = form["shape"]
    if "dimension" in form:
        division = Division(form["dimension"])
        shape = division.whole_shape(torch.Size(shape), form["degree"])
    # Shards of parts of tensor parallelism are joined to parts, which are delayed themselves.
    return promised(lambda: _joined([with_values(one) for one in shards], form), shape, shards[0])


def _joined(shards: Sequence[torch.Tensor], form: Mapping[str, Any]) -> torch.Tensor:
    if "dimension" in form:
        return Division(form["dimension"]).united(shards)
    whole = torch.cat([shard.reshape(-1) for shard in shards])
    return whole[: math.prod(form["shape"])].view(form["shape"])
