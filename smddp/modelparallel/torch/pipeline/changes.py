"""What code of a step changes in modules and other objects, for their callers and for later steps.

attributes.py and shared_state.py say how that is seen; here is what is done about it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import GradientEdge

from smddp.modelparallel.core.logs import warn_user
from smddp.modelparallel.torch.activations.object_values import Change, Values, make_change
from smddp.modelparallel.torch.pipeline.attributes import CallAttributes
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.method import READS, Method, Use
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.objects import Arguments, Reply
from smddp.modelparallel.torch.pipeline.parameters import Parameters
from smddp.modelparallel.torch.pipeline.protocol import Origin
from smddp.modelparallel.torch.pipeline.shared_state import SharedState

__all__ = ["Changes"]


class Changes:
    """Notes what code changes, and warns of what other ranks do not see.

    Attributes:
        is_watched: is this step watched for what code changes, or was the last one? See
            shared_state.py.
        keepers: numbers of the modules here whose code changes attributes or other objects, as
            watched steps have shown.
    """

    def __init__(self, modules: Modules, parameters: Parameters) -> None:
        """Knows of no changes yet."""
        self._modules, self._parameters = modules, parameters
        self.is_watched = False
        self.keepers: set[int] = set()
        # Numbers of the modules whose attributes calls of other ranks have set here, as watched
        # steps have shown; not only those that live here.
        self._setters: set[int] = set()
        # By number of the module: how often each attribute was set by a call, and those that are
        # sent in any case. In a watched step, all that any call has set.
        self._times_set: dict[int, collections.Counter[str]] = {}
        self._often: dict[int, set[str]] = {}
        self._in_place: dict[int, set[str]] = {}
        self._lost: set[tuple[int, str]] = set()
        self._said: set[str] = set()  # warnings that are given once
        self._warned: set[int] = set()  # ids of parameters outside the model
        self._shared: SharedState | None = None  # in a watched step
        # What the keepers and setters had in their attributes before the step.
        self._kept: dict[int, CallAttributes] = {}
        # The same of other objects that microbatches share, and those that the first step changed.
        self._kept_objects = Values([])
        self._shared_objects: list[Any] = []

    def begin_step(self, looks: bool, again: bool, body: Callable[..., Any] | None) -> None:
        """Begins to note what happens in a step.

        Args:
            looks: warn of parameters that are not of the model, and of attributes that are set
                where modules do not live.
            again: the step is run a second time, with what modules kept before the first.
            body: of the step, if there are several partitions; None with one.
        """
        # The second attempt of a first step is still the first that ends.
        self.is_watched = looks = looks or (again and self.is_watched)
        if again:
            for before in self._kept.values():
                before.restore()
            self._kept_objects.restore()
        self._shared = None
        modules = self._modules
        if looks and body is not None:
            self._shared = SharedState(modules, body, self._said)
        kept = range(len(modules.by_number)) if looks else self.keepers | self._setters
        self._kept = {
            one: CallAttributes(
                modules.names[one], modules.by_number[one], self._in_place.get(one, ())
            )
            for one in kept
        }
        if self._shared is not None:
            self._shared_objects = self._shared.objects(changed=False)
        self._kept_objects = Values(self._shared_objects)

    def end_step(self) -> None:
        """Lets the next steps use what this step has found."""
        if self.is_watched:
            # What was set once only, such as a table, is not sent each time.
            for number, times in self._times_set.items():
                self._often[number] = {name for name in times if times[name] > 1}
        if self._shared is not None:
            self.keepers |= {one for one in self._shared.changed if one >= 0}
            self._shared_objects = self._shared.objects(changed=True)
            self._shared = None

    @property
    def order_matters(self) -> bool:
        """Whether this step has shown that microbatches must run one after the other."""
        return self._shared is not None and self._shared.in_order

    def look(self, microbatch: int) -> None:
        """Looks for changes before code of a microbatch waits, while others run."""
        if self._shared is not None:
            self._shared.look(microbatch, waits=True)

    def end_microbatch(self, microbatch: int) -> None:
        """Looks for changes when a microbatch has ended."""
        if self._shared is not None:
            self._shared.begin(microbatch)

    # --- attributes -------------------------------------------------------------------------------

    def attributes_before(
        self, number: int, method: Method, microbatch: int
    ) -> Mapping[int, CallAttributes]:
        """Notes the attributes of modules that a call of another rank may set.

        Args:
            number: of the module that is called. The attributes may be of modules inside it.
            method: what the call does.
            microbatch: of the call.
        """
        looks = self.is_watched
        reads = method.use in READS or method.use is Use.DIFFERENTIATE
        if reads or not (looks or self._setters):
            return {}
        if self._shared is not None:
            self._shared.begin(microbatch)
        modules = self._modules
        return {
            one: CallAttributes(
                modules.names[one], modules.by_number[one], often=self._often.setdefault(one, set())
            )
            for one in modules.inside(number)
            if looks or one in self._setters
        }

    def note_call(self, number: int, arguments: Arguments, reply: Reply, origin: Origin) -> None:
        """Notes what a call of another rank has changed; warns of what its caller does not get.

        Args:
            number: of the module that was called.
            arguments: of the call.
            reply: to the call; it has what the caller gets.
            origin: of the call.
        """
        if self._shared is not None:
            self._shared.look(origin.microbatch, waits=False)
        if reply.objects is not None:
            self._setters.update(reply.objects[2])
        if arguments.attributes:
            self._note_attributes(arguments.attributes, origin.caller_rank)
        if self.is_watched:
            self._note_marks(number, arguments, origin.caller_rank)

    def _note_attributes(self, attributes: Mapping[int, CallAttributes], caller: int) -> None:
        for number, one in attributes.items():
            if one.changed:
                times = self._times_set.setdefault(number, collections.Counter())
                times.update(one.changed)
                names = [n for n in one.changed if times[n] > 1 or self.is_watched]
                self._often.setdefault(number, set()).update(names)
            if one.in_place:
                self._in_place.setdefault(number, set()).update(one.in_place)
            for name, kind in one.lost.items():
                self._setters.add(number)
                if (number, name) in self._lost:
                    continue
                self._lost.add((number, name))
                warn_user(
                    f"module {self._modules.names[number]!r}, on rank {self._modules.rank} of the "
                    f"pipeline, has set its attribute {name!r} in a call, to what holds a "
                    f"{kind.__qualname__}. Rank {caller}, which has called it, does not see that: "
                    "only numbers, texts, tensors, and lists, tuples, dicts and sets of these go "
                    "there. If code there needs it, return it from forward"
                )

    def _note_marks(self, number: int, arguments: Arguments, caller: int) -> None:
        """Warns of what a call has asked autograd to do with the caller's tensors."""
        marked = arguments.marked()
        if marked is None or (number, marked) in self._lost:
            return
        self._lost.add((number, marked))
        warn_user(
            f"{arguments.who}, on rank {self._modules.rank} of the pipeline, {marked} on a tensor "
            "among its arguments. It acts on the copy here, to which only gradients through this "
            f"module go, and rank {caller}, which has called it, does not see it: results may be "
            "others than in one process. Do it where the tensor is made, or to `tensor.clone()` if "
            "it concerns this module alone"
        )

    def set_attributes(self, changes: Mapping[int, Change]) -> None:
        """Sets attributes of modules here as calls on other ranks have set them there.

        Args:
            changes: by number of the module.
        """
        for number, change in changes.items():
            make_change(self._modules.by_number[number], change)
        self.note_elsewhere()

    def note_elsewhere(self) -> None:
        """Notes that a call of another rank has brought home what it has changed."""
        if self._shared is not None:
            self._shared.note_elsewhere()

    def take_attributes(self, frame: Frame, changes: Mapping[int, Change]) -> None:
        """Does `set_attributes`, for code of a frame also after it has waited."""
        self.set_attributes(changes)
        self._setters.update(changes)
        for number, change in changes.items():
            before = frame.set_by_calls.get(number, Change(None, {}, []))
            removed = {*before.removed, *change.removed} - change.attributes.keys()
            merged = {**before.attributes, **change.attributes}
            for name in change.removed:
                merged.pop(name, None)
            frame.set_by_calls[number] = Change(None, merged, sorted(removed))
            # If this happens in a call of yet another rank, that gets the same.
            names = {*change.attributes, *change.removed}
            self._often.setdefault(number, set()).update(names)

    # --- parameters outside the model -------------------------------------------------------------

    def note_roots(self, frame: Frame | None, roots: Sequence[Any]) -> None:
        """Warns of parameters outside the model that a backward pass gives gradients.

        Args:
            frame: of the code that makes the pass.
            roots: tensors or gradient edges, where the pass begins.
        """
        if self._shared is not None and frame is not None and not frame.path:
            self._shared.look(frame.microbatch, waits=True)
        if not self.is_watched:
            return
        todo = [
            root.node if isinstance(root, GradientEdge) else root.grad_fn
            for root in roots
            if isinstance(root, GradientEdge) or root.grad_fn is not None
        ]
        seen = set(todo)
        while todo:
            node = todo.pop()
            found = getattr(node, "variable", None)
            if isinstance(found, nn.Parameter) and self._parameters.name_of(found) is None:
                self._warn_of(found)
            more = [after for after, _ in node.next_functions if after is not None]
            todo += [after for after in more if after not in seen]
            seen.update(more)

    def _warn_of(self, parameter: nn.Parameter) -> None:
        if id(parameter) in self._warned:
            return
        self._warned.add(id(parameter))
        warn_user(
            f"a parameter of shape {tuple(parameter.shape)} that is not of the "
            "smp.DistributedModel gets a gradient in the step. smp does not handle it: the "
            "gradient is the sum over the microbatches, not the mean, is there only on the rank "
            "whose code has used the parameter, and is not averaged over replicas. Put the "
            "parameter, such as that of a loss, into the model before smp.DistributedModel"
        )
