"""Backward passes that ask for the gradients of parameters, wherever these live.

`torch.autograd.grad(loss, parameters)` asks autograd for the ways from the loss to the parameters.
A way through modules on other ranks is not in the autograd graph of this rank: there it ends in the
node of a call. So a pass that asks for parameters of the model visits all nodes of calls, their
messages name the parameters, and each rank that has one of them adds what its part of the pass
gives for it. It comes back with the gradients of the calls' arguments.

One function of torch, behind both `backward` and `grad`, is replaced for that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

__all__ = ["Asked", "Asker", "asked", "asking", "patch_engine"]


class Asked:
    """What a backward pass on this rank has found for the parameters that it asks for.

    Attributes:
        names: of the parameters in the model.
        found: the sums of their gradients so far, by name; those without a gradient are missing.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.found: dict[str, torch.Tensor] = {}

    def add(self, name: str, gradient: torch.Tensor | None) -> None:
        """Adds a gradient of a parameter; None is nothing."""
        if gradient is not None:
            before = self.found.get(name)
            self.found[name] = gradient if before is None else before + gradient


class Asker(Protocol):
    """The model of the step that runs on this thread.

    Attributes:
        anchor: a leaf that is an input of all nodes of calls, see `CallerSide`.
    """

    anchor: torch.Tensor

    def parameters_among(self, inputs: Sequence[Any]) -> dict[int, str]:
        """Returns the names of those inputs that are parameters of the model, by position."""


class _Running(threading.local):
    """The backward pass that runs on a thread; a task has a thread of its own."""

    asked: Asked | None = None


_running = _Running()


def asked() -> Asked | None:
    """Returns what the pass on this thread asks for; None if it asks for no parameters."""
    return _running.asked


@contextlib.contextmanager
def asking(names: Sequence[str]) -> Iterator[Asked]:
    """Makes a context for one pass, which asks for these parameters; for none, if it is empty."""
    before, found = _running.asked, Asked(names)
    _running.asked = found if names else None
    try:
        yield found
    finally:
        _running.asked = before


_original: Any = torch.autograd.graph._engine_run_backward


def patch_engine(find: Callable[[], Asker | None]) -> None:
    """Makes backward passes of a step's code ask all ranks for parameters.

    Args:
        find: returns the model, if the calling thread runs code of a step and some modules live on
            other ranks; else None.
    """

    def run(
        outputs: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *rest: Any, **named: Any
    ) -> Any:
        asker = find()
        names = asker.parameters_among(inputs) if asker is not None and inputs else {}
        with asking(list(dict.fromkeys(names.values()))) as found:
            if asker is None or not names:
                return _original(outputs, gradients, keep, create, inputs, *rest, **named)
            unreachable = rest[0] if rest else named.pop("allow_unreachable", False)
            anchored = (*inputs, asker.anchor)
            result = _original(outputs, gradients, keep, create, anchored, True, **named)
        if named.get("accumulate_grad"):
            for position, name in names.items():
                if name in found.found:
                    _accumulate(inputs[position], found.found.pop(name), create)
            return result
        gradients = list(result[:-1])
        with torch.set_grad_enabled(create):
            for position, name in names.items():
                one, other = gradients[position], found.found.get(name)
                if other is not None:
                    gradients[position] = other if one is None else one + other
        if not unreachable and any(gradient is None for gradient in gradients):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
        return tuple(gradients)

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]


def _accumulate(tensor: torch.Tensor, gradient: torch.Tensor, create: bool) -> None:
    """Adds a gradient to that of a tensor, as autograd does, with its hooks."""
    edge = get_gradient_edge(tensor)
    inputs = () if tensor.is_leaf else (tensor,)
    with asking(()):
        _original((edge,), (gradient,), False, create, inputs, True, accumulate_grad=True)
