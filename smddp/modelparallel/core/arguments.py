"""Divides the arguments of a step's function into those of each microbatch, by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from smddp.modelparallel.core.errors import SMPUsageError

__all__ = ["bind", "check_divisible", "divide_arguments", "entries", "not_of_the_batch"]


def divide_arguments(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    count: int,
    whole: Sequence[str],
    axes: Mapping[str, int],
    pieces: Callable[[str, Any, int, bool, int], list[Any]],
) -> list[tuple[list[Any], dict[str, Any]]]:
    """Returns the (positional, named) arguments of each microbatch.

    Args:
        function: whose parameter names `whole` and `axes` use.
        args: positional arguments.
        kwargs: named arguments.
        count: the number of microbatches.
        whole: names of arguments that are not divided.
        axes: along which dimension to divide, by name of the argument; 0 for those that are not
            named.
        pieces: divides the value of one argument; gets its name, the value, `count`, whether it
            stays whole, and the dimension.

    Raises:
        SMPUsageError: a name is unknown, or the function does not take the arguments.
    """
    bound = bind(function, args, kwargs)
    _check_names(bound.signature, whole, axes)
    parts: list[tuple[list[Any], dict[str, Any]]] = [([], {}) for _ in range(count)]
    for name, item, positional in entries(bound):
        made = pieces(name, item, count, name in whole, axes.get(name, 0))
        for part, piece in zip(parts, made, strict=True):
            if positional:
                part[0].append(piece)
            else:
                part[1][name] = piece
    return parts


def bind(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Returns the arguments of a step's function by their names.

    Raises:
        SMPUsageError: the function does not take them.
    """
    try:
        return inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise SMPUsageError(f"smp.step: {name}: {error}") from None


def entries(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any, bool]]:
    """Yields (name, value, is it positional?) of every argument."""
    skipped = False  # has an argument been left to its default? Those after it need their names
    for name, parameter in bound.signature.parameters.items():
        if name not in bound.arguments:
            skipped = True
            continue
        value, kind = bound.arguments[name], parameter.kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((name, item, True) for item in value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((entry, item, False) for entry, item in value.items())
        else:
            yield name, value, kind is not inspect.Parameter.KEYWORD_ONLY and not skipped


def not_of_the_batch(name: str) -> str:
    """Returns what to do, for errors, with an argument that is not part of the batch."""
    return f"If it is not part of the batch, add {name!r} to non_split_inputs of smp.step"


def check_divisible(
    name: str, shape: tuple[int | None, ...], count: int, axis: int, drop_last: str
) -> None:
    """Raises if a tensor cannot be divided into equal parts.

    Args:
        name: of the argument that has it.
        shape: of the tensor; None for a dimension in which it is ragged.
        count: the number of microbatches.
        axis: the dimension to divide.
        drop_last: how the framework drops the last, smaller batch; for the error.

    Raises:
        SMPUsageError: it has no such dimension, or that is no multiple of `count`.
    """
    advice = not_of_the_batch(name)
    if not -len(shape) <= axis < len(shape):
        raise SMPUsageError(
            f"argument {name!r} has a tensor of shape {shape}, which has no dimension {axis} to "
            f"divide. {advice}, or name the dimension in input_split_axes."
        )
    length = shape[axis]
    if length is None:
        raise SMPUsageError(
            f"argument {name!r} has a tensor of shape {shape}: its dimension {axis} is ragged and "
            "cannot be divided: name another one in input_split_axes."
        )
    if length % count:
        raise SMPUsageError(
            f"argument {name!r} has a tensor of shape {shape}: its dimension {axis} cannot be "
            f"divided into {count} microbatches. Use {drop_last} and a batch size that is a "
            f"multiple of {count}. {advice}."
        )


def _check_names(
    signature: inspect.Signature, whole: Sequence[str], axes: Mapping[str, int]
) -> None:
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in signature.parameters.values()
    )
    for name in (*whole, *axes):
        if name not in signature.parameters and not takes_any:
            raise SMPUsageError(
                f"smp.step: the function has no argument {name!r}; it has "
                f"{', '.join(signature.parameters)}"
            )
