"""Divides nested Python values into tensors, objects and a structure, and builds them again.

The structure says how the parts are nested. It says nothing about the shapes and dtypes of
the tensors.

Unlike torch's pytree, this keeps the class of any dict subclass or dataclass (such as the outputs
of model libraries), and no class has to be registered. A structure is hashable, so it can be a key.

A structure is a tuple that begins with a letter:
    ("t", i)                tensor i
    ("c", value, type)      a plain constant
    ("o", i)                object i: anything else, such as a float or a large int
    ("l" | "u" | "s", children)             list, tuple, set
    ("n", class, children)                  named tuple, or one of torch's, as `max(dim=0)` returns
    ("d", class, keys, children)            dict, UserDict
    ("a", class, names, children)           dataclass
    ("p", structure, count)                 a value whose objects are pickled, see `packed` in
                                            objects.py; only between ranks, never inside another
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = [
    "CONSTANTS",
    "Structure",
    "builder",
    "constants",
    "flatten",
    "map_tensors",
    "may_be_changed",
    "rebuild",
    "replace_tensors",
    "tensors_in",
    "unpicklable",
    "without_repeats",
]

Structure = tuple[Any, ...]

# Values of these types are part of the structure. Floats are not, because each would make a new
# structure.
CONSTANTS = (type(None), bool, str, torch.dtype, torch.device)
_SMALL = 1024


def flatten(
    value: Any,
    tensors: list[torch.Tensor],
    objects: list[Any],
    whole: Callable[[Any], bool] | None = None,
) -> Structure:
    """Appends the tensors and objects of a value to two lists, and returns its structure.

    Args:
        value: any nested value.
        tensors: gets the tensors, in order.
        objects: gets, in order, what is neither a tensor, a container nor a constant.
        whole: returns True for a value that has to be one object, whatever its class.
    """
    if whole is not None and whole(value):
        objects.append(value)
        return ("o", len(objects) - 1)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("t", len(tensors) - 1)
    kind = type(value)
    if kind in CONSTANTS or (kind is int and -_SMALL <= value <= _SMALL):
        # With the type, because True == 1, but they are different arguments.
        return ("c", value, kind)
    if kind is tuple:
        return ("u", tuple([flatten(item, tensors, objects, whole) for item in value]))
    if kind is list:
        return ("l", tuple([flatten(item, tensors, objects, whole) for item in value]))
    if isinstance(value, dict):
        return (
            "d",
            (kind, _Like(value)) if kind is not dict else (dict, None),
            tuple(value),
            tuple([flatten(item, tensors, objects, whole) for item in value.values()]),
        )
    if isinstance(value, collections.UserDict):
        items = value.data
        children = tuple([flatten(item, tensors, objects, whole) for item in items.values()])
        return ("d", (kind, _Like(value)), tuple(items), children)
    # Named tuples of torch are structure sequences of C, which `torch.return_types` has.
    if isinstance(value, tuple) and (
        hasattr(value, "_fields") or kind.__module__ == "torch.return_types"
    ):
        return ("n", kind, tuple([flatten(item, tensors, objects, whole) for item in value]))
    if kind is set:
        # Tensors are hashed by identity, so the order may differ from set to set.
        return ("s", tuple([flatten(item, tensors, objects, whole) for item in value]))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(_fields(value))
        children = tuple([flatten(getattr(value, name), tensors, objects, whole) for name in names])
        return ("a", (kind, _Like(value)), names, children)
    objects.append(value)
    return ("o", len(objects) - 1)


def _fields(value: Any) -> list[str]:
    """Returns the names of the fields that a dataclass has; others may not be set yet."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


class _Like:
    """Makes empty instances of a class whose constructor is not known, by copying an example.

    All examples of a class are equal.
    """

    def __init__(self, example: Any) -> None:
        self._emptied = copy.copy(example)
        # Some outputs of model libraries are dicts and dataclasses, with items as attributes, too.
        if dataclasses.is_dataclass(self._emptied):
            for name in _fields(self._emptied):
                object.__setattr__(self._emptied, name, None)
        if isinstance(self._emptied, collections.UserDict):
            self._emptied.data = {}
        elif isinstance(self._emptied, dict):
            attributes = getattr(self._emptied, "__dict__", {})
            # Fields of a dataclass stay: an output whose item is None has only the attribute.
            fields = _fields(self._emptied) if dataclasses.is_dataclass(self._emptied) else ()
            for key in self._emptied:
                if key not in fields:
                    attributes.pop(key, None)
            # Not the method of the class, because some classes forbid removing items.
            ordered = isinstance(self._emptied, collections.OrderedDict)
            (collections.OrderedDict if ordered else dict).clear(self._emptied)

    def new(self) -> Any:
        return copy.copy(self._emptied)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Like) and type(self._emptied) is type(other._emptied)

    def __hash__(self) -> int:
        return hash(type(self._emptied))


def rebuild(structure: Structure, tensors: Sequence[Any], objects: Sequence[Any] = ()) -> Any:
    """Returns the value with this structure, tensors and objects; reverses `flatten`."""
    letter = structure[0]
    if letter == "t":
        return tensors[structure[1]]
    if letter == "c":
        return structure[1]
    if letter == "o":
        return objects[structure[1]]
    children = [rebuild(child, tensors, objects) for child in structure[-1]]
    if letter == "u":
        return tuple(children)
    if letter == "l":
        return children
    if letter == "s":
        return set(children)
    if letter == "n":
        kind = structure[1]
        return kind._make(children) if hasattr(kind, "_make") else kind(children)
    like = structure[1][1]
    if letter == "d":
        items = dict(zip(structure[2], children, strict=True))
        if like is None:
            return items
        result = like.new()
        for key, item in items.items():
            # Not dict.__setitem__, because some classes set attributes for their items.
            result[key] = item
        return result
    result = like.new()
    for name, child in zip(structure[2], children, strict=True):
        object.__setattr__(result, name, child)
    return result


def without_repeats(structure: Structure, tensors: list[Any]) -> Structure:
    """Lets a tensor that occurs several times in a value be one tensor wherever it is rebuilt.

    Args:
        structure: of the value.
        tensors: of the value; those that repeat an earlier one are removed.

    Returns:
        The structure with the numbers of the tensors that are left. For (a, b, a) it is
        ("u", (("t", 0), ("t", 1), ("t", 0))).
    """
    places: dict[int, int] = {}
    numbers = [places.setdefault(id(one), len(places)) for one in tensors]
    if len(places) == len(tensors):
        return structure
    first = dict(zip(numbers, tensors, strict=True))
    tensors[:] = first.values()
    return _renumbered(structure, numbers)


def _renumbered(structure: Structure, numbers: Sequence[int]) -> Structure:
    if structure[0] == "t":
        return ("t", numbers[structure[1]])
    if structure[0] in "co":
        return structure
    children = tuple([_renumbered(child, numbers) for child in structure[-1]])
    return (*structure[:-1], children)


def builder(structure: Structure) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """Returns a function that does `rebuild` for one structure; it is faster for simple ones."""
    letter = structure[0]
    if letter == "t":
        number = structure[1]
        return lambda tensors, _: tensors[number]
    if letter == "d" and structure[1] == (dict, None) and not structure[2]:
        return lambda tensors, objects: {}
    if letter == "u":
        children = structure[1]
        if children and all(child[0] == "t" for child in children):
            numbers = [child[1] for child in children]
            return lambda tensors, _: tuple([tensors[number] for number in numbers])
        parts = [builder(child) for child in children]
        return lambda tensors, objects: tuple([part(tensors, objects) for part in parts])
    return lambda tensors, objects: rebuild(structure, tensors, objects)


def constants(structure: Structure) -> list[Any]:
    """Returns the constants of a structure, and ("o", i) for each object."""
    if structure[0] == "c":
        return [structure[1]]
    if structure[0] == "t":
        return []
    if structure[0] == "o":
        return [structure]
    return [item for child in structure[-1] for item in constants(child)]


def unpicklable(structure: Structure, objects: Any) -> tuple[str, Any, Exception] | None:
    """Finds an object that does not pickle.

    Args:
        structure: of a value.
        objects: those of the value, by number.

    Returns:
        Where it is in the value, in Python's notation; the object; and the error. None if all of
        them pickle.
    """
    if structure[0] == "o":
        try:
            pickle.dumps(objects[structure[1]], pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            return "", objects[structure[1]], error
        return None
    if structure[0] in "tcp":
        return None
    for position, child in enumerate(structure[-1]):
        found = unpicklable(child, objects)
        if found is not None:
            if structure[0] == "d":
                step = f"[{structure[2][position]!r}]"
            elif structure[0] == "a":
                step = f".{structure[2][position]}"
            else:
                step = f"[{position}]"
            return (step + found[0], *found[1:])
    return None


def may_be_changed(structure: Structure) -> bool:
    """Says whether the arguments of a call have anything that code may change, besides tensors.

    Args:
        structure: of (args, kwargs).
    """
    if structure[0] == "p":
        return True
    positional, named = structure[1]
    # The dict of named arguments is not that of the code.
    return _has_container(positional) or any(map(_has_container, named[-1]))


def _has_container(structure: Structure) -> bool:
    letter = structure[0]
    return letter in "lsda" or (letter not in "tco" and any(map(_has_container, structure[-1])))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns all tensors in a nested value, in order."""
    found: list[torch.Tensor] = []
    flatten(value, found, [])
    return found


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Returns a nested value of the same structure, with `function` applied to each tensor."""
    tensors: list[torch.Tensor] = []
    objects: list[Any] = []
    structure = flatten(value, tensors, objects)
    return rebuild(structure, [function(tensor) for tensor in tensors], objects)


def replace_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Puts what a function returns for each tensor in a nested value into the tensor's place.

    What code may change, such as lists and dicts, stays the same object. Tuples are made anew if
    they change.

    Args:
        function: returns its argument to leave it where it is.
        value: any nested value.

    Returns:
        The value; another one if it is a tensor or a tuple that changes.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        named = hasattr(value, "_fields") or kind.__module__ == "torch.return_types"
        if kind is not tuple and not named:
            return value
        items = [replace_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return kind._make(items) if hasattr(kind, "_make") else kind(items)
    if kind is set:
        items = [replace_tensors(function, item) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            value.clear()
            value.update(items)
    elif kind is list or isinstance(value, dict | collections.UserDict):
        places = enumerate(value) if kind is list else value.items()
        for place, item in list(places):
            new = replace_tensors(function, item)
            if new is not item:
                value[place] = new
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name in _fields(value):
            item = getattr(value, name)
            new = replace_tensors(function, item)
            if new is not item:
                object.__setattr__(value, name, new)
    return value
