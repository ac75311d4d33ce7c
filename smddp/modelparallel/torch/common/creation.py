"""Contexts in which every new module of the script is seen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from smddp._torch_internals import NEW_MODULES

__all__ = ["PARTITION", "each_new_module"]

# Attribute of modules: the partition of the `smp.partition` context in which they were made. A
# copy of a module has it, too.
PARTITION = "_smp_partition"

_observers: list[Callable[[nn.Module], None]] = []


def _observed(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for observer in _observers:
            observer(self)

    return init


@contextlib.contextmanager
def each_new_module(observer: Callable[[nn.Module], None]) -> Iterator[None]:
    """In this context a function gets every new module, when nn.Module.__init__ has ended.

    Of nested contexts, the functions are called from the outermost to the innermost.
    """
    NEW_MODULES.install(_observed)
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()
        if not _observers:
            NEW_MODULES.undo()
