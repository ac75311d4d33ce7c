"""Saves and restores the buffers of a model, around a run that does not count.

A buffer is known by its place, a name in a module, not by its tensor: a module may put another
tensor there, as `self.average = 0.9 * self.average + x` does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["Buffers"]

_Place = tuple[dict[str, torch.Tensor | None], str]


class Buffers:
    """The places of a module's buffers, and copies of their tensors at the last `save`.

    The next `save` uses the memory of the copies again, because allocating it takes longer.
    """

    def __init__(self, module: nn.Module, chosen: Callable[[str], bool] = lambda _: True) -> None:
        """Finds the places.

        Args:
            module: whose buffers they are, with those of the modules inside.
            chosen: gets the name of a buffer, and says whether this object has it; all by default.
        """
        self._places: list[_Place] = [
            (part._buffers, name)
            for prefix, part in module.named_modules()
            for name in part._buffers
            if chosen(f"{prefix}.{name}" if prefix else name)
        ]
        # Per place: the tensor that was there, and the copy.
        self._saved: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors that are in the places now, each once."""
        found = (holder.get(name) for holder, name in self._places)
        return list({id(tensor): tensor for tensor in found if tensor is not None}.values())

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces each tensor by what a function returns for it."""
        for holder, name in self._places:
            tensor = holder.get(name)
            if tensor is not None:
                holder[name] = function(tensor)

    def save(self) -> None:
        """Copies the present tensors."""
        before = self._saved or [(None, None)] * len(self._places)
        self._saved = [
            (tensor, _copied(tensor, copy))
            for tensor, (_, copy) in zip(
                (holder.get(name) for holder, name in self._places), before, strict=True
            )
        ]

    def restore(self) -> None:
        """Puts the tensors of the last `save` back into their places, with the values they had."""
        with torch.no_grad():
            for (holder, name), (tensor, copy) in zip(self._places, self._saved, strict=True):
                if tensor is not None and copy is not None:
                    tensor.copy_(copy)
                holder[name] = tensor


def _copied(tensor: torch.Tensor | None, memory: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a copy of a tensor; in `memory` if shape, dtype, device and strides are the same."""
    if tensor is None:
        return None
    if (
        memory is None
        or (memory.shape, memory.dtype, memory.device)
        != (tensor.shape, tensor.dtype, tensor.device)
        or memory.stride() != tensor.stride()
    ):
        return tensor.detach().clone()
    return memory.copy_(tensor.detach())
