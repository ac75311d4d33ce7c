"""Sends every call of a module to the rank that owns the module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smddp._torch_internals import backward_hooks, forward_hooks, forward_pre_hooks
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common.placeholder import force
from smddp.modelparallel.torch.common.structure import (
    Structure,
    flatten,
    may_be_changed,
    replace_tensors,
    without_repeats,
)
from smddp.modelparallel.torch.pipeline.calls import CallerSide, refuse_transforms
from smddp.modelparallel.torch.pipeline.changes import Changes
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.hooks import ForwardHooks, OwnersHookError
from smddp.modelparallel.torch.pipeline.lazy import Lazy
from smddp.modelparallel.torch.pipeline.learned import Learned
from smddp.modelparallel.torch.pipeline.local_calls import LocalCalls, Seed
from smddp.modelparallel.torch.pipeline.method import HOOKED, LAYERS, READS, RECOMPUTED, Method, Use
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.objects import (
    Arguments,
    Record,
    Reply,
    finder,
    is_immutable,
    packed,
    rebuild_reply,
)
from smddp.modelparallel.torch.pipeline.protocol import Watched, raise_if_unpicklable
from smddp.modelparallel.torch.pipeline.randomness import draw_seed, seeded
from smddp.modelparallel.torch.pipeline.remote_tensor import force_argument, values_of
from smddp.modelparallel.torch.pipeline.services import RankServices

__all__ = ["Routing"]


class Routing:
    """Decides where each call of a module runs; makes the calls that run on other ranks.

    Attributes:
        recomputes: has code asked for activation checkpointing of a single call?
        calling: does the script call the model outside steps now?
    """

    def __init__(
        self,
        services: RankServices,
        caller: CallerSide,
        modules: Modules,
        learned: Learned,
        changes: Changes,
        hooks: ForwardHooks,
        local: LocalCalls,
    ) -> None:
        """Begins; nothing is routed before `takeover.take_over`.

        Args:
            services: of this rank.
            caller: collects and sends calls.
            modules: of the model.
            learned: about calls.
            changes: what code changes.
            hooks: the forward hooks of the modules.
            local: runs calls on this rank.
        """
        self._current, self._member = services.baton.current, services.member
        self._rank = services.rank
        self._caller, self._modules, self._learned = caller, modules, learned
        self._changes, self._hooks, self._local = changes, hooks, local
        self.recomputes = self.calling = False
        # One byte per module, 1 for train and 0 for eval, as all ranks have set it at the beginning
        # of this step; None before the first one.
        self._training: bytes | None = None

    # --- calls of code ----------------------------------------------------------------------------

    def enter(self, number: int, method: Method, args: Any, kwargs: Any) -> Any:
        """Calls a module on the rank where it lives. All calls that code makes come here.

        Args:
            number: of the module.
            method: CALL, FORWARD or RECOMPUTED.
            args: positional arguments.
            kwargs: named arguments.

        Returns:
            What the module returns; with lazy tensors if it runs elsewhere.

        Raises:
            SMPUsageError: it lives elsewhere, and the call is not in a step.
        """
        task = self._current.task
        frame: Frame | None = None if task is None else task.frame
        modules = self._modules
        owner = modules.owners[number]
        if frame is None:
            self._refuse_remote(number, owner)
            return self._local.run(number, method.use, args, kwargs)
        if owner is None:
            owner = self._owner_by_input(frame, args, kwargs)
        if owner == self._rank:
            args, kwargs = _forced(args), _forced(kwargs) if kwargs else kwargs
            if not modules.draw[number]:
                return self._local.run(number, method.use, args, kwargs)
            with seeded(draw_seed()):
                return self._local.run(number, method.use, args, kwargs)
        if self._changes.is_watched:
            self._changes.look(frame.microbatch)
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
        self.recomputes = True
        return self.enter(number, RECOMPUTED, ((args, kwargs), preserve), {})

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
        self.recomputes = True
        modules = self._modules
        numbers = modules.layers(number)[begin:end]
        owners = [owner for one in numbers if (owner := modules.owners[one]) is not None]
        owner = owners[0] if owners else None
        args = value, begin, end, spread, preserve
        task = self._current.task
        frame = None if task is None else task.frame
        if frame is None:
            self._refuse_remote(number, owner)
            return self._local.run_layers(number, None, *args)
        if owner is None:
            owner = self._owner_by_input(frame, args, {})
        seeds = tuple([draw_seed() if modules.draw[one] else None for one in numbers])
        if owner == self._rank:
            return self._local.run_layers(number, seeds, *_forced(args))
        return self._remote(frame, owner, number, LAYERS, args, {}, seeds)

    def read(self, frame: Frame, owner: int, number: int, method: Method) -> Any:
        """Reads a parameter or a buffer of another rank.

        Args:
            frame: of the code that reads.
            owner: the rank.
            number: of the module that has it.
            method: says what.
        """
        return self._remote(frame, owner, number, method, (), {})

    @contextlib.contextmanager
    def outside_a_step(self) -> Iterator[None]:
        """In this context the script calls the model outside steps."""
        self.calling = True
        try:
            yield
        finally:
            self.calling = False

    def _refuse_remote(self, number: int, owner: int | None) -> None:
        """Raises if a module is called outside a step, and lives elsewhere."""
        if owner is not None and owner != self._rank:
            raise SMPUsageError(
                f"module {self._modules.names[number]!r} lives on rank {owner} of the pipeline, "
                "and can be called only within a function decorated with smp.step"
            )

    def _owner_by_input(self, frame: Frame, args: Any, kwargs: Any) -> int:
        """Returns the rank that runs a module without an owner: the one that has its input."""
        if frame.open is not None:
            for value in (*args, *kwargs.values()):
                if type(value) is Lazy:
                    owner: int | None = frame.open.owner_of(value)
                    if owner is not None:
                        return owner
        return self._rank

    # --- what code of a step must not change ------------------------------------------------------

    def training_for_others(self) -> bytes | None:
        """Returns one byte per module, 1 for train and 0 for eval; None if they know it."""
        flags = bytes(module.training for module in self._modules.by_number)
        changed = None if flags == self._training else flags
        self._training = flags
        return changed

    def set_training(self, flags: bytes) -> None:
        """Sets modules to train or eval as rank 0 has set them."""
        self._training = flags
        for module, flag in zip(self._modules.by_number, flags, strict=True):
            module.training = bool(flag)

    def check_training(self, numbers: Iterable[int] | None = None) -> None:
        """Raises if code of this step has set modules of other ranks to train or eval.

        Args:
            numbers: of modules that run on other ranks, and those inside; None for all that live
                there.

        Raises:
            SMPUsageError: it has, and these ranks do not know it.
        """
        flags, modules = self._training, self._modules
        if numbers is None:
            owners = enumerate(modules.owners)
            numbers = [number for number, owner in owners if owner not in (None, self._rank)]
        for number in numbers:
            training = modules.by_number[number].training
            if modules.owners[number] == self._rank:
                continue  # inside a module that runs elsewhere
            if flags is not None and training != bool(flags[number]):
                raise SMPUsageError(
                    f"module {modules.names[number]!r} runs on another rank of the pipeline than "
                    f"the code that has called its {'train' if training else 'eval'}() in this "
                    "step, and does not see that. Call train() and eval() before the step, on all "
                    "ranks"
                )

    def _check_hooks(self, number: int) -> None:
        """Raises if code of this step has given hooks to a module that runs on another rank.

        Forward hooks run on this rank, too.

        Raises:
            SMPUsageError: it has, also to a module inside that one.
        """
        modules, next_handle = self._modules, self._hooks.next_handle
        for part in modules.by_number[number].modules():
            for hooks in (forward_pre_hooks(part), backward_hooks(part)):
                if any(handle >= next_handle for handle in hooks):
                    name = modules.names[modules.numbers.get(id(part), number)]
                    raise SMPUsageError(
                        f"a hook was given in this step to module {name!r}, "
                        "which runs on another rank of the pipeline, where there is none: register "
                        "hooks before the step, on all ranks"
                    )

    # --- calls that run on other ranks ------------------------------------------------------------

    def _remote(
        self,
        frame: Frame,
        owner: int,
        number: int,
        method: Method,
        args: Any,
        kwargs: Any,
        seed: Seed = None,
    ) -> Any:
        modules, learned = self._modules, self._learned
        reads = method.use in READS
        watched: Watched = ()
        if not reads:
            # To look at all parts in every call would take as long as a small message.
            self.check_training(modules.inside(number) if self._changes.is_watched else (number,))
            if RemovableHandle.next_id != self._hooks.next_handle:
                self._check_hooks(number)
            if frame.replays:
                raise OwnersHookError
            watched = self._hooks.watched(number, frame.recorder)
        tensors: list[torch.Tensor] = []
        objects: list[Any] = []
        structure = _flatten_arguments(args, kwargs, tensors, objects)
        # Code may change an object, or an inference tensor, after a call without smp's noticing.
        # Other tensors count their changes; see `version_of`.
        may_change = number in learned.awaited or not all(map(is_immutable, objects))
        structure, objects = self._packed(number, structure, tensors, objects)
        originals = list(tensors)
        for position, tensor in enumerate(tensors):
            if type(tensor) is not torch.Tensor and type(tensor) is not Lazy:
                tensors[position] = values_of(tensor)
        refuse_transforms(tensors, lambda: repr(modules.names[number]))
        collector = self._caller.collector(frame)
        for position, tensor in enumerate(tensors):
            if type(tensor) is Lazy and (tensor.fetch is None or tensor.collector is not collector):
                tensors[position] = tensor = force(tensor)
            may_change = may_change or (type(tensor) is not Lazy and tensor.is_inference())
        if not reads:
            frame.moment = object()
            if self._member is not None:
                self._member.called(number, method)
            if seed is None and modules.draw[number]:
                seed = draw_seed()
        grad = collector.ambient.grad
        key = (number, method, structure, modules.by_number[number].training, grad, watched)
        call = None if may_change else learned.expected(key)
        # If gradients are off now but were on when the frame began, this may be inside an autograd
        # function (such as a checkpoint). Autograd would take a lazy tensor for the function's
        # output, and gradients would be lost; so the call waits for its values.
        waits = call is None or (frame.grad and not grad)
        together = self._member is not None and self._member.waits is not None
        # Replicas know the same structures, and wait for the same modules.
        if together and learned.compares:
            new = call is None and learned.is_new(number)
            self._member.waits.called(self._current.task.number, waits, new)  # type: ignore[union-attr,arg-type]
        value: Any
        if waits:
            collector.add(owner, learned.waited(key), tensors, objects, seed)
            found, tensors, objects = collector.result_of_last()
            who = f"module {modules.names[number]!r}"
            arguments = Arguments(who, args, kwargs, originals, may_be_changed(structure))
            find = finder(modules, arguments)
            value = rebuild_reply(owner, found, tensors, objects, find)
            if type(value) is Reply:
                self._bring_home(frame, value, arguments)
            learned.returned(key, found, together)
        else:
            assert call is not None
            value = collector.add(owner, call, tensors, objects, seed)
        records: Sequence[Record] = ()
        if type(value) is Reply:
            value, records = value.result, value.records
        hooked = method.use in HOOKED and forward_hooks(modules.by_number[number])
        # The owner has recorded this call, too, if hooks of the caller's caller want it.
        if hooked and (frame.recorder is None or all(number != one for one, *_ in watched)):
            if method.use is Use.RECOMPUTED:
                (args, kwargs), _ = args
            records = (*records, Record(str(number), owner, args, kwargs, value))
        for record in records:
            self._run_hooks(frame, record)
        return value

    def _run_hooks(self, frame: Frame, record: Record) -> None:
        """Runs the hooks of this rank for a call on another one."""
        module = int(record.module)
        if frame.recorder is not None and frame.recorder.wants(module):
            frame.recorder.add(module, record)
        self._hooks.run(frame, self._modules.names[module], record)

    def _packed(
        self, number: int, structure: Structure, tensors: list[Any], objects: list[Any]
    ) -> tuple[Structure, list[Any]]:
        """Returns structure and objects of the arguments of a call as they are sent."""
        try:
            structure = without_repeats(structure, tensors)
            return packed(structure, tensors, objects, self._modules)
        except Exception:
            who = f"module {self._modules.names[number]!r} gets"
            raise_if_unpicklable(who, structure, objects, named=True)
            raise

    def _bring_home(self, frame: Frame, reply: Reply, arguments: Arguments) -> None:
        """Changes what code of this rank has as a call on another one has changed it."""
        arguments.take(reply, force)
        self._changes.note_elsewhere()
        if reply.objects is not None and reply.objects[2]:
            self._changes.take_attributes(frame, reply.objects[2])


# The structures of the arguments of most calls: 0 to 8 positional tensors, and nothing else.
_TENSORS_ONLY = [flatten((tuple([torch.empty(0)] * count), {}), [], []) for count in range(9)]
# Types of arguments in which there is no lazy tensor.
_PLAIN = frozenset({torch.Tensor, type(None), bool, int, float, str})


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
    for item in value.values() if isinstance(value, dict) else value:
        if type(item) not in _PLAIN and not isinstance(item, nn.Parameter):
            break
    else:
        return value
    if isinstance(value, dict):
        return {name: _forced_argument(item) for name, item in value.items()}
    return tuple([_forced_argument(item) for item in value])


def _forced_argument(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return force_argument(item)
    return replace_tensors(_forced_lazy, item)


def _forced_lazy(tensor: torch.Tensor) -> torch.Tensor:
    # A parameter of another rank stays what it is: the list may be one that its owner keeps.
    return force(tensor) if type(tensor) is Lazy else tensor
