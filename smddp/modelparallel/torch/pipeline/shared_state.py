"""What code of several microbatches shares: lists and other objects that hooks and modules fill.

While a call waits for another rank, code of the next microbatch runs. It must not find a list that
code of this one has begun to fill. So the first step of a function, whose microbatches run one
after the other, is watched: if such an object has changed when a call leaves this rank, the later
steps run like the first.
"""

from __future__ import annotations

import collections
import contextvars
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

__all__ = ["SharedState"]

# More is not looked for in an object: a data set or a table of constants.
_MOST_ENTRIES = 1000
# A list of lists that an object holds.
_DEEPEST = 3


class SharedState:
    """The objects of the caller's code that outlive a microbatch, in a first step.

    These are lists, dicts, sets, deques, and objects of the user's own classes, to which attributes
    of modules, hooks of modules, their variables, or a ContextVar refer.

    Attributes:
        changes: has one been found to change before a call of another rank?
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Finds them, at the beginning of the step."""
        self.changes = False
        # What refers to an object, the object, and the numbers of the modules whose attributes do;
        # None for everything else.
        self._found: dict[int, tuple[str, Any, set[int | None]]] = {}
        for number, module in enumerate(modules):
            for name, value in vars(module).items():
                if name not in _OF_TORCH:
                    what = f"attribute {name!r} of a {type(module).__name__}"
                    self._add(what, value, number, 0)
        for hook in _hooks(modules):
            for name, value in _variables_of(hook):
                self._add(f"variable {name!r} of hook {_name(hook)}", value, None, 0)
        for variable, value in contextvars.copy_context().items():
            self._add(f"ContextVar {variable.name!r}", value, None, 0)
        self._before: dict[int, list[Any]] = {}
        self.begin_microbatch()

    def begin_microbatch(self) -> None:
        """Notes what they hold."""
        if not self.changes:
            self._before = {key: _content(value) for key, (_, value, _) in self._found.items()}

    def look(self, owners: Sequence[int | None], rank: int) -> None:
        """Compares them, as a call leaves this rank; warns once.

        Args:
            owners: of the modules. What modules of other ranks set comes with results, and each
                microbatch finds its own.
            rank: of this process in the pipeline.
        """
        if self.changes:
            return
        for key, (what, value, numbers) in self._found.items():
            if all(one is not None and owners[one] not in (None, rank) for one in numbers):
                continue
            if not _same(self._before[key], _content(value)):
                self.changes = True
                warnings.warn(
                    f"code of a step changes what microbatches share ({what}) before it calls a "
                    "module on another rank: the microbatches of this step function run one after "
                    "the other, as in one process. They overlap if the forward method makes such "
                    "an object anew in each call",
                    stacklevel=2,
                )
                return

    def _add(self, what: str, value: Any, number: int | None, depth: int) -> None:
        if depth > _DEEPEST or not _is_watched(value):
            return
        _, _, numbers = self._found.setdefault(id(value), (what, value, set()))
        if number in numbers:
            return
        numbers.add(number)
        for entry in _content(value):
            self._add(what, entry, number, depth + 1)


# Attributes of modules that torch itself, or smp, keeps.
_OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}


def _variables_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields the variables outside a function that its code uses, with their names."""
    if isinstance(function, types.MethodType):
        if not isinstance(function.__self__, nn.Module):
            yield "self", function.__self__
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        yield "self", function  # an object that is called
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _hooks(modules: Sequence[nn.Module]) -> Iterator[Callable[..., Any]]:
    for module in modules:
        yield from module._forward_hooks.values()
        yield from module._forward_pre_hooks.values()
    yield from torch_module._global_forward_hooks.values()
    yield from torch_module._global_forward_pre_hooks.values()


def _name(hook: Any) -> str:
    return repr(getattr(hook, "__qualname__", type(hook).__name__))


def _is_watched(value: Any) -> bool:
    if isinstance(value, list | dict | set | collections.deque):
        return len(value) <= _MOST_ENTRIES
    if isinstance(value, torch.Tensor | nn.Module | type | types.ModuleType | types.FunctionType):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and not _is_of(type(value))


def _is_of(kind: type) -> bool:
    """Says whether a class is of Python, torch, or smp: their objects have other rules."""
    return kind.__module__.partition(".")[0] in {"builtins", "torch", "smddp", "functools"}


def _content(value: Any) -> list[Any]:
    """Returns what an object holds."""
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    if isinstance(value, list | set | collections.deque):
        return list(value)
    own = vars(value)
    return [*own.keys(), *own.values()]


def _same(before: list[Any], now: list[Any]) -> bool:
    """Compares numbers and texts by value, everything else by identity."""
    if len(before) != len(now):
        return False
    plain = (bool, int, float, str)
    return all(
        one is other or (type(one) is type(other) and isinstance(one, plain) and one == other)
        for one, other in zip(before, now, strict=True)
    )
