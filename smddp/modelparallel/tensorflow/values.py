"""Divides nested Python values into bytes and tensors, and builds them again on another rank."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["Tensors", "as_tensor", "from_bytes", "pack", "results", "to_bytes", "unpack"]

Tensors = tf.Tensor | tf.RaggedTensor | tf.SparseTensor


def results(value: Any) -> Any:
    """Returns what a step's function has returned, with tensors for variables and slices."""

    def one(leaf: Any) -> Any:
        # Keras 2 has no class of its own.
        if isinstance(leaf, getattr(tf.keras, "Variable", tf.Variable)):
            leaf = as_tensor(leaf)
        is_other = isinstance(leaf, tf.Variable | tf.IndexedSlices)
        return tf.convert_to_tensor(leaf) if is_other else leaf

    return tf.nest.map_structure(one, value)


def as_tensor(variable: Any) -> Any:
    """Returns the variable of TensorFlow in one of Keras 3; other values as they are."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


def _mask_of(tensor: Any) -> Any:
    return getattr(tensor, "_keras_mask", None)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: Any, tensors: list[tf.Tensor]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, tf.Variable):
            obj = tf.convert_to_tensor(obj)
        if not isinstance(obj, tf.Tensor) or obj.dtype == tf.string:
            return None
        self._tensors.append(obj)
        number, mask = len(self._tensors) - 1, _mask_of(obj)
        if mask is None:
            return number, None
        self._tensors.append(mask)
        return number, number + 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: Any, tensors: list[Any]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        number, mask = pid
        tensor = self._tensors[number]
        if mask is not None:
            # Keras passes masks on in this attribute of tensors.
            tensor._keras_mask = self._tensors[mask]
        return tensor


def pack(value: Any) -> tuple[bytes, list[tf.Tensor]]:
    """Returns a value without its tensors, and these, with the masks that Keras keeps in them.

    Raises:
        PicklingError, TypeError, AttributeError: something in it cannot be pickled.
    """
    tensors: list[tf.Tensor] = []
    stream = io.BytesIO()
    _Pickler(stream, tensors).dump(value)
    return stream.getvalue(), tensors


def unpack(packed: bytes, tensors: list[Any]) -> Any:
    """Returns what `pack` was given, with these tensors."""
    return _Unpickler(io.BytesIO(packed), tensors).load()


def to_bytes(tensor: tf.Tensor) -> np.ndarray[Any, Any]:
    """Returns the memory of a tensor."""
    array = np.ascontiguousarray(np.asarray(tensor.numpy()))
    return array.reshape(-1).view(np.uint8)


def from_bytes(data: np.ndarray[Any, Any], kind: str, shape: tuple[int, ...]) -> tf.Tensor:
    """Returns a tensor with a copy of some memory."""
    array = data.view(tf.dtypes.as_dtype(kind).as_numpy_dtype).reshape(shape)
    return tf.convert_to_tensor(array.copy())
