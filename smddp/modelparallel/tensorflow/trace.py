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
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.tensorflow import layers
from smddp.modelparallel.tensorflow.gradients import Gradient
from smddp.modelparallel.tensorflow.values import Tensors, as_tensor, results

__all__ = ["Trace", "code_of_the_script", "handle_of", "trace"]


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
        asked: for those of which variables.
        present: for each of them, does the loss depend on it? Empty if nobody wants to know.
        result: what the function returned.
    """

    called: list[Any] = dataclasses.field(default_factory=list)
    elements: dict[int, int] = dataclasses.field(default_factory=dict)
    size: dict[int, int] = dataclasses.field(default_factory=dict)
    reads: list[tuple[int, tuple[Any, ...]]] = dataclasses.field(default_factory=list)
    used: list[Any] = dataclasses.field(default_factory=list)
    changed: list[tuple[Any, tuple[Any, ...]]] = dataclasses.field(default_factory=list)
    trains: bool = False
    asked: list[Any] = dataclasses.field(default_factory=list)
    present: list[bool] = dataclasses.field(default_factory=list)
    result: Any = None


class Tracer:
    """The interceptor of a trace."""

    def __init__(self, graph: FuncGraph) -> None:
        self.found = Trace()
        self._graph = graph
        self._loss: Any = None
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
        self.found.trains, self.found.asked, self._loss = True, list(variables), loss
        return [Gradient(number) for number in range(len(variables))]

    def add_present(self) -> None:
        """Finds which variables the loss depends on, as a tape would."""
        places = {id(handle): place for handle, place in self._graph.captures}
        handles = [places.get(handle_of(variable)) for variable in self.found.asked]
        there = [handle for handle in handles if handle is not None]
        with self._graph.as_default(), code_of_the_script(False):
            gradients = iter(tf.gradients(self._loss, there))
        self.found.present = [
            handle is not None and next(gradients) is not None for handle in handles
        ]

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
    """Does this thread run code of the script in a step?

    Attributes:
        assigned: takes the handles of variables that it assigns to, by their ids.
    """

    is_running = False
    assigned: dict[int, Any] | None = None


_code = _Code()


@functools.cache
def _watch() -> None:
    """Replaces methods of tapes and variables for the whole process."""
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
    initialize = BaseResourceVariable.__init__

    @functools.wraps(initialize)
    def noted_initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        self._smp_is_local = _code.assigned is not None

    BaseResourceVariable.__init__ = noted_initialize
    for kind in (BaseResourceVariable, ResourceVariable):
        for name, method in list(kind.__dict__.items()):
            if name.startswith(("assign", "scatter_", "batch_scatter_")):
                setattr(kind, name, _noting(method))


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        # No other rank has a variable that a microbatch has made.
        if _code.assigned is not None and not getattr(self, "_smp_is_local", False):
            _code.assigned[id(self.handle)] = self.handle
        return method(self, *args, **kwargs)

    return noted


@contextlib.contextmanager
def code_of_the_script(
    is_running: bool = True, assigned: dict[int, Any] | None = None
) -> Iterator[None]:
    """Refuses gradients of the script's own tapes, which do not see layers of other ranks.

    Args:
        is_running: is it the script's code, and not that of smp?
        assigned: takes the handles of variables that the code assigns to, by their ids.
    """
    _watch()
    before = _code.is_running, _code.assigned
    _code.is_running, _code.assigned = is_running, assigned
    try:
        yield
    finally:
        _code.is_running, _code.assigned = before


def trace(function: Callable[..., Any], args: Any, kwargs: Any, in_graph: bool) -> Trace:
    """Runs a function on symbolic tensors; no operation is executed.

    Args:
        function: of the step.
        args: of one microbatch; of tensors, type and shape count.
        kwargs: of one microbatch.
        in_graph: find out which gradients there are.
    """

    def symbolic(value: Any) -> Any:
        if not isinstance(value, tf.TypeSpec | Tensors):
            return value
        spec = tf.type_spec_from_value(value) if isinstance(value, Tensors) else value
        parts = tf.nest.flatten(spec, expand_composites=True)
        made = [tf.compat.v1.placeholder(part.dtype, part.shape) for part in parts]
        return tf.nest.pack_sequence_as(spec, made, expand_composites=True)

    # Variables that layers make are outside of the graph, and get values at once.
    graph = FuncGraph("smp_trace")
    tracer = Tracer(graph)
    with graph.as_default(), code_of_the_script(), layers.intercepted(tracer):
        given, named = tf.nest.map_structure(symbolic, (list(args), dict(kwargs)))
        tracer.found.result = results(function(*given, **named))
    tracer.add_reads()
    if in_graph and tracer.found.trains:
        tracer.add_present()  # after what looks at the function's own operations
    return tracer.found


def handle_of(variable: Any) -> int:
    """Returns the number by which `Trace.reads` names a variable."""
    return id(as_tensor(variable).handle)
