"""What has been done to delayed tensors, and how to do it again on real ones.

A *delayed* tensor has shape, strides, dtype and device, and no memory. Each operation on delayed
tensors is a `Call`. To get the values of one tensor, `replay` makes the calls again that its values
depend on, in their order, on real tensors.

Tensors that share memory, such as a tensor and its views, belong to one `Memory`. A call that
writes to one of them changes all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from smddp._torch_internals import (
    TreeSpec,
    storage_address,
    tree_leaves,
    tree_unflatten,
    version_of_tensor,
)
from smddp.modelparallel.core.errors import SMPUsageError

__all__ = [
    "Call",
    "Constant",
    "Geometry",
    "Memory",
    "Promise",
    "Random",
    "Value",
    "generator_of",
    "replay",
]

_numbers = itertools.count()


class Geometry(NamedTuple):
    """Which elements of its memory a tensor has."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Geometry:
        """Returns that of a tensor."""
        return Geometry(
            tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
        )

    def covers(self, size: int) -> bool:
        """Says whether the tensor has each byte of a memory of this size exactly once."""
        count = 1
        for length, stride in sorted(
            zip(self.shape, self.strides, strict=True), key=lambda pair: pair[1]
        ):
            if length == 1:
                continue
            if stride != count:
                return False
            count *= length
        return count * self.dtype.itemsize == size


@dataclasses.dataclass(eq=False)
class Memory:
    """Memory that tensors share.

    Attributes:
        storage: the storage without bytes that stands for it. It is kept so that no other storage
            gets its address.
        writers: the calls that have made it or written to it, in order.
        real: the real storage, once a tensor of it has come to life.
    """

    storage: torch.UntypedStorage
    writers: list[Call] = dataclasses.field(default_factory=list)
    real: torch.UntypedStorage | None = None


@dataclasses.dataclass(eq=False)
class Value:
    """A delayed tensor, as calls know it. If its memory or geometry changes, it is another one.

    Attributes:
        memory: where its elements are.
        geometry: which of them it has.
        maker: the call that has made it.
    """

    memory: Memory
    geometry: Geometry
    maker: Call

    def same(self, other: Value) -> bool:
        """Says whether another one is the same part of the same memory."""
        return self.memory is other.memory and self.geometry == other.geometry

    def fits(self, tensor: torch.Tensor) -> bool:
        """Says whether a delayed tensor still has this memory and geometry."""
        same = storage_address(self.memory.storage) == storage_address(tensor.untyped_storage())
        return same and self.geometry == Geometry.of(tensor)


class Constant:
    """A real tensor that a call takes.

    Small ones are copied by default. Others, such as the entries of a state dict, are not, because
    the copies could need as much memory as the whole model; they must not change.
    """

    _SMALL = 2**16  # bytes

    def __init__(self, tensor: torch.Tensor, copy: bool | None = None) -> None:
        """Keeps a tensor.

        Args:
            tensor: the tensor.
            copy: copy it; None copies a small one.
        """
        self._tensor = tensor
        self._version = -1
        small = tensor.numel() * tensor.element_size() <= self._SMALL
        if copy or (copy is None and small):
            self._tensor = tensor.detach().clone()
        elif not tensor.is_inference():
            self._version = version_of_tensor(tensor)

    def get(self, call: Call) -> torch.Tensor:
        """Returns the tensor.

        Raises:
            SMPUsageError: it has changed since the call was recorded.
        """
        if self._version >= 0 and version_of_tensor(self._tensor) != self._version:
            raise SMPUsageError(
                f"a tensor of shape {tuple(self._tensor.shape)} was changed after {call} had used "
                "it for a parameter whose initialization is delayed. Leave it as it is until the "
                "first step, or give the parameter a copy of it"
            )
        return self._tensor.detach()


class Promise(Constant):
    """A real tensor that is made anew for each call that takes it."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        """Keeps the function that makes it."""
        self._make = make

    def get(self, call: Call) -> torch.Tensor:
        """Returns the tensor."""
        return self._make()


class Random(NamedTuple):
    """Where in the stream of random numbers a call has drawn.

    Attributes:
        state: of the generator, before the call.
        device: of the generator.
    """

    state: torch.Tensor
    device: torch.device


@dataclasses.dataclass(eq=False)
class Call:
    """One operation.

    Attributes:
        function: the operator.
        leaves: its arguments: `Value`s, `Constant`s, and what is not a tensor.
        spec: how the leaves make up the arguments.
        results: one for each tensor that it returns.
        overwrites: it writes each byte of the memory of its first argument, and reads none.
        views: it reads and writes nothing, and returns a tensor that shares memory.
        random: where it has drawn random numbers; None if it draws none.
        place: file and line of the code that has made it.
        dtype: torch's default dtype at that time.
        number: larger than that of each earlier call.
    """

    function: Any
    leaves: Sequence[Any]
    spec: TreeSpec
    overwrites: bool
    views: bool
    random: Random | None
    place: str
    results: list[Value] = dataclasses.field(default_factory=list)
    dtype: torch.dtype = dataclasses.field(default_factory=torch.get_default_dtype)
    number: int = dataclasses.field(default_factory=lambda: next(_numbers))

    def __str__(self) -> str:
        return f"{self.function.name()} ({self.place})"

    def values(self) -> Iterator[Value]:
        """Yields the delayed tensors among the arguments."""
        return (leaf for leaf in self.leaves if isinstance(leaf, Value))

    def run(self, tensors: dict[Value, torch.Tensor]) -> None:
        """Makes the call on real tensors.

        Args:
            tensors: has those of the arguments; gets those of the results.
        """
        with _as_before(self.random, self.dtype) as generator:
            leaves = list(self.leaves)
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Value):
                    leaves[place] = tensors[leaf]
                elif isinstance(leaf, Constant):
                    leaves[place] = leaf.get(self)
                elif isinstance(leaf, torch.Generator):
                    leaves[place] = generator
            args, kwargs = tree_unflatten(leaves, self.spec)
            made = self.function(*args, **kwargs)
        found = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        for value, tensor in zip(self.results, found, strict=True):
            tensors[value] = tensor


def generator_of(device: torch.device) -> torch.Generator:
    """Returns the generator from which operations on a device draw by default."""
    module: Any = getattr(torch, device.type, None)  # None for "meta"
    if not hasattr(module, "default_generators"):
        return torch.default_generator
    module.init()  # before, there are none
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


@contextmanager
def _as_before(random: Random | None, dtype: torch.dtype) -> Iterator[torch.Generator | None]:
    """In this context random numbers and the default dtype are those of an earlier call.

    Yields:
        The generator from which to draw in place of one among the arguments.
    """
    other = torch.get_default_dtype()
    if dtype != other:
        torch.set_default_dtype(dtype)
    generator = generator_of(random.device) if random is not None else None
    before = generator.get_state() if generator is not None else None
    try:
        if generator is not None and random is not None:
            generator.set_state(random.state)
        yield generator
    finally:
        if generator is not None and before is not None:
            generator.set_state(before)
        if dtype != other:
            torch.set_default_dtype(other)


def replay(wanted: Sequence[Value]) -> list[torch.Tensor]:
    """Returns real tensors with the values that delayed ones have now.

    Tensors of one memory share memory here, too. Besides them only what the next calls need is in
    memory at a time.
    """
    calls = _needed(wanted)
    last: dict[Value, int] = {}
    for call in calls:
        for value in (*call.values(), *call.results):
            last[value] = call.number
    last.update(dict.fromkeys(wanted, -1))
    tensors: dict[Value, torch.Tensor] = {}
    with torch.no_grad():
        for call in calls:
            call.run(tensors)
            for value in {*call.values(), *call.results}:
                if last[value] == call.number:
                    del tensors[value]
    return [tensors[value] for value in wanted]


def _needed(wanted: Iterable[Value]) -> list[Call]:
    """Returns the calls on which the present values of tensors depend, in their order."""
    calls: dict[int, Call] = {}
    seen: set[tuple[Memory, int]] = set()
    pending: list[Call] = []

    def need(value: Value, before: int) -> None:
        pending.append(value.maker)
        if (value.memory, before) in seen:
            return
        seen.add((value.memory, before))
        for call in reversed(value.memory.writers):
            if call.number < before:
                pending.append(call)
                if call.overwrites:
                    break

    for value in wanted:
        need(value, next(_numbers))
    while pending:
        call = pending.pop()
        if call.number in calls:
            continue
        calls[call.number] = call
        for place, value in enumerate(call.values()):
            if call.views or (call.overwrites and place == 0):
                # It does not matter what was there before; only the tensor has to exist.
                pending.append(value.maker)
            else:
                need(value, call.number)
    return [calls[number] for number in sorted(calls)]
