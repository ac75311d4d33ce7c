"""Training in half precision, as `fp16` and `bf16` in the configuration ask for it.

The model computes in half precision. The optimizer works on *master weights*: copies in fp32, which
stand in its groups in place of the parameters. Losses are multiplied by a scale before their
backward pass, and gradients are divided by it when they are copied to the masters. If a gradient is
infinite, all ranks that hold a part of the model skip the optimizer's step.
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

__all__ = ["MasterWeights", "convert", "half_precision", "to_float", "to_half"]

log = logging.getLogger("smddp.modelparallel")

_HALF = (torch.float16, torch.bfloat16)


def half_precision() -> torch.dtype | None:
    """Returns the dtype that the configuration asks for; None for full precision."""
    if state.cfg.fp16:
        return torch.float16
    return torch.bfloat16 if state.cfg.bf16 else None


def convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Converts a model's floating-point parameters and buffers to a dtype.

    Batch norms are converted to fp32, because their statistics need it.
    """
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


def to_half(value: Any, dtype: torch.dtype) -> Any:
    """Returns a nested value with its fp32 tensors converted to a dtype; for arguments."""
    return map_tensors(lambda t: t.to(dtype) if t.dtype == torch.float32 else t, value)


def to_float(value: Any) -> Any:
    """Returns a nested value with its half-precision tensors converted to fp32; for results."""
    return map_tensors(lambda t: t.float() if t.dtype in _HALF else t, value)


class SteppedElsewhere:
    """Stands for the master weight of a parameter that another replica steps; has its gradient.

    Attributes:
        dtype: of the gradient.
        grad: the unscaled gradient; None if there is none.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.grad: torch.Tensor | None = None


class MasterWeights:
    """The master weights of one optimizer, for the parameters that live on this rank.

    They exist once it is decided which parameters those are. A parameter in full precision has a
    master, too, which shares its memory; so gradients are always unscaled on copies.

    Attributes:
        scaler: holds the loss scale.
        overflow: was a gradient infinite when gradients were last copied to the masters?
    """

    def __init__(self, optimizer: Any, scaler: LossScaler) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.scaler = scaler
        self.overflow = False
        self._originals: dict[int, nn.Parameter] = {}  # by the id of the master
        # (parameter, master)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter | SteppedElsewhere]] = []
        self._elsewhere: dict[int, SteppedElsewhere] = {}  # by the id of the parameter
        self._device = torch.device("cpu")
        self._taken = False  # have the gradients of the last step been copied to the masters?

    def original(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the model's parameter whose master is given; a parameter itself otherwise."""
        return self._originals.get(id(parameter), parameter)

    def adopt(
        self, placement: Placement, steps: Callable[[nn.Parameter], bool] = lambda _: True
    ) -> None:
        """Puts masters into the optimizer's groups, in place of the parameters that live here.

        Args:
            placement: which parameters live here.
            steps: says whether this rank steps a parameter; others have no master here.
        """
        self._device = placement.device
        optimizer: Any = self._optimizer()
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                owned = placement.owns(parameter) and parameter.is_floating_point()
                known = id(parameter) in self._originals or id(parameter) in self._elsewhere
                if known or not owned:
                    continue
                if not steps(parameter):
                    dtype = torch.float32 if parameter.dtype in _HALF else parameter.dtype
                    other = self._elsewhere[id(parameter)] = SteppedElsewhere(dtype)
                    self._pairs.append((parameter, other))
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

    def copy_from_parameters(self) -> None:
        """Copies the parameters to the masters, after parameters have been loaded."""
        with torch.no_grad():
            for parameter, master in self._halves():
                master.copy_(parameter)

    # --- a step -----------------------------------------------------------------------------------

    def note_new_gradients(self) -> None:
        """Notes that there are new gradients."""
        self._taken = False

    def update(self) -> None:
        """Copies the gradients to the masters and unscales them.

        All ranks of the model have to call it; they agree on whether there is an overflow.
        """
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
        """Returns the gradients of the masters; copies them first if that has not been done."""
        if not self._taken:
            self.update()
        return [master.grad for _, master in self._pairs if master.grad is not None]

    def step(self, inner: Callable[[], Any]) -> Any:
        """Steps the optimizer and copies the masters to the parameters; not after an overflow.

        Args:
            inner: does the optimizer's own step.

        Returns:
            What `inner` returns; None after an overflow.
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

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the unscaled gradient of a parameter in the optimizer's groups."""
        other = self._elsewhere.get(id(parameter))
        return parameter.grad if other is None else other.grad

    def _halves(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(p, m) for p, m in self._pairs if p.dtype in _HALF and isinstance(m, nn.Parameter)]

    # --- states -----------------------------------------------------------------------------------

    def state_dict(self, indices: Mapping[int, int]) -> dict[str, Any]:
        """Returns the masters of half-precision parameters, by number, and the loss scale.

        Args:
            indices: the number of each of the model's parameters, by its id.
        """
        masters = {indices[id(p)]: m.detach() for p, m in self._halves()}
        return {"masters": masters, "loss_scaler": self.scaler.state_dict()}

    def load_state_dict(self, given: Mapping[str, Any], indices: Mapping[int, int]) -> None:
        """Loads the masters that belong here.

        Args:
            given: what `state_dict` has returned, merged over any ranks.
            indices: as for `state_dict`.
        """
        with torch.no_grad():
            for parameter, master in self._pairs:
                value = given["masters"].get(indices[id(parameter)])
                if value is not None and parameter.dtype in _HALF:
                    parameter.copy_(value)
                    if isinstance(master, nn.Parameter):
                        master.copy_(value)
        self.scaler.load_state_dict(given["loss_scaler"])
        self._show()

    def _show(self) -> None:
        """Sets the attributes that scripts read: `overflow` and `loss_scale`, as in Apex."""
        optimizer: Any = self._optimizer()
        optimizer.overflow, optimizer.loss_scale = self.overflow, self.scaler.loss_scale
