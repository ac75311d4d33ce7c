"""Reads parameters and buffers of other ranks.

A read is a call without code of the user, which goes the way of all others (`Routing.read`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from smddp.modelparallel.core.baton import Current
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.method import Method, Use
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.remote_tensor import Home, ValueReader

__all__ = ["Homes", "OwnValues"]


class OwnValues:
    """The owner's side: the values of parameters and buffers that live here.

    Attributes:
        read: (number, name) of the buffers that other ranks have read in this step.
    """

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self.read: set[tuple[int, str]] = set()
        self._was_replaced: Callable[[str], bool] = lambda _: False

    def begin_step(self) -> None:
        """Forgets what was read."""
        self.read.clear()

    def look_for_replaced(self, was_replaced: Callable[[str], bool]) -> None:
        """Takes a function that says of a buffer's name whether code has replaced the buffer.

        Args:
            was_replaced: has code ever put another tensor in its place?
        """
        self._was_replaced = was_replaced

    def value(self, number: int, method: Method) -> torch.Tensor | None:
        """Returns the values of a parameter or a buffer of this rank, for another rank.

        The result is None if there is no tensor. For `Use.SAME_BUFFER` it is None if code has ever
        replaced the tensor.

        Raises:
            SMPUsageError: it was taken before a call that may have replaced it, or is sparse.
        """
        module = self._modules.by_number[number]
        use, name = method
        if use is Use.PARAMETER:
            parameter = module._parameters[name]
            assert parameter is not None
            return parameter.view_as(parameter)
        buffer = module._buffers[name]
        full = self._modules.full_name(number, name)
        gone = use is not Use.BUFFER and (buffer is None or self._was_replaced(full))
        if gone and use is Use.SAME_BUFFER:
            return None
        if gone:
            raise SMPUsageError(
                f"buffer {full!r} was taken from its module, which lives on rank "
                f"{self._modules.rank} of the pipeline, and is used after a later call of a "
                "module, which may have put another tensor in its place. Read the buffer where its "
                "values are needed, or take a clone()"
            )
        if buffer is None:
            self.read.add((number, name))
            return None
        if buffer.layout != torch.strided:
            raise SMPUsageError(
                f"buffer {full!r} lives on rank {self._modules.rank} of the pipeline and is "
                "sparse: it cannot be read on another rank. Read it in the forward method of its "
                "module"
            )
        self.read.add((number, name))
        # A copy, because code that runs before it is sent may change the buffer.
        if buffer.grad_fn is None or not torch.is_grad_enabled():
            return buffer.clone()
        copied: torch.Tensor = _Detached.apply(buffer, full)
        return copied


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


class _Reading(Protocol):
    """What makes the calls."""

    def read(self, frame: Frame, owner: int, number: int, method: Method) -> Any:
        """Returns what `OwnValues.value` returns on the owner."""


class Homes:
    """The reader's side: where parameters and buffers of other ranks live, and how to read them.

    Attributes:
        in_order: do the microbatches of this step run one after the other?
    """

    def __init__(self, modules: Modules, routing: _Reading, current: Current) -> None:
        """Knows of no step.

        Args:
            modules: of the model.
            routing: makes calls.
            current: the task of each thread.
        """
        self._modules, self._current = modules, current
        self._routing = routing
        self.in_order = False

    def begin_step(self, in_order: bool) -> None:
        """Begins a step.

        Args:
            in_order: do its microbatches run one after the other?
        """
        self.in_order = in_order

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
        return Home(kind, self._modules.full_name(number, name), owner, device, reader)

    def frame(self) -> Frame | None:
        """Returns the frame whose code runs on this thread; None outside steps."""
        task = self._current.task
        return None if task is None else task.frame

    def read(self, owner: int, number: int, method: Method) -> Any:
        """Reads a value, in a step."""
        frame = self.frame()
        assert frame is not None
        return self._routing.read(frame, owner, number, method)


class _OwnerValueReader(ValueReader):
    """Gets the values of a tensor of the model from the rank where it lives."""

    def __init__(self, homes: Homes, owner: int, number: int, kind: str, name: str) -> None:
        # The tensors of a script may outlive the model.
        self._homes = weakref.ref(homes)
        self._owner, self._number, self._kind, self._name = owner, number, kind, name

    def in_step(self) -> bool:
        homes = self._homes()
        return homes is not None and homes.frame() is not None

    def in_order(self) -> bool:
        homes = self._homes()
        return homes is not None and homes.in_order

    def moment(self) -> Any:
        homes = self._homes()
        frame = None if homes is None else homes.frame()
        assert frame is not None
        return frame.moment

    def values(self, moment: Any) -> Any:
        use = Use.PARAMETER
        if self._kind == "buffer":
            use = Use.BUFFER if moment is self.moment() else Use.EARLIER_BUFFER
        return self._read(use)

    def same_tensor(self) -> Any:
        return self._read(Use.SAME_BUFFER)

    def _read(self, use: Use) -> Any:
        homes = self._homes()
        assert homes is not None
        return homes.read(self._owner, self._number, Method(use, self._name))
