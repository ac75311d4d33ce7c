"""Layers of Keras 2 and 3: what they hold, and how smp sees their calls."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.tensorflow import job

__all__ = [
    "Interceptor",
    "children",
    "intercepted",
    "mark_of",
    "own_weights",
    "partition",
    "training_of",
    "tree",
    "with_training",
]

_Layer = tf.keras.layers.Layer
_MARK = "_smp_partition"


class Interceptor(Protocol):
    """Gets the calls of layers that code of one thread makes."""

    def called(
        self, layer: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Returns the result of a call; `original` is the method of Keras."""


class _Thread(threading.local):
    interceptor: Interceptor | None = None
    partition: int | None = None


_thread = _Thread()


def _install() -> None:
    """Replaces two methods of Keras for the whole process."""
    call, initialize = _Layer.__call__, _Layer.__init__

    @functools.wraps(call)
    def seen_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.partition is not None and mark_of(self) is None:
            _mark(self)
        interceptor = _thread.interceptor
        if interceptor is None:
            return call(self, *args, **kwargs)
        return interceptor.called(self, functools.partial(call, self), args, kwargs)

    @functools.wraps(initialize)
    def seen_initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if _thread.partition is not None:
            _mark(self)

    # Keras reads it where a class has no constructor of its own.
    seen_initialize.__signature__ = inspect.signature(initialize)  # type: ignore[attr-defined]
    _Layer.__call__, _Layer.__init__ = seen_call, seen_initialize


_install()


@contextlib.contextmanager
def intercepted(interceptor: Interceptor | None) -> Iterator[None]:
    """Gives an interceptor the calls that this thread makes in the context."""
    before, _thread.interceptor = _thread.interceptor, interceptor
    try:
        yield
    finally:
        _thread.interceptor = before


def current() -> Interceptor | None:
    """Returns the interceptor of this thread; None if there is none."""
    return _thread.interceptor


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Puts the layers that are made, or called for the first time, in the context on a partition.

    The innermost context counts; what a layer was given when it was made, stays. It has no effect
    with `auto_partition`.

    Args:
        index: of the partition.

    Raises:
        SMPUsageError: there is no such partition.
    """
    if not isinstance(index, int) or not 0 <= index < job.pp_size():
        raise SMPUsageError(
            f"smp.partition({index!r}): the configuration has {job.pp_size()} partitions, whose "
            f"numbers are 0 to {job.pp_size() - 1}"
        )
    before, _thread.partition = _thread.partition, index
    try:
        yield
    finally:
        _thread.partition = before


def _mark(layer: Any) -> None:
    # Not the layer's own setattr, which Keras refuses before its constructor has run.
    object.__setattr__(layer, _MARK, _thread.partition)


def mark_of(layer: Any) -> int | None:
    """Returns the partition that `partition` has given to a layer; None if it has given none."""
    found: int | None = layer.__dict__.get(_MARK)
    return found


def tree(root: Any) -> list[Any]:
    """Returns a layer and all that are in it, each once, in an order that depends on code only."""
    return list({id(layer): layer for layer in root._flatten_layers()}.values())


def children(layer: Any) -> list[Any]:
    """Returns the layers directly in a layer."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def own_weights(layer: Any) -> list[Any]:
    """Returns the weights of a layer that are not those of layers in it."""
    inner = {id(weight) for child in children(layer) for weight in child.weights}
    return [weight for weight in layer.weights if id(weight) not in inner]


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _parameters(layer: Any) -> inspect.Signature:
    return _signature(type(layer).call)


def training_of(layer: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Returns the argument `training` of a call; None if there is none."""
    if "training" in kwargs or not args:
        return kwargs.get("training")
    names = list(_parameters(layer).parameters)[1 : len(args) + 1]
    return args[names.index("training")] if "training" in names else None


def with_training(layer: Any, args: tuple[Any, ...], kwargs: Any, training: Any) -> Any:
    """Returns the named arguments of a call, with `training` if the layer takes it and has none."""
    if training is None or training_of(layer, args, kwargs) is not None:
        return kwargs
    if "training" not in _parameters(layer).parameters:
        return kwargs
    return {**kwargs, "training": training}
