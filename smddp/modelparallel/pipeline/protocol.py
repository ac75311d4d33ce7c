"""What the ranks of a pipeline say to each other in a step, and the frame of a call.

A *call graph* is a group of calls of modules on other ranks that a frame has made and whose values
it has not yet looked at. Consecutive calls of one owner form a *segment*. Values flow along the
edges of the graph: from the caller (`SOURCE`) to segments, between segments directly, and from
segments back to the caller (`SINK`). Gradients flow along the same edges backwards. So there are
only two kinds of messages for the work itself: FORWARD and BACKWARD values of one edge.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from smddp.modelparallel.common.structure import builder

__all__ = ["SINK", "SOURCE", "Ambient", "Call", "Edge", "Graph", "Kind", "Segment", "ambient"]

SOURCE, SINK = -1, -2


class Kind(enum.IntEnum):
    """Kinds of messages."""

    BEGIN = 1  # rank 0 to all: a step begins
    PARTITION = 2  # rank 0 to all: where every module lives
    GRAPH = 3  # caller to a member: a call graph that it does not know yet
    FORWARD = 4  # the values of one edge
    BACKWARD = 5  # the gradients of one edge
    DONE = 6  # rank 0 to all: a microbatch has ended; its graphs may be dropped
    DROP = 7  # caller to a member: no gradients will come for a call graph
    END = 8  # the last message of a step on each stream


class Ambient(NamedTuple):
    """What surrounds a call and must hold on the rank that runs it."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]  # device types for which it is on
    autocast_cache: bool

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Makes this thread's state equal to it."""
        return contextlib.nullcontext() if ambient() == self else self._enter()

    @contextlib.contextmanager
    def _enter(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                cache = self.autocast_cache
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=cache))
            yield


@functools.cache
def _devices() -> tuple[str, ...]:
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def ambient() -> Ambient:
    """Returns the state of this thread."""
    autocast = ()
    for device in _devices():
        if torch.is_autocast_enabled(device):
            autocast += ((device, torch.get_autocast_dtype(device)),)  # type: ignore[assignment]
    return Ambient(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.is_autocast_cache_enabled(),
    )


class Edge(NamedTuple):
    """Values that go from one end to another: outputs, as (call, tensor), in order.

    From SOURCE the pairs are (-1, number of the tensor among the caller's).
    """

    source: int
    target: int
    values: tuple[tuple[int, int], ...]


class Call(NamedTuple):
    """One call within a graph.

    Attributes:
        module: its number.
        method: "forward", when that was called by name; "" when the module itself was.
        shape: of (args, kwargs); see structure.py.
        tensors: where each tensor of the shape comes from: (call, tensor) of an output, or
            (-1, number) of the caller's.
        objects: numbers of the caller's objects.
        returns: the shape of the result that the caller relies on; None if it knows none.
    """

    module: int
    method: str
    shape: Any
    tensors: tuple[tuple[int, int], ...]
    objects: tuple[int, ...]
    returns: Any


class Segment(NamedTuple):
    """Consecutive calls of one owner."""

    owner: int
    calls: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Graph:
    """The shape of a call graph, and what surrounds it; the same for many microbatches and steps.

    Members know it by number, so that messages hold little but numbers.
    """

    ambient: Ambient
    calls: tuple[Call, ...]
    segments: tuple[Segment, ...]
    edges: tuple[Edge, ...]

    @functools.cached_property
    def into(self) -> dict[int, list[Edge]]:
        """The edges into each segment, and into SINK."""
        return self._by_end(lambda edge: edge.target)

    @functools.cached_property
    def out_of(self) -> dict[int, list[Edge]]:
        """The edges out of each segment, and out of SOURCE."""
        return self._by_end(lambda edge: edge.source)

    @functools.cached_property
    def between(self) -> dict[tuple[int, int], Edge]:
        """The edges by their ends."""
        return {(edge.source, edge.target): edge for edge in self.edges}

    @functools.cached_property
    def results(self) -> tuple[tuple[int, int], ...]:
        """What comes back to the caller of calls whose shape is known, in order."""
        return tuple(sorted(place for edge in self.into[SINK] for place in edge.values))

    @functools.cached_property
    def builders(self) -> list[Callable[..., Any]]:
        """What makes (args, kwargs) of each call, from tensors and objects."""
        return [builder(call.shape) for call in self.calls]

    def __getstate__(self) -> dict[str, Any]:
        """Sends what it is made of only."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def depths(self) -> list[int]:
        """How many segments come before each at most, and itself."""
        depths: list[int] = []
        for number in range(len(self.segments)):
            before = [depths[e.source] for e in self.into[number] if e.source != SOURCE]
            depths.append(1 + max(before, default=0))
        return depths

    def _by_end(self, end: Callable[[Edge], int]) -> dict[int, list[Edge]]:
        found: dict[int, list[Edge]] = {n: [] for n in (SOURCE, SINK, *range(len(self.segments)))}
        for edge in self.edges:
            found[end(edge)].append(edge)
        return found

    def owners(self) -> list[int]:
        """Returns the ranks that take part, ascending."""
        return sorted({segment.owner for segment in self.segments})
