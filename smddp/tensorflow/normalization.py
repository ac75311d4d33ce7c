"""`BatchNormalization(synchronized=True)`: moments of the batches of all ranks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smddp.tensorflow import job
from smddp.tensorflow.collectives import allgather

__all__ = ["install"]


def install() -> None:
    """Lets layers of Keras 2 and 3 that are synchronized use the moments of all ranks.

    Keras asks `tf.distribute` for them, which knows one process here, and so does nothing.
    """
    layer = tf.keras.layers.BatchNormalization
    for kind in layer.__mro__:
        if "_sync_calculate_mean_and_var" in kind.__dict__:  # Keras 2
            _replace(kind, "_sync_calculate_mean_and_var", _of_keras_2)
            return
    nn = importlib.import_module("keras.src.backend.tensorflow.nn")
    _replace(nn, "moments", _of_keras_3)
    if hasattr(layer, "_moments"):
        _replace(layer, "_moments", _of_masked)


def _replace(place: Any, name: str, made: Any) -> None:
    former = getattr(place, name)

    @functools.wraps(former)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return made(former, *args, **kwargs)

    setattr(place, name, replaced)


def _of_keras_2(
    former: Any, layer: Any, x: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None
) -> Any:
    if not job.is_shared():
        return former(layer, x, reduction_axes, keep_dims, mask=mask)
    return _moments(x, reduction_axes, keep_dims, mask)


def _of_keras_3(
    former: Any, x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False
) -> Any:
    if not (synchronized and job.is_shared()):
        return former(x, axes, keepdims, synchronized)
    return _moments(x, axes, keepdims)


def _of_masked(former: Any, layer: Any, inputs: Any, mask: Any) -> Any:
    # With a mask Keras 3 does not look whether the layer is synchronized.
    if mask is None or not (layer.synchronized and job.is_shared()):
        return former(layer, inputs, mask)
    return _moments(inputs, layer._reduction_axes, False, mask)


def _moments(x: Any, axes: Sequence[int], keepdims: bool, mask: Any = None) -> tuple[Any, Any]:
    """Returns mean and variance over the batches of all ranks, which have gradients.

    Ranks may have batches of different sizes, and empty ones.

    Args:
        x: the batch of this rank.
        axes: over which they are computed.
        keepdims: keep these axes.
        mask: which elements count, without the last axis. None: all.
    """
    kind, axes = x.dtype, list(axes)
    if kind in (tf.float16, tf.bfloat16):
        x = tf.cast(x, tf.float32)
    is_in = tf.ones_like(x, tf.bool)
    if mask is not None:
        is_in = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(x))
        x = tf.where(is_in, x, tf.zeros_like(x))  # what is left out may be no number

    def total(values: Any) -> Any:
        return tf.reduce_sum(tf.where(is_in, values, tf.zeros_like(values)), axes, keepdims=True)

    def mean(values: Any) -> Any:
        return tf.math.divide_no_nan(tf.reduce_sum(values, 0), tf.reduce_sum(counts, 0))

    # Squares of differences from the mean of this rank: those of the numbers themselves would lose
    # digits.
    count = total(tf.ones_like(x))
    own = tf.math.divide_no_nan(total(x), count)
    each = allgather(tf.stack([count, own, total(tf.square(x - own))]))
    counts, means, squares = each[:, 0], each[:, 1], each[:, 2]
    middle = mean(counts * means)
    variance = mean(squares + counts * tf.square(means - middle))
    if not keepdims:
        middle, variance = tf.squeeze(middle, axes), tf.squeeze(variance, axes)
    return tf.saturate_cast(middle, kind), tf.saturate_cast(variance, kind)
