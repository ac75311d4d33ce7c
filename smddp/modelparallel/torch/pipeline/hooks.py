"""Forward hooks for modules that run on another rank than the code around them.

A forward hook runs where its module lives. Most hooks only look: they put what the module has
returned into a list, for code that calls the model. So they run again on each rank whose code has
called the module, or a module around it, with the same arguments and results. The owner *records*
what modules inside the called one have taken and returned. It all comes to the caller as lazy
tensors, so what hooks do not keep is never sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from smddp._torch_internals import (
    backward_hooks,
    backward_pre_hooks,
    forward_hooks,
    forward_hooks_with_kwargs,
    forward_pre_hooks,
    forward_pre_hooks_with_kwargs,
)
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.failure import StructureChangedError
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.objects import Record
from smddp.modelparallel.torch.pipeline.protocol import Watched

__all__ = ["ForwardHooks", "OwnersHookError", "Recorder"]


class OwnersHookError(Exception):
    """A hook calls a module that lives on another rank: it does more than look."""


class Recorder:
    """Records calls of some modules while a call of another rank is served.

    Attributes:
        records: what it has recorded.
    """

    def __init__(self, watched: Watched) -> None:
        """Begins.

        Args:
            watched: the modules.
        """
        self._watched = {number: (named, ranks) for number, named, ranks in watched}
        self.records: list[Record] = []

    def wants(self, number: int) -> bool:
        """Says whether it records calls of a module."""
        return number in self._watched

    def among(self, numbers: Iterable[int]) -> Watched:
        """Returns those of the modules that it records."""
        return tuple([(one, *self._watched[one]) for one in numbers if one in self._watched])

    def runs_later(self, number: int, rank: int) -> bool:
        """Says whether the hooks of a module run on this rank when the record has come back."""
        return rank in self._watched[number][1]

    def add(self, number: int, record: Record) -> None:
        """Records a call.

        Args:
            number: of the module.
            record: of the call.
        """
        self.records.append(record if self._watched[number][0] else record._replace(kwargs=None))


class ForwardHooks:
    """The forward hooks of the model's modules on this rank.

    Attributes:
        next_handle: the number of the first handle of a hook that code of this step gets.
    """

    def __init__(self, modules: Modules) -> None:
        """Knows of no hooks that belong to the owner alone."""
        self._rank = modules.rank
        self._by_number, self._number_of = modules.by_number, modules.number_of
        self.next_handle = RemovableHandle.next_id
        # The handles that code of earlier steps has got: on this rank alone.
        self._in_steps: list[range] = []
        # Numbers of modules and handles of hooks that do more than look: they belong to the owner.
        self._of_owner: set[tuple[int, int]] = set()
        # Those that this step has found. All its microbatches make the same calls.
        self._found: set[tuple[int, int]] = set()
        # By number of a module: those inside it that have hooks. Made anew if there are more hooks.
        self._inside: dict[int, list[int]] = {}
        self._known = RemovableHandle.next_id

    def begin_step(self) -> None:
        """Notes which hooks are from before the step that begins."""
        self.next_handle = RemovableHandle.next_id

    def end_step(self) -> None:
        """Notes which hooks the step has given, and which belong to the owner."""
        self._of_owner |= self._found
        self._found.clear()
        if RemovableHandle.next_id > self.next_handle:
            self._in_steps.append(range(self.next_handle, RemovableHandle.next_id))
            self.next_handle = RemovableHandle.next_id

    def watched(self, number: int, recorder: Recorder | None) -> Watched:
        """Returns the modules whose calls have to be recorded inside a call of another rank.

        Args:
            number: of the called module. Hooks of this rank need no record of its own call.
            recorder: of the call that is served here now, whose caller needs records, too.
        """
        if self._known != RemovableHandle.next_id:
            self._known = RemovableHandle.next_id
            self._inside.clear()
        inside = self._inside.get(number)
        if inside is None:
            numbers = map(self._number_of, self._by_number[number].modules())
            inside = [
                one for one in numbers if one is not None and forward_hooks(self._by_number[one])
            ]
            self._inside[number] = inside
        found: dict[int, tuple[bool, tuple[int, ...]]] = {}
        for one in inside:
            handles = self._handles(one)
            if one != number and handles:
                with_kwargs = forward_hooks_with_kwargs(self._by_number[one])
                named = any(handle in with_kwargs for handle in handles)
                found[one] = named, (self._rank,)
        if recorder is not None:
            numbers = map(self._number_of, self._by_number[number].modules())
            for one, named, ranks in recorder.among(n for n in numbers if n is not None):
                mine = found.get(one, (False, ()))
                found[one] = mine[0] or named, tuple(sorted({*mine[1], *ranks}))
        return tuple([(one, *found[one]) for one in sorted(found)])

    def call_without(self, module: nn.Module, number: int, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a module whose forward hooks run on this rank later, in the order of all records.

        Args:
            module: that lives here.
            number: of the module.
            *args: positional arguments.
            **kwargs: named arguments, which may have any names.

        Raises:
            SMPUsageError: it has hooks of the backward pass, too.
        """
        if backward_hooks(module) or backward_pre_hooks(module):
            raise SMPUsageError(
                f"a {type(module).__name__} has hooks of the forward and of the backward pass, and "
                "is called by a module of another rank, which this rank has called: give it hooks "
                "of one kind, or let smp.set_partition put both modules on one rank"
            )
        for handle, hook in list(forward_pre_hooks(module).items()):
            if handle in forward_pre_hooks_with_kwargs(module):
                changed: Any = hook(module, args, kwargs)
                args, kwargs = (args, kwargs) if changed is None else changed
            else:
                changed = hook(module, args)
                if changed is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
        result = module.forward(*args, **kwargs)
        for handle, hook in list(forward_hooks(module).items()):
            if (number, handle) in self._of_owner:
                named = (kwargs,) if handle in forward_hooks_with_kwargs(module) else ()
                changed = hook(module, args, *named, result)
                result = result if changed is None else changed
        return result

    def _handles(self, number: int) -> list[int]:
        hooks = forward_hooks(self._by_number[number])
        return [handle for handle in hooks if (number, handle) not in self._of_owner]

    def run(self, frame: Any, name: str, record: Record) -> None:
        """Runs the hooks of a module for a call that this rank's code has caused on another one.

        Args:
            frame: of the code that has called it, or a module around it.
            name: of the module.
            record: of the call.

        Raises:
            StructureChangedError: a hook was expected to look only, and returns something.
            SMPUsageError: a hook that code of a step has given returns something.
        """
        number, (args, kwargs, result) = int(record.module), record[2:]
        module = self._by_number[number]
        for handle in self._handles(number):
            hook: Any = forward_hooks(module).get(handle)
            if hook is None:
                continue
            named = (kwargs or {},) if handle in forward_hooks_with_kwargs(module) else ()
            in_step = handle >= self.next_handle or any(handle in one for one in self._in_steps)
            frame.replays = not in_step
            try:
                changed = hook(module, args, *named, result) is not None
            except (OwnersHookError, SMPUsageError):
                if in_step:
                    raise
                changed = True
            finally:
                frame.replays = False
            if changed and in_step:
                raise SMPUsageError(
                    f"a forward hook that was given in a step to module {name!r}, which runs on "
                    "another rank of the pipeline, returns a value in place of the module's "
                    "result, which that rank does not see: register such a hook before the step, "
                    "on all ranks"
                )
            if changed:
                self._found.add((number, handle))
                if record.ran == self._rank:
                    raise StructureChangedError(name)
