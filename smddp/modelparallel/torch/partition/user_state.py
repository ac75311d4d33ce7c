"""What code of a model changes outside tensors, to put it back after a trace.

A trace runs the model's code once more than the script asks for, with fake tensors or on one rank.
Nothing that the code keeps may remain: entries of lists and dicts, attributes, counters, states of
generators of random numbers. They are looked for where the code of modules and their hooks can find
them: in the modules, in closures, in global variables that the code names, and in classes.
"""

from __future__ import annotations

import collections
import functools
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from smddp._torch_internals import forward_hooks, forward_pre_hooks
from smddp.modelparallel.torch.activations.object_values import ObjectValues

__all__ = ["UserState"]

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_CONTAINERS = (list, dict, set, collections.deque)
_ABSENT = object()


class UserState:
    """The state at one point of the program."""

    def __init__(self, root: nn.Module, arguments: Any) -> None:
        """Notes it.

        Args:
            root: the model.
            arguments: objects that the model gets.
        """
        # Global variables and attributes of classes: where, name and value.
        self._places: list[tuple[Any, str, Any]] = []
        self._seen: set[int] = set()
        objects: list[Any] = [arguments]
        for module in root.modules():
            objects.append(module.__dict__)
            for value in _hooks(module):
                objects += self._held_by(value)
            for kind in type(module).__mro__:
                objects += self._of_class(kind)
            for value in module.__dict__.values():
                objects += self._held_by(value)
        self._objects = ObjectValues("the trace", objects)

    def restore(self) -> None:
        """Puts it back."""
        for where, name, value in self._places:
            now = where.get(name, _ABSENT) if isinstance(where, dict) else vars(where).get(name)
            if now is value:
                continue
            if isinstance(where, dict):
                where[name] = value
            else:
                setattr(where, name, value)
        self._objects.restore()

    def _of_class(self, kind: type) -> Iterator[Any]:
        """Yields what methods of a class, and the class itself, keep."""
        if id(kind) in self._seen or kind.__module__.partition(".")[0] in ("torch", "builtins"):
            return
        self._seen.add(id(kind))
        own = not _is_of_library(kind.__module__)
        for name, value in list(vars(kind).items()):
            if isinstance(value, types.FunctionType | staticmethod | classmethod | property):
                yield from self._held_by(value)
            elif own and not name.startswith("__") and not callable(value):
                self._places.append((kind, name, value))
                if _may_hold(value):
                    yield value

    def _held_by(self, value: Any) -> Iterator[Any]:
        """Yields what a function keeps, or can find by a name."""
        if isinstance(value, functools.partial):
            yield from value.args
            yield from value.keywords.values()
            value = value.func
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, types.MethodType):
            if not isinstance(value.__self__, nn.Module | type):
                yield value.__self__
            value = value.__func__
        value = getattr(value, "__wrapped__", value)
        value = getattr(value, "__func__", value)
        if not isinstance(value, types.FunctionType):
            if callable(value) and not isinstance(value, nn.Module | type) and _may_hold(value):
                yield value
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        for cell in value.__closure__ or ():
            try:
                inner = cell.cell_contents
            except ValueError:  # not set yet
                continue
            if isinstance(inner, types.FunctionType):
                yield from self._held_by(inner)
            elif _may_hold(inner):
                yield inner
        if _is_of_library(value.__module__):
            return
        names = set(_names(value.__code__))
        for name in names & value.__globals__.keys():
            found = value.__globals__[name]
            yield from self._global(value.__globals__, name, found, names)

    def _global(self, where: Any, name: str, value: Any, names: set[str]) -> Iterator[Any]:
        if isinstance(value, types.FunctionType):
            yield from self._held_by(value)
        elif isinstance(value, types.ModuleType):
            if id(value) not in self._seen and not _is_of_library(value.__name__):
                self._seen.add(id(value))
                for inner in names & vars(value).keys():
                    yield from self._global(vars(value), inner, vars(value)[inner], names)
        elif not callable(value) and not isinstance(value, nn.Module | type):
            self._places.append((where, name, value))
            if _may_hold(value):
                yield value


def _hooks(module: nn.Module) -> Iterator[Any]:
    for hooks in (forward_hooks(module), forward_pre_hooks(module)):
        yield from hooks.values()


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names of global variables and attributes in some code, and in functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _may_hold(value: Any) -> bool:
    """Says whether a value is a container, or an object of a class of the script."""
    if isinstance(value, nn.Module | type | types.ModuleType):
        return False
    return isinstance(value, _CONTAINERS) or not _is_of_library(type(value).__module__)


@functools.cache
def _is_of_library(name: str | None) -> bool:
    """Says whether a module of Python belongs to an installed library."""
    if name is None or name == "builtins":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if name.partition(".")[0] in ("smddp", "smdistributed"):
        return True
    return name != "__main__" and (file is None or file.startswith(_LIBRARIES))
