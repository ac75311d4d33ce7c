"""Sends every call of a module to the rank that owns the module.

`nn.Module._call_impl` is replaced until `smp.shutdown`, for all modules. A call of a module of the
model goes to `Modules.enter`, which decides where it runs; all other calls go on as usual. Modules
that live elsewhere get a `forward` of their own, too; in copies of them it raises.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from smddp._torch_internals import (
    MODULE_CALLS,
    backward_hooks,
    forward_hooks,
    forward_pre_hooks,
    until_undone,
)
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.logs import warn_user
from smddp.modelparallel.core.order import SliceObserver
from smddp.modelparallel.torch.activations.object_values import Change, Values, make_change
from smddp.modelparallel.torch.activations.offload import Offloader
from smddp.modelparallel.torch.activations.region import Keeper, Region, layer_arguments, runs_again
from smddp.modelparallel.torch.common.placeholder import force
from smddp.modelparallel.torch.common.structure import (
    Structure,
    flatten,
    may_be_changed,
    replace_tensors,
    without_repeats,
)
from smddp.modelparallel.torch.pipeline.attributes import CallAttributes
from smddp.modelparallel.torch.pipeline.calls import CallerSide, refuse_transforms
from smddp.modelparallel.torch.pipeline.collector import KnownCall, predictable
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.hooks import ForwardHooks, OwnersHookError
from smddp.modelparallel.torch.pipeline.lazy import Lazy, patch_function_apply
from smddp.modelparallel.torch.pipeline.objects import (
    Arguments,
    Record,
    Reply,
    is_immutable,
    packed,
    rebuild_reply,
)
from smddp.modelparallel.torch.pipeline.outlook import Outlook, key_of
from smddp.modelparallel.torch.pipeline.passes import patch_engine
from smddp.modelparallel.torch.pipeline.protocol import (
    DIFFERENTIATE,
    Call,
    Watched,
    raise_if_unpicklable,
)
from smddp.modelparallel.torch.pipeline.randomness import draw_seed, may_draw, seed_all, seeded
from smddp.modelparallel.torch.pipeline.references import references
from smddp.modelparallel.torch.pipeline.remote_tensor import (
    Home,
    RemoteTensor,
    ValueReader,
    force_argument,
    patch_torch,
    stand_in_for,
    values_of,
)
from smddp.modelparallel.torch.pipeline.services import RankServices
from smddp.modelparallel.torch.pipeline.shared_state import SharedState
from smddp.modelparallel.torch.pipeline.waits import Waits

__all__ = ["Findings", "Modules", "Surroundings", "difference", "forget_owner", "note_replaced"]

# For the random numbers of a call; None if it draws none. Of several layers: one for each.
Seed = int | tuple[int | None, ...] | None

# What a call has in place of a method if it reads a parameter or a buffer; its name follows.
_PARAMETER, _BUFFER = "parameter ", "buffer "
# For a buffer that was taken from its module before a later call of a module on another rank. If
# code has ever put another tensor in the buffer's place, the owner raises.
_EARLIER_BUFFER = "earlier buffer "
# As _EARLIER_BUFFER, but the owner answers None in place of raising.
_SAME_BUFFER = "same buffer "
_READS = _PARAMETER, _BUFFER, _EARLIER_BUFFER, _SAME_BUFFER
# Calls with activation checkpointing: of a module, whose arguments are ((args, kwargs), preserve
# the state of random generators?); of some layers of an nn.Sequential, see `Modules.call_layers`.
_RECOMPUTED, _LAYERS = "recomputed", "layers"
# Calls for which forward hooks run.
_HOOKED = "", _RECOMPUTED
# `difference` names at most so many modules of each side.
_NAMED = 5
# If the structure of a call's result has changed this often, callers always wait for the result
# from then on, because each change means that a step runs twice.
_MAX_CHANGES = 2


def difference(names: Sequence[str], others: Sequence[str], who: str, other: str) -> str:
    """Says how the modules of two models differ, for the text of an error.

    Args:
        names: of the modules of one model, in their order.
        others: those of the other model.
        who: has the one model.
        other: has the other model.

    Returns:
        A text; empty if the names are the same, in the same order.
    """
    found = []
    for mine, theirs, owner in ((names, others, who), (others, names, other)):
        only = sorted(set(mine) - set(theirs), key=list(mine).index)
        if only:
            more = f" and {len(only) - _NAMED} more" if len(only) > _NAMED else ""
            found.append(f"only {owner} has {', '.join(map(repr, only[:_NAMED]))}{more}")
    if not found and list(names) != list(others):
        pairs = zip(names, others, strict=False)
        first, second = next(((a, b) for a, b in pairs if a != b), ("", ""))
        found.append(f"the order differs: {who} has {first!r} where {other} has {second!r}")
    return "; ".join(found)


class Findings(NamedTuple):
    """What a rank has found out in a step about the calls that it makes.

    Attributes:
        structures: of the results, by the key of a call in `Modules`; None for a call whose caller
            has to wait for the result.
        awaited: numbers of the modules for whose results callers have to wait, because arguments
            have been changed.
    """

    structures: dict[Any, Structure | None]
    awaited: frozenset[int]

    def join(self, other: Findings) -> Findings:
        """Returns what ranks that make the same calls may rely on, so that they go on to do so.

        If they have not found the same about a call, callers wait for all results of its module:
        one rank may pass a mask where another passes None, and both must wait, or neither.
        """
        structures = {}
        awaited = self.awaited | other.awaited
        for key in dict.fromkeys((*self.structures, *other.structures)):
            ours, theirs = self.structures.get(key), other.structures.get(key)
            structures[key] = ours if ours == theirs else None
            if ours != theirs:
                awaited |= {key[0]}
        return Findings(structures, awaited)


class Surroundings(Protocol):
    """What else happens around tasks and around the modules that run on this rank."""

    def around_task(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for the code of a task."""

    def around_module(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for a call of the module with this number."""


class Modules:
    """The modules of the model, by number, and who owns them.

    A module's number is its place in `root.modules()`, the same on all ranks.

    Attributes:
        by_number: the modules.
        names: by number; the root's is "model".
        owners: ranks of the pipeline, by number; None for modules without parameters and buffers,
            which run where their input is.
        divided: do modules live on other ranks?
        forwarding: may values go directly from owner to owner? (`direct_forwarding`)
        predicts_structures: may callers go on before a result has come, if they know its structure?
            Not in the second attempt of a step.
        is_watched: is this step watched for what code changes, or was the last one? See
            shared_state.py.
        in_order: do the microbatches of this step run one after the other?
        training_flags: one byte per module, 1 for train and 0 for eval, as all ranks have set it at
            the beginning of this step; None before the first one.
        out_of_order: numbers of the modules here that have been called in this step after a later
            part of the program had called them: another microbatch, or another call graph. Only
            of modules with buffers, and keepers.
        keepers: numbers of the modules here whose code changes attributes or other objects, as
            watched steps have shown.
        setters: numbers of the modules whose attributes calls of other ranks have set here, as
            watched steps have shown; not only those that live here.
        buffers_read: (number, name) of the buffers here that other ranks have read in this step.
        surroundings: entered around tasks and modules; None for nothing.
        observer: is told which slices run, if there is an order group; None for nobody.
        waits: is told for which calls this rank waits, if its tasks have an order; None for nobody.
        called: is told of the calls of tasks that go to other ranks: number of the module and
            method.
        entered: is told of the calls that come from other ranks: name of the module.
        replaced: a function of the name of a buffer in the model, which lives here: has code ever
            put another tensor in its place?
        recomputed: the modules that have activation checkpointing where they live, by number: do
            both runs draw the same random numbers?
        offloader: keeps the arguments of calls with activation checkpointing; None for autograd.
        outlook: which of them are needed soon; None with one partition.
        calls_recomputed: has code asked for activation checkpointing of a single call?
        calling: does the script call the model outside steps now?
        hooks: the forward hooks of the modules.
        default_device: where tasks make tensors if they do not say where; that of the script.
        settled: has the last step found nothing that makes calls of this rank wait, or not wait,
            from now on?
    """

    def __init__(
        self, services: RankServices, caller: CallerSide, root: nn.Module, forwarding: bool = True
    ) -> None:
        self._baton, self._caller = services.baton, caller
        self._rank = services.rank
        self.forwarding = forwarding
        self.predicts_structures = True
        # Numbers of modules whose arguments have been changed in place after a call.
        self._awaited: set[int] = set()
        self._awaited_before: frozenset[int] = frozenset()  # at the end of the last step
        self.settled = False
        self.in_order = False
        self.training_flags: bytes | None = None
        self.buffers_read: set[tuple[int, str]] = set()
        self.out_of_order: set[int] = set()
        self.keepers: set[int] = set()
        self.setters: set[int] = set()
        self._inside: dict[int, list[int]] = {}
        # By number of the module: how often each attribute was set by a call, and those that are
        # sent in any case. In a watched step, all that any call has set.
        self._times_set: dict[int, collections.Counter[str]] = {}
        self._often: dict[int, set[str]] = {}
        self._in_place: dict[int, set[str]] = {}
        self._lost: set[tuple[int, str]] = set()
        self._said: set[str] = set()  # warnings that are given once
        self.is_watched = False
        self._warned: set[int] = set()  # ids of parameters outside the model
        # By number of a module here that has buffers: which task has called it last.
        self._called_last: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.replaced: Callable[[str], bool] = lambda _: False
        self.surroundings: Surroundings | None = None
        self.observer: SliceObserver | None = None
        self.waits: Waits | None = None
        self.called: Callable[[int, str], None] = lambda number, method: None
        self.entered: Callable[[str], None] = lambda name: None
        self.recomputed: dict[int, bool] = {}
        self.offloader: Offloader | None = None
        self.outlook: Outlook | None = None
        self.calls_recomputed = False
        self.calling = False
        self.default_device = torch.device("cpu")
        # By number of the module, and the first and last layer: see `Region`.
        self._regions: dict[tuple[int, int, int], Region] = {}
        self.by_number = list(root.modules())
        by_id = {id(module): name for name, module in reversed(list(root.named_modules()))}
        self.names = [by_id[id(module)] or "model" for module in self.by_number]
        self._numbers = {id(module): number for number, module in enumerate(self.by_number)}
        self._by_name = {name: number for number, name in enumerate(self.names)}
        self._by_name[""] = 0
        self._parameter_names: dict[int, str] = {}  # by id
        self.hooks = ForwardHooks(self._rank, self.by_number, self.number_of)
        self._draws = [may_draw(module) for module in self.by_number]
        self.owners: list[int | None] = [0] * len(self.by_number)
        self.divided = False
        # By (module, method, structure of the arguments, train or eval, gradients on?): first calls
        # whose result structure callers may rely on; then calls whose callers wait for the
        # result. A key may be in both.
        self._with_structure: dict[Any, KnownCall] = {}
        self._without_structure: dict[Any, KnownCall] = {}
        # Structures found in this step. They are used from the next step on, so that all
        # microbatches of a step make the same calls, and pass every module in the same order.
        self._learned: dict[Any, Any] = {}
        self.shared: SharedState | None = None  # in a watched step
        # What the keepers and setters had in their attributes before the step.
        self._kept: dict[int, CallAttributes] = {}
        # The same of other objects that microbatches share, and those that the first step changed.
        self._kept_objects = Values([])
        self._shared_objects: list[Any] = []
        # How often the structure of a call's result has changed.
        self._changes: collections.Counter[Any] = collections.Counter()

    def set_owners(self, owners: Sequence[int | None]) -> None:
        """Sets the owners; from now on `module.forward(...)` of a remote module is a call, too."""
        self.owners = list(owners)
        self.divided = any(owner not in (None, self._rank) for owner in self.owners)
        for number, owner in enumerate(self.owners):
            if owner is not None and owner != self._rank:
                module = self.by_number[number]
                object.__setattr__(module, "forward", _RemoteForward(self, number))

    def home(self, kind: str, number: int, name: str, owner: int, device: torch.device) -> Home:
        """Returns where a parameter or a buffer lives.

        Args:
            kind: "parameter" or "buffer".
            number: of the module that has it.
            name: in that module.
            owner: rank of the pipeline.
            device: of what lives on this rank.
        """
        reader = _OwnerValueReader(self, owner, number, kind, name)
        return Home(kind, self.full_name(number, name), owner, device, reader)

    def full_name(self, number: int, name: str) -> str:
        """Returns the name in the model of a parameter or buffer.

        Args:
            number: of the module that has it.
            name: in that module.
        """
        return f"{self.names[number]}.{name}" if number else name

    def findings(self) -> Findings:
        """Returns what this step has found out, and what ranks that know the same should know."""
        # Most results whose callers have to wait were not predictable before either.
        structures = {
            key: returns
            for key, returns in self._learned.items()
            if returns is not None or key in self._with_structure
        }
        return Findings(structures, frozenset(self._awaited))

    def end_step(self, findings: Findings) -> None:
        """Lets the next steps use what this step has found.

        Args:
            findings: of this rank; with an order group, what its members have in common.
        """
        self.settled = findings.awaited <= self._awaited_before
        self._awaited |= findings.awaited
        self._awaited_before = frozenset(self._awaited)
        for key, returns in findings.structures.items():
            before = self._with_structure.pop(key, None)
            self.settled &= before is not None and before.returns == returns
            if before is not None and before.returns != returns:
                self._changes[key] += 1
            if returns is not None and self._changes[key] < _MAX_CHANGES:
                self._with_structure[key] = KnownCall(key[0], key[1], key[2], returns, key[5])
        self._learned.clear()
        if self.is_watched:
            # What was set once only, such as a table, is not sent each time.
            for number, times in self._times_set.items():
                self._often[number] = {name for name in times if times[name] > 1}
        if self.shared is not None:
            self.keepers |= {one for one in self.shared.changed if one >= 0}
            self._shared_objects = self.shared.objects(changed=True)
            self.shared = None

    def begin_step(self, looks: bool, again: bool, body: Callable[..., Any] | None) -> None:
        """Begins to note what happens in a step.

        Args:
            again: the step is run a second time, with what modules kept before the first.
            looks: warn of parameters that are not of the model, and of attributes that are set
                where modules do not live.
            body: of the step, if there are several partitions; None with one.
        """
        # The second attempt of a first step is still the first that ends.
        self.is_watched = looks = looks or (again and self.is_watched)
        if again:
            for before in self._kept.values():
                before.restore()
            self._kept_objects.restore()
        self.shared = None
        if looks and body is not None:
            self.shared = SharedState(
                *(self.by_number, self.names, self._owner_of, self._rank, body, self._said)
            )
        kept = range(len(self.by_number)) if looks else self.keepers | self.setters
        self._kept = {
            one: CallAttributes(self.names[one], self.by_number[one], self._in_place.get(one, ()))
            for one in kept
        }
        if self.shared is not None:
            self._shared_objects = self.shared.objects(changed=False)
        self._kept_objects = Values(self._shared_objects)
        self.buffers_read.clear()
        self.out_of_order.clear()
        self._called_last.clear()

    def attributes_before(self, number: int, method: str) -> Mapping[int, CallAttributes]:
        """Notes the attributes of modules that a call of another rank may set.

        Args:
            number: of the module that is called. The attributes may be of modules inside it.
            method: see `Call.method`.
        """
        looks = self.is_watched
        if not (looks or self.setters) or method.startswith(_READS) or method == DIFFERENTIATE:
            return {}
        if self.shared is not None:
            self.shared.begin(self._microbatch())
        inside = self._numbers_inside(number)
        return {
            one: CallAttributes(
                self.names[one], self.by_number[one], often=self._often.setdefault(one, set())
            )
            for one in inside
            if looks or one in self.setters
        }

    def _numbers_inside(self, number: int) -> list[int]:
        """Returns the numbers of a module and of those inside it."""
        inside = self._inside.get(number)
        if inside is None:
            parts = self.by_number[number].modules()
            inside = [self._numbers[id(part)] for part in parts if id(part) in self._numbers]
            self._inside[number] = inside
        return inside

    def note_attributes(
        self, attributes: Mapping[int, CallAttributes], reply: Reply, caller: int
    ) -> None:
        """Notes which modules a call has given attributes; warns of what the caller does not get.

        Args:
            attributes: before the call.
            reply: to the call; it has what the caller gets.
            caller: the rank.
        """
        if self.shared is not None:
            self.shared.look(self._microbatch(), waits=False)
        if reply.objects is not None:
            self.setters.update(reply.objects[2])
        for number, one in attributes.items():
            if one.changed:
                times = self._times_set.setdefault(number, collections.Counter())
                times.update(one.changed)
                names = [n for n in one.changed if times[n] > 1 or self.is_watched]
                self._often.setdefault(number, set()).update(names)
            if one.in_place:
                self._in_place.setdefault(number, set()).update(one.in_place)
            for name, kind in one.lost.items():
                self.setters.add(number)
                if (number, name) in self._lost:
                    continue
                self._lost.add((number, name))
                warn_user(
                    f"module {self.names[number]!r}, on rank {self._rank} of the pipeline, has set "
                    f"its attribute {name!r} in a call, to what holds a {kind.__qualname__}. Rank "
                    f"{caller}, which has called it, does not see that: only numbers, texts, "
                    "tensors, and lists, tuples, dicts and sets of these go there. If code there "
                    "needs it, return it from forward"
                )

    def note_arguments(self, number: int, arguments: Arguments, caller: int) -> None:
        """Warns of what a call has asked autograd to do with the caller's tensors.

        Args:
            number: of the module that was called.
            arguments: of the call.
            caller: the rank.
        """
        marked = arguments.marked() if self.is_watched else None
        if marked is None or (number, marked) in self._lost:
            return
        self._lost.add((number, marked))
        warn_user(
            f"{arguments.who}, on rank {self._rank} of the pipeline, {marked} on a tensor among "
            "its arguments. It acts on the copy here, to which only gradients through this module "
            f"go, and rank {caller}, which has called it, does not see it: results may be others "
            "than in one process. Do it where the tensor is made, or to `tensor.clone()` if it "
            "concerns this module alone"
        )

    def set_attributes(self, changes: Mapping[int, Change]) -> None:
        """Sets attributes of modules here as calls on other ranks have set them there.

        Args:
            changes: by number of the module.
        """
        for number, change in changes.items():
            make_change(self.by_number[number], change)
        if self.shared is not None:
            self.shared.note_elsewhere()

    def _take_attributes(self, frame: Frame, changes: Mapping[int, Change]) -> None:
        """Does `set_attributes`, for code of a frame also after it has waited."""
        self.set_attributes(changes)
        self.setters.update(changes)
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

    def note_roots(self, roots: Sequence[Any]) -> None:
        """Warns of parameters outside the model that a backward pass gives gradients.

        Args:
            roots: tensors or gradient edges, where the pass begins.
        """
        frame = self._frame()
        if self.shared is not None and frame is not None and not frame.path:
            self.shared.look(frame.microbatch, waits=True)
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
            if isinstance(found, nn.Parameter) and self._name_of(found) is None:
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

    def _note_call(self, number: int) -> None:
        """Notes a call of a module here, which may change its buffers, or what it keeps."""
        frame = self._frame()
        if frame is None or runs_again():
            return
        now = frame.microbatch, frame.path
        last = self._called_last.setdefault(number, now)
        if now != last:
            (microbatch, path), (earlier, before) = now, last
            # A call within another one may come before or after calls of that itself.
            length = min(len(path), len(before))
            if (microbatch, path[:length]) < (earlier, before[:length]):
                self.out_of_order.add(number)
            self._called_last[number] = now

    def make_callers_wait(self, numbers: set[int]) -> None:
        """Makes callers wait for the results of these modules from now on.

        Args:
            numbers: of the modules.
        """
        self._awaited |= numbers

    def install(self) -> None:
        """Begins to handle the calls of these modules."""
        _installed.append(weakref.ref(self))
        MODULE_CALLS.install(_to_owners)
        _refuse_new_parameters()
        patch_function_apply()
        patch_torch()
        patch_engine(_in_step)

    def settle(self) -> None:
        """See `Asker`."""
        frame = self._frame()
        if frame is not None and frame.open is not None:
            self._caller.settle(frame)

    def anchors(self, names: Collection[str]) -> list[torch.Tensor]:
        """See `Asker`."""
        return self._caller.anchors(names)

    def parameters_among(self, inputs: Sequence[Any]) -> tuple[dict[int, str], set[Any]]:
        """See `Asker`; `force` returns the values of a parameter of another rank."""
        found: dict[int, str] = {}
        captured = set()
        for position, tensor in enumerate(inputs) if self.divided else ():
            home = stand_in_for(tensor)
            if home is not None:
                found[position] = self._canonical(home.name)
                continue
            if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                continue
            edge = get_gradient_edge(tensor)
            if tensor.is_leaf:
                # A parameter that was saved within a checkpoint comes back as another object.
                name = self._name_of(edge.node.variable)  # type: ignore[attr-defined]
            else:
                read = self._caller.call_of(edge)
                if read is None or not read.method.startswith(_PARAMETER):
                    continue
                name = self._name_of_read(read)
                captured.add((edge.node, edge.output_nr))
            if name is not None:
                found[position] = name
        return found, captured

    def _canonical(self, full: str) -> str:
        """Returns the first name of a parameter, which may have several."""
        parameter = self._parameter(full)
        return full if parameter is None else self._name_of(parameter) or full

    def _name_of_read(self, call: Call) -> str | None:
        parameter = self.by_number[call.module]._parameters[call.method[len(_PARAMETER) :]]
        return None if parameter is None else self._name_of(parameter)

    def reach(self, calls: Iterable[Call]) -> frozenset[str]:
        """Returns the names of the parameters that calls may use.

        These are the parameters of their modules, of the modules inside these, and those to which
        attributes of these modules refer.
        """
        found: set[str | None] = set()
        for call in calls:
            if call.method.startswith(_PARAMETER):
                found.add(self._name_of_read(call))
            elif not call.method.startswith(_READS):
                found.update(map(self._name_of, _parameters_used(self.by_number[call.module])))
        return frozenset(name for name in found if name is not None)

    def _name_of(self, parameter: torch.Tensor) -> str | None:
        """Returns the name in the model of a parameter; None if it is not of the model."""
        found = self._parameter_names.get(id(parameter))
        if found is None or self._parameter(found) is not parameter:
            self._parameter_names = {
                id(one): self.full_name(number, name)
                for number, module in reversed(list(enumerate(self.by_number)))
                for name, one in module._parameters.items()
                if one is not None
            }
            found = self._parameter_names.get(id(parameter))
        return found

    def _parameter(self, full: str) -> nn.Parameter | None:
        prefix, _, name = full.rpartition(".")
        number = self._by_name.get(prefix)
        return None if number is None else self.by_number[number]._parameters.get(name)

    def local_parameters(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns those of the named parameters that live here and are trained, by name."""
        found = {name: self._parameter(name) for name in names}
        return {
            name: one
            for name, one in found.items()
            if one is not None and not isinstance(one, RemoteTensor) and one.requires_grad
        }

    def number_of(self, module: nn.Module) -> int | None:
        """Returns the number of a module; None if it is not of the model."""
        return self._numbers.get(id(module))

    def enter(self, number: int, method: str, args: Any, kwargs: Any) -> Any:
        """Calls a module on the rank where it lives. All calls that code makes come here.

        Args:
            number: of the module.
            method: "forward" if that was called by name; "" if the module itself was.
            args: positional arguments.
            kwargs: named arguments.

        Returns:
            What the module returns; with lazy tensors if it runs elsewhere.

        Raises:
            SMPUsageError: it lives elsewhere, and the call is not in a step.
        """
        frame = self._frame()
        owner = self.owners[number]
        if frame is None:
            self._refuse_remote(number, owner)
            return self._original(number, method, args, kwargs)
        if owner is None:
            owner = self._owner_by_input(frame, args, kwargs)
        if owner == self._rank:
            args, kwargs = _forced(args), _forced(kwargs)
            if not self._draws[number]:
                return self._original(number, method, args, kwargs)
            with seeded(draw_seed()):
                return self._original(number, method, args, kwargs)
        if self.shared is not None:
            self.shared.look(frame.microbatch, waits=True)
        return self._remote(frame, owner, number, method, args, kwargs)

    def call_recomputed(self, number: int, args: Any, kwargs: Any, preserve: bool) -> Any:
        """Calls a module once with activation checkpointing, on the rank where it lives.

        Args:
            number: of the module.
            args: positional arguments.
            kwargs: named arguments.
            preserve: draw the same random numbers in both runs.

        Returns:
            What `enter` returns.
        """
        self.calls_recomputed = True
        return self.enter(number, _RECOMPUTED, ((args, kwargs), preserve), {})

    def call_layers(
        self, number: int, begin: int, end: int, value: Any, spread: bool, preserve: bool
    ) -> Any:
        """Calls some layers of an nn.Sequential, with one activation checkpoint around them.

        Random numbers are those of calls of the layers one by one.

        Args:
            number: of the nn.Sequential.
            begin: the first layer.
            end: the one after the last layer. Layers with state all live on one rank.
            value: the argument of the first layer.
            spread: see `layer_arguments`.
            preserve: draw the same random numbers in both runs.

        Returns:
            What the last layer returns; with lazy tensors if the layers live elsewhere.
        """
        self.calls_recomputed = True
        numbers = self.layers(number)[begin:end]
        owners = [owner for one in numbers if (owner := self.owners[one]) is not None]
        owner = owners[0] if owners else None
        args = value, begin, end, spread, preserve
        frame = self._frame()
        if frame is None:
            self._refuse_remote(number, owner)
            return self._run_layers(number, None, *args)
        if owner is None:
            owner = self._owner_by_input(frame, args, {})
        seeds = tuple([draw_seed() if self._draws[one] else None for one in numbers])
        if owner == self._rank:
            return self._run_layers(number, seeds, *_forced(args))
        return self._remote(frame, owner, number, _LAYERS, args, {}, seeds)

    def check_training(self, numbers: Iterable[int] | None = None) -> None:
        """Raises if code of this step has set modules of other ranks to train or eval.

        Args:
            numbers: of modules that run on other ranks, and those inside; None for all that live
                there.

        Raises:
            SMPUsageError: it has, and these ranks do not know it.
        """
        flags = self.training_flags
        if numbers is None:
            numbers = [n for n, owner in enumerate(self.owners) if owner not in (None, self._rank)]
        for number in numbers:
            training = self.by_number[number].training
            if self.owners[number] == self._rank:
                continue  # inside a module that runs elsewhere
            if flags is not None and training != bool(flags[number]):
                raise SMPUsageError(
                    f"module {self.names[number]!r} runs on another rank of the pipeline than the "
                    f"code that has called its {'train' if training else 'eval'}() in this step, "
                    "and does not see that. Call train() and eval() before the step, on all ranks"
                )

    def _check_hooks(self, number: int) -> None:
        """Raises if code of this step has given hooks to a module that runs on another rank.

        Forward hooks run on this rank, too.

        Raises:
            SMPUsageError: it has, also to a module inside that one.
        """
        if RemovableHandle.next_id == self.hooks.next_handle:
            return
        for part in self.by_number[number].modules():
            for hooks in (forward_pre_hooks(part), backward_hooks(part)):
                if any(handle >= self.hooks.next_handle for handle in hooks):
                    name = self.names[self._numbers.get(id(part), number)]
                    raise SMPUsageError(
                        f"a hook was given in this step to module {name!r}, "
                        "which runs on another rank of the pipeline, where there is none: register "
                        "hooks before the step, on all ranks"
                    )

    def _owner_of(self, number: int) -> int | None:
        return self.owners[number]

    def lives_here(self, number: int) -> bool:
        """Says whether calls of a module that are made here run here."""
        return self.owners[number] in (None, self._rank)

    def layers(self, number: int) -> list[int]:
        """Returns the numbers of the modules of an nn.Sequential, in their order.

        Raises:
            SMPUsageError: one of them is not of the model.
        """
        layers = self.by_number[number]._modules.values()
        found = [self._numbers.get(id(layer), -1) for layer in layers]
        if -1 in found:
            raise SMPUsageError(
                f"layer {found.index(-1)} of {self.names[number]!r} was put there after "
                "smp.DistributedModel, so it is not part of the model"
            )
        return found

    def _frame(self) -> Frame | None:
        task = self._baton.task
        return task.frame if task is not None else None

    def _microbatch(self) -> int:
        """Returns the microbatch whose code runs on this thread."""
        frame = self._frame()
        assert frame is not None
        return frame.microbatch

    def _refuse_remote(self, number: int, owner: int | None) -> None:
        """Raises if a module is called outside a step, and lives elsewhere."""
        if owner is not None and owner != self._rank:
            raise SMPUsageError(
                f"module {self.names[number]!r} lives on rank {owner} of the pipeline, and can "
                "be called only within a function decorated with smp.step"
            )

    def run(self, number: int, method: str, seed: Seed, args: Any, kwargs: Any) -> Any:
        """Runs a call that another rank has sent.

        Args:
            number: of the module, which lives here.
            method: see `Call.method`.
            seed: for the random numbers of the call; None if it draws none; of several layers, one
                for each.
            args: positional arguments.
            kwargs: named arguments.

        Returns:
            What the module returns; for a read, the values, or None if there is no tensor.
        """
        if not method.startswith(_READS):
            self.entered(self.names[number])
        if isinstance(seed, tuple):
            return self._run_layers(number, seed, *args)
        # The random state is not restored afterwards: the task has none of its own, and
        # `Baton.wait` saves that of a task that waits.
        if seed is not None:
            seed_all(seed)
        return self._original(number, method, args, kwargs)

    def _owner_by_input(self, frame: Any, args: Any, kwargs: Any) -> int:
        """Returns the rank that runs a module without an owner: the one that has its input."""
        if frame.open is not None:
            for value in (*args, *kwargs.values()):
                if type(value) is Lazy:
                    owner: int | None = frame.open.owner_of(value)
                    if owner is not None:
                        return owner
        return self._rank

    def _remote(
        self,
        frame: Frame,
        owner: int,
        number: int,
        method: str,
        args: Any,
        kwargs: Any,
        seed: Seed = None,
    ) -> Any:
        reads = method.startswith(_READS)
        if not reads:
            # To look at all parts in every call would take as long as a small message.
            self.check_training(self._numbers_inside(number) if self.is_watched else (number,))
            self._check_hooks(number)
            if frame.replays:
                raise OwnersHookError
        watched = () if reads else self.hooks.watched(number, frame.recorder)
        tensors: list[torch.Tensor] = []
        objects: list[Any] = []
        structure = _flatten_arguments(args, kwargs, tensors, objects)
        # Code may change an object, or an inference tensor, after a call without smp's noticing.
        # Other tensors count their changes; see `version_of`.
        may_change = number in self._awaited or not all(map(is_immutable, objects))
        try:
            structure = without_repeats(structure, tensors)
            structure, objects = packed(structure, tensors, objects, self.number_of)
        except Exception:
            who = f"module {self.names[number]!r} gets"
            raise_if_unpicklable(who, structure, objects, named=True)
            raise
        originals = list(tensors)
        for position, tensor in enumerate(tensors):
            if type(tensor) is not torch.Tensor and type(tensor) is not Lazy:
                tensors[position] = values_of(tensor)
        refuse_transforms(tensors, lambda: repr(self.names[number]))
        collector = self._caller.collector(frame)
        for position, tensor in enumerate(tensors):
            if type(tensor) is Lazy and (tensor.fetch is None or tensor.collector is not collector):
                tensors[position] = force(tensor)
        if not reads:
            frame.moment = object()
            self.called(number, method)
        if seed is None and self._draws[number] and not reads:
            seed = draw_seed()
        grad = collector.ambient.grad
        key = (number, method, structure, self.by_number[number].training, grad, watched)
        may_change = may_change or any(
            tensor.is_inference() for tensor in tensors if type(tensor) is not Lazy
        )
        call = (
            self._with_structure.get(key) if self.predicts_structures and not may_change else None
        )
        # If gradients are off now but were on when the frame began, this may be inside an autograd
        # function (such as a checkpoint). Autograd would take a lazy tensor for the function's
        # output, and gradients would be lost; so the call waits for its values.
        waits = call is None or (frame.grad and not grad)
        # Replicas know the same structures, and wait for the same modules.
        if self.waits is not None and self.predicts_structures and self._with_structure:
            new = call is None and number not in self._awaited_before
            self.waits.called(self._baton.task.number, waits, new)  # type: ignore[union-attr,arg-type]
        if not waits:
            assert call is not None
            value = collector.add(owner, call, tensors, objects, seed)
            return self._taken(frame, owner, number, method, args, kwargs, value, watched)
        call = self._without_structure.setdefault(
            key, KnownCall(number, method, structure, None, watched)
        )
        who = f"module {self.names[number]!r}"
        arguments = Arguments(who, args, kwargs, originals, may_be_changed(structure))
        collector.add(owner, call, tensors, objects, seed)
        found, tensors, objects = collector.result_of_last()
        find = functools.partial(self.find, arguments=arguments)
        value = rebuild_reply(owner, found, tensors, objects, find)
        if type(value) is Reply:
            arguments.take(value, force)
            if self.shared is not None:
                self.shared.note_elsewhere()
            if value.objects is not None and value.objects[2]:
                self._take_attributes(frame, value.objects[2])
        if self.waits is not None and not predictable(found):
            self._awaited.add(number)  # so that no replica has to tell the others again
        known = self.forwarding and predictable(found) and self._learned.get(key, found) == found
        self._learned[key] = found if known else None
        return self._taken(frame, owner, number, method, args, kwargs, value, watched)

    def find(self, kind: str, number: int, arguments: Arguments | None = None) -> Any:
        """Returns what a name in a message stands for here; see objects.py.

        Args:
            kind: "module", or what `Arguments.find` knows.
            number: of the module, for instance.
            arguments: of the call that the message answers.
        """
        return self.by_number[number] if arguments is None else arguments.find(kind, number)

    def _taken(
        self,
        frame: Frame,
        owner: int,
        number: int,
        method: str,
        args: Any,
        kwargs: Any,
        value: Any,
        watched: Watched,
    ) -> Any:
        """Returns the result of a call on another rank; runs the hooks of this rank for it."""
        records: Sequence[Record] = ()
        if type(value) is Reply:
            value, records = value.result, value.records
        recorder = frame.recorder
        if method == _RECOMPUTED:
            (args, kwargs), _ = args
        # The owner has recorded this call, too, if hooks of the caller's caller want it.
        recorded = recorder is not None and any(number == one for one, *_ in watched)
        if forward_hooks(self.by_number[number]) and method in _HOOKED and not recorded:
            records = (*records, Record(str(number), owner, args, kwargs, value))
        for record in records:
            module = int(record.module)
            if recorder is not None and recorder.wants(module):
                recorder.add(module, record)
            self.hooks.run(frame, self.names[module], record)
        return value

    def _own_value(self, number: int, method: str) -> torch.Tensor | None:
        """Returns the values of a parameter or a buffer of this rank, for another rank.

        The result is None if there is no tensor. For "same buffer" it is None if code has ever
        replaced the tensor.

        Raises:
            SMPUsageError: it was taken before a call that may have replaced it, or is sparse.
        """
        module = self.by_number[number]
        prefix = next(prefix for prefix in _READS if method.startswith(prefix))
        name = method[len(prefix) :]
        if prefix == _PARAMETER:
            parameter = module._parameters[name]
            assert parameter is not None
            return parameter.view_as(parameter)
        buffer = module._buffers[name]
        full = self.full_name(number, name)
        gone = prefix in (_EARLIER_BUFFER, _SAME_BUFFER) and (buffer is None or self.replaced(full))
        if gone and prefix == _SAME_BUFFER:
            return None
        if gone:
            raise SMPUsageError(
                f"buffer {full!r} was taken from its module, which lives on rank {self._rank} of "
                "the pipeline, and is used after a later call of a module, which may have put "
                "another tensor in its place. Read the buffer where its values are needed, or "
                "take a clone()"
            )
        if buffer is None:
            self.buffers_read.add((number, name))
            return None
        if buffer.layout != torch.strided:
            raise SMPUsageError(
                f"buffer {full!r} lives on rank {self._rank} of the pipeline and is sparse: it "
                "cannot be read on another rank. Read it in the forward method of its module"
            )
        self.buffers_read.add((number, name))
        # A copy, because code that runs before it is sent may change the buffer.
        if buffer.grad_fn is None or not torch.is_grad_enabled():
            return buffer.clone()
        copied: torch.Tensor = _Detached.apply(buffer, full)
        return copied

    @contextlib.contextmanager
    def around_task(self) -> Iterator[None]:
        """In this context the code of a task runs."""
        with contextlib.ExitStack() as stack:
            # `torch.set_default_device` holds for one thread, and slows torch down on it.
            if self.default_device.type != "cpu":
                stack.enter_context(self.default_device)
            if self.surroundings is not None:
                stack.enter_context(self.surroundings.around_task())
            yield

    def _original(self, number: int, method: str, args: Any, kwargs: Any) -> Any:
        module = self.by_number[number]
        if (module._buffers or number in self.keepers) and not method.startswith(_READS):
            self._note_call(number)
        if method.startswith(_READS):
            return self._surrounded(number, functools.partial(self._own_value, number, method))
        preserve = self.recomputed.get(number) if not method else None
        function = functools.partial(MODULE_CALLS.original, module)
        frame = self._frame()
        recorder = frame.recorder if frame is not None else None
        if recorder is not None and not (recorder.wants(number) and method in _HOOKED):
            recorder = None
        if recorder is not None and recorder.runs_later(number, self._rank):
            function = functools.partial(self._without_hooks, number)
        if method == _RECOMPUTED:
            (args, kwargs), preserve = args
        elif method:
            function = functools.partial(getattr(type(module), method), module)
        # Both runs of a module with activation checkpointing have the same surroundings.
        surrounded = functools.partial(self._surrounded, number, function)
        if preserve is None:
            result = surrounded(*args, **kwargs)
        else:
            region = self._region_of(number)
            result = region.call(surrounded, args, kwargs, preserve, self._keeper())
        if recorder is not None:
            recorder.add(number, Record(str(number), self._rank, args, kwargs, result))
        return result

    def _without_hooks(self, number: int, /, *args: Any, **kwargs: Any) -> Any:
        return self.hooks.call_without(self.by_number[number], number, args, kwargs)

    def _region_of(self, number: int) -> Region:
        region = self._regions.get((number, 0, 0))
        if region is None:
            region = Region(f"module {self.names[number]!r}", [self.by_number[number]])
            self._regions[number, 0, 0] = region
        return region

    def _surrounded(
        self, number: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a function of a module, whose arguments may have any names."""
        if self.surroundings is None:
            return function(*args, **kwargs)
        with self.surroundings.around_module(number):
            return function(*args, **kwargs)

    def _keeper(self) -> Keeper | None:
        """Returns what keeps the arguments of a call that runs here now."""
        if self.offloader is None:
            return None
        if self.outlook is None:
            return functools.partial(self.offloader.keep, None)
        frame = self._frame()
        return None if frame is None else functools.partial(self.offloader.keep, key_of(frame))

    def _run_layers(
        self,
        number: int,
        seeds: tuple[int | None, ...] | None,
        value: Any,
        begin: int,
        end: int,
        spread: bool,
        preserve: bool,
    ) -> Any:
        """Does `call_layers` on this rank; the seeds are those of the layers."""
        numbers = self.layers(number)[begin:end]

        def run(value: Any) -> Any:
            for one, seed in zip(numbers, seeds or [None] * len(numbers), strict=True):
                args = layer_arguments(self.by_number[one], value, spread)
                with seeded(seed) if seed is not None else contextlib.nullcontext():
                    value = self._original(one, "", args, {})
            return value

        region = self._regions.get((number, begin, end))
        if region is None:
            name = f"layers {begin} to {end - 1} of {self.names[number]!r}"
            region = Region(name, [self.by_number[one] for one in numbers])
            self._regions[number, begin, end] = region
        return region.call(run, (value,), {}, preserve, self._keeper())


class _OwnerValueReader(ValueReader):
    """Gets the values of a tensor of the model from the rank where it lives."""

    def __init__(self, modules: Modules, owner: int, number: int, kind: str, name: str) -> None:
        self._modules = weakref.ref(modules)
        self._owner, self._number, self._kind, self._name = owner, number, kind, name

    def _frame(self) -> Frame | None:
        modules = self._modules()
        task = modules._baton.task if modules is not None else None
        frame: Frame | None = task.frame if task is not None else None
        return frame

    def in_step(self) -> bool:
        return self._frame() is not None

    def in_order(self) -> bool:
        modules = self._modules()
        return modules is not None and modules.in_order

    def moment(self) -> Any:
        frame = self._frame()
        assert frame is not None
        return frame.moment

    def values(self, moment: Any) -> Any:
        modules, frame = self._modules(), self._frame()
        assert modules is not None
        assert frame is not None
        method = _PARAMETER
        if self._kind == "buffer":
            method = _BUFFER if moment is frame.moment else _EARLIER_BUFFER
        return modules._remote(frame, self._owner, self._number, method + self._name, (), {})

    def same_tensor(self) -> Any:
        modules, frame = self._modules(), self._frame()
        assert modules is not None
        assert frame is not None
        method = _SAME_BUFFER + self._name
        return modules._remote(frame, self._owner, self._number, method, (), {})


class _Detached(torch.autograd.Function):
    """Returns the values of a buffer that has an autograd graph, and refuses gradients for it."""

    @staticmethod
    def forward(ctx: Any, buffer: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return buffer.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise SMPUsageError(
            f"buffer {ctx.name!r} was computed with gradients, and was read on another rank: smp "
            "does not send gradients through buffers. Assign it detached, or return the value from "
            "the forward method of its module"
        )


# Modules in whose place another one is now, with those inside them, and the names of the former.
_replaced: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def note_replaced(module: nn.Module, name: str) -> None:
    """Notes that another module has taken the place of a module, and is called in a step.

    Args:
        module: the original.
        name: in the model.
    """
    _replaced.update(dict.fromkeys(module.modules(), name))


# The models of the process, usually one. The newest one is asked first.
_installed: list[weakref.ref[Modules]] = []


def _to_owners(original: Any) -> Any:
    """Returns what `nn.Module.__call__` calls in place of the original."""

    @functools.wraps(original)
    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        for reference in reversed(_installed):
            modules = reference()
            if modules is None:
                _installed.remove(reference)
                continue
            number = modules._numbers.get(id(module))
            if number is not None:
                return modules.enter(number, "", args, kwargs)
            if module in _replaced and (modules.calling or modules._frame() is not None):
                raise SMPUsageError(
                    f"module {_replaced[module]!r} was divided over tensor-parallel ranks by "
                    "smp.DistributedModel, which has put another module in its place, and code of "
                    "the step still calls the original, which is not trained. Keep modules in a "
                    "torch.nn.ModuleList, not in a list or a closure; or call "
                    "smp.set_tensor_parallelism(module, False) before"
                )
        return original(module, *args, **kwargs)

    return call


def _refuse_new_parameters() -> None:
    """Makes modules of a model raise if code of a step gives them a parameter."""
    register = nn.modules.module.register_module_parameter_registration_hook
    until_undone("smp", "parameters", lambda: register(_refuse_new_parameter).remove)


def _refuse_new_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    modules = _in_step()
    number = None if modules is None else modules.number_of(module)
    if modules is None or number is None or modules._name_of(parameter) is not None:
        return
    raise SMPUsageError(
        f"code of the step gives module {modules.names[number]!r} a new parameter {name!r}. Other "
        "ranks would not know it, and no optimizer and no reduction of gradients: make it in the "
        "module's constructor, or call the model once before smp.DistributedModel"
    )


def _in_step() -> Modules | None:
    """Returns the model of the step whose code runs on this thread; None outside steps."""
    found = (modules for reference in reversed(_installed) if (modules := reference()) is not None)
    return next((modules for modules in found if modules._frame() is not None), None)


def _parameters_used(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters to which a module's code can get."""
    left: list[Any] = [module]
    seen: dict[int, Any] = {}  # the objects, too: `references` may make one, whose id comes again
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Parameter):
            yield value
        else:
            left += [one for _, one in references(value)]


class _RemoteForward:
    """The `forward` of a module that lives elsewhere."""

    def __init__(self, modules: Modules, number: int) -> None:
        self._modules = weakref.ref(modules)
        self._number = number
        self._name, self._owner = modules.names[number], modules.owners[number]
        self._class = type(modules.by_number[number])

    @property
    def __signature__(self) -> inspect.Signature:
        """The parameters that code finds which passes only what a forward method takes."""
        return inspect.signature(functools.partial(self._class.forward, None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modules = self._modules()
        if modules is None:
            raise SMPUsageError("the model that this module belonged to is gone")
        return modules.enter(self._number, "forward", args, kwargs)

    def __deepcopy__(self, memo: Any) -> _CopiedForward:
        return _CopiedForward(self._name, self._owner)

    def __reduce__(self) -> Any:
        raise SMPUsageError("a module that lives on another rank cannot be pickled on this one")


class _CopiedForward:
    """The `forward` of a copy of a module that lives elsewhere."""

    def __init__(self, name: str, owner: int | None) -> None:
        self._name, self._owner = name, owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SMPUsageError(
            f"this is a copy of module {self._name!r}, which lives on rank {self._owner} of the "
            "pipeline, and so do the parameters of the copy. Copy them back into the model's, on "
            "all ranks, and call the model"
        )


def forget_owner(copied: nn.Module) -> None:
    """Gives a copy of a module that lives elsewhere the `forward` of its class again.

    Args:
        copied: the copy; its parameters have values or shapes of their own.
    """
    if isinstance(copied.__dict__.get("forward"), _CopiedForward):
        object.__delattr__(copied, "forward")


# The structures of the arguments of most calls: 0 to 8 positional tensors, and nothing else.
_TENSORS_ONLY = [flatten((tuple([torch.empty(0)] * count), {}), [], []) for count in range(9)]


def _flatten_arguments(args: Any, kwargs: Any, tensors: list[Any], objects: list[Any]) -> Structure:
    if not kwargs and len(args) < len(_TENSORS_ONLY):
        for value in args:
            if type(value) is not torch.Tensor and type(value) is not Lazy:
                break
        else:
            tensors.extend(args)
            return _TENSORS_ONLY[len(args)]
    return flatten((args, kwargs), tensors, objects)


def _forced(value: Any) -> Any:
    """Returns arguments (a tuple or dict) with the values of all lazy tensors in their place.

    Lists and the like among them stay the same objects: a module may change one for its caller.
    """
    items: Callable[[], Any] = value.values if isinstance(value, dict) else value.__iter__
    if any(not isinstance(item, torch.nn.Parameter) and _may_hide_lazy(item) for item in items()):
        if isinstance(value, dict):
            return {name: _forced_argument(item) for name, item in value.items()}
        return tuple([_forced_argument(item) for item in value])
    return value


def _forced_argument(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return force_argument(item)
    return replace_tensors(_forced_lazy, item)


def _forced_lazy(tensor: torch.Tensor) -> torch.Tensor:
    # A parameter of another rank stays what it is: the list may be one that its owner keeps.
    return force(tensor) if type(tensor) is Lazy else tensor


def _may_hide_lazy(item: Any) -> bool:
    kind = type(item)
    return kind is Lazy or not (
        kind is torch.Tensor or item is None or kind in (bool, int, float, str)
    )
