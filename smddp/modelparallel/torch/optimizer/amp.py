"""Mixed precision: torch's GradScaler for models whose parts live on different ranks."""

from __future__ import annotations

from typing import Any

import torch

from smddp._torch_internals import (
    begin_scaling,
    device_of_scaler,
    scale_of_scaler,
    states_of_scaler,
    unscale_outside,
)
from smddp.modelparallel.torch.common.device import kind
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.optimizer.clipping import largest

__all__ = ["GradScaler"]

_COMPLETE = "only there the gradients of all microbatches are complete"


class GradScaler(torch.amp.GradScaler):
    """Does what `torch.amp.GradScaler` does; all ranks of a replica skip a step together.

    Scripts call `scale` inside the step, on one rank, and `step` and `update` on all ranks.

    Args:
        device: its type; if None, that of the accelerator, such as "cuda", and "cpu" without one.
        args: as for torch's GradScaler.
        kwargs: as for torch's GradScaler.
    """

    def __init__(self, device: str | None = None, *args: Any, **kwargs: Any) -> None:
        if not isinstance(device, str | None):
            # As in torch.cuda.amp: the first argument is the initial scale.
            args, device = (device, *args), None
        super().__init__(device or kind(), *args, **kwargs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale; all ranks learn whether any of them is infinite."""
        if not self.is_enabled():
            return
        state.refuse_in_step("scaler.unscale_()", _COMPLETE)
        self._begin()
        super().unscale_(optimizer)
        found = states_of_scaler(self)[id(optimizer)]["found_inf_per_device"]
        device = torch.device(device_of_scaler(self))
        total = torch.zeros((), device=device)
        for value in found.values():
            total = total + value.to(device)
        found.clear()
        found[device] = largest(total)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Calls the optimizer's step unless a gradient is infinite on any rank."""
        state.refuse_in_step("scaler.step()", _COMPLETE)
        if self.is_enabled():
            self._begin()
            # A fused optimizer would look for infinite gradients itself, among those of this rank
            # only. Without this it is treated like any other.
            unscale_outside(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """Adapts the scale, in the same way on all ranks."""
        state.refuse_in_step("scaler.update()")
        if self.is_enabled():
            self._begin()
        super().update(new_scale)

    def _begin(self) -> None:
        # Ranks other than the first have never scaled a loss.
        if scale_of_scaler(self) is None:
            begin_scaling(self)(torch.device(device_of_scaler(self)))
