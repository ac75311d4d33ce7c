"""Counts the memory of tensors in a process: the oracle of tests about memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
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


@contextlib.contextmanager
def counting_tasks(baton: Any) -> Iterator[None]:
    """Counts in this context what the tasks of a baton do, too."""
    submit = baton.submit

    def counted(task: Any) -> None:
        function = task.function

        def run() -> None:
            with Census():
                function()

        task.function = run
        submit(task)

    baton.submit = counted
    try:
        yield
    finally:
        baton.submit = submit


def resident(name: str) -> int:
    """Returns a figure of this process in bytes, such as "VmRSS"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) * 1024


class Highest(threading.Thread):
    """Looks all the time at a figure of this process; `most` is the largest one."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True)
        self._name, self._over, self.most = name, threading.Event(), 0

    def __enter__(self) -> Highest:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.0005):
            self.most = max(self.most, resident(self._name))


def give_back_at_once(least: int) -> ctypes.CDLL:
    """Lets malloc give to the system what is freed, also if small tensors came to lie beside it.

    Args:
        least: bytes of an allocation that gets memory of its own.

    Returns:
        The functions of malloc.
    """
    malloc = ctypes.CDLL(None)
    malloc.mallopt(-8, 1)  # M_ARENA_MAX
    malloc.mallopt(-3, least)  # M_MMAP_THRESHOLD
    return malloc
