"""Objects that calls between ranks take, change and return.

What `flatten` leaves as one object, such as a cache of keys and values, is pickled without its
tensors. These travel like all others, in the autograd graph. A module may change what it gets: put
something into a list, a dict or an object, or change a tensor in place. It does so to copies if it
runs on another rank. So the owner sends back what has changed, and the caller's objects, the same
ones, get it. Where the result of a call holds an object that the call has got, the caller gets its
own. Modules are such objects, too: what a call has set as their attributes, the caller's copies of
them get.

Beside the result may come records: what modules inside the called one have taken and returned, for
hooks of the caller.
"""

from __future__ import annotations

import enum
import io
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from smddp._torch_internals import backward_hooks_of_tensor
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.failure import summary
from smddp.modelparallel.torch.activations.object_values import ObjectValues, make_change
from smddp.modelparallel.torch.common.buffers import version_of
from smddp.modelparallel.torch.common.structure import (
    Structure,
    flatten,
    rebuild,
    without_repeats,
)
from smddp.modelparallel.torch.pipeline.attributes import CallAttributes
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.protocol import raise_if_unpicklable

__all__ = [
    "Arguments",
    "Finder",
    "Record",
    "Reply",
    "finder",
    "flatten_reply",
    "is_immutable",
    "opened",
    "packed",
    "rebuild_reply",
]

# Arguments of these types do not change.
_IMMUTABLE = (int, float, complex, str, bytes, range, slice, frozenset, type, enum.Enum)
# Names of what both ends have, in a pickle: an object among the arguments, a tensor among them, a
# module of the model; and of a tensor that travels with the pickle.
_OBJECT, _ARGUMENT, _MODULE, _TENSOR = "object", "argument", "module", "tensor"

# Returns what a name stands for at this end.
Finder = Callable[[str, int], Any]


class Record(NamedTuple):
    """A call of a module inside another one, for forward hooks of the other one's caller.

    Attributes:
        module: its number, as a text, which is part of a structure.
        ran: the rank of the pipeline where it ran, and where its own hooks did.
        args: positional arguments.
        kwargs: named arguments; None if no hook wants them.
        result: what it returned.
    """

    module: str
    ran: int
    args: Any
    kwargs: Any
    result: Any


class Reply(NamedTuple):
    """What comes back from a call, if it is more than a result.

    Attributes:
        result: of the module.
        objects: what the call has changed in objects and modules: see `Arguments.changes`; None for
            nothing.
        tensors: those that it has changed in place, by their place among the tensors of the
            arguments; None for none.
        records: of calls inside this one.
    """

    result: Any
    objects: Any
    tensors: Any
    records: tuple[Record, ...]


def is_immutable(value: Any) -> bool:
    """Says whether code cannot change an object, so that a call need not look for changes."""
    return isinstance(value, _IMMUTABLE)


class Arguments:
    """The arguments of a call, to find out later what the call has changed.

    Attributes:
        who: the module, for messages.
        tensors: those in the arguments.
        attributes: of the modules whose attributes the call may set, by their number; at the owner.
    """

    def __init__(
        self, who: str, args: Any, kwargs: Any, tensors: Sequence[Any], may_change: bool
    ) -> None:
        """Notes what they hold.

        Args:
            who: the module, for messages.
            args: positional arguments.
            kwargs: named arguments.
            tensors: those in the arguments, in the order of the structure.
            may_change: see `may_be_changed`.
        """
        self.tensors = tensors
        self.who = who
        self._versions: list[int] = []
        self._require_grad: list[bool] = []
        self._values: ObjectValues | None = None
        self._unknown: list[bytes | None] = []
        self.attributes: Mapping[int, CallAttributes] = {}
        if may_change:
            self._values = ObjectValues(who, [args, tuple(kwargs.values())])

    def watch(self, marks: bool) -> None:
        """Prepares to tell which tensors a call changes, and which objects of unknown kinds.

        Only at the owner: the caller's tensors may be lazy.

        Args:
            marks: shall `marked` be called, too?
        """
        self._versions = [version_of(tensor) for tensor in self.tensors]
        if marks:
            self._require_grad = [tensor.requires_grad for tensor in self.tensors]
        if self._values is not None:
            self._unknown = [_content(value) for value in self._values.unknown]

    @property
    def objects(self) -> list[Any]:
        """What code may change in the arguments, in the same order at both ends."""
        return self._values.objects if self._values is not None else []

    @property
    def kinds(self) -> int:
        """A number that is the same at both ends if they have the same objects."""
        return zlib.crc32(repr([type(one).__qualname__ for one in self.objects]).encode())

    def changes(self) -> Any:
        """Returns what the call has changed in objects.

        Returns:
            (`kinds`, a `Change` by the number of the object, one by the number of the module); None
            if nothing has changed.

        Raises:
            SMPUsageError: it has changed an object of which smp does not know what it holds.
        """
        attributes = {
            number: change
            for number, one in self.attributes.items()
            if (change := one.change()) is not None
        }
        if self._values is None:
            return (0, {}, attributes) if attributes else None
        for value, before in zip(self._values.unknown, self._unknown, strict=True):
            if _content(value) != before:
                raise SMPUsageError(
                    f"{self.who} has changed a {type(value).__name__} among its arguments, which "
                    "its caller, on another rank of the pipeline, would not see: let it return the "
                    "new value"
                )
        found = self._values.changes()
        return (self.kinds, found, attributes) if found or attributes else None

    def changed_tensors(self) -> list[int]:
        """Returns the numbers of the tensors that the call has changed in place."""
        return [
            number
            for number, tensor in enumerate(self.tensors)
            if version_of(tensor) != self._versions[number]
        ]

    def marked(self) -> str | None:
        """Returns what the call has asked autograd to do with its copy of a tensor, or None.

        The caller's tensor does not know of it.
        """
        for tensor, required_grad in zip(self.tensors, self._require_grad, strict=True):
            if backward_hooks_of_tensor(tensor):
                return "has registered a gradient hook"
            if tensor.retains_grad:
                return "has called retain_grad()"
            if tensor.requires_grad and not required_grad:
                return "has called requires_grad_()"
        return None

    def take(self, reply: Reply, value_of: Callable[[Any], torch.Tensor]) -> None:
        """Changes the caller's arguments as the call has changed their copies.

        Args:
            reply: what has come back.
            value_of: returns the values of a tensor that may be lazy.

        Raises:
            SMPUsageError: the copies are not like the arguments.
        """
        for number, value in (reply.tensors or {}).items():
            value_of(self.tensors[number]).copy_(value)
        if reply.objects is None:
            return
        kinds, changes, _ = reply.objects
        if changes and kinds != self.kinds:
            names = ", ".join(dict.fromkeys(type(one).__qualname__ for one in self.objects))
            raise SMPUsageError(
                f"{self.who}, which lives on another rank of the pipeline, has changed an object "
                "among its arguments. smp cannot change the caller's in the same way, because the "
                "copy that was sent has other parts, or because it was passed twice: let the "
                f"module return the new value. Its arguments have these objects: {names}"
            )
        for number, change in changes.items():
            make_change(self.objects[number], change)

    def names(self) -> dict[int, tuple[str, int]]:
        """Returns how a pickle for the other end names the objects and tensors, by their id."""
        found = {id(one): (_ARGUMENT, number) for number, one in enumerate(self.tensors)}
        return found | {id(one): (_OBJECT, number) for number, one in enumerate(self.objects)}

    def find(self, kind: str, number: int) -> Any:
        """Returns what a name stands for at this end; see `names`."""
        return self.objects[number] if kind == _OBJECT else self.tensors[number]


def _content(value: Any) -> bytes | None:
    """Returns a text that differs if an object holds something else; None if there is none."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return None


def packed(
    structure: Structure,
    tensors: list[Any],
    objects: list[Any],
    modules: Modules,
    names: dict[int, tuple[str, int]] | None = None,
) -> tuple[Structure, list[Any]]:
    """Pickles the objects of a value without their tensors, if one of them may hold any.

    Args:
        structure: of the value.
        tensors: of the value; gets those of the objects at the end.
        objects: of the value.
        modules: of the model.
        names: of what the other end has already, by id.

    Returns:
        Structure and objects of what is sent.
    """
    if all(map(is_immutable, objects)):
        return structure, objects
    data = io.BytesIO()
    before = len(tensors)
    _Packer(data, tensors, modules, names or {}).dump(objects)
    return ("p", structure, len(tensors) - before), [data.getvalue()]


def opened(
    sender: int, structure: Structure, tensors: list[Any], objects: list[Any], find: Finder
) -> tuple[Structure, list[Any], list[Any]]:
    """Reverses `packed`: returns structure, tensors and objects of the value.

    Args:
        sender: rank of the pipeline.
        structure: of what was sent.
        tensors: that were sent.
        objects: that were sent.
        find: returns what a name stands for at this end.

    Raises:
        SMPUsageError: an object cannot be unpickled.
    """
    if structure[0] != "p":
        return structure, tensors, objects
    inner, count = structure[1:]
    first = len(tensors) - count
    try:
        loaded = _Unpacker(io.BytesIO(objects[0]), tensors[first:], find).load()
    except BaseException as error:  # of an object of the script; signals raise elsewhere
        raise SMPUsageError(
            f"an object that rank {sender} of the pipeline has sent cannot be unpickled: "
            f"{summary(error)}"
        ) from None
    return inner, tensors[:first], loaded


class _Packer(pickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        tensors: list[Any],
        modules: Modules,
        names: dict[int, tuple[str, int]],
    ) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors, self._first = tensors, len(tensors)
        self._modules, self._names = modules, names
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        name = self._names.get(id(value))
        if name is not None:
            return name
        if isinstance(value, torch.Tensor):
            place = self._places.setdefault(id(value), len(self._tensors) - self._first)
            if place == len(self._tensors) - self._first:
                self._tensors.append(value)
            return _TENSOR, place
        if isinstance(value, nn.Module):
            number = self._modules.number_of(value)
            return None if number is None else (_MODULE, number)
        return None


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Any], find: Finder) -> None:
        super().__init__(file)
        self._tensors, self._find = tensors, find

    def persistent_load(self, name: tuple[str, int]) -> Any:
        kind, number = name
        return self._tensors[number] if kind == _TENSOR else self._find(kind, number)


def finder(modules: Modules, arguments: Arguments | None = None) -> Finder:
    """Returns what finds the modules, objects and tensors that a message names.

    Args:
        modules: of the model.
        arguments: of the call that the message answers; None if it answers none.
    """

    def find(kind: str, number: int) -> Any:
        if kind == _MODULE or arguments is None:
            return modules.by_number[number]
        return arguments.find(kind, number)

    return find


def flatten_reply(
    reply: Reply,
    arguments: Arguments,
    modules: Modules,
    tensors: list[Any],
    objects: list[Any],
) -> tuple[Structure, list[Any]]:
    """Flattens what comes back from a call: only the result, if there is nothing else.

    Args:
        reply: what comes back.
        arguments: of the call.
        modules: of the model.
        tensors: gets the tensors.
        objects: gets the objects.

    Returns:
        The structure, and the objects to be sent.
    """
    # Only where callers wait anyway, because they cannot expect an object.
    awaited = reply.objects is not None or reply.tensors is not None
    mine = {id(one) for one in arguments.objects} if awaited else set()

    def whole(value: Any) -> bool:
        return id(value) in mine

    structure = flatten(reply.result, tensors, objects, whole if mine else None)
    result = structure
    if awaited or reply.records:
        changed: Structure = ("c", None, type(None))
        if reply.objects is not None:
            objects.append(reply.objects)
            changed = ("o", len(objects) - 1)
        rest = [flatten(one, tensors, objects) for one in (reply.tensors, reply.records)]
        structure = ("n", Reply, (structure, changed, *rest))
    structure = without_repeats(structure, tensors)
    if all(map(is_immutable, objects)):
        return structure, objects
    try:
        return packed(structure, tensors, objects, modules, arguments.names())
    except Exception:
        raise_if_unpicklable(f"{arguments.who} returns", result, objects)
        raise


def rebuild_reply(
    sender: int, structure: Structure, tensors: list[Any], objects: list[Any], find: Finder
) -> Any:
    """Returns what has come back: a `Reply`, or only a result.

    Args:
        sender: rank of the pipeline.
        structure: of what was sent.
        tensors: that were sent.
        objects: that were sent.
        find: returns what a name stands for at this end.
    """
    return rebuild(*opened(sender, structure, tensors, objects, find))
