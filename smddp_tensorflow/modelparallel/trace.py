"""Runs a step's function on symbolic tensors, which finds out what layers it calls, and how."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from smddp_smp.errors import SMPUsageError
from smddp_tensorflow.modelparallel import layers
from smddp_tensorflow.modelparallel.gradients import Gradient
from smddp_tensorflow.modelparallel.values import as_tensor, results

__all__ = ["Trace", "code_of_the_script", "trace"]


_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


@dataclasses.dataclass
class Trace:
    """What was found out.

    Attributes:
        called: the layers, in the order of their first calls.
        elements: of the results of each layer's calls, by id of the layer.
        size: bytes of these results.
        reads: for each variable that was read or assigned: the id of its handle, and the layers
            whose code did it, from the outermost to the innermost; empty for the step's function.
        used: the handles of these variables.
        changed: the handles of variables that may be assigned to, and the same layers.
        trains: did the function ask for gradients?
        result: what the function returned.
    """

    called: list[Any] = dataclasses.field(default_factory=list)
    elements: dict[int, int] = dataclasses.field(default_factory=dict)
    size: dict[int, int] = dataclasses.field(default_factory=dict)
    reads: list[tuple[int, tuple[Any, ...]]] = dataclasses.field(default_factory=list)
    used: list[Any] = dataclasses.field(default_factory=list)
    changed: list[tuple[Any, tuple[Any, ...]]] = dataclasses.field(default_factory=list)
    trains: bool = False
    result: Any = None


class Tracer:
    """The interceptor of a trace."""

    def __init__(self, graph: FuncGraph) -> None:
        self.found = Trace()
        self._graph = graph
        self._stack: tuple[Any, ...] = ()
        # From which operation of the graph on which layers run.
        self.borders: list[tuple[int, tuple[Any, ...]]] = [(0, ())]

    def _move(self, stack: tuple[Any, ...]) -> None:
        self._stack = stack
        self.borders.append((len(self._graph.get_operations()), stack))

    def called(
        self, layer: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Notes a call; see `Interceptor`."""
        if all(one is not layer for one in self.found.called):
            self.found.called.append(layer)
        outer = self._stack
        self._move((*outer, layer))
        try:
            result = original(*args, **kwargs)
        finally:
            self._move(outer)
        for tensor in tf.nest.flatten(result):
            if isinstance(tensor, tf.Tensor) and (count := tensor.shape.num_elements()) is not None:
                size, elements = self.found.size, self.found.elements
                elements[id(layer)] = elements.get(id(layer), 0) + count
                size[id(layer)] = size.get(id(layer), 0) + count * tensor.dtype.size
        return result

    def gradients(self, loss: Any, variables: Any) -> list[Gradient]:
        """Notes that the function asks for gradients; see `gradients.install`."""
        self.found.trains = True
        return [Gradient(number) for number in range(len(variables))]

    def add_reads(self) -> None:
        """Finds which variables the operations use."""
        handles = {place.name: handle for handle, place in self._graph.captures}
        self.found.used = [one for one in handles.values() if one.dtype == tf.resource]
        borders = iter([*self.borders[1:], (len(self._graph.get_operations()) + 1, ())])
        stack, (until, following) = (), next(borders)
        for number, operation in enumerate(self._graph.get_operations()):
            while number >= until:
                stack, (until, following) = following, next(borders)
            for tensor in operation.inputs:
                if tensor.name in handles:
                    handle = handles[tensor.name]
                    self.found.reads.append((id(handle), stack))
                    if handle.dtype == tf.resource and operation.type not in _READS:
                        self.found.changed.append((handle, stack))


class _Code(threading.local):
    """Does this thread run code of the script in a step?"""

    is_running = False


_code = _Code()


@functools.cache
def _watch_tapes() -> None:
    real = tf.GradientTape.gradient

    @functools.wraps(real)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        if _code.is_running:
            raise SMPUsageError(
                "tf.GradientTape does not see layers of other ranks: use "
                "optimizer.get_gradients(loss, model.trainable_variables) inside smp.step"
            )
        return real(*args, **kwargs)

    tf.GradientTape.gradient = gradient


@contextlib.contextmanager
def code_of_the_script(is_running: bool = True) -> Iterator[None]:
    """Refuses gradients of the script's own tapes, which do not see layers of other ranks."""
    _watch_tapes()
    before, _code.is_running = _code.is_running, is_running
    try:
        yield
    finally:
        _code.is_running = before


def trace(function: Callable[..., Any], args: Any, kwargs: Any) -> Trace:
    """Runs a function on symbolic tensors; no operation is executed.

    Args:
        function: of the step.
        args: of one microbatch; of tensors, type and shape count.
        kwargs: of one microbatch.
    """

    def symbolic(value: Any) -> Any:
        if isinstance(value, tf.Tensor | tf.TensorSpec):
            return tf.compat.v1.placeholder(value.dtype, value.shape)
        return value

    # Variables that layers make are outside of the graph, and get values at once.
    graph = FuncGraph("smp_trace")
    tracer = Tracer(graph)
    with graph.as_default(), code_of_the_script(), layers.intercepted(tracer):
        given, named = tf.nest.map_structure(symbolic, (list(args), dict(kwargs)))
        tracer.found.result = results(function(*given, **named))
    tracer.add_reads()
    return tracer.found


def handle_of(variable: Any) -> int:
    """Returns the number by which `Trace.reads` names a variable."""
    return id(as_tensor(variable).handle)
