"""Training in half precision, as `fp16` and `bf16` in the configuration ask for it.

The model computes in half precision; the optimizer works on *master weights*, copies in fp32 that
take the places of the parameters in its groups. Losses are scaled before their backward pass, and
gradients unscaled on their way to the masters; a step with an infinite gradient is left out, on all
ranks that hold a part of the model.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smddp.modelparallel.common.structure import map_tensors
from smddp.modelparallel.job.state import state
from smddp.modelparallel.optimizer.loss_scale import LossScaler
from smddp.modelparallel.partition.placement import Placement

__all__ = ["MasterWeights", "convert", "half_precision", "lowered", "raised"]

log = logging.getLogger("smddp.modelparallel")

_HALF = (torch.float16, torch.bfloat16)


def half_precision() -> torch.dtype | None:
    """Returns the type that the configuration asks for, if any."""
    if state.cfg.fp16:
        return torch.float16
    return torch.bfloat16 if state.cfg.bf16 else None


def convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives a model's parameters and buffers a type; batch norms get fp32, for their statistics."""
    for part in module.modules():
        norm = isinstance(part, nn.modules.batchnorm._BatchNorm)
        own = torch.float32 if norm else dtype
        for parameter in part._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(own)
                if state.cfg._fp32_grad_accumulation:
                    parameter.grad_dtype = torch.float32
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(own)


def lowered(value: Any, dtype: torch.dtype) -> Any:
    """Returns arguments of the model with tensors of fp32 in its own type."""
    return map_tensors(lambda t: t.to(dtype) if t.dtype == torch.float32 else t, value)


def raised(value: Any) -> Any:
    """Returns results of the model with tensors of half precision in fp32."""
    return map_tensors(lambda t: t.float() if t.dtype in _HALF else t, value)


class MasterWeights:
    """The masters of one optimizer's parameters, of those that live on this rank.

    They exist once it is known which do. A parameter that is no half has a master, too, which
    shares its memory: so every gradient is unscaled on a copy.

    Attributes:
        scaler: scales the losses.
        overflow: was a gradient infinite when gradients were last taken over?
    """

    def __init__(self, optimizer: Any, scaler: LossScaler) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.scaler = scaler
        self.overflow = False
        self._originals: dict[int, nn.Parameter] = {}  # by the id of the master
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (parameter, master)
        self._device = torch.device("cpu")
        self._taken = False  # have the gradients of the last backward pass been taken over?

    def original(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the model's parameter for what is in a group."""
        return self._originals.get(id(parameter), parameter)

    def adopt(self, placement: Placement) -> None:
        """Puts masters in the places of the parameters that live here."""
        self._device = placement.device
        optimizer: Any = self._optimizer()
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                owned = placement.owns(parameter) and parameter.is_floating_point()
                if not owned or id(parameter) in self._originals:
                    continue
                data = parameter.detach()
                value = data.float() if data.dtype in _HALF else data
                master = nn.Parameter(value, parameter.requires_grad)
                self._originals[id(master)] = parameter
                self._pairs.append((parameter, master))
                group["params"][place] = master
                if parameter in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(parameter)
        halves = {id(master) for _, master in self._halves()}
        optimizer.fp32_from_fp16_groups = [
            [master for master in group["params"] if id(master) in halves]
            for group in optimizer.param_groups
        ]
        self._show()

    def refresh(self) -> None:
        """Makes the masters what the parameters are; for parameters that have been loaded."""
        with torch.no_grad():
            for parameter, master in self._halves():
                master.copy_(parameter)

    # --- a step -----------------------------------------------------------------------------------

    def renew(self) -> None:
        """Hears that there are new gradients."""
        self._taken = False

    def update(self) -> None:
        """Takes the gradients over, unscaled; all ranks of the model learn of an overflow."""
        gradients = []
        for parameter, master in self._pairs:
            gradient = parameter.grad
            master.grad = None if gradient is None else gradient.to(master.dtype, copy=True)
            if master.grad is not None:
                gradients.append(master.grad)
        self._unscale(gradients)
        self._taken = True
        self._show()

    def _unscale(self, gradients: list[torch.Tensor]) -> None:
        found = torch.zeros(1, device=self._device)
        if gradients:
            inverse = torch.full((1,), 1.0 / self.scaler.loss_scale, device=self._device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        if state.topology.size_of("mp") > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=state.groups.of("mp"))
        self.overflow = bool(found)

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients of the masters, taken over if they were not."""
        if not self._taken:
            self.update()
        return [master.grad for _, master in self._pairs if master.grad is not None]

    def step(self, inner: Callable[[], Any]) -> Any:
        """Lets the optimizer change the masters, and the model follow, unless there is an overflow.

        Args:
            inner: the optimizer's own step.
        """
        self.gradients()
        self._taken = False
        before = self.scaler.loss_scale
        self.scaler.update_scale(self.overflow)
        self._show()
        if self.overflow:
            if state.topology.rank == 0:
                now = self.scaler.loss_scale
                log.info("smp: overflow at loss scale %g, step left out; it is %g now", before, now)
            return None
        result = inner()
        with torch.no_grad():
            for parameter, master in self._halves():
                parameter.copy_(master)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of parameters and masters."""
        self._taken = False
        for parameter, master in self._pairs:
            master.grad = None
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    def _halves(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(p, m) for p, m in self._pairs if p.dtype in _HALF]

    # --- states -----------------------------------------------------------------------------------

    def state_dict(self, indices: Mapping[int, int]) -> dict[str, Any]:
        """Returns masters of half-precision parameters by number, and the state of the scale.

        Args:
            indices: numbers by the id of the model's parameter.
        """
        masters = {indices[id(p)]: m.detach() for p, m in self._halves()}
        return {"masters": masters, "loss_scaler": self.scaler.state_dict()}

    def load_state_dict(self, given: Mapping[str, Any], indices: Mapping[int, int]) -> None:
        """Loads what belongs here of what `state_dict` has returned, of any ranks."""
        with torch.no_grad():
            for parameter, master in self._halves():
                value = given["masters"].get(indices[id(parameter)])
                if value is not None:
                    master.copy_(value)
                    parameter.copy_(master)
        self.scaler.load_state_dict(given["loss_scaler"])
        self._show()

    def _show(self) -> None:
        """Sets what scripts read, by its names in Apex."""
        optimizer: Any = self._optimizer()
        optimizer.overflow, optimizer.loss_scale = self.overflow, self.scaler.loss_scale
