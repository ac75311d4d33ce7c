"""Loss scales for training in half precision: constant, or adapted to overflows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from smddp.modelparallel.core.errors import SMPUsageError

__all__ = ["DynamicLossScaler", "LossScaler", "make_scaler"]


class LossScaler:
    """A constant loss scale.

    Attributes:
        loss_scale: the factor by which a loss is multiplied before its backward pass.
    """

    # Attributes that change from step to step, and have to be saved; the script gives the others.
    _saved: ClassVar[tuple[str, ...]] = ()

    def __init__(self, loss_scale: float = 1.0) -> None:
        self.loss_scale = float(loss_scale)

    def update_scale(self, overflow: bool) -> None:
        """Does nothing, because the scale is constant.

        Args:
            overflow: was a gradient of the step infinite?
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what has to be saved."""
        return {name: getattr(self, name) for name in self._saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what a scaler of the same kind has saved; does nothing with another kind's."""
        if all(name in state for name in self._saved):
            vars(self).update({name: state[name] for name in self._saved})


class DynamicLossScaler(LossScaler):
    """A loss scale that grows as long as nothing overflows. The arguments are those of Apex.

    Args:
        init_scale: the first scale.
        scale_factor: the scale is multiplied by it, or divided by it after an overflow.
        scale_window: after so many steps without an overflow the scale grows.
        min_scale: the smallest scale.
        delayed_shift: so many overflows are needed before the scale gets smaller.
        consecutive_hysteresis: each step without an overflow resets the count for `delayed_shift`;
            otherwise only growth resets it.

    Raises:
        SMPUsageError: a value is out of range.
    """

    _saved = ("loss_scale", "good_steps", "tolerance")

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> None:
        super().__init__(init_scale)
        if not 0 < init_scale < math.inf:
            raise SMPUsageError(f"dynamic_loss_args: init_scale must be positive, not {init_scale}")
        if scale_factor <= 1 or scale_window < 1 or min_scale <= 0 or delayed_shift < 1:
            raise SMPUsageError(
                "dynamic_loss_args: scale_factor must be more than 1, scale_window and "
                "delayed_shift at least 1, min_scale positive"
            )
        self._factor, self._window, self._least = float(scale_factor), scale_window, min_scale
        self._shift, self._forget = delayed_shift, consecutive_hysteresis
        self.good_steps = 0
        self.tolerance = delayed_shift

    def update_scale(self, overflow: bool) -> None:
        """Adapts the scale; once per step.

        Args:
            overflow: was a gradient of the step infinite?
        """
        if overflow:
            self.good_steps = 0
            if self.tolerance > 1:
                self.tolerance -= 1
            else:
                self.loss_scale = max(self.loss_scale / self._factor, float(self._least))
            return
        self.good_steps += 1
        grows = self.good_steps % self._window == 0
        if grows or self._forget:
            self.tolerance = self._shift
        if grows:
            self.loss_scale *= self._factor


def make_scaler(static: float, dynamic: bool, arguments: Mapping[str, Any]) -> LossScaler:
    """Returns the scaler that the arguments of `smp.DistributedOptimizer` ask for.

    Args:
        static: the constant scale.
        dynamic: return a DynamicLossScaler instead.
        arguments: of that one, by name; or all of them in one dict under `dynamic_loss_args`.

    Raises:
        SMPUsageError: an argument is unknown, or its value is out of range.
    """
    named = dict(arguments)
    named = {**(named.pop("dynamic_loss_args", None) or {}), **named}
    known = inspect.signature(DynamicLossScaler).parameters
    unknown = sorted(named.keys() - known.keys())
    if unknown:
        raise SMPUsageError(
            f"smp.DistributedOptimizer has no argument {', '.join(unknown)}; those of dynamic "
            f"loss scales are {', '.join(known)}"
        )
    if not dynamic:
        if not 0 < static < math.inf:
            raise SMPUsageError(f"static_loss_scale must be positive, not {static}")
        return LossScaler(static)
    return DynamicLossScaler(**named)
