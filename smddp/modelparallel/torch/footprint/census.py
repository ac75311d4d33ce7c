"""Counts the tensors of a rank that have memory, while a script asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from smddp._torch_internals import (
    StorageWeakRef,
    TorchDispatchMode,
    storage_address,
    storage_expired,
)
from smddp.modelparallel.torch.common.structure import tensors_in
from smddp.modelparallel.torch.footprint.estimate import KINDS, Bytes

__all__ = ["Census", "count"]

# A new peak is looked at closely if it is larger than the last one by this factor.
_CLOSER = 1.005


def count(
    kinds: Mapping[str, Iterable[torch.Tensor]], device: torch.device, total: int | None = None
) -> Bytes:
    """Returns the bytes of tensors by kind; each memory counts once, for the first kind.

    Args:
        kinds: tensors by kind.
        device: only those on a device of this type count.
        total: of all tensors; what is missing is activations.
    """
    seen: set[int] = set()
    found = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        for tensor in kinds.get(kind, ()):
            if not _counts(tensor, device):
                continue
            storage = tensor.untyped_storage()
            address = storage_address(storage)
            if address not in seen:
                seen.add(address)
                found[kind] += storage.nbytes()
    if total is not None:
        found["activations"] = max(total - sum(found.values()), 0)
    return Bytes(**found)


def _counts(tensor: torch.Tensor, device: torch.device) -> bool:
    if tensor.device.type != device.type or tensor.layout != torch.strided:
        return False
    # The storage of a tensor without values, as in a trace, is on the device "meta".
    return tensor.untyped_storage().device.type == device.type


class Census:
    """Counts the storages that operations touch, on the threads that are in a `watch`."""

    def __init__(
        self,
        kinds: Callable[[], Mapping[str, list[torch.Tensor]]],
        moment: Callable[[], str],
        device: torch.device,
    ) -> None:
        """Begins with the tensors that exist.

        Args:
            kinds: returns tensors by what they are for; all others are activations.
            moment: names what runs now.
            device: of the rank; what is elsewhere, such as in memory of the host, does not count.
        """
        self._device = device
        self._kinds, self._moment = kinds, moment
        self._lock = threading.RLock()
        self._living: dict[int, tuple[Any, int]] = {}
        self._sum = 0
        self._highest: dict[str, int] = {}
        # The moment of a new peak of which is not known yet what it is made of.
        self._new: str | None = None
        self._peaks: dict[str, Bytes] = {}
        self._note([tensor for some in kinds().values() for tensor in some])

    @property
    def peaks(self) -> dict[str, Bytes]:
        """By moment, what there was when most memory was used."""
        with self._lock:
            self._look_closer()
            return dict(self._peaks)

    def watch(self) -> TorchDispatchMode:
        """Returns a context in which operations of this thread are counted."""
        return _Watch(self)

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if not _counts(tensor, self._device):
                continue
            storage = tensor.untyped_storage()
            address = storage_address(storage)
            if address not in self._living:
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._living[address] = weak, storage.nbytes()
                self._sum += storage.nbytes()

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts what an operation has touched."""
        with self._lock:
            self._look_closer()
            self._note(tensors)
            moment = self._moment()
            # The sum has also what is free by now; so it is a bound.
            if self._sum > self._highest.get(moment, -1):
                self._look(moment)

    def _look(self, moment: str) -> None:
        living = self._living.items()
        for key in [key for key, (weak, _) in living if storage_expired(weak.cdata)]:
            self._sum -= self._living.pop(key)[1]
        if self._sum <= self._highest.get(moment, -1):
            return
        self._highest[moment] = self._sum
        last = self._peaks.get(moment)
        if last is None or self._sum > _CLOSER * last.total:
            self._new = moment

    def _look_closer(self) -> None:
        """Finds out what a new peak is made of.

        That is at the next operation: by then, the program has put the result of the one that made
        the peak where it belongs.
        """
        moment, self._new = self._new, None
        if moment is None:
            return
        kinds = self._kinds()
        self._note([tensor for some in kinds.values() for tensor in some])
        self._highest[moment] = max(self._highest[moment], self._sum)
        self._peaks[moment] = count(kinds, self._device, self._highest[moment])


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a census what operations touch."""

    def __init__(self, census: Census) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._census = census

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Two calls: a tuple of all would be another structure each time.
        self._census.note([*tensors_in(args), *tensors_in(result)])
        return result
