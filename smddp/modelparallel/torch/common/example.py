"""The shapes of the arguments of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from smddp.modelparallel.torch.common.structure import Structure, flatten, rebuild

__all__ = ["Example"]


class Example(NamedTuple):
    """Arguments of a call without their values.

    Attributes:
        structure: of (args, kwargs).
        shapes: its tensors, on the device "meta", with the device of the originals.
        objects: its other values.
        complete: False if an object was left out, because it might keep memory alive, or if the
            arguments cannot be taken apart; then the call cannot be repeated.
    """

    structure: Structure
    shapes: list[tuple[torch.Tensor, torch.device]]
    objects: list[Any]
    complete: bool

    @staticmethod
    def of(args: Any, kwargs: Any) -> Example:
        """Returns the example of a call."""
        try:
            return Example._of(args, kwargs)
        except Exception:  # of classes of the script
            return Example(("u", ()), [], [], False)

    @staticmethod
    def _of(args: Any, kwargs: Any) -> Example:
        tensors: list[torch.Tensor] = []
        objects: list[Any] = []
        structure = flatten((args, kwargs), tensors, objects)
        shapes = [
            (torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor.device)
            for tensor in tensors
        ]
        for (shape, _), tensor in zip(shapes, tensors, strict=True):
            shape.requires_grad_(tensor.requires_grad)
        plain = all(isinstance(one, int | float | complex | bytes | slice) for one in objects)
        return Example(structure, shapes, objects if plain else [], plain)

    def arguments(self, tensors: list[torch.Tensor]) -> tuple[Any, Any]:
        """Returns (args, kwargs) with other tensors in the places of the shapes."""
        args, kwargs = rebuild(self.structure, tensors, self.objects)
        return args, kwargs
