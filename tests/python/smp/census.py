"""Counts the memory of tensors in a process: the oracle of tests about memory."""

from __future__ import annotations

import threading
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes arguments and results of an operation."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                storage = value.untyped_storage()
                if storage.device.type == "meta":  # of a tensor without memory
                    continue
                weak = StorageWeakRef(storage)
                with Census.guard:
                    Census.storages.setdefault(weak.cdata, (weak, storage.nbytes()))
        Census.peak = max(Census.peak, Census.live())
        return result
