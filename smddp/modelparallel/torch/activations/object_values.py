"""What the objects among a call's arguments held before the call.

A module may keep something in an object that it gets, as layers of a language model put keys and
values into a cache. A second run of the module has to find the object as the first run did, and
must not put the same into it again. If the module runs on another rank than its caller, the
caller's object has to get what the copy there has got.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import logging
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common.buffers import version_of

__all__ = ["Change", "ObjectValues", "Values", "make_change", "slots_of"]

# Objects of these classes hold nothing that a call changes, or nothing that may be put back.
_OPAQUE = (
    *(type(None), bool, int, float, complex, str, bytes, type, enum.Enum, range, slice),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(torch.dtype, torch.device, nn.Module, logging.Logger),
)
_ABSENT = object()


class Change(NamedTuple):
    """What an object holds now, where it held something else before.

    Attributes:
        items: all that it holds as a container; None if that has not changed.
        attributes: those that have another value now, by name.
        removed: names of those that it has no more.
    """

    items: Any
    attributes: dict[str, Any]
    removed: list[str]


class _Part(NamedTuple):
    """An object that can change.

    Attributes:
        owner: the object.
        items: what it holds as a container; None if it is none.
        attributes: those in its `__dict__`; None if it has none.
        slots: its other attributes.
    """

    owner: Any
    items: list[Any] | dict[Any, Any] | set[Any] | None
    attributes: dict[str, Any] | None
    slots: dict[str, Any]

    @staticmethod
    def of(owner: Any) -> _Part:
        """Returns what an object holds now."""
        items: list[Any] | dict[Any, Any] | set[Any] | None = None
        # Not the methods of subclasses, which may do more.
        if isinstance(owner, list):
            items = list.copy(owner)
        elif isinstance(owner, dict):
            items = dict.copy(owner)
        elif isinstance(owner, set):
            items = set.copy(owner)
        elif isinstance(owner, collections.deque):
            items = list(collections.deque.__iter__(owner))
        own = getattr(owner, "__dict__", None)
        attributes = dict(own) if isinstance(own, dict) else None
        slots = {name: getattr(owner, name, _ABSENT) for name in _slots(type(owner))}
        return _Part(owner, items, attributes, slots)

    def restore(self) -> None:
        """Gives the object what it held."""
        owner = self.owner
        _fill(owner, self.items)
        if self.attributes is not None:
            owner.__dict__.clear()
            owner.__dict__.update(self.attributes)
        for name, value in self.slots.items():
            if value is not _ABSENT:
                object.__setattr__(owner, name, value)
            elif hasattr(owner, name):
                object.__delattr__(owner, name)

    def change(self) -> Change | None:
        """Returns what the object holds now in place of what it held; None if it holds the same."""
        now = _Part.of(self.owner)
        if self.equals(now):
            return None
        before = {**(self.attributes or {}), **self.slots}
        attributes = {
            name: value
            for name, value in {**(now.attributes or {}), **now.slots}.items()
            if value is not before.get(name, _ABSENT)
        }
        removed = [
            name
            for name, value in before.items()
            if value is not _ABSENT and not (name in (now.attributes or {}) or name in now.slots)
        ]
        for name in [name for name, value in attributes.items() if value is _ABSENT]:
            removed.append(name)
            del attributes[name]
        mine, others = _Part(None, self.items, None, {}), _Part(None, now.items, None, {})
        return Change(None if mine.equals(others) else now.items, attributes, removed)

    def values(self) -> Iterator[Any]:
        """Yields what it holds."""
        if isinstance(self.items, dict):
            yield from self.items
            yield from self.items.values()
        else:
            yield from self.items or ()
        yield from (self.attributes or {}).values()
        yield from self.slots.values()

    def equals(self, other: _Part) -> bool:
        """Says whether both hold the same objects."""
        mine, others = list(self.values()), list(other.values())
        return (
            len(mine) == len(others)
            and all(one is two for one, two in zip(mine, others, strict=True))
            and (self.attributes or {}).keys() == (other.attributes or {}).keys()
        )


def _fill(owner: Any, items: Any) -> None:
    """Gives a container other items; does nothing for other objects."""
    # Not the methods of subclasses, which may do more.
    if isinstance(owner, list):
        list.__setitem__(owner, slice(None), items)
    elif isinstance(owner, dict):
        # An ordered dict has an order of its own.
        ordered = isinstance(owner, collections.OrderedDict)
        kind: Any = collections.OrderedDict if ordered else dict
        kind.clear(owner)
        for key, value in items.items():
            kind.__setitem__(owner, key, value)
    elif isinstance(owner, set):
        set.clear(owner)
        set.update(owner, items or ())
    elif isinstance(owner, collections.deque):
        collections.deque.clear(owner)
        collections.deque.extend(owner, items or ())


def make_change(owner: Any, change: Change) -> None:
    """Changes an object as a copy of it has changed.

    Args:
        owner: the object.
        change: of the copy.
    """
    if change.items is not None:
        _fill(owner, change.items)
    slots = _slots(type(owner))
    for name, value in change.attributes.items():
        if name in slots:
            object.__setattr__(owner, name, value)
        else:
            # Not `setattr`, which some classes replace.
            owner.__dict__[name] = value
    for name in change.removed:
        if name in slots:
            object.__delattr__(owner, name)
        else:
            owner.__dict__.pop(name, None)


class Values:
    """What some objects hold, without the objects in them, at one point of the program."""

    def __init__(self, objects: Iterable[Any]) -> None:
        """Notes what they hold now.

        Args:
            objects: modules, functions and classes among them are left out.
        """
        left_out = (*_OPAQUE, tuple, frozenset, torch.Tensor)
        self._parts = [_Part.of(one) for one in objects if not isinstance(one, left_out)]

    def restore(self) -> None:
        """Lets the objects hold what they held."""
        _restore(self._parts)


class ObjectValues:
    """What some objects hold, and the objects in them, at one point of the program.

    It knows containers and attributes of Python's objects. What objects of other languages hold, a
    module's own state, and values of tensors are not noted; but a tensor that has changed since is.

    Attributes:
        unknown: the objects of which it does not know what they hold.
    """

    def __init__(self, who: str, objects: Sequence[Any]) -> None:
        """Notes what they hold now.

        Args:
            who: the module, for messages.
            objects: arguments of a call.
        """
        self._who = who
        self._parts: list[_Part] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        # Generators of random numbers, and their states.
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        # Objects of which nothing is known.
        self.unknown: list[Any] = []
        self._note(objects)

    @property
    def objects(self) -> list[Any]:
        """The objects that can change, in an order which is the same for a copy of all of them."""
        return [part.owner for part in self._parts]

    def changes(self) -> dict[int, Change]:
        """Returns what objects hold now in place of what they held, by their place in `objects`."""
        found = ((number, part.change()) for number, part in enumerate(self._parts))
        return {number: change for number, change in found if change is not None}

    def changed(self) -> bool:
        """Says whether an object holds something else now, or a tensor has changed in place."""
        return bool(self.changes()) or any(version_of(one) != old for one, old in self._versions)

    def _note(self, objects: Iterable[Any]) -> None:
        seen: set[int] = set()
        open_ones = [value for value in objects if not isinstance(value, _OPAQUE)]
        while open_ones:
            value = open_ones.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                # Tensors of other classes may have no values: those of another rank, for instance.
                if type(value) is torch.Tensor:
                    self._versions.append((value, version_of(value)))
                continue
            if isinstance(value, torch.Generator):
                self._generators.append((value, value.get_state()))
            if isinstance(value, tuple | frozenset):
                open_ones += [one for one in value if not isinstance(one, _OPAQUE)]
                continue
            part = _Part.of(value)
            if part.items is None and part.attributes is None and not part.slots:
                self.unknown.append(value)
                continue
            self._parts.append(part)
            open_ones += [one for one in part.values() if not isinstance(one, _OPAQUE)]

    def restore(self) -> None:
        """Lets the objects hold what they held."""
        _restore(self._parts)
        _set_states(self._generators)

    def check_tensors(self) -> None:
        """Checks that the tensors in the objects have not changed.

        Raises:
            SMPUsageError: one has.
        """
        for tensor, version in self._versions:
            if version_of(tensor) != version:
                raise SMPUsageError(
                    f"{self._who} has activation checkpointing, and a tensor of shape "
                    f"{tuple(tensor.shape)} in an object among its arguments was changed in place "
                    "between the beginning of its forward and its backward pass: its activations "
                    "cannot be computed again. Put a new tensor into the object, or pass it none"
                )

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Lets the objects hold what they held, for the code inside; then what they hold now.

        Raises:
            SMPUsageError: a tensor in them has changed.
        """
        self.check_tensors()
        present = [_Part.of(part.owner) for part in self._parts]
        states = [(generator, generator.get_state()) for generator, _ in self._generators]
        self.restore()
        try:
            yield
        finally:
            _restore(present)
            _set_states(states)


def _restore(parts: Iterable[_Part]) -> None:
    for part in parts:
        # Other threads may change an object that the call only reads: it stays alone.
        if not part.equals(_Part.of(part.owner)):
            part.restore()


def _set_states(generators: Iterable[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in generators:
        generator.set_state(state)


def slots_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object that have no place in its `__dict__`, as far as set.

    Args:
        value: any object.
    """
    names = _slots(type(value))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _slots(kind: type) -> list[str]:
    """Returns the names of the attributes for which a class has no place in a `__dict__`."""
    names = []
    for base in kind.__mro__:
        own = base.__dict__.get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            if name in ("__dict__", "__weakref__"):
                continue
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return names
