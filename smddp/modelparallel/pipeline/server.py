"""The owner's side of calls between ranks: runs segments of call graphs, forward and backward.

A segment runs when the values of all edges into it have arrived; its backward, when the gradients
of all edges out of it have. It is an autograd graph of its own: inputs are leaves, and gradients of
the outputs come from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from smddp.modelparallel.errors import SMPUsageError
from smddp.modelparallel.pipeline.baton import Priority, Task
from smddp.modelparallel.pipeline.calls import Frame, run_backward
from smddp.modelparallel.pipeline.lazy import force
from smddp.modelparallel.pipeline.protocol import SINK, SOURCE, Ambient, Graph, Kind
from smddp.modelparallel.pipeline.wire import Message
from smddp.modelparallel.structure import flatten, rebuild

if TYPE_CHECKING:
    from smddp.modelparallel.pipeline.executor import Executor

__all__ = ["Server"]

Place = tuple[int, int]


class _Hosted:
    """A call graph of somebody, as a member knows it.

    Attributes:
        arrived: per segment, the values of each edge into it.
        gradients: per segment, the gradients of each edge out of it.
        saved: per segment with a graph: its leaves and its outputs, by place.
        sunk: per segment, the places of its edge to SINK.
        sent: per saved segment, the numbers of the call graphs that it has sent itself.
    """

    def __init__(self, head: tuple[Any, ...], graph: Graph) -> None:
        self.caller: int = head[0]
        self.number: int = head[1]
        self.microbatch: int = head[3]
        self.ambient: Ambient = graph.ambient
        self.head = head
        self.graph = graph
        self.seeds: list[int | None] | None = None
        self.objects: dict[int, Any] = {}
        self.arrived: dict[int, dict[int, list[torch.Tensor]]] = {}
        self.gradients: dict[int, dict[int, list[torch.Tensor | None]]] = {}
        self.saved: dict[int, tuple[dict[Place, torch.Tensor], dict[Place, torch.Tensor]]] = {}
        self.sunk: dict[int, list[Place]] = {}
        self.sent: dict[int, list[int]] = {}


class Server:
    """The call graphs in which this rank takes part."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._hosted: dict[tuple[int, int], _Hosted] = {}
        # Values that were faster than the graph they belong to.
        self._early: dict[tuple[int, int], list[tuple[int, Message]]] = {}
        # Microbatches with saved segments here, and how many; at most `limit` minus their depth.
        self._flying: dict[int, int] = {}
        self.limit = 1 << 30

    def clear(self) -> None:
        """Forgets the step; graphs stay known."""
        self._flying.clear()
        self._hosted.clear()
        self._early.clear()

    def forget(self) -> None:
        """Forgets the graphs, too: there is another model."""
        self.clear()
        self._graphs.clear()

    def drop(self, microbatch: int) -> None:
        """Frees what a microbatch has left."""
        for key in [k for k, h in self._hosted.items() if h.microbatch == microbatch]:
            self._abandon_calls_of(self._hosted.pop(key))
        self._flying.pop(microbatch, None)
        self._executor.baton.look()

    # --- what arrives; on a receiving thread, or on the caller's if it is this rank ---------------

    def take_graph(self, caller: int, identity: int, graph: Graph) -> None:
        """Learns a call graph."""
        self._graphs[caller, identity] = graph
        for peer, message in self._early.pop((caller, identity), []):
            self.take_forward(peer, message)

    def take_forward(self, peer: int, message: Message) -> None:
        """Takes the values of an edge; begins the segment if they were the last."""
        head, seeds, source, target, extra = message.header
        if target == SINK:
            self._executor.caller.take_values(head[1], source, message.tensors, extra)
            return
        graph = self._graphs.get((head[0], head[2]))
        if graph is None:
            self._early.setdefault((head[0], head[2]), []).append((peer, message))
            return
        hosted = self._hosted.get(head[:2])
        if hosted is None:
            hosted = self._hosted[head[:2]] = _Hosted(head, graph)
        hosted.seeds = seeds
        if source == SOURCE and extra:
            hosted.objects.update(extra)
        box = hosted.arrived.setdefault(target, {})
        box[source] = message.tensors  # type: ignore[assignment]
        if len(box) == len(graph.into[target]):
            depth, grad = head[4] + graph.depths[target], hosted.ambient.grad
            frame = Frame(hosted.microbatch, True, (*head[5], target), "", depth, grad)
            admitted = (lambda: self._admits(frame)) if grad else None
            self._begin(frame, lambda: self._forward(frame, hosted, target), admitted)

    def take_backward(self, peer: int, message: Message) -> None:
        """Takes the gradients of an edge; begins the segment's backward if they were the last."""
        caller, number, source, target = message.header
        if target == SOURCE:
            self._executor.caller.take_gradients(number, source, message.tensors)
            return
        hosted = self._hosted.get((caller, number))
        if hosted is None:  # dropped: its step has failed
            return
        box = hosted.gradients.setdefault(target, {})
        box[source] = message.tensors
        if len(box) == len(hosted.graph.out_of[target]):
            frame = Frame(hosted.microbatch, False, (*hosted.head[5], target), "", 0, True)
            self._begin(frame, lambda: self._backward(frame, hosted, target), None)

    def take_drop(self, caller: int, number: int, microbatch: int) -> None:
        """Forgets a call graph for which no gradients will come."""
        frame = Frame(microbatch, False, (), "", 0, True)
        # A task, as only the holder of the baton counts what is under way.
        task = Task(Priority(False, microbatch), lambda: self._drop(caller, number))
        task.local = frame
        self._executor.baton.submit(task)

    def _drop(self, caller: int, number: int) -> None:
        hosted = self._hosted.pop((caller, number), None)
        if hosted is not None:
            self._land(hosted.microbatch, len(hosted.saved))
            self._abandon_calls_of(hosted)

    def _abandon_calls_of(self, hosted: _Hosted) -> None:
        for sent in hosted.sent.values():
            self._executor.caller.abandon(sent)

    def _admits(self, frame: Frame) -> bool:
        """May forward work of a microbatch begin here?

        The further back a segment is in the pipeline, the fewer microbatches wait for their
        backward there: more would not fill a gap, but come in bursts, and make gaps elsewhere.
        One that is under way here, or older than all that are, always may: so the oldest
        microbatch of all is never held up, whatever the way of the others.
        """
        flying = self._flying
        if not flying or frame.microbatch in flying or frame.microbatch < min(flying):
            return True
        return len(flying) < max(1, self.limit - frame.depth)

    def _land(self, microbatch: int, count: int) -> None:
        """Notes that saved segments of a microbatch are gone."""
        left = self._flying.get(microbatch, 0) - count
        if left > 0:
            self._flying[microbatch] = left
        else:
            self._flying.pop(microbatch, None)

    def _begin(self, frame: Frame, function: Any, admitted: Any) -> None:
        priority = Priority(frame.forward, frame.microbatch, frame.order)
        task = Task(priority, lambda: self._run(frame, function), admitted)
        task.local = frame
        self._executor.baton.submit(task)

    def _run(self, frame: Frame, function: Any) -> None:
        timeline = self._executor.timeline
        timeline.enter(frame.microbatch, frame.forward, frame.name)
        try:
            function()
        finally:
            timeline.leave()

    # --- the work; with the baton -----------------------------------------------------------------

    def _forward(self, frame: Frame, hosted: _Hosted, number: int) -> None:
        graph, segment = hosted.graph, hosted.graph.segments[number]
        self._flying[frame.microbatch] = self._flying.get(frame.microbatch, 0) + 1
        leaves: dict[Place, torch.Tensor] = {}
        for edge in graph.into[number]:
            leaves.update(zip(edge.values, hosted.arrived[number][edge.source], strict=True))
        del hosted.arrived[number]
        values = {place: _Entrance.of(tensor) for place, tensor in leaves.items()}
        returned: dict[int, tuple[Any, list[Any], int]] = {}
        with hosted.ambient.entered():
            for index in segment.calls:
                tensors, shape, objects = self._call(frame, hosted, index, values)
                values.update({(index, i): tensor for i, tensor in enumerate(tensors)})
                if graph.calls[index].returns is None:
                    returned[index] = (shape, objects, len(tensors))
        outputs = {place: tensor for place, tensor in values.items() if place not in leaves}
        if hosted.ambient.grad and any(tensor.requires_grad for tensor in outputs.values()):
            hosted.saved[number] = (leaves, outputs)
            hosted.sent[number] = frame.sent
        else:
            self._land(frame.microbatch, 1)
            self._executor.caller.abandon(frame.sent)
        for edge in graph.out_of[number]:
            places = list(edge.values)
            if edge.target == SINK:
                places += [(call, i) for call, (*_, n) in returned.items() for i in range(n)]
                hosted.sunk[number] = places
            owner = hosted.caller if edge.target == SINK else graph.segments[edge.target].owner
            extra = returned if edge.target == SINK and returned else None
            header = (hosted.head, hosted.seeds, number, edge.target, extra)
            tensors = [outputs[place] for place in places]
            self._executor.send(owner, Kind.FORWARD, header, tensors)

    def _call(
        self, frame: Frame, hosted: _Hosted, index: int, values: dict[Place, torch.Tensor]
    ) -> tuple[list[torch.Tensor], Any, list[Any]]:
        """Runs one call; returns its tensors, shape and objects."""
        call = hosted.graph.calls[index]
        objects = [hosted.objects[number] for number in call.objects]
        args, kwargs = rebuild(call.shape, [values[place] for place in call.tensors], objects)
        seed = hosted.seeds[index] if hosted.seeds is not None else None
        modules = self._executor.modules
        frame.name = modules.names[call.module]
        result = modules.run(call.module, call.method, seed, args, kwargs)
        tensors: list[torch.Tensor] = []
        found: list[Any] = []
        shape = flatten(result, tensors, found)
        tensors = [force(tensor) for tensor in tensors]
        if call.returns is not None and shape != call.returns:
            raise SMPUsageError(
                f"module {frame.name!r} returned another structure than before with the same "
                "arguments, and its caller has gone on already. Set direct_forwarding: False in "
                "the smp configuration."
            )
        return tensors, shape, found

    def _backward(self, frame: Frame, hosted: _Hosted, number: int) -> None:
        graph = hosted.graph
        if number in hosted.saved:
            self._land(frame.microbatch, 1)
        leaves, outputs = hosted.saved.pop(number, ({}, {}))
        boxes = hosted.gradients.pop(number)
        sums: dict[Place, torch.Tensor] = {}
        for edge in graph.out_of[number]:
            places = hosted.sunk[number] if edge.target == SINK else edge.values
            for place, gradient in zip(places, boxes[edge.target], strict=True):
                if gradient is not None and place in outputs and outputs[place].requires_grad:
                    sums[place] = sums[place] + gradient if place in sums else gradient
        frame.name = self._executor.modules.names[
            graph.calls[graph.segments[number].calls[-1]].module
        ]
        run_backward([outputs[place] for place in sums], list(sums.values()))
        # What it has called, but not for this gradient; or called again, for a checkpoint.
        self._executor.caller.abandon([*hosted.sent.pop(number, []), *frame.sent])
        for edge in graph.into[number]:
            owner = hosted.caller if edge.source == SOURCE else graph.segments[edge.source].owner
            gradients = [leaves[place].grad if place in leaves else None for place in edge.values]
            header = (hosted.caller, hosted.number, number, edge.source)
            self._executor.send(owner, Kind.BACKWARD, header, gradients)


class _Entrance(torch.autograd.Function):
    """Makes a leaf an ordinary tensor, which code may change in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    @staticmethod
    def of(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        result: torch.Tensor = _Entrance.apply(tensor)
        return result
