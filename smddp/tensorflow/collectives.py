"""Collectives on tensors of TensorFlow, in eager code and in `tf.function`."""

from __future__ import annotations

import contextlib
import enum
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import smddp.numpy
from smddp.tensorflow import interrupts, job

__all__ = [
    "Compression",
    "ReduceOp",
    "allgather",
    "allreduce",
    "allreduce_all",
    "broadcast",
    "broadcast_variables",
    "check_how",
    "oob_allreduce",
    "overlap",
]


class ReduceOp(enum.Enum):
    """How tensors of ranks are combined."""

    AVERAGE = smddp.numpy.Op.AVERAGE
    SUM = smddp.numpy.Op.SUM
    MIN = smddp.numpy.Op.MIN
    MAX = smddp.numpy.Op.MAX


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
    """Sends float32 and float64 as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns what is sent, and what `decompress` needs."""
        value = tf.convert_to_tensor(tensor)
        # bfloat16 is as short, and has numbers that float16 does not have.
        is_long = value.dtype.is_floating and value.dtype.size > 2
        sent = tf.cast(value, tf.float16) if is_long else value
        return sent, value.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Returns the tensor in its own type."""
        return tf.cast(tensor, context)


class Compression:
    """What travels: `none` is the tensor itself, `fp16` halves float32 and loses digits."""

    none = _Compressor
    fp16 = _Half


_eager = types.SimpleNamespace()


def _order() -> tf.Tensor:
    """Returns the resource that all collectives use, so that TensorFlow keeps their order.

    In a `tf.function` it keeps that of operations with state. But a call of a function that uses
    variables is kept in order only with others that use the same ones.
    """
    with contextlib.nullcontext() if tf.executing_eagerly() else tf.init_scope():
        holder = _eager if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if not hasattr(holder, "_smddp_order"):
            with tf.device("CPU:0"):
                holder._smddp_order = tf.compat.v1.Variable(
                    0, trainable=False, collections=[], use_resource=True
                )
        return holder._smddp_order.handle


def _through_numpy(
    call: Callable[[Any], Any],
    backward: Callable[..., Any],
    given: Any,
    order: Any = None,
    shape: Any = None,
) -> tf.Tensor:
    """Runs a call on an array; stateful, so TensorFlow keeps the order of the program.

    Args:
        call: gets the array.
        backward: gets the gradient of the result and, in a graph, the resource of this call.
        given: what becomes the array.
        order: the resource; see `_order`.
        shape: of the result, if it is not that of `given`.
    """

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def run(array: Any) -> Any:
        with interrupts.waiting():
            return call(np.asarray(array))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(tensor: Any) -> Any:
        if tf.executing_eagerly():
            try:
                made = tf.convert_to_tensor(run(tensor.numpy()))
                return made, functools.partial(backward, order=None)
            except smddp.numpy.Error as error:  # as the compiled operations do
                raise tf.errors.InternalError(None, None, str(error)) from error
        result = tf.py_function(
            lambda value, _: run(value.numpy()),
            [tensor, _order() if order is None else order],
            tensor.dtype,
        )
        result.set_shape(tensor.shape if shape is None else shape)
        return result, functools.partial(backward, order=result.op.inputs[1])

    return differentiable(tf.convert_to_tensor(given))


def check_how(op: Any, compression: Any) -> None:
    """Checks how tensors are to be combined.

    Raises:
        ValueError: `op` is no ReduceOp, or `compression` is not of Compression.
    """
    if not hasattr(compression, "compress"):
        raise ValueError(
            f"smddp: compression is {compression!r}: it has to be Compression.none or "
            "Compression.fp16"
        )
    if not isinstance(op, ReduceOp):
        raise ValueError(f"smddp: {op!r} is no ReduceOp: it is AVERAGE, SUM, MIN or MAX")


def _check(tensors: Sequence[Any]) -> None:
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
            a graph may run them in another one; eager code must not. 0: the order of the program
            counts.

    Raises:
        ValueError: a tf.function begins a step before it has made all calls of the one before.
    """
    check_how(op, compression)
    _check(tensors)
    sent = [compression.compress(tensor) for tensor in tensors]
    made = _reduced([value for value, _ in sent], op, number, count)
    return [
        compression.decompress(value, context)
        for value, (_, context) in zip(made, sent, strict=True)
    ]


def _reduced(
    tensors: list[Any], op: ReduceOp, number: int, count: int, order: Any = None
) -> list[tf.Tensor]:
    operations = job.operations()
    if operations is None:
        group = job.group()

        def call(array: np.ndarray[Any, Any]) -> Any:
            if count:
                _take_turn(number, count)
            return group.allreduce(array, op=op.value)

        def backward(gradient: Any, order: Any) -> Any:
            return _sum_of_gradients([gradient], op, order, count)[0]

        return [_through_numpy(call, backward, tensor, order) for tensor in tensors]
    call_of = operations.kernels.operations
    if count:
        group_and_op = operations.numbered, op.value
        current = _set_of(number, count)
        with tf.control_dependencies(current.before):
            made = call_of.smddp_allreduce(
                tensors, _order(), *group_and_op, number, count, job.timeout()
            )
        current.results[number] = made[0]
        return list(made)
    order = _order() if order is None else order
    return list(call_of.smddp_allreduce_in_order(tensors, order, operations.program, op.value))


class _Set(NamedTuple):
    """The calls of one step in a `tf.function`.

    Attributes:
        size: how many there are.
        before: an operation that runs after all calls of the step before.
        results: of the calls that have been made, by number.
    """

    size: int
    before: list[Any]
    results: dict[int, Any]


def _set_of(number: int, count: int) -> _Set:
    """Returns the set of a call that is made now.

    Of two sets in one function TensorFlow would run the calls in any order, and in another one on
    each rank.
    """
    if tf.executing_eagerly() or is_v1_graph():
        return _Set(count, [], {})
    graph = tf.compat.v1.get_default_graph()
    current: _Set = getattr(graph, "_smddp_set", None) or _Set(count, [], {})
    if count != current.size or number in current.results:
        missing = sorted(set(range(current.size)) - set(current.results))
        if missing:
            raise ValueError(
                f"smddp: allreduce: number {number} of {count} comes in a tf.function before "
                f"number(s) {missing} of {current.size}: make all calls of a step before those of "
                "the next one"
            )
        with tf.control_dependencies(list(current.results.values())):
            current = _Set(count, [tf.no_op()], {})
    graph._smddp_set = current
    return current


# By how many calls a step makes: the group for which the number counts, and the next one.
_turns: dict[int, tuple[smddp.numpy.Group, int]] = {}


def _take_turn(number: int, count: int) -> None:
    group, turn = _turns.get(count, (None, 0))
    turn = turn if group is job.group() else 0
    if number != turn:
        raise ValueError(
            f"smddp: allreduce: it is not the turn of number {number} of {count}: without compiled "
            "operations, calls of a step come in the order of their numbers, once each"
        )
    _turns[count] = job.group(), (number + 1) % count


# --- gradients, of the sum over ranks of what each of them differentiates -------------------------
#
# They use the resource that the operation has used, and not that of `_order`: in the gradient of a
# loop TensorFlow cannot use what is outside of it.


def _sum_of_gradients(
    gradients: Sequence[Any], op: ReduceOp, order: Any, count: int = 0
) -> list[Any]:
    if count:
        raise LookupError("smddp: allreduce has no gradient: use oob_allreduce")
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise LookupError(f"smddp: {op} has no gradient")
    return _reduced(list(gradients), op, 0, 0, order)


def _gradient_of_broadcast(gradient: Any, root: int, order: Any) -> Any:
    (total,) = _sum_of_gradients([gradient], ReduceOp.SUM, order)
    return total if job.rank() == root else tf.zeros_like(total)


def _gradient_of_allgather(gradient: Any, order: Any) -> Any:
    return _sum_of_gradients([gradient], ReduceOp.SUM, order)[0][job.rank()]


@tf.RegisterGradient("SmddpAllreduceInOrder")  # type: ignore[untyped-decorator]
def _(operation: Any, *gradients: Any) -> list[Any]:
    kind = ReduceOp(smddp.numpy.Op(operation.get_attr("op")))
    return [*_sum_of_gradients(gradients, kind, operation.inputs[-1]), None]


@tf.RegisterGradient("SmddpAllreduce")  # type: ignore[untyped-decorator]
def _(operation: Any, *gradients: Any) -> list[Any]:
    count = operation.get_attr("count")
    return [*_sum_of_gradients(gradients, ReduceOp.SUM, operation.inputs[-1], count), None]


@tf.RegisterGradient("SmddpBroadcast")  # type: ignore[untyped-decorator]
def _(operation: Any, gradient: Any) -> Any:
    root = operation.get_attr("root")
    return _gradient_of_broadcast(gradient, root, operation.inputs[-1]), None


@tf.RegisterGradient("SmddpAllgather")  # type: ignore[untyped-decorator]
def _(operation: Any, gradient: Any) -> Any:
    return _gradient_of_allgather(gradient, operation.inputs[-1]), None


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
        param_index: its number among them. Every step reduces each number once: inside
            `tf.function` in any order, in eager code in the order of the numbers.
        num_params: how many there are. Inside `tf.function` several such sets, of any size, come
            one after the other.
        compression: what travels.
        op: how.

    Raises:
        ValueError: the number is not among them, `op` is no ReduceOp, or a tf.function begins a set
            before it has made all calls of the one before.
        TypeError: the tensor is sparse, or of a type that cannot be communicated. For the latter,
            eager code raises tf.errors.InvalidArgumentError instead.
        tf.errors.InvalidArgumentError: in eager code, it is not the turn of the number.
        tf.errors.CancelledError, tf.errors.DeadlineExceededError: an operation with a smaller
            number has not come. No rank can reduce numbers of gradients any more.
    """
    if num_params < 1:
        raise ValueError(f"smddp: num_params is {num_params}; a step reduces at least one")
    if not 0 <= param_index < num_params:
        raise ValueError(f"smddp: param_index {param_index} is not in 0 to {num_params - 1}")
    return allreduce_all([tensor], op, compression, param_index, num_params)[0]


def oob_allreduce(
    tensor: Any,
    compression: type[_Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
) -> tf.Tensor:
    """Combines the tensors of all ranks, outside of the gradients: a loss or a metric.

    The average of integers is that of their type: their sum, which wraps, divided and truncated.
    Cast them to float64 before, or take their SUM.

    Args:
        tensor: of one shape and type on all ranks.
        compression: what travels.
        op: how; the original library has AVERAGE only.

    Raises:
        ValueError: `op` is no ReduceOp, or `compression` is not of Compression.
        TypeError: the tensor is sparse.
    """
    return allreduce_all([tensor], op, compression)[0]


def allgather(tensor: Any) -> tf.Tensor:
    """Returns the tensors of all ranks, of one shape, one after the other: [ranks, ...]."""
    operations = job.operations()
    if operations is not None:
        return operations.kernels.operations.smddp_allgather(tensor, _order(), operations.program)
    group, value = job.group(), tf.convert_to_tensor(tensor)
    shape = None if value.shape.rank is None else [group.size, *value.shape]
    return _through_numpy(group.allgather, _gradient_of_allgather, value, shape=shape)


def broadcast(tensor: Any, root_rank: int) -> tf.Tensor:
    """Returns rank `root_rank`'s tensor on all ranks.

    Raises:
        ValueError: there is no such rank.
    """
    group = job.group()
    if not 0 <= root_rank < group.size:
        raise ValueError(f"smddp: root_rank {root_rank} is no rank of {group.size}")
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype == tf.string:
        return _broadcast_strings(tensor, root_rank)
    operations = job.operations()
    if operations is not None:
        call_of = operations.kernels.operations
        return call_of.smddp_broadcast(tensor, _order(), operations.program, root_rank)

    def call(array: np.ndarray[Any, Any]) -> Any:
        # A copy that can be written to; TensorFlow gives numbers for tensors without dimensions.
        return group.broadcast(np.array(array), root_rank)

    return _through_numpy(call, functools.partial(_gradient_of_broadcast, root=root_rank), tensor)


def _broadcast_strings(tensor: tf.Tensor, root_rank: int) -> tf.Tensor:
    """Sends lengths and bytes."""
    flat = tf.reshape(tensor, [-1])
    lengths = broadcast(tf.strings.length(flat), root_rank)
    given = tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)
    # The strings of other ranks have other lengths.
    if job.rank() != root_rank:
        given = tf.zeros([tf.reduce_sum(lengths)], tf.uint8)
    with tf.control_dependencies([lengths] if is_v1_graph() else []):
        given = broadcast(tf.identity(given), root_rank)
    letters = tf.gather(tf.constant([bytes([i]) for i in range(256)]), tf.cast(given, tf.int32))
    words = tf.RaggedTensor.from_row_lengths(letters, lengths)
    return tf.reshape(tf.strings.reduce_join(words, axis=-1), tf.shape(tensor))


def is_v1_graph() -> bool:
    """Returns whether operations go to a graph that does not keep the order of the program."""
    graph = tf.compat.v1.get_default_graph
    return not tf.executing_eagerly() and not graph().building_function


def broadcast_variables(variables: Any, root_rank: int) -> Any:
    """Gives variables, of tf or Keras, the values that they have on rank `root_rank`.

    Args:
        variables: the same ones, in the same order, on all ranks.
        root_rank: a rank.

    Returns:
        In a graph of TensorFlow 1 the operation that does it; else None.

    Raises:
        TypeError: it is no list of variables.
    """
    if not isinstance(variables, Iterable) or isinstance(variables, tf.Variable | tf.Tensor):
        raise TypeError(
            f"smddp: broadcast_variables takes a list, such as model.variables, and not a "
            f"{type(variables).__name__}"
        )
    made: list[Any] = []
    for variable in variables:
        # A graph of TensorFlow 1 would run them in any order.
        with tf.control_dependencies(made[-1:] if is_v1_graph() else []):
            value = broadcast(tf.convert_to_tensor(variable), root_rank)
            made.append(variable.assign(value))
    return tf.group(made) if is_v1_graph() else None


def overlap(tensor: Any) -> Any:
    """Returns the tensor. The original library marked places for XLA with it."""
    return tensor
