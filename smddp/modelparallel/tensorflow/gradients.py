"""What `optimizer.get_gradients` returns in a step: names of gradients, which owners compute."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import tensorflow as tf

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.tensorflow import job, layers

__all__ = ["Gradient", "install"]

_FIXED = (
    "smp: gradients cannot be changed inside smp.step, because they are on the ranks that own the "
    "variables. Return them from the step, and change what it returns."
)


class Gradient:
    """The gradient of a variable in one microbatch; it is on the rank that owns the variable.

    Attributes:
        number: of the variable among those of the model.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return Gradient, (self.number,)

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> NoReturn:
        raise SMPUsageError(_FIXED)

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise SMPUsageError(_FIXED)

    def _refused(self, *args: Any) -> NoReturn:
        raise SMPUsageError(_FIXED)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refused
    __truediv__ = __rtruediv__ = __neg__ = __pow__ = __matmul__ = __rmatmul__ = _refused


def install() -> None:
    """Changes two methods of Keras's optimizers for the whole process.

    `get_gradients` works in a step, also with Keras 3, which does not have it. `apply_gradients`
    takes no gradients, which a rank has whose layers are all frozen.
    """
    kinds = {tf.keras.optimizers.Optimizer}
    legacy = getattr(getattr(tf.keras.optimizers, "legacy", None), "Optimizer", None)
    if hasattr(legacy, "apply_gradients"):  # that of Keras 3 only warns
        kinds.add(legacy)
    for kind in kinds:
        kind.get_gradients = _replacement(getattr(kind, "get_gradients", None))
        kind.apply_gradients = _taking_none(kind.apply_gradients)


def _taking_none(apply: Any) -> Any:
    @functools.wraps(apply)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if pairs or not job.is_initialized():
            return apply(self, pairs, *args, **kwargs)
        # Keras 3 would raise an error on this rank only, and Keras 2 would not count the step.
        with tf.init_scope():
            _ = self.iterations  # a legacy optimizer makes the variable now
        self._iterations.assign_add(1)
        return self._iterations

    return apply_gradients


def _check(optimizer: Any) -> None:
    """Refuses what each rank would do by its own gradients only.

    Raises:
        SMPUsageError: the optimizer does.
    """
    if isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        raise SMPUsageError(
            "optimizer.get_gradients: a LossScaleOptimizer would skip other steps on each "
            "rank. Give smp.step the optimizer in it, and use mixed_bfloat16 or float32"
        )
    if getattr(optimizer, "global_clipnorm", None) and job.pp_size() > 1:
        raise SMPUsageError(
            "optimizer.get_gradients: with global_clipnorm each rank would clip by the norm of its "
            "own gradients. Leave it out, and clip what the step returns by the norm over all "
            "ranks, as docs/tensorflow-model-parallel.md shows; or use clipnorm, which is by "
            "variable"
        )


def _replacement(former: Any) -> Any:
    def get_gradients(self: Any, loss: Any, params: Any) -> Any:
        """Returns the gradients of a loss by variables, inside a function under smp.step."""
        inside = getattr(layers.current(), "gradients", None)
        if inside is not None:
            _check(self)
            return inside(loss, params)
        if former is None:
            raise SMPUsageError("optimizer.get_gradients works inside a function under smp.step")
        return former(self, loss, params)

    return get_gradients
