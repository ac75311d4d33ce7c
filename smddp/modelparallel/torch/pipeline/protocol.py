"""What ranks send each other in a step: kinds of messages, and call graphs.

A *call graph* is a group of calls of modules on other ranks that a frame has made and whose values
it has not needed yet. Consecutive calls to modules of one owner form a *segment*. Values flow along
the edges of the graph: from the caller (`SOURCE`) to segments, between segments directly, and from
segments back to the caller (`SINK`). Gradients flow along the same edges backwards. So the work
itself needs only two kinds of messages: FORWARD has the values of one edge, BACKWARD the gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common import device
from smddp.modelparallel.torch.common.structure import (
    Structure,
    builder,
    may_be_changed,
    unpicklable,
)
from smddp.modelparallel.torch.pipeline.method import Method

__all__ = [
    "SINK",
    "SOURCE",
    "Ambient",
    "Call",
    "Differentiation",
    "Edge",
    "Graph",
    "Kind",
    "Message",
    "Origin",
    "Pass",
    "Segment",
    "TensorId",
    "Watched",
    "ambient",
    "raise_if_unpicklable",
]

SOURCE, SINK = -1, -2

# Modules whose calls are recorded; see `Call.watched`.
Watched = tuple[tuple[int, bool, tuple[int, ...]], ...]

# Names a tensor in a call graph: (number of the call, number of the tensor in its result). For the
# caller's tensors: (-1, number of the tensor among the caller's inputs).
TensorId = tuple[int, int]


class Kind(enum.IntEnum):
    """Kinds of messages.

    All ranks are ranks of the pipeline, but those of DECISIONS, STOP, ALIVE, WAIT and NOTED, which
    the members of an order group send each other; so is END, at the end of what they send.

    The headers, which hold no tensors:
        BEGIN: a `StepBegin`.
        PARTITION: a `Decision`.
        GRAPH: (caller_rank, graph_id, `Graph`); see `Origin`.
        FORWARD: (the fields of the `Origin`, seeds of all calls of the graph, source, target,
            extra). `extra` has the caller's objects by number, on an edge from SOURCE; or, on an
            edge to SINK, what `CallerSide.on_values` says; None if there is nothing.
        BACKWARD: (caller_rank, sending, target of the edge, source of the edge, fields of the
            `Pass`): the target sends, the source receives. See `Origin`. What a segment sends to
            the caller also has, at the end, the gradients of the parameters in `Pass.asked`; so
            then each segment sends it one, with or without an edge.
        DONE: the number of the microbatch.
        DROP: the fields of the `Origin`, without depth and path.
        END: a `Failure`; or after a success, from rank 0 (`StepResult.header`, a `StepReport`),
            from the others a `StepReport`; None from a rank that has heard of a failure. In an
            order group, a `Verdict` and a `Point`.
        DECISIONS: a list of `Decision`s, in their order; None if the leader makes no more.
        STOP: (the fields of an `Elsewhere`, what `StepCollectives.stop` has returned).
        ALIVE: the fields of a `Point`.
        WAIT: the number of a task, and that of its call; see `Waits.told`.
        NOTED: None.
        UNREADABLE: the class and text of the error.
    """

    BEGIN = 1  # rank 0 to all: a step begins
    PARTITION = 2  # rank 0 to all: where every module lives
    GRAPH = 3  # caller to a member: a graph that it does not know
    FORWARD = 4  # the values of one edge, to its target
    BACKWARD = 5  # the gradients of one edge, to its source
    DONE = 6  # rank 0 to all: a microbatch has ended, so what is kept of it can be freed
    DROP = 7  # caller to a member: a graph gets no gradients, so it can be forgotten in this step
    END = 8  # the last message of a step on each stream
    DECISIONS = 9  # leader to the followers: which tasks begin or go on
    STOP = 10  # member to all others: the step has failed, or has to be run again
    ALIVE = 11  # member to all others, if nothing moves: how far it is
    WAIT = 12  # member to all others: a task waits for a call whose structure is new there
    NOTED = 13  # the answer to WAIT
    UNREADABLE = 14  # in place of a message that cannot be unpickled; never sent


class Message(NamedTuple):
    """What one rank tells another.

    Attributes:
        kind: see `Kind`.
        header: anything that pickles and holds no tensors.
        tensors: dense ones of any shape and dtype, but not quantized; None stands for "no
            gradient". Whether a tensor requires a gradient is preserved, its autograd graph is not.
    """

    kind: int
    header: Any
    tensors: list[torch.Tensor | None]


class Origin(NamedTuple):
    """Says which call graph a message is about, and where in the program its caller stands.

    It is sent as a plain tuple, which is shorter.

    Attributes:
        caller_rank: the rank of the pipeline that has sent the graph.
        sending: which sending of a graph it is, counted by the caller in this step.
        graph_id: names the graph in messages; the caller never uses one for two graphs.
        microbatch: for which it was sent.
        depth: of the caller's frame.
        path: of the graph: that of the caller's frame, and how many graphs the frame had sent
            before this one; see `Frame.path`.
    """

    caller_rank: int
    sending: int
    graph_id: int
    microbatch: int
    depth: int
    path: tuple[int, ...]


class Pass(NamedTuple):
    """Which kind of backward pass it is; sent as a plain tuple.

    Attributes:
        accumulates: parameters get gradients. Not if the script has asked for certain gradients,
            as `torch.autograd.grad` does.
        keeps: there may be another backward pass through the same graph (`retain_graph`).
        asked: the names of the parameters, of any rank, whose gradients the script has asked for.
            Only if it does not accumulate.
    """

    accumulates: bool
    keeps: bool
    asked: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Differentiation:
    """A backward pass with create_graph=True through a graph of one segment, as a call.

    The arguments of the call are this, the gradients of the graph's results (None where there is
    none), and a stand-in for each of its inputs that requires a gradient. It returns the gradients
    of these inputs, and those of the parameters that are asked for.

    Attributes:
        sending: of the graph.
        accumulates: see `Pass`.
        asked: see `Pass`.
        results: the ids of the graph's results.
        inputs: the ids of its inputs that require a gradient.
    """

    sending: int
    accumulates: bool
    asked: tuple[str, ...]
    results: tuple[TensorId, ...]
    inputs: tuple[TensorId, ...]


class Ambient(NamedTuple):
    """The state of a thread in torch that a call depends on; the owner sets the same for the call.

    Attributes:
        grad: are gradients on?
        inference: is inference mode on?
        autocast: (device type, dtype) for each device type for which autocast is on.
        autocast_cache: does autocast cache the weights that it casts?
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which this thread has this state."""
        return contextlib.nullcontext() if ambient() == self else self._enter()

    @contextlib.contextmanager
    def _enter(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            on = dict(self.autocast)
            # The cache is one setting for all devices, so at least one context sets it.
            for kind in {**on, **dict.fromkeys(_kinds())}:
                stack.enter_context(
                    torch.autocast(
                        kind,
                        on.get(kind),
                        enabled=kind in on,
                        cache_enabled=self.autocast_cache,
                    )
                )
            yield


@functools.cache
def _kinds() -> tuple[str, ...]:
    kinds = dict.fromkeys(("cpu", device.kind()))
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))


def ambient() -> Ambient:
    """Returns the ambient state of the calling thread."""
    autocast = ()
    for kind in _kinds():
        if torch.is_autocast_enabled(kind):
            autocast += ((kind, torch.get_autocast_dtype(kind)),)  # type: ignore[assignment]
    return Ambient(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.is_autocast_cache_enabled(),
    )


class Edge(NamedTuple):
    """Values that go from one end to another in one message.

    Attributes:
        source: number of a segment, or SOURCE.
        target: number of a segment, or SINK.
        values: in the order of the message.
    """

    source: int
    target: int
    values: tuple[TensorId, ...]


class Call(NamedTuple):
    """One call within a graph.

    Attributes:
        module: its number; see `Modules`.
        method: what it does.
        structure: of (args, kwargs); see structure.py.
        tensors: the ids of the tensors of `structure`, in its order.
        objects: the numbers of the objects of `structure` among those of the caller, in its order.
        returns: the structure that the caller expects of the result; None if the caller waits for
            the result.
        watched: the modules inside this one whose calls the owner records for hooks of the caller:
            their numbers; whether hooks want named arguments; the ranks where hooks run for the
            record. They may be those of the caller's caller. The called module is among them if its
            call is for such a caller.
    """

    module: int
    method: Method
    structure: Any
    tensors: tuple[TensorId, ...]
    objects: tuple[int, ...]
    returns: Any
    watched: Watched = ()


class Segment(NamedTuple):
    """Consecutive calls to modules of one owner.

    Attributes:
        owner: rank of the pipeline.
        calls: their numbers in the graph.
    """

    owner: int
    calls: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Graph:
    """The calls, segments and edges of a call graph; the same for many microbatches and steps.

    It is sent to its members once for each model. Then FORWARD and DROP name it by its `graph_id`.

    Attributes:
        ambient: the state in which all its calls run.
        calls: in the order of the program.
        segments: in the order of the program.
        edges: sorted by source and target; at most one from each end to each other end.
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
    def results(self) -> tuple[TensorId, ...]:
        """What comes back to the caller from calls whose result has a known structure."""
        return tuple(sorted(value for edge in self.into[SINK] for value in edge.values))

    @functools.cached_property
    def builders(self) -> list[Callable[..., Any]]:
        """For each call, a function that makes (args, kwargs) from tensors and objects."""
        structures = [call.structure for call in self.calls]
        return [builder(one[1] if one[0] == "p" else one) for one in structures]

    @functools.cached_property
    def changeable(self) -> list[bool]:
        """For each call, whether its arguments have anything that code may change."""
        return [may_be_changed(call.structure) for call in self.calls]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields only; the cached properties are not sent."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def depths(self) -> list[int]:
        """For each segment, the length of the longest chain of segments that ends with it."""
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

    def members(self) -> list[int]:
        """Returns the ranks that own a segment, ascending."""
        return sorted({segment.owner for segment in self.segments})


def raise_if_unpicklable(who: str, structure: Structure, objects: Any, named: bool = False) -> None:
    """Raises an error that names an object of a value, if one cannot be sent.

    Args:
        who: begins the text: who gets or returns the value, with the verb.
        structure: of the value.
        objects: those of the value, by number.
        named: the value is (args, kwargs).

    Raises:
        SMPUsageError: an object does not pickle.
    """
    found = unpicklable(structure, objects)
    if found is None:
        return
    where, value, error = found
    if named:
        where = where[3:]
        if where.startswith("['"):
            name, _, rest = where[2:].partition("']")
            where = name + rest
        else:
            where = f"argument {where[1:].replace(']', '', 1)}"
    as_what = f" as {where}" if where else ""
    raise SMPUsageError(
        f"{who} a {type(value).__name__}{as_what}, which cannot be sent to another rank, "
        f"because it does not pickle: {error}"
    ) from error
