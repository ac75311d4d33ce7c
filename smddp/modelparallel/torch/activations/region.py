"""Runs modules without keeping their activations; the backward pass computes them again.

This is `torch.utils.checkpoint` in its variant that is not re-entrant, with three additions:
buffers have in the second run the values that they had in the first one, and keep those that they
have by then; a module may change its arguments in place; and the arguments may be kept elsewhere
than in memory.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from smddp._torch_internals import NormBase, saved_tensors_hooks_now
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.activations.object_values import ObjectValues
from smddp.modelparallel.torch.common.buffers import version_of
from smddp.modelparallel.torch.common.random_state import RandomState
from smddp.modelparallel.torch.common.structure import flatten, rebuild

__all__ = ["Keeper", "Region", "layer_arguments"]

# Takes tensors, and returns a function that returns them: the same values, detached.
Keeper = Callable[[Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]]


class Region:
    """Modules whose activations are computed again together, in one second run.

    The arguments are kept until the backward pass: tensors as autograd keeps them, or by a
    `Keeper`. A parameter among them stays itself. The second run gets containers of its own, and
    the same other objects, which hold what they did before the first run.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module]) -> None:
        """Remembers the modules.

        Args:
            name: for messages.
            modules: those that run, without the modules inside them.
        """
        self._name = name
        parts = {id(part): part for module in modules for part in module.modules()}
        self._parts = list(parts.values())
        # Does a call change tensors among its arguments in place? Not known before the first call.
        self._changes_arguments: bool | None = None
        self._changed_unseen: dict[tuple[int, str, bool], bool] = {}

    def call(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        preserve_rng_state: bool,
        keeper: Keeper | None = None,
    ) -> Any:
        """Runs a function that calls the modules, and runs it again in the backward pass.

        Without gradients it runs once, and nothing is kept.

        Args:
            function: to run.
            args: its positional arguments.
            kwargs: its named arguments.
            preserve_rng_state: draw the same random numbers in both runs.
            keeper: keeps the tensors among the arguments; if None, autograd does. It does so in any
                case inside another checkpoint, whose second run makes them again.

        Returns:
            What the function returns in the first run.

        Raises:
            SMPUsageError: a call changes an argument in place, and the first one did not; or it
                changes a tensor inside an object in place.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        flat: list[torch.Tensor] = []
        objects: list[Any] = []
        structure = flatten((args, kwargs), flat, objects, _stays)
        # Each tensor once, also if it is several arguments.
        unique = {id(tensor): tensor for tensor in flat}
        tensors = list(unique.values())
        order = {key: number for number, key in enumerate(unique)}
        numbers = [order[id(tensor)] for tensor in flat]
        del flat, unique
        # Arguments that a call changes have to be copied before; but most calls change nothing.
        copied = self._changes_arguments is not False
        kept = [_copy(tensor) for tensor in tensors] if copied else tensors
        versions = [version_of(tensor) for tensor in tensors]
        buffers = _BufferValues(self._name, self._parts, self._changed_unseen)
        objects_before = ObjectValues(self._name, [one for one in objects if not _stays(one)])
        fetch = None
        if keeper is not None and not _inside_another():
            fetch, kept = keeper(kept), []
        random_state = RandomState() if preserve_rng_state else None
        first = [(args, kwargs)]

        def run(*again: torch.Tensor) -> Any:
            if first:
                positional, named = first.pop()
                return function(*positional, **named)
            values = list(again) if fetch is None else fetch()
            if self._changes_arguments:
                # Not leaves, which cannot be changed in place; and another run needs the values.
                values = [value.clone() for value in values]
            positional, named = rebuild(structure, [values[i] for i in numbers], objects)
            before = buffers.as_before(), objects_before.as_before()
            with before[0], before[1], _restored(random_state), _second():
                return function(*positional, **named)

        result = checkpoint(run, *kept, use_reentrant=False, preserve_rng_state=False)
        buffers.note_changes()
        objects_before.check_tensors()
        changed = [version_of(tensor) for tensor in tensors] != versions
        if self._changes_arguments is None:
            self._changes_arguments = changed
        elif changed and not self._changes_arguments:
            raise SMPUsageError(
                f"{self._name} has activation checkpointing, and has changed an argument in place, "
                "which it did not do in its first call: its activations cannot be computed again. "
                "Let it change a clone()"
            )
        return result


class _Running(threading.local):
    """What runs on a thread."""

    again = False


_running = _Running()


def runs_again() -> bool:
    """Says whether this thread is in the second run of a region, which changes no buffers."""
    return _running.again


@contextlib.contextmanager
def _second() -> Iterator[None]:
    before, _running.again = _running.again, True
    try:
        yield
    finally:
        _running.again = before


def layer_arguments(layer: nn.Module, value: Any, spread: bool) -> tuple[Any, ...]:
    """Returns the positional arguments of a layer of an nn.Sequential.

    Args:
        layer: to call.
        value: what the layer before it has returned.
        spread: pass the elements of a tuple as arguments, if the layer takes so many. A layer that
            does not gets the tuple: scripts for later versions of the original library do without
            `pack_args_as_tuple`.
    """
    if not spread or not isinstance(value, tuple):
        return (value,)
    try:
        inspect.signature(type(layer).forward).bind(layer, *value)
    except TypeError:
        return (value,)
    return value


def _inside_another() -> bool:
    """Says whether the calling code runs inside another checkpoint, or in hooks of the user's."""
    hooks = saved_tensors_hooks_now(False)
    # Hooks of sharded parameters keep all other tensors as autograd does.
    return hooks is not None and not hasattr(hooks[0], "of_sharded_parameters")


def _stays(value: Any) -> bool:
    """Says whether a value is passed to the second run as it is, although it is a tensor."""
    # Parameters, and what stands for a tensor of another rank.
    return isinstance(value, torch.Tensor) and (isinstance(value, nn.Parameter) or value.is_meta)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _restored(state: RandomState | None) -> Iterator[None]:
    """Gives the random generators a state for the code inside."""
    if state is None:
        yield
        return
    now = RandomState()
    state.restore()
    try:
        yield
    finally:
        now.restore()


class _Buffer(NamedTuple):
    """A buffer before a call.

    Attributes:
        part: the module that has it.
        name: in that module.
        tensor: what was there; None if there was none.
        version: of the tensor.
        copy: of the tensor; None if the call has not changed it.
        changed: has the call changed it?
    """

    part: nn.Module
    name: str
    tensor: torch.Tensor | None
    version: int
    copy: torch.Tensor | None
    changed: bool


class _BufferValues:
    """The buffers that live here of some modules, as they were before a call."""

    def __init__(
        self,
        who: str,
        parts: Sequence[nn.Module],
        changed_unseen: dict[tuple[int, str, bool], bool],
    ) -> None:
        """Copies them.

        Args:
            who: for messages.
            parts: the modules.
            changed_unseen: by module, name and train or eval: has the first call changed the buffer
                without a change of its version? Functions such as `batch_norm` do.
        """
        self._who = who
        self._changed_unseen = changed_unseen
        self._buffers: list[_Buffer] = []
        copies: dict[int, torch.Tensor] = {}
        for part in parts:
            # By the methods of dict: those of another rank's buffers would ask that rank.
            for name, tensor in dict.items(part._buffers):
                if tensor is not None and tensor.is_meta:
                    continue
                copy = None
                if tensor is not None:
                    copy = copies.setdefault(id(tensor), _copy(tensor))
                buffer = _Buffer(part, name, tensor, version_of(tensor), copy, False)
                self._buffers.append(buffer)

    def note_changes(self) -> None:
        """Notes which buffers the call has changed, and frees the copies of the others."""
        for number, buffer in enumerate(self._buffers):
            if not _is_as(buffer) or self._has_other_values(buffer):
                self._buffers[number] = buffer._replace(changed=True)
            else:
                self._buffers[number] = buffer._replace(copy=None)

    def _has_other_values(self, buffer: _Buffer) -> bool:
        """Says whether the call has changed a buffer without a change of its version."""
        part, name, tensor, _, copy, _ = buffer
        if tensor is None or copy is None or isinstance(part, NormBase):
            return tensor is not None and part.training
        place = id(part), name, part.training
        # On a GPU, a comparison waits for all kernels. So there the first one counts.
        if tensor.device.type == "cpu" or place not in self._changed_unseen:
            self._changed_unseen[place] = not torch.equal(tensor, copy)
        return self._changed_unseen[place]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Gives the buffers the values from before the call, for the code inside.

        Raises:
            SMPUsageError: other code has changed a buffer that the call had only read.
        """
        for buffer in self._buffers:
            if not buffer.changed and not _is_as(buffer):
                raise SMPUsageError(
                    f"{self._who} has activation checkpointing, and its buffer {buffer.name!r} was "
                    "changed between the forward and the backward pass by other code: its "
                    "activations cannot be computed again. Change it in the module's forward method"
                )
        changed = [buffer for buffer in self._buffers if buffer.changed]
        present = [dict.get(buffer.part._buffers, buffer.name) for buffer in changed]
        copies: dict[int, torch.Tensor] = {}
        for part, name, tensor, _, copy, _ in changed:
            value = None if copy is None else copies.setdefault(id(tensor), _copy(copy))
            dict.__setitem__(part._buffers, name, value)
        try:
            yield
        finally:
            for buffer, tensor in zip(changed, present, strict=True):
                dict.__setitem__(buffer.part._buffers, buffer.name, tensor)


def _is_as(buffer: _Buffer) -> bool:
    """Says whether a buffer is as it was when it was noted."""
    tensor = dict.get(buffer.part._buffers, buffer.name)
    return tensor is buffer.tensor and version_of(tensor) == buffer.version
