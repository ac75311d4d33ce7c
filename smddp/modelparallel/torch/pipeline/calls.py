"""The caller's side of calls between ranks, with its node in the caller's autograd graph.

A frame collects calls of remote modules in a call graph. When the code needs a value, the frame
sends the graph and waits. The results enter the frame's autograd graph as the outputs of one node.
In the backward pass this node sends the gradients along the same edges, and waits for those of its
inputs. It may wait inside a backward function, because every microbatch has a thread of its own and
autograd runs in the calling thread (see `Baton._run`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smddp._torch_internals import (
    apply_of,
    execution_engine,
    forward_level,
    graph_is_kept,
    interpreter_stack,
    is_batched,
    will_execute_node,
)
from smddp.modelparallel.core.baton import Ticket
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.failure import (
    ArgumentChangedError,
    DifferentiatedTwiceError,
    OrderMattersError,
)
from smddp.modelparallel.torch.common.buffers import version_of
from smddp.modelparallel.torch.common.structure import flatten, rebuild
from smddp.modelparallel.torch.pipeline import passes
from smddp.modelparallel.torch.pipeline.collector import Collector, KnownCall
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.lazy import Lazy
from smddp.modelparallel.torch.pipeline.method import DIFFERENTIATE
from smddp.modelparallel.torch.pipeline.protocol import (
    SINK,
    SOURCE,
    Ambient,
    Call,
    Differentiation,
    Graph,
    Kind,
    Origin,
    Pass,
    TensorId,
    ambient,
    raise_if_unpicklable,
)
from smddp.modelparallel.torch.pipeline.services import RankServices

__all__ = ["CallerSide", "Outgoing", "leaf_like", "refuse_transforms", "run_backward"]


class _Known(NamedTuple):
    """A graph that all its members know; see `Outgoing`."""

    graph: Graph
    graph_id: int
    reach: frozenset[str]
    anchor: torch.Tensor


class Outgoing:
    """A call graph that has been sent.

    Attributes:
        sending, graph_id: see `Origin`.
        graph: the calls and edges.
        reach: the names of the parameters that its modules have; see `Parameters.reach`.
        anchor: an extra input of the autograd node; see `CallerSide`.
        inputs: the caller's tensors that enter the graph, in the order of their numbers.
        versions: of the inputs when the code passed them.
        microbatch: for which it was sent.
        values: the results that have arrived.
        returned: for each call whose result had no known structure: its structure, its objects,
            and how many tensors it has.
        results: the ids of the tensors that are the outputs of the autograd node, in their order.
        ticket: done when all values have arrived.
        missing: how many edges to SINK have not brought their values yet.
        gradients: those of the inputs, by the number of the input and of the segment that sent it.
        asked: the gradients of the parameters that the pass asks for, by the segment that sent
            them.
        backward_ticket, backward_missing: the same as `ticket` and `missing`, for what segments
            send to the caller in a backward pass.
        backward_of: the microbatch whose backward pass has come here last; -1 for none.
        sunk: by segment, the ids of all values of its edge to SINK; only of edges that have results
            of unknown structure.
        hollow: do the inputs of the autograd node have no memory? See `CallerSide._linked`.
        dropped: no gradients will come. The members are told so (DROP) when all values have
            arrived.
    """

    def __init__(self, sending: int, known: _Known, opened: Collector, mb: int) -> None:
        self.sending = sending
        self.graph, self.graph_id, self.reach, self.anchor = known
        graph = self.graph
        self.inputs = opened.inputs
        self.versions = opened.versions
        self.microbatch = mb
        self.values: dict[TensorId, torch.Tensor] = {}
        self.returned: dict[int, tuple[Any, list[Any], int]] = {}
        self.results: Sequence[TensorId] = graph.results
        self.ticket = Ticket()
        self.missing = len(graph.into[SINK])
        self.gradients: dict[tuple[int, int], torch.Tensor] = {}
        self.asked: dict[int, list[torch.Tensor | None]] = {}
        self.backward_ticket = Ticket()
        self.backward_missing = 0
        self.backward_of = -1
        self.sunk: dict[int, list[TensorId]] = {}
        self.hollow = False
        self.dropped = False


class CallerSide:
    """The graphs that frames of this rank have sent in this step.

    Only the holder of the baton calls its methods; between tasks, also the thread in
    `Executor.run`.
    """

    def __init__(self, services: RankServices) -> None:
        self._services = services
        # By `Origin.sending`. A graph is taken out after its backward pass, or if it needs none.
        self._outgoing: dict[int, Outgoing] = {}
        self._sendings = itertools.count()
        # By the signature of a graph. Each graph has an anchor, a leaf that is an extra input of
        # its nodes. Their outputs then require gradients even if no real input does; parameters on
        # other ranks need them. And a pass that asks for the anchor visits the nodes.
        self._known: dict[Hashable, _Known] = {}
        self._graph_ids = itertools.count()
        # The calls that differentiate a segment, by module, structure of the gradients, and reach.
        self._differentiations: dict[Hashable, KnownCall] = {}

    def clear(self) -> None:
        """Forgets the graphs that were sent in this step."""
        self._outgoing.clear()
        self._sendings = itertools.count()

    def forget(self) -> None:
        """Forgets also which graphs their members know, because there is another model."""
        self.clear()
        self._known.clear()
        self._differentiations.clear()

    def collector(self, frame: Frame) -> Collector:
        """Returns the frame's open graph.

        It sends that and begins another if the ambient state has changed since.
        """
        now = ambient()
        opened = frame.open
        if opened is not None and opened.ambient != now:
            self.send(frame)
            opened = None
        if opened is None:
            opened = frame.open = _CallerCollector(self, frame, now)
        return opened

    def send(self, frame: Frame) -> Outgoing:
        """Sends the frame's open graph.

        GRAPH goes to its members if they do not know it, then FORWARD with the caller's values.

        Returns:
            The sent graph.

        Raises:
            SMPUsageError: an argument of a call cannot be pickled.
            ArgumentChangedError: code has changed an input since it was passed.
        """
        opened = frame.open
        assert isinstance(opened, _CallerCollector)
        frame.open = None
        alive = opened.lazies_in_use()
        known = self._graph(opened, alive)
        graph, graph_id = known.graph, known.graph_id
        out = Outgoing(next(self._sendings), known, opened, frame.microbatch)
        self._check_inputs(out)
        opened.sent = out
        self._outgoing[out.sending] = out
        path = (*frame.path, len(frame.sent))
        frame.sent.append(out.sending)
        services, inputs = self._services, opened.inputs
        origin = Origin(services.rank, out.sending, graph_id, frame.microbatch, frame.depth, path)
        for edge in graph.out_of[SOURCE]:
            segment = graph.segments[edge.target]
            objects = None
            if opened.objects:
                numbers = [i for c in segment.calls for i in graph.calls[c].objects]
                objects = {i: opened.objects[i] for i in numbers} or None
            tensors = [inputs[number] for _, number in edge.values]
            header = (tuple(origin), opened.seeds, SOURCE, edge.target, objects)
            try:
                services.mail.send(segment.owner, Kind.FORWARD, header, tensors)
            except Exception:
                for call in [graph.calls[number] for number in segment.calls]:
                    who = f"module {services.modules.names[call.module]!r} gets"
                    values = [opened.objects[number] for number in call.objects]
                    raise_if_unpicklable(who, call.structure, values, named=True)
                raise
        return out

    def settle(self, frame: Frame) -> None:
        """Sends the frame's open graph, if there is one, and waits until its calls have run.

        At the end of a frame nobody uses their results. But the calls may change buffers, draw
        random numbers, or fail.
        """
        # It has no calls if one has failed before it could be added; no results would come.
        if frame.open is not None and frame.open.seeds:
            frame.open.fetch()

    def _graph(self, opened: _CallerCollector, alive: list[Lazy]) -> _Known:
        """Returns the graph; sends it to its members if they do not know it."""
        signature = opened.signature(alive)
        known = self._known.get(signature)
        if known is None:
            # A graph_id is never used again: a member may know another graph by it, if that was
            # sent to some of its members only.
            graph, graph_id = opened.graph(alive), next(self._graph_ids)
            reach = opened.reach or self._services.model.parameters.reach(graph.calls)
            with torch.inference_mode(False):  # a later call may need gradients
                anchor = torch.zeros((), requires_grad=True)
            known = _Known(graph, graph_id, reach, anchor)
            header = self._services.rank, graph_id, graph
            if all(
                self._services.mail.send(member, Kind.GRAPH, header) for member in graph.members()
            ):
                self._known[signature] = known
        return known

    def _check_inputs(self, out: Outgoing) -> None:
        """Raises ArgumentChangedError if an input of a graph has changed since it was passed.

        Called when the graph is sent and when it has its results, because a message may refer to
        the tensor's memory until it has been read.
        """
        changed = set()
        for number, tensor in enumerate(out.inputs):
            if version_of(tensor) != out.versions[number]:
                changed.add((-1, number))
        if changed:
            calls = [call for call in out.graph.calls if not changed.isdisjoint(call.tensors)]
            self._services.model.learned.make_callers_wait({call.module for call in calls})
            raise ArgumentChangedError(self.names(out))

    def results(self, frame: Frame, out: Outgoing) -> dict[TensorId, torch.Tensor]:
        """Waits for the values of a graph and makes them outputs of one autograd node.

        Args:
            frame: that waits.
            out: the graph.

        Returns:
            The values, by id. `out` does not keep them: they refer to the autograd node, and the
            node refers to `out`. Python could not free such a cycle of references.

        Raises:
            ArgumentChangedError: code has changed an input since it was passed.
            Aborted: the step has failed meanwhile.
        """
        self._services.wait(out.ticket, frame, frame.forward)
        self._check_inputs(out)
        if out.returned:
            out.results = sorted(out.values)
        values: Sequence[torch.Tensor] = [out.values[result] for result in out.results]
        if not out.graph.ambient.grad:
            self._outgoing.pop(out.sending, None)
        elif any(value.requires_grad for value in values):
            if torch.is_grad_enabled():
                values = _apply_remote(self, frame, out, out.anchor, *self._linked(out))
            else:
                with torch.enable_grad():
                    values = _apply_remote(self, frame, out, out.anchor, *self._linked(out))
        out.values = {}
        out.inputs = []
        return dict(zip(out.results, values, strict=True))

    def _linked(self, out: Outgoing) -> list[torch.Tensor]:
        """Returns the inputs of a graph's node; without memory if it may be differentiated twice.

        The node then keeps them, because gradients of the second order have to find the way to
        them. Callers wait for each result of modules whose gradients have been differentiated; so
        their graphs have one segment, and the last result comes with its structure.
        """
        if not out.returned or len(out.graph.segments) > 1:
            return out.inputs
        needed = [one for one in out.inputs if one.requires_grad]
        out.hollow = True
        hollow = iter(_Hollow.apply(*needed) if needed else ())
        return [next(hollow) if one.requires_grad else one for one in out.inputs]

    # --- messages that arrive; on the thread that has the baton -----------------------------------

    def on_values(self, sending: int, segment: int, tensors: list[Any], extra: Any) -> None:
        """Takes the values of an edge to SINK.

        Args:
            sending: see `Origin`.
            segment: from which the edge comes.
            tensors: the values.
            extra: for each call whose result had no known structure, (structure, objects, number of
                tensors); None if there is none. The tensors of those calls come last.
        """
        out = self._outgoing.get(sending)
        if out is None:
            return
        ids: Sequence[TensorId] = out.graph.between[segment, SINK].values
        if extra is not None:
            more = list(ids)
            for call, (structure, objects, count) in extra.items():
                out.returned[call] = (structure, objects, count)
                more += [(call, index) for index in range(count)]
            ids = out.sunk[segment] = more
        out.values.update(zip(ids, tensors, strict=True))
        out.missing -= 1
        if out.missing == 0:
            self._services.baton.complete(out.ticket)
            if out.dropped:
                self._send_drop(out)

    def drop(self, sendings: Sequence[int]) -> None:
        """Drops those of the given graphs that have had no gradients: none will come any more.

        Their results did not reach the loss, or a checkpoint has computed them again. If nobody
        told their members so, these would keep the graphs until the end of the step, and count the
        microbatch as under way.

        Args:
            sendings: of the graphs; see `Origin`.
        """
        for sending in sendings:
            out = self._outgoing.get(sending)
            if out is None or not out.graph.ambient.grad:
                continue
            out.dropped = True
            if out.missing == 0:
                self._send_drop(out)

    def _send_drop(self, out: Outgoing) -> None:
        self._outgoing.pop(out.sending, None)
        header = (self._services.rank, out.sending, out.graph_id, out.microbatch)
        for member in out.graph.members():
            self._services.mail.send(member, Kind.DROP, header)

    def on_gradients(self, sending: int, segment: int, tensors: list[Any]) -> None:
        """Takes the gradients of an edge from SOURCE.

        Args:
            sending: see `Origin`.
            segment: at the other end of the edge.
            tensors: the gradients; None stands for "no gradient". At the end, those of the
                parameters that the pass asks for.
        """
        out = self._outgoing.get(sending)
        if out is None:
            return
        edge = out.graph.between.get((SOURCE, segment))
        values = () if edge is None else edge.values
        out.asked[segment] = tensors[len(values) :]
        for (_, index), gradient in zip(values, tensors[: len(values)], strict=True):
            if gradient is not None:
                # Kept apart by segment, because the sum must not depend on who answers first.
                out.gradients[index, segment] = gradient
        out.backward_missing -= 1
        if out.backward_missing == 0:
            self._services.baton.complete(out.backward_ticket)

    def call_of(self, edge: GradientEdge) -> Call | None:
        """Returns which call of another rank has made a tensor; None if none has."""
        node: Any = edge.node
        out = getattr(node, "out", None)
        if not isinstance(out, Outgoing) or node.caller is not self:
            return None
        return out.graph.calls[out.results[edge.output_nr][0]]

    def anchors(self, names: Collection[str]) -> list[torch.Tensor]:
        """Returns the anchors of the graphs whose modules have some of the named parameters."""
        return [one.anchor for one in self._known.values() if not one.reach.isdisjoint(names)]

    def this_pass(self, out: Outgoing) -> Pass:
        """Returns which kind of backward pass runs on this thread, through the node of a graph."""
        keeps = graph_is_kept()
        asked = passes.asked()
        if asked is not None:
            return Pass(False, keeps, tuple([name for name in asked.names if name in out.reach]))
        # Autograd executes the anchor's node, unless the script has asked for certain gradients.
        anchor = get_gradient_edge(out.anchor).node
        return Pass(will_execute_node(anchor), keeps)

    def names(self, out: Outgoing) -> str:
        """Returns which modules a graph calls, and where they live, for the text of an error."""
        modules, calls = self._services.modules, out.graph.calls
        return ", ".join(
            dict.fromkeys(
                f"{modules.names[call.module]!r} (on rank {modules.owners[call.module]})"
                for call in calls
            )
        )

    def backward(
        self, frame: Frame, out: Outgoing, gradients: Sequence[Any], this: Pass
    ) -> list[Any]:
        """Sends the gradients of a graph's outputs, and waits for those of its inputs.

        Args:
            frame: that runs the backward pass.
            out: the graph.
            gradients: of the node's outputs, in the order of `out.results`.
            this: the kind of backward pass.

        Returns:
            The gradients of the inputs, in their order; None where there is none. Inputs at the end
            that have none are left out.

        Raises:
            SMPUsageError: an earlier backward pass through this graph has freed it, or runs.
            Aborted: the step has failed meanwhile.
        """
        services, graph = self._services, out.graph
        self._check_first(out)
        out.backward_of = self._microbatch()
        segments = len(graph.segments) if this.asked else len(graph.out_of[SOURCE])
        out.backward_missing = segments
        of_result = dict(zip(out.results, gradients, strict=True))
        for edge in graph.into[SINK]:
            header = (services.rank, out.sending, SINK, edge.source, tuple(this))
            results = out.sunk.get(edge.source, edge.values)
            owner = graph.segments[edge.source].owner
            services.mail.send(
                owner, Kind.BACKWARD, header, [of_result[result] for result in results]
            )
        services.wait(out.backward_ticket, frame, False)
        sums: dict[int, torch.Tensor] = {}
        for index, segment in sorted(out.gradients):
            gradient = out.gradients[index, segment]
            sums[index] = sums[index] + gradient if index in sums else gradient
        out.gradients = {}
        asked = passes.asked()
        for segment in sorted(out.asked) if asked is not None else ():
            for name, found in zip(this.asked, out.asked[segment], strict=True):
                asked.add(name, found)  # type: ignore[union-attr]
        out.asked = {}
        if this.keeps:
            out.backward_ticket = Ticket()
        else:
            self._outgoing.pop(out.sending, None)
        return [sums.get(index) for index in range(len(sums) and max(sums) + 1)]

    def _microbatch(self) -> int:
        """Returns the microbatch that runs, which may be another than that of the graph.

        Raises:
            SMPUsageError: none does.
        """
        task = self._services.baton.current.task
        if task is None:
            raise SMPUsageError(
                "a backward pass outside the step, through calls of modules on other ranks: they "
                "have ended with the step. Call model.backward(loss) in the step function"
            )
        return task.frame.microbatch  # type: ignore[no-any-return]

    def _check_first(self, out: Outgoing) -> None:
        """Raises SMPUsageError if an earlier backward pass through a graph has freed it, or runs.

        It may run for another microbatch, if the code has kept a tensor where both find it.
        """
        if out.backward_missing == 0 and not out.backward_ticket.done:
            return
        text = (
            "a second backward pass through a call of a module on another rank: what it needs "
            "is gone. Add up the losses, and make one backward pass; or give the first one "
            f"retain_graph=True. It is a call of {self.names(out)}"
        )
        this = self._microbatch()
        if {this, out.backward_of} != {out.microbatch}:
            text += (
                f", made in microbatch {out.microbatch}; the first pass was that of microbatch "
                f"{out.backward_of}, and this is that of microbatch {this}. "
                "Microbatches run by turns, so code must not keep tensors of one where another "
                "finds them, such as in a list of the model: make a new list in every call"
            )
        raise SMPUsageError(text)

    def differentiate(
        self,
        out: Outgoing,
        gradients: Sequence[Any],
        inputs: Sequence[Any] | None,
        needed: Sequence[bool],
        this: Pass,
    ) -> list[Any]:
        """Does what `backward` does, with an autograd graph of the gradients.

        For the ranks it is one more call: of the segment's backward pass, with the gradients of its
        results as arguments. So it has a backward pass of its own, which can be differentiated in
        the same way.

        Args:
            out: the graph.
            gradients: of the node's outputs, in the order of `out.results`.
            inputs: of the node, without memory; None if it has not kept them.
            needed: which of them require a gradient.
            this: the kind of backward pass.

        Returns:
            The gradients of the inputs, in their order; None where there is none.

        Raises:
            DifferentiatedTwiceError: the graph has several segments, or its inputs are not known
                any more. In the second attempt, calls are sent one by one.
            SMPUsageError: an earlier backward pass through this graph has freed it, or runs.
        """
        self._check_first(out)
        services, graph = self._services, out.graph
        services.model.learned.make_callers_wait({call.module for call in graph.calls})
        if inputs is None:
            raise DifferentiatedTwiceError(self.names(out))
        numbers = [number for number, need in enumerate(needed) if need]
        what = Differentiation(
            out.sending,
            this.accumulates,
            this.asked,
            tuple(out.results),
            tuple([(-1, number) for number in numbers]),
        )
        # Stand for the inputs, which their owner has; so they have a place in the call's messages.
        stand_ins = [torch.zeros((), requires_grad=True) for _ in numbers]
        tensors: list[torch.Tensor] = []
        objects: list[Any] = []
        arguments: Any = ((what, list(gradients), stand_ins), {})
        whole = lambda value: isinstance(value, Differentiation)  # noqa: E731
        structure = flatten(arguments, tensors, objects, whole)
        last, segment = graph.calls[-1], graph.segments[0]
        known = KnownCall(last.module, DIFFERENTIATE, structure, None, ())
        key = (last.module, structure, out.reach)
        known = self._differentiations.setdefault(key, known)
        frame: Frame = services.baton.task.frame  # type: ignore[union-attr]
        self.settle(frame)
        collector = frame.open = _CallerCollector(self, frame, ambient())
        collector.reach = out.reach
        collector.add(segment.owner, known, tensors, objects, None)
        sent = self.send(frame)
        first = len(sent.inputs) - len(numbers)
        sent.inputs[first:] = [inputs[number] for number in numbers]
        of_inputs, asked = rebuild(*collector.result_of_last())
        running = passes.asked()
        for name, found in zip(this.asked, asked, strict=True):
            running.add(name, found)  # type: ignore[union-attr]
        of_number = dict(zip(numbers, of_inputs, strict=True))
        return [of_number.get(number) for number in range(len(needed))]


class _CallerCollector(Collector):
    """A collector that can send its graph and fetch the values."""

    def __init__(self, caller: CallerSide, frame: Frame, ambient: Ambient) -> None:
        super().__init__(ambient)
        self._caller = caller
        self._frame = frame
        self.sent: Outgoing | None = None
        self.reach: frozenset[str] = frozenset()

    def fetch(self) -> dict[TensorId, torch.Tensor]:
        """Sends the graph if that has not been done, and fills in all lazy tensors.

        Raises:
            OrderMattersError: code of another microbatch needs a value of this one. It has found
                the tensor in an object that microbatches share.
        """
        task = self._caller._services.baton.current.task
        if task is not None and task.frame.microbatch != self._frame.microbatch:
            raise OrderMattersError(
                f"microbatch {task.frame.microbatch} uses a tensor of microbatch "
                f"{self._frame.microbatch}"
            )
        if self.sent is None:
            self._caller.send(self._frame)
        assert self.sent is not None
        values = self._caller.results(self._frame, self.sent)
        for lazy in self.lazies_in_use():
            lazy.value = values[lazy.tensor_id]
            lazy.fetch = None
        self.inputs = []
        return values

    def result_of_last(self) -> tuple[Any, list[Any], list[Any]]:
        """Fetches; returns what the last call has returned, whose structure was unknown."""
        call = len(self.seeds) - 1
        values = self.fetch()
        assert self.sent is not None
        structure, objects, count = self.sent.returned[call]
        return structure, [values[call, index] for index in range(count)], objects


class _Remote(torch.autograd.Function):
    """The one node that stands for a whole call graph in the caller's autograd graph.

    Its inputs are the tensors that entered the call graph, its outputs the results.
    """

    @staticmethod
    def forward(
        ctx: Any, caller: Any, frame: Any, out: Outgoing, _anchor: Any, *inputs: Any
    ) -> Any:
        ctx.caller, ctx.frame, ctx.out, ctx.count = caller, frame, out, len(inputs)
        ctx.inputs = [one if one.requires_grad else None for one in inputs] if out.hollow else None
        ctx.set_materialize_grads(False)
        values = [out.values[result] for result in out.results]
        ctx.mark_non_differentiable(*[value for value in values if not value.requires_grad])
        return tuple([value.detach() if value.requires_grad else value for value in values])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        caller, out = ctx.caller, ctx.out
        refuse_transforms(gradients, lambda: caller.names(out))
        asked = passes.asked()
        if asked is not None:
            gradients = tuple(
                [None if (ctx, at) in asked.captured else one for at, one in enumerate(gradients)]
            )
            if all(one is None for one in gradients):
                return (None,) * (4 + ctx.count)  # autograd visits it for its anchor only
        this = caller.this_pass(out)
        if torch.is_grad_enabled() and any(one is not None for one in gradients):
            needed = ctx.needs_input_grad[4:]
            found = caller.differentiate(out, gradients, ctx.inputs, needed, this)
        else:
            found = caller.backward(ctx.frame, out, gradients, this)
        return (None, None, None, None, *found, *([None] * (ctx.count - len(found))))


class _Hollow(torch.autograd.Function):
    """Returns tensors without memory, through which gradients go to the given ones."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([leaf_like(tensor) for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return gradients


def refuse_transforms(tensors: Sequence[Any], who: Callable[[], str]) -> None:
    """Raises if a call or its gradients are part of what messages cannot carry.

    Args:
        tensors: what would be sent.
        who: returns which modules are called.

    Raises:
        SMPUsageError: a transform of torch.func is running, or a tensor has a tangent, or is one of
            batched gradients.
    """
    what = ""
    if interpreter_stack() is not None:
        what = "a transform of torch.func (such as grad, vjp, jvp, vmap)"
    elif forward_level(forward_ad) >= 0 and any(
        forward_ad.unpack_dual(one).tangent is not None  # type: ignore[no-untyped-call]
        for one in tensors
        if type(one) is torch.Tensor
    ):
        what = "a tensor with a tangent (forward-mode derivatives)"
    else:
        for one in tensors:  # not `any`: this runs in every call
            if one is not None and is_batched(one):
                what = "a batch of gradients (is_grads_batched=True or vectorize=True)"
    if what:
        raise SMPUsageError(
            f"{what} cannot go through calls of modules on another rank: {who()}. Use "
            "torch.autograd.grad for one gradient after the other, with create_graph=True for "
            "derivatives of derivatives; or keep these modules on the rank that calls them, which "
            "is partition 0 for the body: smp.set_partition(module, 0) before the first step"
        )


def leaf_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a leaf of the shape, dtype and layout of a tensor; the memory is of one element.

    That of a sparse one may have indices, too.
    """
    if tensor.layout != torch.strided:
        return torch.zeros_like(tensor, requires_grad=True)
    return tensor.new_empty(()).expand(tensor.shape).requires_grad_()


# `Function.apply` would look for lazy tensors among the arguments, and for functorch transforms;
# there are neither.
_apply_remote: Any = apply_of(_Remote)


def run_backward(
    roots: Sequence[GradientEdge],
    gradients: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    this: Pass,
    parameters: Mapping[str, torch.Tensor],
    anchors: Sequence[torch.Tensor],
    create: bool = False,
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Does what `torch.autograd.backward` or `grad` does, without checks.

    It runs on the calling thread only, which has to be one of the baton: see `Baton._run`.

    Args:
        roots: where the pass begins.
        gradients: of the roots, of the same shapes and dtypes.
        inputs: leaves.
        this: the kind of backward pass.
        parameters: those of `this.asked` that live here, by name.
        anchors: of the graphs of this rank that may use `this.asked`; see `CallerSide`.
        create: make an autograd graph of the gradients.

    Returns:
        The gradients of the inputs, in their order, and those of the parameters in `this.asked`;
        None where there is none.
    """
    only = () if this.accumulates else (*inputs, *parameters.values(), *anchors)
    if not roots or not (only or this.accumulates):
        return [None] * len(inputs), [None] * len(this.asked)
    with passes.asking(this.asked) as asked:
        found = execution_engine.run_backward(
            tuple(roots), tuple(gradients), this.keeps, create, only, True, this.accumulates
        )
    if not this.accumulates:
        with torch.set_grad_enabled(create):
            for name, gradient in zip(parameters, found[len(inputs) :], strict=False):
                asked.add(name, gradient)
        return list(found[: len(inputs)]), [asked.found.get(name) for name in this.asked]
    taken = []
    for leaf in inputs:
        taken.append(leaf.grad)
        leaf.grad = None
    return taken, []
