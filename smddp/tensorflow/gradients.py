"""Gradients that are averaged over ranks: for a tape, and in optimizers of Keras 2 and 3."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smddp.tensorflow.collectives import (
    Compression,
    ReduceOp,
    allgather,
    allreduce_all,
    check_how,
    is_v1_graph,
)

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "averaged"]

_BUCKET = 25  # MiB
_SUMS = (ReduceOp.SUM, ReduceOp.AVERAGE)


def _refuse_devices(device_dense: str, device_sparse: str) -> None:
    for name, value in (("device_dense", device_dense), ("device_sparse", device_sparse)):
        if value:
            raise ValueError(f"smddp: {name} is not supported: leave it out")


def _present(gradient: Any, variable: Any, keeps_sparse: bool) -> Any:
    """Returns a tensor, or slices if they are kept.

    A variable that the loss of this rank does not use gets zeros: that of another rank may use it.
    """
    if gradient is not None:
        is_sparse = isinstance(gradient, tf.IndexedSlices) and not gradient.dtype.is_integer
        return gradient if is_sparse and keeps_sparse else tf.convert_to_tensor(gradient)
    if getattr(variable, "trainable", False):
        return tf.zeros(variable.shape, variable.dtype)
    return None


def averaged(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    compression: Any = Compression.none,
    bucket_cap_mb: float = _BUCKET,
    sparse_as_dense: bool = False,
) -> list[Any]:
    """Combines gradients over ranks.

    In eager code all are reduced at once. In a graph they are reduced in buckets, so that the first
    ones travel while TensorFlow computes the rest. The last gradients of the list come first: they
    are those of the last layers, where the backward pass begins.

    Args:
        gradients: tensors, sparse ones, or None.
        variables: to which they belong, or other tensors; the same ones on all ranks.
        op: how.
        compression: what travels.
        bucket_cap_mb: size of a bucket in MiB.
        sparse_as_dense: make tensors of sparse gradients, and do not gather their rows. So does
            MIN or MAX, and a graph of TensorFlow 1.
    """
    keeps_sparse = not (sparse_as_dense or is_v1_graph() or op not in _SUMS)
    results = [_present(*pair, keeps_sparse) for pair in zip(gradients, variables, strict=True)]
    places = [i for i, one in enumerate(results) if one is not None]
    if not places:
        return results
    are_sparse = [isinstance(one, tf.IndexedSlices) for one in results]
    on_ranks: Any = None
    if keeps_sparse:
        # A rank whose loss does not use a variable cannot know that its gradient is sparse on
        # others. A constant in a graph: this does not wait for gradients.
        on_ranks = allgather(tf.constant(are_sparse))
    most = sys.maxsize if tf.executing_eagerly() else int(bucket_cap_mb * 2**20)
    made: list[Any] = []
    for bucket in _buckets(results, places, most):
        if are_sparse[bucket[0]]:
            (place,) = bucket
            is_sparse = tf.reduce_all(on_ranks[:, place])
            results[place] = _slices_over_ranks(results[place], is_sparse, op, compression)
            continue
        # A graph of TensorFlow 1 would run them in any order.
        with tf.control_dependencies(made[-1:] if is_v1_graph() else []):
            made = allreduce_all([results[i] for i in bucket], op, compression)
        for i, value in zip(bucket, made, strict=True):
            results[i] = value
    return results


def _buckets(gradients: list[Any], places: list[int], most: int) -> list[list[int]]:
    """Divides them from the last to the first; a bucket has one gradient, or `most` bytes.

    A sparse gradient is alone. All ranks make their calls in this order, also if a gradient is
    sparse on some of them only.
    """
    buckets: list[list[int]] = []
    room = 0
    for place in reversed(places):
        gradient = gradients[place]
        if isinstance(gradient, tf.IndexedSlices):
            buckets.append([place])
            room = -1
            continue
        size = (gradient.shape.num_elements() or 0) * gradient.dtype.size
        if not buckets or size > room:
            buckets.append([])
            room = most
        buckets[-1].append(place)
        room -= size
    return buckets


def _slices_over_ranks(
    slices: tf.IndexedSlices, is_sparse: Any, op: ReduceOp, compression: Any
) -> tf.IndexedSlices:
    """Combines a gradient that is sparse on this rank.

    Args:
        slices: the gradient.
        is_sparse: is it so on all ranks? Else they add tensors, and the result has all rows.
        op: SUM or AVERAGE.
        compression: what travels.
    """

    def gathered() -> tuple[Any, Any]:
        sent, context = compression.compress(slices.values)
        count = tf.shape(slices.indices, tf.int64)[0]
        counts = allgather(count)
        most = tf.reduce_max(counts)
        is_row = tf.sequence_mask(counts, most)

        def of_all(rows: Any) -> Any:
            shape = tf.concat([[most - count], tf.shape(rows, tf.int64)[1:]], 0)
            padded = tf.concat([rows, tf.zeros(shape, rows.dtype)], 0)
            return tf.boolean_mask(allgather(padded), is_row)

        # One rank may have indices in int32, and another one in int64.
        indices = of_all(tf.cast(slices.indices, tf.int64))
        values = compression.decompress(of_all(sent), context)
        if op is ReduceOp.AVERAGE:
            values /= tf.cast(tf.shape(counts)[0], values.dtype)
        return values, tf.cast(indices, slices.indices.dtype)

    def added() -> tuple[Any, Any]:
        (total,) = allreduce_all([tf.convert_to_tensor(slices)], op, compression)
        return total, tf.range(tf.shape(total, slices.indices.dtype)[0])

    values, indices = tf.cond(is_sparse, gathered, added)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` returns averages over ranks.

    Args:
        tape: the tape that records; everything else is done by it.
        device_dense: must be empty.
        device_sparse: must be empty.
        compression: what travels.
        sparse_as_dense: reduce sparse gradients, as those of embeddings, as tensors. Otherwise the
            rows of all ranks are gathered.
        op: how gradients are combined.

    Raises:
        ValueError: a device is given, or `op` or `compression` is none.
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp = ReduceOp.AVERAGE,
    ) -> None:
        _refuse_devices(device_dense, device_sparse)
        check_how(op, compression)
        self._tape, self._compression, self._op = tape, compression, op
        self._sparse_as_dense = sparse_as_dense

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the gradients as the tape does, with its arguments, averaged over ranks.

        That of a trainable variable which the target does not use is zeros, and not None: on
        another rank the target may use it.
        """
        found = self._tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(found), tf.nest.flatten(sources)
        made = averaged(*flat, self._op, self._compression, sparse_as_dense=self._sparse_as_dense)
        return tf.nest.pack_sequence_as(found, made)


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    bucket_cap_mb: float = _BUCKET,
) -> Any:
    """Makes an optimizer average gradients over ranks before it applies them; returns it.

    `model.fit`, `optimizer.apply_gradients` and, with Keras 3, `optimizer.apply` then train one
    model on all ranks.

    Args:
        optimizer: of Keras 3 or of tf_keras. It stays the same object, of a subclass of its class.
            A LossScaleOptimizer that is put around it, as `compile` does with mixed_float16,
            averages in its place, so that all ranks skip the same steps.
        name: accepted.
        use_locking: accepted.
        device_dense: must be empty.
        device_sparse: must be empty.
        compression: what travels.
        sparse_as_dense: reduce sparse gradients, as those of embeddings, as tensors. Otherwise the
            rows of all ranks are gathered.
        op: how gradients are combined.
        bucket_cap_mb: size of the buckets in which gradients travel, in MiB.

    Raises:
        ValueError: a device is given, `op` or `compression` is none, the size of a bucket is not
            positive, or the optimizer averages gradients already.
        TypeError: it is no optimizer of Keras.
    """
    _refuse_devices(device_dense, device_sparse)
    check_how(op, compression)
    if bucket_cap_mb <= 0:
        raise ValueError(f"smddp: bucket_cap_mb is {bucket_cap_mb}; it must be more than 0")
    if _averager_of(optimizer) is not None:
        raise ValueError("smddp: the optimizer is a DistributedOptimizer already")
    _install_for_loss_scaling()

    def over_ranks(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return averaged(gradients, variables, op, compression, bucket_cap_mb, sparse_as_dense)

    return _with_averager(optimizer, over_ranks)


_Averager = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


class _Inside(threading.local):
    """Does this thread run an optimizer with gradients that are averaged already?"""

    is_averaged = False


_inside = _Inside()


def _averager_of(optimizer: Any) -> _Averager | None:
    found: _Averager | None = getattr(type(optimizer), "_over_ranks", None)
    return found


def _with_averager(optimizer: Any, over_ranks: _Averager) -> Any:
    kind = type(optimizer)

    def apply_averaged(apply: Callable[..., Any], grads: Any, variables: Any) -> Any:
        # A LossScaleOptimizer has averaged what it gives the optimizer in it.
        if _inside.is_averaged:
            return apply(grads)
        grads = over_ranks(grads, variables)
        _inside.is_averaged = True
        try:
            return apply(grads)
        finally:
            _inside.is_averaged = False

    if hasattr(kind, "apply"):  # Keras 3

        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            variables = (
                self._trainable_variables
                if trainable_variables is None
                else list(trainable_variables)
            )
            if len(grads) != len(variables):
                return kind.apply(self, grads, trainable_variables)  # Keras says what is wrong
            return apply_averaged(
                lambda made: kind.apply(self, made, trainable_variables), grads, variables
            )

        methods: dict[str, Any] = {"apply": apply}
    elif hasattr(kind, "apply_gradients"):

        def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            variables = [variable for _, variable in pairs]
            return apply_averaged(
                lambda made: kind.apply_gradients(
                    self, list(zip(made, variables, strict=True)), *args, **kwargs
                ),
                [gradient for gradient, _ in pairs],
                variables,
            )

        methods = {"apply_gradients": apply_gradients}
    else:
        raise TypeError(f"smddp: {kind.__name__} is no optimizer of Keras")
    methods["_over_ranks"] = staticmethod(over_ranks)
    # A saved model names the class and its module; whoever loads it needs that of Keras.
    methods["__module__"] = kind.__module__
    optimizer.__class__ = type(kind.__name__, (kind,), methods)
    return optimizer


@functools.cache
def _install_for_loss_scaling() -> None:
    """Lets a LossScaleOptimizer average in place of the optimizer in it.

    Otherwise each rank would look at gradients of its own to decide whether it skips a step.
    """
    base = tf.keras.mixed_precision.LossScaleOptimizer
    # In Keras 2 the class that is made depends on the optimizer.
    for kind in (base, *base.__subclasses__()):
        if "__init__" in kind.__dict__:
            kind.__init__ = _seen_initialize(kind.__init__)


def _seen_initialize(initialize: Any) -> Any:
    @functools.wraps(initialize)
    def seen(self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, inner_optimizer, *args, **kwargs)
        over_ranks = _averager_of(inner_optimizer)
        if over_ranks is not None:
            _with_averager(self, over_ranks)

    return seen
