"""What backward passes that code of a step makes ask about the model; see passes.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from smddp.modelparallel.core.baton import Current
from smddp.modelparallel.torch.pipeline.calls import CallerSide
from smddp.modelparallel.torch.pipeline.changes import Changes
from smddp.modelparallel.torch.pipeline.method import Use
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.parameters import Parameters
from smddp.modelparallel.torch.pipeline.remote_tensor import stand_in_for

__all__ = ["ModelAsker"]


class ModelAsker:
    """An `Asker` for passes of tasks."""

    def __init__(
        self,
        current: Current,
        modules: Modules,
        parameters: Parameters,
        caller: CallerSide,
        changes: Changes,
    ) -> None:
        self._current = current
        self._modules, self._parameters = modules, parameters
        self._caller, self._changes = caller, changes

    def settle(self) -> None:
        """See `Asker`."""
        task = self._current.task
        if task is not None and task.frame is not None and task.frame.open is not None:
            self._caller.settle(task.frame)

    def note_roots(self, roots: Sequence[Any]) -> None:
        """See `Asker`."""
        task = self._current.task
        self._changes.note_roots(None if task is None else task.frame, roots)

    def anchors(self, names: Collection[str]) -> list[torch.Tensor]:
        """See `Asker`."""
        return self._caller.anchors(names)

    def parameters_among(self, inputs: Sequence[Any]) -> tuple[dict[int, str], set[Any]]:
        """See `Asker`; `force` returns the values of a parameter of another rank."""
        found: dict[int, str] = {}
        captured = set()
        parameters = self._parameters
        for position, tensor in enumerate(inputs) if self._modules.divided else ():
            home = stand_in_for(tensor)
            if home is not None:
                found[position] = parameters.canonical(home.name)
                continue
            if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                continue
            edge = get_gradient_edge(tensor)
            if tensor.is_leaf:
                # A parameter that was saved within a checkpoint comes back as another object.
                name = parameters.name_of(edge.node.variable)  # type: ignore[attr-defined]
            else:
                read = self._caller.call_of(edge)
                if read is None or read.method.use is not Use.PARAMETER:
                    continue
                name = parameters.name_of_read(read)
                captured.add((edge.node, edge.output_nr))
            if name is not None:
                found[position] = name
        return found, captured
