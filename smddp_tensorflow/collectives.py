"""Collectives on tensors of TensorFlow, in eager code and in `tf.function`."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import smddp_numpy
from smddp_tensorflow import job, kernels

__all__ = [
    "Compression",
    "ReduceOp",
    "allgather",
    "allreduce",
    "allreduce_all",
    "broadcast",
    "broadcast_variables",
    "oob_allreduce",
    "overlap",
]


class ReduceOp(enum.Enum):
    """How tensors of ranks are combined."""

    AVERAGE = smddp_numpy.Op.AVERAGE
    SUM = smddp_numpy.Op.SUM
    MIN = smddp_numpy.Op.MIN
    MAX = smddp_numpy.Op.MAX


class _Compressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns what is sent, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Returns the tensor in its own type."""
        return tensor


class _Half(_Compressor):
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns what is sent, and what `decompress` needs."""
        value = tf.convert_to_tensor(tensor)
        sent = tf.cast(value, tf.float16) if value.dtype.is_floating else value
        return sent, value.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Returns the tensor in its own type."""
        return tf.cast(tensor, context)


class Compression:
    """What travels: `none` is the tensor itself, `fp16` halves float32 and loses digits."""

    none = _Compressor
    fp16 = _Half


def _through_numpy(call: Any, given: Any, shape: Any = None) -> tf.Tensor:
    """Runs a call on an array; stateful, so TensorFlow keeps the order of the program."""
    tensor = tf.convert_to_tensor(given)
    if tf.executing_eagerly():
        return tf.convert_to_tensor(call(np.asarray(tensor.numpy())))
    result = tf.numpy_function(call, [tensor], tensor.dtype)
    result.set_shape(tensor.shape if shape is None else shape)
    return result


def _check(tensors: Sequence[Any], op: Any) -> None:
    if not isinstance(op, ReduceOp):
        raise ValueError(f"smddp: {op!r} is no ReduceOp: it is AVERAGE, SUM, MIN or MAX")
    for tensor in tensors:
        if isinstance(tensor, tf.IndexedSlices):
            raise TypeError(
                "smddp: sparse tensors cannot be reduced: give tf.convert_to_tensor(tensor)"
            )


def allreduce_all(
    tensors: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    compression: type[_Compressor] = Compression.none,
    number: int = 0,
    count: int = 0,
) -> list[tf.Tensor]:
    """Combines each of some tensors over ranks, all at once.

    Args:
        tensors: of the same shapes and types on all ranks.
        op: how.
        compression: what travels.
        number: the place of this call among those that a step makes, with `count`.
        count: how many such calls a step makes. They begin in the order of their numbers, although
            a graph may run them in another one. 0: the order of the program counts.
    """
    _check(tensors, op)
    sent = [compression.compress(tensor) for tensor in tensors]
    made = _reduced([value for value, _ in sent], op, number, count)
    return [
        compression.decompress(value, context)
        for value, (_, context) in zip(made, sent, strict=True)
    ]


def _reduced(tensors: list[Any], op: ReduceOp, number: int, count: int) -> list[tf.Tensor]:
    operations = kernels.load()
    if operations is None:
        group = job.group()

        def call(array: np.ndarray[Any, Any]) -> Any:
            return group.allreduce(array, op=op.value)

        return [_through_numpy(call, tensor) for tensor in tensors]
    if count:
        handle = job.numbered_group()._use().value
        return list(
            operations.smddp_allreduce(tensors, handle, op.value, number, count, job.timeout())
        )
    return list(operations.smddp_allreduce_in_order(tensors, job.group()._use().value, op.value))


def allreduce(
    tensor: Any,
    param_index: int,
    num_params: int,
    compression: type[_Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
) -> tf.Tensor:
    """Combines the tensors of all ranks, one of `num_params` that each step reduces.

    Args:
        tensor: of one shape and type on all ranks.
        param_index: its number among them. Every step reduces each number once.
        num_params: how many there are.
        compression: what travels.
        op: how.

    Raises:
        ValueError: the number is not among them, or `op` is no ReduceOp.
        TypeError: the tensor is sparse, or of a type that cannot be communicated. For the latter,
            eager code raises tf.errors.InvalidArgumentError instead.
    """
    if not 0 <= param_index < num_params:
        raise ValueError(f"smddp: param_index {param_index} is not in 0 to {num_params - 1}")
    return allreduce_all([tensor], op, compression, param_index, num_params)[0]


def oob_allreduce(
    tensor: Any,
    compression: type[_Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
) -> tf.Tensor:
    """Averages a tensor over ranks, outside of the gradients: a loss or a metric.

    Raises:
        ValueError: `op` is not AVERAGE.
    """
    if op is not ReduceOp.AVERAGE:
        raise ValueError("smddp: oob_allreduce averages; op must be ReduceOp.AVERAGE")
    return allreduce_all([tensor], op, compression)[0]


def allgather(tensor: Any) -> tf.Tensor:
    """Returns the tensors of all ranks, of one shape, one after the other: [ranks, ...]."""
    group = job.group()
    operations = kernels.load()
    if operations is not None:
        return operations.smddp_allgather(tensor, group._use().value)
    value = tf.convert_to_tensor(tensor)
    return _through_numpy(group.allgather, value, [group.size, *value.shape])


def broadcast(tensor: Any, root_rank: int) -> tf.Tensor:
    """Returns rank `root_rank`'s tensor on all ranks.

    Raises:
        ValueError: there is no such rank.
    """
    group = job.group()
    if not 0 <= root_rank < group.size:
        raise ValueError(f"smddp: root_rank {root_rank} is no rank of {group.size}")
    operations = kernels.load()
    if operations is not None:
        return operations.smddp_broadcast(tensor, group._use().value, root_rank)

    def call(array: np.ndarray[Any, Any]) -> Any:
        # A copy that can be written to; TensorFlow gives numbers for tensors without dimensions.
        return group.broadcast(np.array(array), root_rank)

    return _through_numpy(call, tensor)


def broadcast_variables(variables: Any, root_rank: int) -> None:
    """Gives variables, of tf or Keras, the values that they have on rank `root_rank`.

    Args:
        variables: the same ones, in the same order, on all ranks.
        root_rank: a rank.
    """
    for variable in variables:
        if variable.dtype not in (tf.string, "string"):
            variable.assign(broadcast(tf.convert_to_tensor(variable), root_rank))


def overlap(tensor: Any) -> Any:
    """Returns the tensor. The original library marked places for XLA with it."""
    return tensor
