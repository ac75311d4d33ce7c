"""Copies the buffers of a model: to restore them later, and to see which of them have changed.

A buffer is known by its place, a name in a module, not by its tensor: a module may put another
tensor there, as `self.average = 0.9 * self.average + x` does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from smddp._torch_internals import version_of_tensor

__all__ = ["Buffers", "version_of", "without_repeats"]

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
        places: dict[str, _Place] = {}
        for prefix, part in module.named_modules():
            for name in part._buffers:
                full = f"{prefix}.{name}" if prefix else name
                if chosen(full):
                    places[full] = part._buffers, name
        self._places = list(places.values())
        self._numbers = {name: number for number, name in enumerate(places)}
        # Per place: the tensor that was there at the last `save`, and the copy.
        self._saved: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        # The numbers of places where code has put another tensor.
        self._replaced: set[int] = set()
        # Per place: how often its tensor had been changed before the last `save`.
        self._versions: list[int] = []

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors that are in the places now, each once."""
        found = (holder.get(name) for holder, name in self._places)
        return list({id(tensor): tensor for tensor in found if tensor is not None}.values())

    def copies(self) -> list[torch.Tensor]:
        """Returns the copies of the last `save`."""
        return [copy for _, copy in self._saved if copy is not None]

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces each tensor by what a function returns for it."""
        for number, (holder, name) in enumerate(self._places):
            tensor = holder.get(name)
            if tensor is not None:
                holder[name] = function(tensor)
                if self._saved:
                    self._saved[number] = holder[name], None

    def save(self) -> None:
        """Copies the present tensors."""
        self._note_replaced()
        before = self._saved or [(None, None)] * len(self._places)
        found = [holder.get(name) for holder, name in self._places]
        self._versions = list(map(version_of, found))
        # Copies made in inference mode could not be used again outside.
        with torch.inference_mode(False), torch.no_grad():
            self._saved = [
                (tensor, _copied(tensor, copy))
                for tensor, (_, copy) in zip(found, before, strict=True)
            ]

    def restore(self) -> None:
        """Puts the tensors of the last `save` back into their places, with the values they had."""
        with torch.no_grad():
            for (holder, name), (tensor, copy) in zip(self._places, self._saved, strict=True):
                if tensor is not None and copy is not None:
                    without_repeats(tensor).copy_(without_repeats(copy, tensor))
                holder[name] = tensor

    def changed(self, name: str) -> bool:
        """Says whether a buffer has other values than at the last `save`."""
        number = self._numbers.get(name)
        if number is None:  # registered later
            return True
        holder, key = self._places[number]
        tensor, (_, copy) = holder.get(key), self._saved[number]
        if tensor is None or copy is None:
            return tensor is not copy
        if (tensor.shape, tensor.dtype) != (copy.shape, copy.dtype):
            return True
        if torch.equal(tensor, copy):
            return False
        both_nan = (tensor != tensor) & (copy != copy)
        return not bool(((tensor == copy) | both_nan).all())

    def was_replaced(self, name: str) -> bool:
        """Says whether code has put another tensor into a buffer's place since the first `save`."""
        self._note_replaced()
        return self._numbers.get(name, -1) in self._replaced

    def _note_replaced(self) -> None:
        for number, (tensor, _) in enumerate(self._saved):
            holder, name = self._places[number]
            if tensor is not None and holder.get(name) is not tensor:
                self._replaced.add(number)

    def touched(self) -> list[str]:
        """Returns the names of the buffers that code has replaced or written to since `save`."""
        pairs = zip(self._numbers, self._places, self._saved, self._versions, strict=True)
        return [
            full
            for full, (holder, name), (tensor, _), version in pairs
            if holder.get(name) is not tensor or version_of(tensor) != version
        ]


def version_of(tensor: torch.Tensor | None) -> int:
    """Returns how often a tensor, or a view of it, has changed in place; 0 if that is not known."""
    return 0 if tensor is None or tensor.is_inference() else version_of_tensor(tensor)


def without_repeats(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a view of a tensor that has each element once; it can be written to.

    Args:
        tensor: as `expand` makes, or any other.
        like: has the same shape, and says what is repeated; None for the tensor itself.
    """
    like = tensor if like is None else like
    if like.layout != torch.strided or 0 not in like.stride():
        return tensor
    return tensor[tuple([slice(1) if step == 0 else slice(None) for step in like.stride()])]


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
