"""The caller's side of calls between ranks, with its node in the caller's autograd graph.

A frame collects calls of remote modules in a call graph. When the code needs a value, the frame
sends the graph and waits. The results enter the frame's autograd graph as the outputs of one node.
In the backward pass this node sends the gradients along the same edges, and waits for those of its
inputs. It may wait inside a backward function, because every microbatch has a thread of its own and
autograd runs in the calling thread (see `Baton._run`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from smddp.modelparallel.common.errors import SMPUsageError
from smddp.modelparallel.common.structure import rebuild
from smddp.modelparallel.pipeline.baton import Ticket
from smddp.modelparallel.pipeline.collector import Collector
from smddp.modelparallel.pipeline.frame import Frame
from smddp.modelparallel.pipeline.host import Host
from smddp.modelparallel.pipeline.lazy import Lazy
from smddp.modelparallel.pipeline.protocol import (
    SINK,
    SOURCE,
    Ambient,
    Graph,
    Kind,
    ambient,
)

__all__ = ["Caller", "Outgoing", "run_backward"]


class Outgoing:
    """A call graph that has been sent.

    Attributes:
        number: of the graph among those that this rank has sent in this step.
        graph, graph_id: the calls and edges, and the number by which its members know them.
        inputs: the caller's tensors that enter the graph, in the order of their numbers.
        microbatch: for which it was sent.
        values: the results that have arrived, by place: (number of the call, number of the tensor
            in its result).
        returned: for each call whose result had no known structure: its structure, its objects,
            and how many tensors it has.
        places: of the outputs of the autograd node, in their order.
        ticket: done when all values have arrived.
        missing: how many edges to SINK have not brought their values yet.
        gradients: of the inputs. The key is i * n + s for the gradient of input i from segment s,
            where n is the number of segments.
        backward_ticket, backward_missing: the same as `ticket` and `missing`, for gradients.
        sunk: by segment, all places of its edge to SINK, if that has results of unknown structure.
        abandoned: no gradients will come. The owners are told so when all values have arrived.
    """

    def __init__(
        self, number: int, graph: Graph, graph_id: int, inputs: list[torch.Tensor], mb: int
    ) -> None:
        self.number = number
        self.graph = graph
        self.graph_id = graph_id
        self.inputs = inputs
        self.microbatch = mb
        self.values: dict[tuple[int, int], torch.Tensor] = {}
        self.returned: dict[int, tuple[Any, list[Any], int]] = {}
        self.places: Sequence[tuple[int, int]] = graph.results
        self.ticket = Ticket()
        self.missing = len(graph.into[SINK])
        self.gradients: dict[int, torch.Tensor] = {}
        self.backward_ticket = Ticket()
        self.backward_missing = len(graph.out_of[SOURCE])
        self.sunk: dict[int, list[tuple[int, int]]] = {}
        self.abandoned = False


class Caller:
    """The graphs that frames of this rank have sent in this step."""

    def __init__(self, host: Host) -> None:
        self._host = host
        # By number; those that have had their backward pass, or need none, are taken out.
        self._outgoing: dict[int, Outgoing] = {}
        self._numbers = itertools.count()
        # By the signature of a graph: the graph, and the number by which its members know it.
        self._known: dict[Hashable, tuple[Graph, int]] = {}
        self._lock = threading.Lock()
        # An extra input of each node. Its outputs then require gradients even if no real input
        # does; parameters on other ranks need them.
        self._anchor = torch.zeros((), requires_grad=True)

    def clear(self) -> None:
        """Forgets the graphs that were sent in this step."""
        self._outgoing.clear()
        self._numbers = itertools.count()

    def forget(self) -> None:
        """Forgets which graphs their members know, too, because there is another model."""
        self.clear()
        self._known.clear()

    def collector(self, frame: Frame) -> Collector:
        """Returns the frame's open graph; begins a new one if the ambient state has changed."""
        now = ambient()
        opened = frame.open
        if opened is not None and opened.ambient != now:
            self.send(frame)
            opened = None
        if opened is None:
            opened = frame.open = _OpenGraph(self, frame, now)
        return opened

    def send(self, frame: Frame) -> Outgoing:
        """Sends the frame's open graph to the owners."""
        opened = frame.open
        assert isinstance(opened, _OpenGraph)
        frame.open = None
        alive = opened.close()
        graph, graph_id = self._graph(opened, alive)
        out = Outgoing(next(self._numbers), graph, graph_id, opened.inputs, frame.microbatch)
        opened.sent, opened.alive = out, alive
        self._outgoing[out.number] = out
        path = (*frame.path, len(frame.sent))
        frame.sent.append(out.number)
        host, inputs = self._host, opened.inputs
        head = (host.rank, out.number, graph_id, frame.microbatch, frame.depth, path)
        for edge in graph.out_of[SOURCE]:
            segment = graph.segments[edge.target]
            objects = None
            if opened.objects:
                numbers = [i for c in segment.calls for i in graph.calls[c].objects]
                objects = {i: opened.objects[i] for i in numbers} or None
            tensors = [inputs[number] for _, number in edge.values]
            header = (head, opened.seeds, SOURCE, edge.target, objects)
            host.send(segment.owner, Kind.FORWARD, header, tensors)
        return out

    def _graph(self, opened: Collector, alive: list[Lazy]) -> tuple[Graph, int]:
        """Returns the graph and its number; sends it to its members if they do not know it yet."""
        signature = opened.signature(alive)
        known = self._known.get(signature)
        if known is None:
            graph, graph_id = opened.graph(alive), len(self._known)
            known = self._known[signature] = graph, graph_id
            for owner in graph.owners():
                self._host.send(owner, Kind.GRAPH, (self._host.rank, graph_id, graph))
        return known

    def results(
        self, frame: Frame, out: Outgoing, surroundings: Ambient
    ) -> dict[tuple[int, int], torch.Tensor]:
        """Waits for the values of a graph and makes them outputs of one autograd node.

        Returns:
            The values by place. `out` does not keep them: they refer to the autograd node, and the
            node refers to `out`. Python could not free such a cycle of references.
        """
        self._host.wait(out.ticket, frame, frame.forward)
        if out.returned:
            out.places = sorted(out.values)
        values: Sequence[torch.Tensor] = [out.values[place] for place in out.places]
        if not surroundings.grad:
            self._outgoing.pop(out.number, None)
        elif any(value.requires_grad for value in values):
            if torch.is_grad_enabled():
                values = _apply_remote(self, frame, out, self._anchor, *out.inputs)
            else:
                with torch.enable_grad():
                    values = _apply_remote(self, frame, out, self._anchor, *out.inputs)
        out.values = {}
        out.inputs = []
        return dict(zip(out.places, values, strict=True))

    # --- messages that arrive; on the thread that has the baton -----------------------------------

    def take_values(self, number: int, segment: int, tensors: list[Any], extra: Any) -> None:
        """Takes the values of an edge to SINK.

        Args:
            number: of the graph.
            segment: from which the edge comes.
            tensors: the values.
            extra: for each call whose result had no known structure, (structure, objects, number of
                tensors); None if there is none. The tensors of those calls come last.
        """
        out = self._outgoing.get(number)
        if out is None:
            return
        places: Sequence[tuple[int, int]] = out.graph.between[segment, SINK].values
        if extra is not None:
            more = list(places)
            for call, (structure, objects, count) in extra.items():
                out.returned[call] = (structure, objects, count)
                more += [(call, index) for index in range(count)]
            places = out.sunk[segment] = more
        out.values.update(zip(places, tensors, strict=True))
        with self._lock:
            out.missing -= 1
            complete, abandoned = out.missing == 0, out.abandoned
        if complete:
            self._host.baton.complete(out.ticket)
        if complete and abandoned:
            self._drop(out)

    def abandon(self, numbers: Sequence[int]) -> None:
        """Drops those of the given graphs that have had no gradients: none will come any more.

        Their results did not reach the loss, or a checkpoint has computed them again. Without this
        their owners would keep them until the end of the step, and count the microbatch as under
        way.

        Args:
            numbers: of the graphs.
        """
        for number in numbers:
            out = self._outgoing.get(number)
            if out is None or not out.graph.ambient.grad:
                continue
            with self._lock:
                out.abandoned = True
                complete = out.missing == 0
            if complete:
                self._drop(out)

    def _drop(self, out: Outgoing) -> None:
        self._outgoing.pop(out.number, None)
        header = (self._host.rank, out.number, out.graph_id, out.microbatch)
        for owner in out.graph.owners():
            self._host.send(owner, Kind.DROP, header)

    def take_gradients(self, number: int, segment: int, tensors: list[Any]) -> None:
        """Takes the gradients of an edge from SOURCE; None stands for "no gradient"."""
        out = self._outgoing.get(number)
        if out is None:
            return
        graph = out.graph
        values = graph.between[SOURCE, segment].values
        for (_, index), gradient in zip(values, tensors, strict=True):
            if gradient is not None:
                # Kept apart by segment, because the sum must not depend on who answers first.
                out.gradients[index * len(graph.segments) + segment] = gradient
        out.backward_missing -= 1
        if out.backward_missing == 0:
            self._host.baton.complete(out.backward_ticket)

    def backward(self, frame: Frame, out: Outgoing, gradients: Sequence[Any]) -> list[Any]:
        """Sends the gradients of a graph's outputs, and waits for those of its inputs.

        Args:
            frame: that runs the backward pass.
            out: the graph.
            gradients: of the node's outputs, in the order of `out.places`.

        Returns:
            The gradients of the inputs, in their order; None where there is none. Inputs at the end
            that have none are left out.

        Raises:
            SMPUsageError: it is the second backward pass through this graph.
            Aborted: the step has failed meanwhile.
        """
        host, graph = self._host, out.graph
        if out.backward_ticket.done:
            raise SMPUsageError(
                "a second backward pass through a call of a module on another rank: what it needs "
                "is gone. Add up the losses, and make one backward pass."
            )
        by_place = dict(zip(out.places, gradients, strict=True))
        for edge in graph.into[SINK]:
            header = (host.rank, out.number, SINK, edge.source)
            places = out.sunk.get(edge.source, edge.values)
            owner = graph.segments[edge.source].owner
            host.send(owner, Kind.BACKWARD, header, [by_place[place] for place in places])
        host.wait(out.backward_ticket, frame, False)
        self._outgoing.pop(out.number, None)
        count = len(graph.segments)
        sums: dict[int, torch.Tensor] = {}
        for key in sorted(out.gradients):
            index = key // count
            gradient = out.gradients[key]
            sums[index] = sums[index] + gradient if index in sums else gradient
        return [sums.get(index) for index in range(len(sums) and max(sums) + 1)]


class _OpenGraph(Collector):
    """A collector that can send its graph and fetch the values."""

    def __init__(self, caller: Caller, frame: Frame, surroundings: Ambient) -> None:
        super().__init__(surroundings)
        self._caller = caller
        self._frame = frame
        self.sent: Outgoing | None = None
        self.alive: list[Lazy] = []

    def fetch(self) -> dict[tuple[int, int], torch.Tensor]:
        """Sends the graph if that has not been done, and fills in all lazy tensors."""
        if self.sent is None:
            self._caller.send(self._frame)
        assert self.sent is not None
        values = self._caller.results(self._frame, self.sent, self.ambient)
        for lazy in self.alive:
            lazy.value = values[lazy.place]
            lazy.fetch = None
        self.alive, self.inputs = [], []
        return values

    def result_of_last(self) -> tuple[Any, Any]:
        """Returns (structure, value) of the last call; the structure was not known before."""
        call = len(self.seeds) - 1
        values = self.fetch()
        assert self.sent is not None
        structure, objects, count = self.sent.returned[call]
        tensors = [values[call, index] for index in range(count)]
        return structure, rebuild(structure, tensors, objects)


class _Remote(torch.autograd.Function):
    """The one node that stands for a whole call graph in the caller's autograd graph.

    Its inputs are the tensors that entered the call graph, its outputs the results.
    """

    @staticmethod
    def forward(
        ctx: Any, caller: Any, frame: Any, out: Outgoing, _anchor: Any, *inputs: Any
    ) -> Any:
        ctx.caller, ctx.frame, ctx.out, ctx.count = caller, frame, out, len(inputs)
        ctx.set_materialize_grads(False)
        values = [out.values[place] for place in out.places]
        ctx.mark_non_differentiable(*[value for value in values if not value.requires_grad])
        return tuple([value.detach() if value.requires_grad else value for value in values])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # with create_graph=True: using that graph has to fail
            return _Remote._once_only(ctx, *gradients)
        return _Remote._backward(ctx, *gradients)

    @staticmethod
    def _backward(ctx: Any, *gradients: Any) -> Any:
        found = ctx.caller.backward(ctx.frame, ctx.out, gradients)
        return (None, None, None, None, *found, *([None] * (ctx.count - len(found))))

    _once_only = staticmethod(torch.autograd.function.once_differentiable(_backward))


# `Function.apply` would search the arguments for lazy tensors and functorch; there are none.
_apply_remote: Any = vars(torch._C._FunctionBase)["apply"].__get__(None, _Remote)
_engine: Any = torch.autograd.Variable._execution_engine


def run_backward(tensors: Sequence[torch.Tensor], gradients: Sequence[Any]) -> None:
    """Does what `torch.autograd.backward` does, without its checks, in the calling thread.

    The thread matters: see `Baton._run`.

    Args:
        tensors: the roots.
        gradients: of the roots, of the same shapes and dtypes.
    """
    if tensors:
        _engine.run_backward(tuple(tensors), tuple(gradients), False, False, (), True, True)
