"""The owner's side of calls between ranks: runs segments of call graphs, forward and backward.

A segment runs when the values of all edges into it have arrived. Its backward pass runs when the
gradients of all edges out of it have arrived. A segment is an autograd graph of its own: its inputs
are leaves, and the gradients of its outputs come in messages.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smddp._torch_internals import apply_of
from smddp.modelparallel.core.baton import Priority, Task
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.failure import StructureChangedError
from smddp.modelparallel.core.order import TaskName
from smddp.modelparallel.torch.common.placeholder import force
from smddp.modelparallel.torch.pipeline.calls import CallerSide, leaf_like, run_backward
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.hooks import Recorder
from smddp.modelparallel.torch.pipeline.method import Use
from smddp.modelparallel.torch.pipeline.model import PipelineModel
from smddp.modelparallel.torch.pipeline.objects import (
    Arguments,
    Reply,
    finder,
    flatten_reply,
    opened,
)
from smddp.modelparallel.torch.pipeline.protocol import (
    SINK,
    SOURCE,
    Call,
    Differentiation,
    Edge,
    Graph,
    Kind,
    Message,
    Origin,
    Pass,
    TensorId,
    ambient,
    raise_if_unpicklable,
)
from smddp.modelparallel.torch.pipeline.services import RankServices
from smddp.modelparallel.torch.pipeline.step import UNLIMITED, under_way_at

__all__ = ["Server"]

# Names a segment run: (caller_rank, sending, number of the segment); see `Origin`.
_Key = tuple[int, int, int]


class _SegmentRun:
    """What the owner of a segment keeps for one microbatch, until its backward pass.

    A `Segment` says which calls belong together, for many microbatches and steps. This is one
    execution of it.

    Attributes:
        key: see `_Key`.
        number: of the segment.
        origin: what the messages say about the caller and the graph.
        seeds: of the graph's calls; None for those that draw no random numbers.
        graph: the call graph of the segment.
        into, out_of: the edges into the segment and out of it.
        objects: the caller's values that are not tensors, by number.
        arrived, gradients: values and gradients that have arrived, by the edge's other end.
        saved: the two ends of the segment's autograd graph, while a backward pass may come: leaves
            without memory that get the gradients of its inputs, and the gradient edges of its
            outputs. Else None. Only the graph itself keeps values.
        counted: does it count for what is under way? It does from its beginning to its backward
            pass.
        returned: for each call whose result had no known structure: its structure, its objects,
            and how many tensors it has.
        sent: the sendings of the call graphs that it has sent itself.
        differentiates: has it made the derivatives of another run?
    """

    __slots__ = (
        "arrived",
        "counted",
        "differentiates",
        "gradients",
        "graph",
        "into",
        "key",
        "number",
        "objects",
        "origin",
        "out_of",
        "returned",
        "saved",
        "seeds",
        "sent",
    )

    def __init__(self, key: _Key, origin: Origin, seeds: list[Any], graph: Graph) -> None:
        self.key = key
        self.number = key[2]
        self.origin = origin
        self.seeds = seeds
        self.graph = graph
        self.into = graph.into[self.number]
        self.out_of = graph.out_of[self.number]
        self.objects: dict[int, Any] = {}
        self.arrived: dict[int, list[torch.Tensor]] = {}
        self.gradients: dict[int, list[torch.Tensor | None]] = {}
        self.saved: tuple[dict[TensorId, torch.Tensor], dict[TensorId, GradientEdge]] | None = None
        self.counted = False
        self.returned: dict[int, tuple[Any, list[Any], int]] = {}
        self.sent: list[int] = []
        self.differentiates = False

    def owner(self, end: int) -> int:
        """Returns the rank at an end of an edge: the caller, if it is SOURCE or SINK."""
        return self.origin.caller_rank if end < 0 else self.graph.segments[end].owner

    def values(self, edge: Edge) -> Sequence[TensorId]:
        """Returns the ids of the values of an edge out of it.

        On an edge to SINK, those of results whose structure was not known come last.
        """
        if edge.target != SINK or not self.returned:
            return edge.values
        more = [(call, i) for call, (*_, count) in self.returned.items() for i in range(count)]
        return [*edge.values, *more]


class Server:
    """The segments that this rank owns, in the call graphs of any rank.

    Attributes:
        under_way_limit: see `Schedule.under_way_limit`.
    """

    _model: PipelineModel  # since `adopt`

    def __init__(self, services: RankServices, caller: CallerSide) -> None:
        self._services, self._caller = services, caller
        # By caller_rank and graph_id; see `Origin`.
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._runs: dict[_Key, _SegmentRun] = {}
        # The microbatches of runs that were freed with them, or because they get no gradients.
        self._ended: dict[_Key, int] = {}
        # FORWARD messages that have come before their graph, by its key in `_graphs`.
        self._early: dict[tuple[int, int], list[Message]] = {}
        # The microbatches that are under way here: how many segments of each have begun, and have
        # not had their backward pass.
        self._under_way: dict[int, int] = {}
        self.under_way_limit = UNLIMITED

    def clear(self) -> None:
        """Forgets what belongs to the step; the graphs stay known."""
        self._under_way.clear()
        self._runs.clear()
        self._ended.clear()
        self._early.clear()

    def adopt(self, model: PipelineModel) -> None:
        """Serves another model from now on; the graphs are forgotten, too."""
        self.clear()
        self._graphs.clear()
        self._model, self._modules = model, model.modules
        self._find = finder(model.modules)

    def end_microbatch(self, microbatch: int) -> None:
        """Frees what is left here of a microbatch that has ended."""
        for key in [k for k, run in self._runs.items() if run.origin.microbatch == microbatch]:
            self._caller.drop(self._runs.pop(key).sent)
            self._ended[key] = microbatch
        self._under_way.pop(microbatch, None)
        self._services.baton.wake()

    # --- messages that arrive; on the thread that has the baton -----------------------------------

    def on_graph(self, caller_rank: int, graph_id: int, graph: Graph) -> None:
        """Stores a call graph, and takes the values that have come before it.

        Args:
            caller_rank: see `Origin`.
            graph_id: see `Origin`.
            graph: the graph.
        """
        self._graphs[caller_rank, graph_id] = graph
        for message in self._early.pop((caller_rank, graph_id), []):
            self.on_forward(message)

    def on_forward(self, message: Message) -> None:
        """Takes the values of an edge; makes the segment a task if no others are missing.

        Values of an edge to SINK are for this rank as the caller.
        """
        fields, seeds, source, target, extra = message.header
        origin = Origin(*fields)
        if target == SINK:
            self._caller.on_values(origin.sending, source, message.tensors, extra)
            return
        key = (origin.caller_rank, origin.sending, target)
        run = self._runs.get(key)
        if run is None:
            graph = self._graphs.get((origin.caller_rank, origin.graph_id))
            if graph is None:
                self._early.setdefault((origin.caller_rank, origin.graph_id), []).append(message)
                return
            run = self._runs[key] = _SegmentRun(key, origin, seeds, graph)
        if extra is not None:
            run.objects = extra
        run.arrived[source] = message.tensors  # type: ignore[assignment]
        if len(run.arrived) == len(run.into):
            grad = run.graph.ambient.grad
            frame = Frame(
                microbatch=origin.microbatch,
                forward=True,
                path=(*origin.path, target),
                name="",
                depth=origin.depth + run.graph.depths[target],
                grad=grad,
            )
            # No limit without gradients: nothing is kept for a backward pass.
            self._submit(frame, run, self._forward, self._admits if grad else None)

    def on_backward(self, message: Message) -> None:
        """Takes the gradients of an edge; makes the backward pass a task if no others are missing.

        Gradients of an edge from SOURCE are for this rank as the caller.
        """
        caller_rank, sending, sender, receiver, this = message.header
        if receiver == SOURCE:
            self._caller.on_gradients(sending, sender, message.tensors)
            return
        key = caller_rank, sending, receiver
        run = self._runs.get(key)
        if run is None:
            if key in self._ended:
                self._refuse_late(self._ended[key])
            return
        run.gradients[sender] = message.tensors
        if len(run.gradients) == len(run.out_of):
            origin = run.origin
            frame = Frame(
                microbatch=origin.microbatch,
                forward=False,
                path=(*origin.path, receiver),
                name="",
                depth=0,
                grad=True,
            )
            work = functools.partial(self._backward, this=Pass(*this))
            self._submit(frame, run, work, None)

    def _refuse_late(self, microbatch: int) -> None:
        """Ends the step: the caller waits for gradients of a microbatch that has ended."""

        def refuse() -> None:
            raise SMPUsageError(
                f"a backward pass through calls of modules on other ranks that microbatch "
                f"{microbatch} has made, which has ended: another microbatch has found one of its "
                "tensors, in a list or an attribute, for instance. Keep tensor.detach() there, or "
                "do what needs several microbatches in one, with microbatches: 1"
            )

        self._submit_ending(microbatch, refuse)

    def on_drop(self, caller_rank: int, sending: int, graph_id: int, microbatch: int) -> None:
        """Forgets, in this step, a call graph that gets no gradients.

        Args:
            caller_rank: see `Origin`.
            sending: see `Origin`.
            graph_id: see `Origin`.
            microbatch: see `Origin`.
        """
        graph = self._graphs[caller_rank, graph_id]

        def drop() -> None:
            for target in range(len(graph.segments)):
                run = self._runs.pop((caller_rank, sending, target), None)
                if run is not None:
                    self._ended[caller_rank, sending, target] = microbatch
                    self._end_under_way(run)
                    self._caller.drop(run.sent)

        self._submit_ending(microbatch, drop)

    def _submit_ending(self, microbatch: int, work: Callable[[], None]) -> None:
        """Submits a task that ends something of a microbatch.

        Only the holder of the baton may change what is under way, and fail.
        """
        task = Task(Priority(False, microbatch), work)
        task.frame = Frame(
            microbatch=microbatch, forward=False, path=(), name="", depth=0, grad=True
        )
        self._services.baton.submit(task)

    def _admits(self, frame: Frame) -> bool:
        """Says whether forward work of a microbatch may begin here.

        The later a segment comes in the pipeline, the fewer microbatches may be under way there.
        With more of them, work would come in bursts and leave gaps on other ranks.
        A microbatch that is under way here, or that is older than all of those, may always begin;
        so the oldest microbatch of all is never held back.
        """
        under_way = self._under_way
        if not under_way or frame.microbatch in under_way or frame.microbatch < min(under_way):
            return True
        return len(under_way) < under_way_at(self.under_way_limit, frame.depth)

    def _end_under_way(self, run: _SegmentRun) -> None:
        """Notes that a segment has had its backward pass, or gets none."""
        if not run.counted:
            return
        run.counted, run.saved = False, None
        microbatch = run.origin.microbatch
        left = self._under_way.get(microbatch, 0) - 1
        if left > 0:
            self._under_way[microbatch] = left
        else:
            self._under_way.pop(microbatch, None)

    def _submit(self, frame: Frame, run: _SegmentRun, work: Any, admits: Any) -> None:
        """Submits the task that does `work` for a run; it begins when `admits` allows it."""
        priority = Priority(frame.forward, frame.microbatch, frame.order)
        admitted = functools.partial(admits, frame) if admits is not None else None
        task = Task(priority, functools.partial(self._timed, work, frame, run), admitted)
        kind = "forward" if frame.forward else "backward"
        calls = [run.graph.calls[number] for number in run.graph.segments[run.number].calls]
        digest = 0
        if self._services.baton.order is not None:
            digest = zlib.crc32(repr([(call.module, call.method) for call in calls]).encode())
        task.frame = frame
        task.name = TaskName(kind, frame.microbatch, frame.path, calls[0].module, digest)
        self._services.baton.submit(task)

    def _timed(self, work: Any, frame: Frame, run: _SegmentRun) -> None:
        """Does `work` for a run, and notes it in the timeline."""
        try:
            self._services.enter(frame, frame.forward)
            work(frame, run)
        finally:
            self._services.timeline.leave()

    # --- the work of tasks ------------------------------------------------------------------------

    def _forward(self, frame: Frame, run: _SegmentRun) -> None:
        graph = run.graph
        # Counted before the calls, which may wait: `_admits` is asked meanwhile.
        self._under_way[frame.microbatch] = self._under_way.get(frame.microbatch, 0) + 1
        run.counted = True
        leaves: dict[TensorId, torch.Tensor] = {}
        with self._model.local.around_task():
            if ambient() == graph.ambient:
                outputs = self._run_calls(frame, run, leaves)
            else:
                with graph.ambient.entered():
                    outputs = self._run_calls(frame, run, leaves)
        if graph.ambient.grad and any(tensor.requires_grad for tensor in outputs.values()):
            ends = {
                value: get_gradient_edge(tensor)
                for value, tensor in outputs.items()
                if tensor.requires_grad
            }
            run.saved = leaves, ends
            run.sent = frame.sent
        else:
            self._end_under_way(run)
            self._caller.drop(frame.sent)
        if not graph.ambient.grad:
            del self._runs[run.key]
        for edge in run.out_of:
            extra = (run.returned or None) if edge.target == SINK else None
            header = (tuple(run.origin), run.seeds, run.number, edge.target, extra)
            tensors = [_unchanging(outputs[value]) for value in run.values(edge)]
            try:
                self._services.mail.send(run.owner(edge.target), Kind.FORWARD, header, tensors)
            except Exception:
                for index, (structure, objects, _) in run.returned.items():
                    name = self._modules.names[graph.calls[index].module]
                    raise_if_unpicklable(f"module {name!r} returns", structure, objects)
                raise

    def _run_calls(
        self, frame: Frame, run: _SegmentRun, leaves: dict[TensorId, torch.Tensor]
    ) -> dict[TensorId, torch.Tensor]:
        """Runs the calls of a segment; returns the tensors of their results.

        Args:
            frame: of the segment.
            run: the segment.
            leaves: gets those of its autograd graph.

        Raises:
            StructureChangedError: the structure of a result is not the one that the caller expects.
        """
        model, modules, graph = self._model, self._modules, run.graph
        values: dict[TensorId, torch.Tensor] = {}
        arrived, run.arrived = run.arrived, {}
        for edge in run.into:
            for tensor_id, tensor in zip(edge.values, arrived.pop(edge.source), strict=True):
                values[tensor_id] = tensor
                if tensor.requires_grad and torch.is_grad_enabled():
                    leaves[tensor_id] = leaf = leaf_like(tensor)
                    values[tensor_id] = _apply_entrance(leaf, tensor.detach())
        outputs: dict[TensorId, torch.Tensor] = {}
        for index in graph.segments[run.number].calls:
            call = graph.calls[index]
            arguments = [values[tensor_id] for tensor_id in call.tensors]
            objects = [run.objects[number] for number in call.objects]
            caller = run.origin.caller_rank
            sent = opened(caller, call.structure, arguments, objects, self._find)
            _, parts, objects = sent
            args, kwargs = graph.builders[index](parts, objects)
            frame.name = name = modules.names[call.module]
            before = Arguments(f"module {name!r}", args, kwargs, arguments, graph.changeable[index])
            before.watch(model.changes.is_watched)
            before.attributes = model.changes.attributes_before(
                call.module, call.method, frame.microbatch
            )
            frame.recorder = recorder = Recorder(call.watched) if call.watched else None
            if call.method.use is Use.DIFFERENTIATE:
                result = self._differentiate(run, call, leaves, *args)
            else:
                result = model.local.serve(call.module, call.method, run.seeds[index], args, kwargs)
            frame.recorder = None
            changed = {
                number: arguments[number]
                for number in before.changed_tensors()
                if _is_seen(graph, run.number, index, call.tensors[number])
            }
            records = tuple(recorder.records) if recorder is not None else ()
            reply = Reply(result, before.changes(), changed or None, records)
            model.changes.note_call(call.module, before, reply, run.origin)
            tensors: list[torch.Tensor] = []
            found: list[Any] = []
            structure, found = flatten_reply(reply, before, modules, tensors, found)
            if call.returns is None:
                run.returned[index] = (structure, found, len(tensors))
            elif structure != call.returns:
                raise StructureChangedError(frame.name)
            for position, tensor in enumerate(tensors):
                values[index, position] = outputs[index, position] = force(tensor)
        self._caller.settle(frame)
        return outputs

    def _differentiate(
        self,
        run: _SegmentRun,
        call: Call,
        leaves: dict[TensorId, torch.Tensor],
        what: Differentiation,
        gradients: Sequence[torch.Tensor | None],
        _: Sequence[torch.Tensor],
    ) -> Any:
        """Does the backward pass of a segment that has run, and keeps an autograd graph of it.

        The graph leads also to the inputs of that segment. Gradients go to them in the places of
        the stand-ins, which are the last tensors of the call.

        Args:
            run: of the call.
            call: see `Differentiation`.
            leaves: those of the call's autograd graph; gets the inputs of the other segment.
            what: says which segment and which gradients.
            gradients: of its results.

        Returns:
            What the call returns.

        Raises:
            SMPUsageError: an earlier backward pass has freed the segment.
        """
        other = self._runs.get((run.origin.caller_rank, what.sending, 0))
        if other is None:
            raise SMPUsageError(
                "a gradient with create_graph=True goes through a call of a module on another rank "
                "whose graph is freed: keep it with retain_graph=True in the passes before"
            )
        inputs, ends = ({}, {}) if other.saved is None else other.saved
        run.differentiates = True
        wanted = [inputs[tensor_id] for tensor_id in what.inputs]
        places = call.tensors[len(call.tensors) - len(wanted) :]
        leaves.update(zip(places, wanted, strict=True))
        roots = {
            ends[value]: gradient
            for value, gradient in zip(what.results, gradients, strict=True)
            if gradient is not None and value in ends
        }
        this = Pass(what.accumulates, True, what.asked)
        return self._run_backward(list(roots), list(roots.values()), wanted, this, True)

    def _run_backward(
        self,
        roots: list[GradientEdge],
        gradients: list[torch.Tensor],
        inputs: list[torch.Tensor],
        this: Pass,
        create: bool = False,
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Does what the function `run_backward` does, with the parameters that live here."""
        parameters = self._model.parameters.local(this.asked) if this.asked else {}
        anchors = self._caller.anchors(this.asked) if this.asked else []
        return run_backward(roots, gradients, inputs, this, parameters, anchors, create)

    def _backward(self, frame: Frame, run: _SegmentRun, this: Pass) -> None:
        graph = run.graph
        leaves, ends = ({}, {}) if run.saved is None else run.saved
        if not this.keeps:
            self._end_under_way(run)
            del self._runs[run.key]
        sums: dict[TensorId, torch.Tensor] = {}
        for edge in run.out_of:
            for value, gradient in zip(run.values(edge), run.gradients[edge.target], strict=True):
                if gradient is not None and value in ends:
                    sums[value] = sums[value] + gradient if value in sums else gradient
        run.gradients = {}
        frame.name = self._modules.names[graph.calls[graph.segments[run.number].calls[-1]].module]
        roots = [ends[value] for value in sums]
        if this.accumulates:
            self._model.changes.note_roots(frame, roots)
        # A pass through the derivatives of a segment comes before that through the segment itself,
        # and must not free what both need. It is freed with the runs.
        kept = this._replace(keeps=this.keeps or run.differentiates)
        with self._model.local.around_task():
            found, asked = self._run_backward(
                roots, list(sums.values()), list(leaves.values()), kept
            )
        of_input = dict(zip(leaves, found, strict=True))
        # Drop the graphs that the segment has sent and that got no gradient, and those that a
        # checkpoint has sent again in this backward pass.
        sent = frame.sent if this.keeps else [*run.sent, *frame.sent]
        if sent:
            self._caller.drop(sent)
        for edge in run.into:
            gradients = [of_input.get(value) for value in edge.values]
            if edge.source == SOURCE:
                gradients += asked
                asked = []
            header = (
                run.origin.caller_rank,
                run.origin.sending,
                run.number,
                edge.source,
                tuple(this),
            )
            self._services.mail.send(run.owner(edge.source), Kind.BACKWARD, header, gradients)
        if asked:
            header = (run.origin.caller_rank, run.origin.sending, run.number, SOURCE, tuple(this))
            self._services.mail.send(run.origin.caller_rank, Kind.BACKWARD, header, asked)


def _is_seen(graph: Graph, segment: int, index: int, tensor: TensorId) -> bool:
    """Says whether a change of a tensor in place is to be seen outside the segment that makes it.

    Not if the tensor was made in the segment: other code gets it as it is at the end of that. But
    it must not do so if it was called before the change.

    Args:
        graph: the call graph.
        segment: number of the segment.
        index: number of the call that has changed the tensor.
        tensor: which one.
    """
    own = graph.segments[segment].calls
    return tensor[0] not in own or any(
        tensor in call.tensors and number not in own
        for number, call in enumerate(graph.calls[:index])
    )


def _unchanging(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that no code changes while a message refers to its memory.

    A tensor without a `grad_fn` may be one that the module keeps, such as a buffer.
    """
    if tensor.grad_fn is not None:
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class _Entrance(torch.autograd.Function):
    """Returns a value whose gradient goes to a leaf.

    The value is not the leaf itself: a leaf cannot be changed in place, and it keeps its memory as
    long as the graph, also if nothing needs the value any more.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # no gradient is not zeros
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return gradient, None


# `Function.apply` would look for lazy tensors among the arguments, and for functorch transforms;
# there are neither.
_apply_entrance: Any = apply_of(_Entrance)
