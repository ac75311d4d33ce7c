"""Forward hooks for modules that run on another rank than the code around them.

A forward hook runs where its module lives. Most hooks only look: they put what the module has
returned into a list, for code that calls the model. So they run again on each rank whose code has
called the module, or a module around it, with the same arguments and results. The owner *records*
what modules inside the called one have taken and returned. It all comes to the caller as lazy
tensors, so what hooks do not keep is never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from smddp.modelparallel.pipeline.objects import Record
from smddp.modelparallel.pipeline.protocol import Watched
from smddp_smp.errors import SMPUsageError

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
        self._watched = dict(watched)
        self.records: list[Record] = []

    def wants(self, number: int) -> bool:
        """Says whether it records calls of a module."""
        return number in self._watched

    def among(self, numbers: Iterable[int]) -> Watched:
        """Returns those of the modules that it records."""
        return tuple([(one, self._watched[one]) for one in numbers if one in self._watched])

    def add(self, number: int, record: Record) -> None:
        """Records a call.

        Args:
            number: of the module.
            record: of the call.
        """
        self.records.append(record if self._watched[number] else record._replace(kwargs=None))


class ForwardHooks:
    """The forward hooks of the model's modules on this rank.

    Attributes:
        next_handle: the number of the first handle of a hook that code of this step gets.
    """

    def __init__(self, by_number: list[nn.Module], number_of: Callable[[nn.Module], int | None]):
        """Knows of no hooks that belong to the owner alone.

        Args:
            by_number: the modules.
            number_of: returns the number of a module, None if it is not of the model.
        """
        self._by_number, self._number_of = by_number, number_of
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
            number: of the called module, whose own call need not be recorded.
            recorder: of the call that is served here now, whose caller needs records, too.
        """
        if self._known != RemovableHandle.next_id:
            self._known = RemovableHandle.next_id
            self._inside.clear()
        inside = self._inside.get(number)
        if inside is None:
            numbers = map(self._number_of, self._by_number[number].modules())
            inside = [
                one for one in numbers if one is not None and self._by_number[one]._forward_hooks
            ]
            self._inside[number] = inside
        found: dict[int, bool] = {}
        for one in inside:
            handles = self._handles(one)
            if one != number and handles:
                with_kwargs = self._by_number[one]._forward_hooks_with_kwargs
                found[one] = any(handle in with_kwargs for handle in handles)
        if recorder is not None:
            numbers = map(self._number_of, self._by_number[number].modules())
            for one, named in recorder.among(n for n in numbers if n is not None and n != number):
                found[one] = found.get(one, False) or named
        return tuple(sorted(found.items()))

    def _handles(self, number: int) -> list[int]:
        hooks = self._by_number[number]._forward_hooks
        return [handle for handle in hooks if (number, handle) not in self._of_owner]

    def run(self, frame: Any, number: int, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Runs the hooks of a module that has run on another rank.

        Args:
            frame: of the code that has called it, or a module around it.
            number: of the module.
            name: of the module.
            args: its positional arguments.
            kwargs: its named arguments; None if no hook wants them.
            result: what it has returned, after its hooks there.

        Raises:
            SMPUsageError: a hook that code of a step has given returns something.
        """
        module = self._by_number[number]
        for handle in self._handles(number):
            hook: Any = module._forward_hooks.get(handle)
            if hook is None:
                continue
            named = (kwargs or {},) if handle in module._forward_hooks_with_kwargs else ()
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
