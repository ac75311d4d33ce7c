"""Backward passes that ask for the gradients of parameters, wherever these live.

`torch.autograd.grad(loss, parameters)` asks autograd for the ways from the loss to the parameters.
A way through modules on other ranks is not in the autograd graph of this rank: there it ends in the
node of a call. So a pass that asks for parameters of the model visits the nodes of all calls of
modules that have them, contain a module that does, or refer to them by an attribute. Their messages
name the parameters, and each rank that has one of them adds what its part of the pass gives for it.
It comes back with the gradients of the calls' arguments.

One function of torch, behind both `backward` and `grad`, is replaced for that (`BACKWARD_PASSES`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from smddp._torch_internals import BACKWARD_PASSES
from smddp.modelparallel.torch.common.random_state import RandomState

__all__ = ["Asked", "Asker", "asked", "asking", "patch_engine"]


class Asked:
    """What a backward pass on this rank has found for the parameters that it asks for.

    Attributes:
        names: of the parameters in the model.
        captured: (node, output) of those values of parameters that the script has passed as inputs.
            Autograd itself takes the gradients that reach them.
        found: the sums of their gradients so far, by name; those without a gradient are missing.
    """

    def __init__(self, names: Sequence[str], captured: Collection[tuple[Any, int]]) -> None:
        self.names = tuple(names)
        self.captured = captured
        self.found: dict[str, torch.Tensor] = {}

    def add(self, name: str, gradient: torch.Tensor | None) -> None:
        """Adds a gradient of a parameter; None is nothing."""
        if gradient is not None:
            before = self.found.get(name)
            self.found[name] = gradient if before is None else before + gradient


class Asker(Protocol):
    """The model of the step that runs on this thread."""

    def settle(self) -> None:
        """Sends the calls that are not sent yet, and waits until they have run.

        Else calls within the pass would share a node with them. In one process they have nothing in
        common.
        """

    def note_roots(self, roots: Sequence[Any]) -> None:
        """Looks at the graph of a pass that gives all parameters their gradients."""

    def anchors(self, names: Collection[str]) -> list[torch.Tensor]:
        """Returns leaves; a pass that asks for them visits calls that may use these parameters.

        Args:
            names: of the parameters.
        """

    def parameters_among(self, inputs: Sequence[Any]) -> tuple[dict[int, str], set[Any]]:
        """Returns the names of those inputs that are parameters of the model, by position.

        Returns:
            The names, and (node, output) of those inputs that are values of remote parameters.
        """


class _Running(threading.local):
    """The backward pass that runs on a thread; a task has a thread of its own."""

    asked: Asked | None = None


_running = _Running()


def asked() -> Asked | None:
    """Returns what the pass on this thread asks for; None if it asks for no parameters."""
    return _running.asked


@contextlib.contextmanager
def asking(names: Sequence[str], captured: Collection[tuple[Any, int]] = ()) -> Iterator[Asked]:
    """Makes a context for one pass, which asks for these parameters; for none, if it is empty."""
    before, found = _running.asked, Asked(names, captured)
    _running.asked = found if names else None
    try:
        yield found
    finally:
        _running.asked = before


def patch_engine(find: Callable[[], Asker | None]) -> None:
    """Makes backward passes of a step's code ask all ranks for parameters.

    Args:
        find: returns the model, if the calling thread runs code of a step; else None.
    """
    BACKWARD_PASSES.install(functools.partial(_asking_ranks, find))


def _asking_ranks(find: Callable[[], Asker | None], original: Any) -> Any:
    def run(
        outputs: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *rest: Any, **named: Any
    ) -> Any:
        asker = find()
        if asker is None:
            return original(outputs, gradients, keep, create, inputs, *rest, **named)
        # Code in backward passes may draw random numbers, such as the seeds of calls: on this rank
        # or on others. What comes after the pass shall not depend on it.
        random = RandomState()
        try:
            return asked_of(asker, outputs, gradients, keep, create, inputs, *rest, **named)
        finally:
            random.restore()

    def asked_of(
        asker: Asker,
        outputs: Any,
        gradients: Any,
        keep: Any,
        create: Any,
        inputs: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        asker.settle()
        if not inputs:
            asker.note_roots(outputs)
        names, captured = asker.parameters_among(inputs)
        different = list(dict.fromkeys(names.values()))
        anchors = asker.anchors(different) if names else []
        with asking(different, captured) as found:
            if not anchors:
                result = original(outputs, gradients, keep, create, inputs, *rest, **named)
                asker.settle()
                return result
            unreachable = rest[0] if rest else named.pop("allow_unreachable", False)
            anchored = (*inputs, *anchors)
            result = original(outputs, gradients, keep, create, anchored, True, **named)
            asker.settle()
        if named.get("accumulate_grad"):
            for position, name in names.items():
                if name in found.found:
                    _accumulate(inputs[position], found.found.pop(name), create)
            return result
        gradients = list(result[: len(inputs)])
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

    return run


def _accumulate(tensor: torch.Tensor, gradient: torch.Tensor, create: bool) -> None:
    """Adds a gradient to that of a tensor, as autograd does, with its hooks."""
    edge = get_gradient_edge(tensor)
    inputs = () if tensor.is_leaf else (tensor,)
    run = BACKWARD_PASSES.original
    with asking(()):
        run((edge,), (gradient,), False, create, inputs, True, accumulate_grad=True)
