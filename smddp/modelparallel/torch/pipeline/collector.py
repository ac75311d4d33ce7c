"""Collects those calls of a frame whose values its code has not needed; makes a graph of them."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch

from smddp.modelparallel.torch.common.buffers import version_of
from smddp.modelparallel.torch.common.structure import Structure, builder, constants
from smddp.modelparallel.torch.pipeline.lazy import Lazy
from smddp.modelparallel.torch.pipeline.method import Method
from smddp.modelparallel.torch.pipeline.objects import Reply
from smddp.modelparallel.torch.pipeline.protocol import (
    SINK,
    SOURCE,
    Ambient,
    Call,
    Edge,
    Graph,
    Segment,
    TensorId,
    Watched,
)

__all__ = ["Collector", "KnownCall", "count_tensors", "predictable"]


class KnownCall:
    """What stays the same each time a call is made, unlike its tensors, its objects and its seed.

    `Learned` keeps one for each module, method, structure of arguments and mode. They are compared
    by identity, so a known call graph is found without comparing structures. "Known" means that
    this rank has met the call before; `returns` says whether its result's structure is known.

    Attributes:
        module, method, structure, returns, watched: see `Call`.
        count: how many tensors the result has; 0 if its structure is not known.
        build: makes the result from its tensors; None if its structure is not known.
    """

    __slots__ = ("build", "count", "method", "module", "returns", "structure", "watched")

    def __init__(
        self,
        module: int,
        method: Method,
        structure: Structure,
        returns: Structure | None,
        watched: Watched,
    ) -> None:
        self.module = module
        self.method = method
        self.structure = structure
        self.returns = returns
        self.watched = watched
        self.count = count_tensors(returns) if returns is not None else 0
        self.build = builder(returns) if returns is not None else None


class Collector:
    """The open call graph of a frame: it grows until it is sent.

    Attributes:
        ambient: holds for all its calls.
        inputs: the caller's tensors that enter the graph.
        versions: of the inputs when they were passed; see `version_of`.
        objects: the caller's other values that enter it.
        seeds: one per call, see `add`.
        lazies: weak references to the lazy tensors that were returned to the user's code.
    """

    def __init__(self, ambient: Ambient) -> None:
        self.ambient = ambient
        self.inputs: list[torch.Tensor] = []
        self.versions: list[int] = []
        self.objects: list[Any] = []
        self.seeds: list[Any] = []
        self.lazies: list[weakref.ref[Lazy]] = []
        # The numbers of the inputs, by the id of the tensor.
        self._numbers: dict[int, int] = {}
        # Calls, where their tensors come from, numbers of their objects.
        self._calls: list[tuple[KnownCall, tuple[TensorId, ...], tuple[int, ...]]] = []
        self._owners: list[int] = []

    def fetch(self) -> object:
        """Sends the graph, waits for its values, and gives them to the lazy tensors in use."""
        raise NotImplementedError

    def result_of_last(self) -> tuple[Structure, list[Any], list[Any]]:
        """Calls `fetch`; returns structure, tensors and objects of the last call's result.

        The structure of that result was not known before.
        """
        raise NotImplementedError

    def owner_of(self, lazy: Lazy) -> int | None:
        """Returns the rank that computes a lazy tensor; None if it is not of this graph."""
        if lazy.fetch is None or lazy.collector is not self:
            return None
        owner: int = self._owners[lazy.tensor_id[0]]
        return owner

    def add(
        self,
        owner: int,
        known: KnownCall,
        tensors: list[torch.Tensor],
        objects: list[Any],
        seed: int | tuple[int | None, ...] | None,
    ) -> Any:
        """Adds a call.

        Args:
            owner: rank of the pipeline that runs it.
            known: the call.
            tensors: among its arguments, lazy or not, in the order of the structure.
            objects: other values among its arguments, in the order of the structure.
            seed: for the random numbers of the call; None if it draws none; of several layers, one
                for each.

        Returns:
            What the user's code gets: lazy tensors in the structure that it expects; None if that
            is not known.
        """
        number = len(self._calls)
        ids = tuple([self._id_of(tensor) for tensor in tensors])
        numbers: tuple[int, ...] = ()
        if objects:
            numbers = tuple(range(len(self.objects), len(self.objects) + len(objects)))
            self.objects.extend(objects)
        self._calls.append((known, ids, numbers))
        self._owners.append(owner)
        self.seeds.append(seed)
        if known.build is None:
            return None
        stand_ins = [Lazy.of(self, (number, index), self.fetch) for index in range(known.count)]
        self.lazies.extend([weakref.ref(lazy) for lazy in stand_ins])
        return known.build(stand_ins, ())

    def _id_of(self, tensor: torch.Tensor) -> TensorId:
        if type(tensor) is Lazy and tensor.fetch is not None:
            assert tensor.collector is self, "a frame has one open graph at a time"
            return tensor.tensor_id
        number = self._numbers.setdefault(id(tensor), len(self.inputs))
        if number == len(self.inputs):
            # Held as long as the graph is open, so that no other tensor can get its id.
            self.inputs.append(tensor)
            self.versions.append(version_of(tensor))
        return (-1, number)

    def lazies_in_use(self) -> list[Lazy]:
        """Returns the lazy tensors that are still in use; only their values have to come back."""
        return [lazy for ref in self.lazies if (lazy := ref()) is not None]

    def signature(self, alive: list[Lazy]) -> Hashable:
        """Returns a key: graphs with equal signatures are equal.

        Args:
            alive: the lazy tensors that are still in use; see `lazies_in_use`.
        """
        wanted = tuple([lazy.tensor_id for lazy in alive])
        return self.ambient, tuple(self._owners), tuple(self._calls), wanted

    def graph(self, alive: list[Lazy]) -> Graph:
        """Returns the graph.

        Args:
            alive: the lazy tensors whose values come back to the caller; see `lazies_in_use`.
        """
        calls = [
            Call(
                module=known.module,
                method=known.method,
                structure=known.structure,
                tensors=ids,
                objects=numbers,
                returns=known.returns,
                watched=known.watched,
            )
            for known, ids, numbers in self._calls
        ]
        segments, of_call = self._segments()
        wanted: dict[tuple[int, int], list[TensorId]] = {}  # by the ends of the edge
        for number, call in enumerate(calls):
            target = of_call[number]
            for value in call.tensors:
                source = SOURCE if value[0] == -1 else of_call[value[0]]
                if source != target:
                    values = wanted.setdefault((source, target), [])
                    if value not in values:
                        values.append(value)
        for lazy in alive:
            wanted.setdefault((of_call[lazy.tensor_id[0]], SINK), []).append(lazy.tensor_id)
        for number, segment in enumerate(segments):
            _connect(wanted, number, segment, calls)
        edges = tuple(Edge(*ends, tuple(wanted[ends])) for ends in sorted(wanted))
        return Graph(self.ambient, tuple(calls), tuple(segments), edges)

    def _segments(self) -> tuple[list[Segment], list[int]]:
        segments: list[list[int]] = []
        of_call = []
        for number, owner in enumerate(self._owners):
            if not segments or self._owners[segments[-1][0]] != owner:
                segments.append([])
            segments[-1].append(number)
            of_call.append(len(segments) - 1)
        return [Segment(self._owners[calls[0]], tuple(calls)) for calls in segments], of_call


def _connect(
    wanted: dict[tuple[int, int], list[TensorId]],
    number: int,
    segment: Segment,
    calls: list[Call],
) -> None:
    """Adds the edges without which a segment would never begin, or its end would not be known."""
    needs_objects = any(calls[call].objects for call in segment.calls)
    if needs_objects or not any(target == number for _, target in wanted):
        wanted.setdefault((SOURCE, number), [])
    unknown = any(calls[call].returns is None for call in segment.calls)
    if unknown or not any(source == number for source, _ in wanted):
        wanted.setdefault((number, SINK), [])


def count_tensors(structure: Structure) -> int:
    """Returns how many tensors a structure has."""
    if structure[0] == "t":
        return 1
    if structure[0] in "co":
        return 0
    if structure[0] == "p":
        return int(structure[2]) + count_tensors(structure[1])
    return sum(count_tensors(child) for child in structure[-1])


def predictable(structure: Structure) -> bool:
    """Says whether a caller may expect this structure of the next result of the same call.

    It may if the structure holds tensors and None only: other values may differ each time. It may
    not if the call has changed its arguments. Records for hooks hold other constants, too.
    """
    if structure[0] == "p":
        return False
    if structure[:2] == ("n", Reply):
        result, objects, tensors, records = structure[2]
        nothing = ("c", None, type(None))
        return (
            objects == nothing == tensors
            and predictable(result)
            and not any(isinstance(one, tuple) for one in constants(records))
        )
    return count_tensors(structure) > 0 and all(value is None for value in constants(structure))
