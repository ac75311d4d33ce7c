"""To what the code of a model can get: what modules, functions and other objects refer to."""

from __future__ import annotations

import argparse
import collections
import contextvars
import dis
import functools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smddp.modelparallel.torch.activations.object_values import slots_of

__all__ = [
    "OF_TORCH",
    "Variable",
    "attributes_of",
    "has_attributes",
    "is_of_library",
    "references",
    "variables_of",
]

# Attributes of modules that torch itself, or smp, keeps.
OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}
# A longer container is a data set or a table of constants.
_MOST_ENTRIES = 1000
# Instructions of Python that use a global variable.
_GLOBAL = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})
# Objects of these packages have other rules.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"builtins", "numpy", "smddp", "torch"}


def references(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects to which an object refers, with their names; nothing for most objects.

    These are: of a module, its attributes, with its parameters and modules, not its buffers, and
    its class; of a class of modules, its forward method and the methods that this calls; of a
    function, its default arguments, its attributes and the variables outside it that its code uses;
    of a container, its entries; of a class, or of an object, of the user's code, its attributes. Of
    Python's own objects and those of torch, nothing.

    Args:
        value: any object.
    """
    if isinstance(value, nn.Module):
        yield from _of_module(value)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "function", value.__func__
    elif isinstance(value, functools.partial):
        yield from (("function", value.func), ("args", value.args), ("kwargs", value.keywords))
    elif isinstance(value, weakref.ref):
        yield "object", value()
    elif isinstance(value, dict):
        if len(value) <= _MOST_ENTRIES:
            yield from ((str(key), one) for key, one in dict.items(value))
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        if len(value) <= _MOST_ENTRIES:
            yield from ((str(number), one) for number, one in enumerate(value))
    elif isinstance(value, contextvars.ContextVar):
        yield value.name, value.get(None)
    elif isinstance(value, type):
        yield from _of_class(value)
    elif has_attributes(value):
        yield from attributes_of(value).items()


def has_attributes(value: Any) -> bool:
    """Says whether an object is of a class of the user's code, which may have attributes.

    Args:
        value: any object.
    """
    if isinstance(value, torch.Tensor | types.ModuleType | types.FunctionType | type):
        return False
    # What libraries have for the attributes of others.
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return True
    return not is_of_library(type(value).__module__)


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object of the user's code: its own, and those with slots.

    Args:
        value: the object.
    """
    return {**getattr(value, "__dict__", {}), **slots_of(value)}


def is_of_library(module: str | None) -> bool:
    """Says whether a Python module is Python's own, or of torch, numpy or smp.

    Args:
        module: its name.
    """
    return module is None or module.partition(".")[0] in _LIBRARIES


class Variable:
    """A variable outside a function, which may have another value later.

    Attributes:
        name: as the code has it.
        key: the same for functions that share the variable.
    """

    __slots__ = ("_place", "key", "name")

    def __init__(self, name: str, place: dict[str, Any] | types.CellType) -> None:
        self.name, self._place = name, place
        self.key = id(place), name if isinstance(place, dict) else ""

    @property
    def value(self) -> Any:
        """What it is now; None if it is not set."""
        if isinstance(self._place, dict):
            return self._place.get(self.name)
        try:
            return self._place.cell_contents
        except ValueError:
            return None


def variables_of(function: types.FunctionType) -> Iterator[Variable]:
    """Yields the variables outside a function that its code uses; not those of Python's builtins.

    Args:
        function: any function of Python.
    """
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        yield Variable(name, cell)
    for name in _globals_in(function.__code__):
        if name in function.__globals__:
            yield Variable(name, function.__globals__)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if is_of_library(function.__module__):
        return
    yield from ((one.name, one.value) for one in variables_of(function))
    yield from (
        (f"default {number}", one) for number, one in enumerate(function.__defaults__ or ())
    )
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()


def _of_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    own = vars(module)
    for name, value in own.items():
        if name not in OF_TORCH:
            yield name, value
    # Not the methods of these dicts, which may ask other ranks; so may a buffer.
    yield from dict.items(own["_parameters"])
    yield from dict.items(own["_modules"])
    yield "class", type(module)


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    if is_of_library(kind.__module__):
        return
    for base in kind.__mro__:
        if not is_of_library(base.__module__):
            yield from ((name, one) for name, one in vars(base).items() if _is_data(name, one))
    if issubclass(kind, nn.Module):
        yield from ((function.__name__, function) for function in _methods(kind))  # type: ignore[arg-type]


@functools.cache
def _methods(kind: type[nn.Module]) -> tuple[types.FunctionType, ...]:
    """Returns the forward method of a class, and the methods of the class that it calls."""
    found: dict[str, types.FunctionType] = {}
    left = ["forward"]
    while left:
        name = left.pop()
        function = getattr(kind, name, None)
        if name in found or not isinstance(function, types.FunctionType):
            continue
        if is_of_library(function.__module__):
            continue
        found[name] = function
        left += function.__code__.co_names
    return tuple(found.values())


@functools.cache
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of the global variables that code uses, with the code inside it."""
    names = {one.argval: None for one in dis.get_instructions(code) if one.opname in _GLOBAL}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_globals_in(constant)))
    return tuple(names)


def _is_data(name: str, value: Any) -> bool:
    """Says whether an attribute of a class is data of the user's code."""
    return not name.startswith("__") and isinstance(
        value, (bool, int, float, str, list, dict, set, collections.deque, torch.Tensor)
    )
