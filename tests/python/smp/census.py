"""Counts the memory of tensors in a process: the oracle of tests about memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Census(TorchDispatchMode):
    """Counts the bytes of all storages that operations of this process have touched and that live.

    It sees the threads on which it is entered; its lists are those of the process.
    """

    storages: ClassVar[dict[int, tuple[Any, int]]] = {}
    peak = 0
    guard: ClassVar[Any] = threading.RLock()

    @classmethod
    def live(cls) -> int:
        """Returns the bytes that live now."""
        with cls.guard:
            expired = torch.UntypedStorage._expired
            dead = [key for key, (weak, _) in cls.storages.items() if expired(weak.cdata)]
            for key in dead:
                del cls.storages[key]
            return sum(size for _, size in cls.storages.values())

    def size(self, storage: Any) -> int:
        """Returns the bytes to count for a storage."""
        count: int = storage.nbytes()
        return count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes arguments and results of an operation."""
        result = func(*args, **(kwargs or {}))
        known = Census.storages
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                storage = value.untyped_storage()
                if storage.device.type == "meta":  # of a tensor without memory
                    continue
                weak = StorageWeakRef(storage)
                with Census.guard:
                    if weak.cdata not in known:
                        known[weak.cdata] = weak, self.size(storage)
        Census.peak = max(Census.peak, Census.live())
        return result


class UnmappedCensus(Census):
    """Does not count what is mapped from a checkpoint, whose memory the system takes back."""

    def size(self, storage: Any) -> int:
        """Returns the bytes to count for a storage."""
        count, address = super().size(storage), storage.data_ptr()
        if count < 2**14:  # spares time
            return count
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith((".pt", ".safetensors")):
                begin, end = (int(number, 16) for number in line.split()[0].split("-"))
                if begin <= address < end:
                    return 0
        return count
