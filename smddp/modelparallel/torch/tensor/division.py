"""How a parameter is divided over the ranks of a tp group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Division", "copy_division", "division_of", "form_of", "mark"]

_ATTRIBUTE = "_smp_division"


@dataclasses.dataclass(frozen=True)
class Division:
    """How a parameter is divided: rank i of T has the i-th of T equal parts of one dimension.

    Attributes:
        dimension: the one that is divided.
    """

    dimension: int

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Returns a copy of the part of a rank.

        Args:
            whole: the parameter of one process.
            rank: in the tp group.
            size: of the group; it divides the dimension.
        """
        return whole.chunk(size, self.dimension)[rank].clone(memory_format=torch.contiguous_format)

    def united(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole parameter.

        Args:
            parts: of all ranks, in the order of ranks.
        """
        return torch.cat(list(parts), self.dimension)

    def whole_shape(self, part: torch.Size, size: int) -> torch.Size:
        """Returns the shape of the whole parameter.

        Args:
            part: the shape of a part.
            size: of the tp group.
        """
        shape = list(part)
        shape[self.dimension] *= size
        return torch.Size(shape)

    def state_parts(
        self, state: Mapping[str, Any], part: torch.Size, rank: int, size: int
    ) -> dict[str, Any]:
        """Returns the state of a parameter in an optimizer for one rank.

        Args:
            state: of the whole parameter. Tensors of its shape are divided as it is.
            part: the shape of the rank's part of the parameter.
            rank: in the tp group.
            size: of the group.
        """
        whole = self.whole_shape(part, size)
        return {
            key: self.part(value, rank, size)
            if isinstance(value, Tensor) and value.shape == whole
            else value
            for key, value in state.items()
        }


def mark(parameters: Iterator[tuple[Any, Division]]) -> None:
    """Lets `division_of` answer for parameters. Copies of them are not marked."""
    for parameter, division in parameters:
        setattr(parameter, _ATTRIBUTE, division)


def division_of(parameter: Any) -> Division | None:
    """Returns how a parameter of a model is divided; None if it is whole."""
    division: Division | None = getattr(parameter, _ATTRIBUTE, None)
    return division


def copy_division(parameter: Any, other: Any) -> None:
    """Lets `division_of` answer for what stands for a parameter as for the parameter."""
    division = division_of(parameter)
    if division is not None:
        setattr(other, _ATTRIBUTE, division)


def form_of(division: Division, part: Sequence[int], rank: int, size: int) -> dict[str, Any]:
    """Returns what one has to know about a part to unite it with the others, as plain data.

    Args:
        division: of the parameter.
        part: the shape of a part.
        rank: in the tp group.
        size: of the group.
    """
    return {
        **dataclasses.asdict(division),
        "shape": list(part),
        "rank": rank,
        "degree": size,
    }
