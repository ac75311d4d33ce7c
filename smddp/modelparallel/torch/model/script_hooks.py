"""The hooks that a script registers with a model: after the division, and after the next step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from torch.utils.hooks import RemovableHandle

__all__ = ["ScriptHooks"]


class HookArguments(Protocol):
    """Returns what hooks get."""

    def __call__(self) -> tuple[Any, Any]:
        """Returns the model and the last optimizer."""


class ScriptHooks:
    """Hooks that are called once each."""

    def __init__(self, arguments: HookArguments) -> None:
        """Has no hooks yet.

        Args:
            arguments: returns those of each hook.
        """
        self._arguments = arguments
        # Not plain dicts: the handles keep weak references to them.
        self._hooks: dict[str, OrderedDict[int, Callable[..., Any]]] = {
            "partition": OrderedDict(),
            "step": OrderedDict(),
        }

    def register(self, kind: str, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a hook that is called once.

        Args:
            kind: "partition", or "step" for the next step.
            hook: gets the model and the last optimizer.
        """
        handle = RemovableHandle(self._hooks[kind])
        self._hooks[kind][handle.id] = hook
        return handle

    def run(self, kind: str) -> None:
        """Calls the hooks of a kind, for the first and last time."""
        hooks = dict(self._hooks[kind])
        self._hooks[kind].clear()
        for hook in hooks.values():
            hook(*self._arguments())
