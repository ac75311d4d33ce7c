"""What code of several microbatches shares: attributes, lists and other objects, and variables.

While code waits for another rank, code of the next microbatch runs. It must not find what code of
this one has set. And code of one rank does not see what code of another one sets. So steps 1, 2, 4,
8 and so on of a function, whose microbatches run one after the other, are watched. If code changes
the same thing in several microbatches before it waits, all later steps run like these. If modules
of another rank use it, too, a warning says that they do not see the change.
"""

from __future__ import annotations

import collections
import contextvars
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smddp._torch_internals import (
    forward_hooks,
    forward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
)
from smddp.modelparallel.core.logs import warn_user
from smddp.modelparallel.torch.common.buffers import version_of
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.references import (
    OF_TORCH,
    Variable,
    attributes_of,
    has_attributes,
    is_of_library,
    references,
    variables_of,
)

__all__ = ["SharedState"]

# A list of lists that an object holds.
_DEEPEST = 3
# What uses an object, in place of the number of a module: the body of the step, which runs on rank
# 0 of the pipeline; code that runs on any rank; or a forward hook. A hook runs again where code has
# called its module, so that what it collects is there, too.
_BODY, _ANY, _HOOK = -1, -2, -3
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_CONTAINERS = (list, dict, set, collections.deque)


class _Entry:
    """What can change.

    Attributes:
        what: what refers to it, for messages.
        value: a container, an object, a module for its attributes, or a variable.
        users: the numbers of the modules whose code can get to it.
        before: what it held when it was last noted.
        times: in how many microbatches it has changed before code waited; of what only the body
            uses, in how many it has changed.
        last: the last of these microbatches.
        changed: has it changed at all?
    """

    __slots__ = ("before", "changed", "last", "times", "users", "value", "what")

    def __init__(self, what: str, value: Any) -> None:
        self.what, self.value = what, value
        self.users: set[int] = set()
        self.before: dict[Any, Any] = {}
        self.times = 0
        self.last = -1
        self.changed = False


class SharedState:
    """What outlives a microbatch and may change, in a watched step of a function.

    Attributes:
        in_order: have microbatches to run one after the other?
        changed: the numbers of the modules whose code can get to what has changed in the step.
    """

    def __init__(
        self,
        modules: Modules,
        body: Callable[..., Any],
        said: set[str],
    ) -> None:
        """Finds it, at the beginning of the step.

        Args:
            modules: of the model, which may be divided in the step.
            body: the function whose step this is.
            said: the warnings of earlier steps, which are not given again; gets those of this one.
        """
        self.in_order = False
        self.changed: set[int] = set()
        self._modules, self._rank = modules, modules.rank
        self._said = said
        self._warned = False
        self._found: dict[Any, _Entry] = {}
        by_number = modules.by_number
        self._with_buffers = {
            id(module) for module in by_number if module._buffers and self._waits_inside(module)
        }
        classes: dict[type, set[int]] = {}
        for number, module in enumerate(by_number):
            classes.setdefault(type(module), set()).add(number)
            self._add("", module, {number}, 0)
        for kind, numbers in classes.items():
            self._add(kind.__name__, kind, numbers, 0)
        self._add(f"variables of {_name(body)}", body, {_BODY}, 0)
        for hook in _hooks(by_number):
            self._add(f"variables of hook {_name(hook)}", hook, {_HOOK}, 0)
        for variable, value in contextvars.copy_context().items():
            self._add(f"ContextVar {variable.name!r}", value, {_ANY}, 0)
        self._add("torch.get_default_dtype()", _DEFAULT_DTYPE, {*range(len(by_number))}, 0)
        self._note()

    def objects(self, changed: bool) -> list[Any]:
        """Returns the objects to which code of modules and hooks can get.

        Args:
            changed: only those that have changed in this step?
        """
        return [
            entry.value
            for entry in self._found.values()
            if entry.users != {_BODY} and (entry.changed or not changed)
        ]

    def begin(self, microbatch: int) -> None:
        """Begins to look for changes of a call from another rank, or of the next microbatch.

        Args:
            microbatch: the one whose code has run until now.
        """
        self.look(microbatch, waits=False)
        self._note()

    def _note(self) -> None:
        for entry in self._found.values():
            entry.before = self._content(entry.value)

    def note_elsewhere(self) -> None:
        """Notes what a call of another rank has brought home; that is no change of code here."""
        for entry in self._found.values():
            if self._users_elsewhere(entry):
                entry.before = self._content(entry.value)

    def _users_elsewhere(self, entry: _Entry) -> list[int]:
        return [one for one in entry.users if self._is_elsewhere(one)]

    def _is_elsewhere(self, user: int) -> bool:
        return self._owner(user) not in (None, self._rank)

    def look(self, microbatch: int, waits: bool) -> None:
        """Looks for changes; warns of the first one.

        Args:
            microbatch: the one whose code runs.
            waits: code of the next microbatch may run before the code that runs now goes on.
        """
        for entry in self._found.values():
            now = self._content(entry.value)
            name = _difference(entry.before, now)
            if name is None:
                continue
            elsewhere = self._users_elsewhere(entry)
            collected = entry.users == {_BODY, _HOOK} and self._rank > 0
            if elsewhere and not collected:
                self._say_unseen(entry, name, elsewhere)
            if len(elsewhere) == len(entry.users):
                entry.before = now
                continue
            entry.changed = True
            self.changed |= entry.users
            if isinstance(entry.value, contextvars.ContextVar):
                continue  # each microbatch has its own
            if entry.users == {_BODY}:
                # Bodies of microbatches run by turns. What one adds to a list it does not read.
                if not _grown(entry.value, entry.before, now):
                    self._note_time(entry, name, microbatch)
            elif waits:
                self._note_time(entry, name, microbatch)

    def _note_time(self, entry: _Entry, name: str, microbatch: int) -> None:
        """Notes that a microbatch has changed it; in the second one, order matters."""
        if entry.last == microbatch:
            return
        entry.last = microbatch
        entry.times += 1
        if entry.times == 2:
            self._say_order(entry, name)

    def _owner(self, user: int) -> int | None:
        if user == _BODY:
            return 0
        return None if user in (_ANY, _HOOK) else self._modules.owners[user]

    def _say_order(self, entry: _Entry, name: str) -> None:
        if self.in_order:
            return
        self.in_order = True
        warn_user(
            f"code of a step changes what microbatches share ({_text(entry, name)}), while others "
            "of them run: the microbatches of this step function run one after the other, as in "
            "one process. They overlap if the code keeps it in a local variable, and returns what "
            "its caller needs"
        )

    def _say_unseen(self, entry: _Entry, name: str, elsewhere: Sequence[int]) -> None:
        if self._warned:
            return
        self._warned = True
        user = min(elsewhere)
        who = "The body" if user == _BODY else f"Module {self._modules.names[user]!r}"
        text = (
            f"code of rank {self._rank} of the pipeline has changed {_text(entry, name)} in a "
            f"step. {who} on rank {self._owner(user)}, whose code can read that, does not see the "
            "change, and its results may be others than in one process. Change it outside the "
            "step, on all ranks; or pass it as an argument of the forward method, and return what "
            "that changes"
        )
        if text not in self._said:
            self._said.add(text)
            warn_user(text)

    def _waits_inside(self, module: nn.Module) -> bool:
        """Says whether a module here has parts elsewhere, which its code waits for."""
        if self._owner(self._modules.numbers[id(module)]) != self._rank:
            return False
        inside = (self._modules.numbers.get(id(part)) for part in module.modules())
        return any(one is not None and self._is_elsewhere(one) for one in inside)

    def _content(self, value: Any) -> dict[Any, Any]:
        found = _content(value)
        if id(value) in self._with_buffers:
            found |= {name: _state(one) for name, one in value._buffers.items()}
        return found

    def _add(self, what: str, value: Any, users: set[int], depth: int) -> None:
        if depth > _DEEPEST or isinstance(value, (*_PLAIN, torch.Tensor, types.ModuleType)):
            return
        if isinstance(value, nn.Module):
            is_of_model = id(value) in self._modules.numbers
            if (is_of_model and (depth or what)) or _is_of_smp(value):
                return  # it has a number of its own
            if not is_of_model:
                self._with_buffers.add(id(value))
        if self._note_users(id(value), what, value, users):
            return
        if isinstance(value, types.FunctionType) and not is_of_library(value.__module__):
            for one in variables_of(value):
                self._note_users(one.key, _named("", one.name, value), one, users)
        inner = depth + (isinstance(value, (*_CONTAINERS, tuple)) or has_attributes(value))
        for name, one in references(value):
            self._add(_named(what, name, value), one, users, inner)

    def _note_users(self, key: Any, what: str, value: Any, users: set[int]) -> bool:
        """Notes who can get to something; says whether all of that is known."""
        entry = self._found.get(key)
        if entry is None:
            entry = self._found[key] = _Entry(what, value)
        known = users <= entry.users
        entry.users |= users
        return known


class _DefaultDtype:
    """Stands for torch's setting."""


_DEFAULT_DTYPE = _DefaultDtype()


def _is_of_smp(module: nn.Module) -> bool:
    return type(module).__module__.startswith("smddp.")


def _named(what: str, name: str, value: Any) -> str:
    if isinstance(value, nn.Module):
        return f"attribute {name!r} of a {type(value).__name__}"
    if isinstance(value, types.FunctionType):
        return f"variable {name!r} of {_name(value)}"
    return what


def _text(entry: _Entry, name: str) -> str:
    return _named(entry.what, name, entry.value)


def _hooks(modules: Sequence[nn.Module]) -> Iterator[Callable[..., Any]]:
    for module in modules:
        yield from forward_hooks(module).values()
        yield from forward_pre_hooks(module).values()
    yield from global_forward_hooks.values()
    yield from global_forward_pre_hooks.values()


def _name(function: Any) -> str:
    return repr(getattr(function, "__qualname__", type(function).__name__))


def _content(value: Any) -> dict[Any, Any]:
    """Returns what can change in an object, in a form in which `_difference` can compare it."""
    if isinstance(value, dict):
        return {key: _state(one) for key, one in dict.items(value)}
    if isinstance(value, list | collections.deque):
        return dict(enumerate(map(_state, value)))
    if isinstance(value, set):
        return dict.fromkeys(value)
    if isinstance(value, nn.Module):
        own = {name: _state(one) for name, one in vars(value).items() if name not in OF_TORCH}
        return {**own, **value._modules}
    if isinstance(value, types.FunctionType):
        return {name: _state(one) for name, one in vars(value).items()}
    if isinstance(value, contextvars.ContextVar):
        return {"": _state(value.get(None))}
    if isinstance(value, Variable):
        return {"": _state(value.value)}
    if value is _DEFAULT_DTYPE:
        return {"": torch.get_default_dtype()}
    if isinstance(value, type):
        # Python adds names with underscores, such as __slotnames__ when an object is pickled.
        found = vars(value).items()
        return {name: _state(one) for name, one in found if not name.startswith("__")}
    if has_attributes(value):
        return {name: _state(one) for name, one in attributes_of(value).items()}
    return {}


def _state(value: Any) -> Any:
    return (value, version_of(value)) if type(value) is torch.Tensor else value


def _grown(value: Any, before: dict[Any, Any], now: dict[Any, Any]) -> bool:
    """Says whether something has only been added to a list."""
    return isinstance(value, list) and all(now.get(at) is one for at, one in before.items())


def _difference(before: dict[Any, Any], now: dict[Any, Any]) -> str | None:
    """Returns what differs: an attribute, for instance; None if nothing does.

    Compares numbers and texts by value, tensors by their version, everything else by identity.
    """
    if before.keys() != now.keys():
        return str(next(iter(before.keys() ^ now.keys())))
    for key, one in now.items():
        other = before[key]
        if one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other):
            continue
        tensors = type(one) is type(other) is tuple and len(one) == len(other) == 2
        if tensors and one[0] is other[0] and one[1] is other[1]:
            continue
        return str(key)
    return None
