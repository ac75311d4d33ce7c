"""Divides the arguments of a step into microbatches, and collects what comes back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from smddp.modelparallel.core.arguments import (
    check_divisible,
    divide_arguments,
    entries,
    not_of_the_batch,
)
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common.structure import Structure, flatten, rebuild

__all__ = ["StepOutput", "collect", "divided_arguments", "split_arguments", "unequal_lengths"]


class StepOutput:
    """What a step returns for a tensor of the body: its value in each microbatch.

    Attributes:
        outputs: the values, by microbatch, with the shapes and dtypes that the body has returned.

    Source: the SageMaker Python SDK's page on `smdistributed.modelparallel.torch.step`.

    Example:
        >>> output = smp.StepOutput([torch.zeros(2), torch.ones(2)])
        >>> output.reduce_mean()
        tensor([0.5000, 0.5000])
        >>> output.concat().shape, output.stack().shape
        (torch.Size([4]), torch.Size([2, 2]))
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> torch.Tensor:
        """Returns the mean over the microbatches, of the shape of one value.

        Integers and bools become floating-point numbers. All values must have the same shape.
        """
        first = self.outputs[0].dtype
        # The sum may be too large for a small dtype, the mean is not.
        wide = torch.int64
        if first.is_floating_point or first.is_complex:
            wide = torch.promote_types(first, torch.float32)
        mean = StepOutput([output.to(wide) for output in self.outputs]).reduce_sum()
        mean = mean / len(self.outputs)
        return mean if wide == torch.int64 else mean.to(first)

    average = reduce_mean

    def reduce_sum(self) -> torch.Tensor:
        """Returns the sum over the microbatches, of the shape and dtype of one value.

        Of bools, it is how often they are True, in int64.

        Raises:
            RuntimeError: the shapes of the values do not broadcast.
        """
        total = self.outputs[0]
        if total.dtype == torch.bool:
            total = total.long()
        for output in self.outputs[1:]:
            total = total + output
        return total

    def concat(self) -> torch.Tensor:
        """Returns the values one after the other along dimension 0, as torch.cat does.

        Raises:
            RuntimeError: the values have no dimensions, as losses have; use `stack` for them.
        """
        return torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """Returns the values along a new dimension 0, which is the microbatch.

        Raises:
            RuntimeError: the values differ in shape.
        """
        return torch.stack(self.outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs})"

    # It has no __getitem__ either, so `for x in output` raises a TypeError.
    __iter__ = None


def split_arguments(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    count: int,
    whole: Sequence[str],
    axes: Mapping[str, int],
) -> list[tuple[list[Any], dict[str, Any]]]:
    """Returns the arguments of each microbatch; those of this function are of `divide_arguments`.

    Returns:
        (positional, named) arguments for each microbatch. Tensors share memory with the given
        ones. An object with a method `smp_slice` is replaced by the result of `smp_slice(count,
        number, axis)`. Modules and optimizers are not divided.

    Raises:
        SMPUsageError: a name is unknown, the function does not take the arguments, or a tensor
            cannot be divided evenly.
    """
    return divide_arguments(function, args, kwargs, count, whole, axes, _pieces)


def divided_arguments(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    whole: Sequence[str],
) -> Iterator[tuple[str, Structure, list[torch.Tensor]]]:
    """Yields name, structure and tensors of each argument that is divided.

    The arguments are those of `split_arguments`.
    """
    for name, item, _ in entries(inspect.signature(function).bind(*args, **kwargs)):
        if name not in whole and not isinstance(item, torch.nn.Module | torch.optim.Optimizer):
            tensors: list[torch.Tensor] = []
            yield name, flatten(item, tensors, [], _slices_itself), tensors


def unequal_lengths(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    whole: Sequence[str],
    axes: Mapping[str, int],
) -> str:
    """Returns a text with the length of each argument of a step if they differ; else "".

    Different lengths are not an error: one argument may have several rows for each row of another.
    The arguments are those of `split_arguments`.
    """
    found: dict[str, int] = {}
    for name, _, tensors in divided_arguments(function, args, kwargs, whole):
        axis = axes.get(name, 0)
        for tensor in tensors:
            if -tensor.dim() <= axis < tensor.dim():
                found[f"{name!r} has {tensor.shape[axis]} (dimension {axis})"] = tensor.shape[axis]
    if len(set(found.values())) < 2:
        return ""
    return f"the arguments that smp.step divides differ in length: {', '.join(found)}"


def _pieces(name: str, value: Any, count: int, whole: bool, axis: int) -> list[Any]:
    if whole:
        return [value] * count
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer) and not _slices_itself(value):
        return [value] * count
    tensors: list[torch.Tensor] = []
    objects: list[Any] = []
    structure = flatten(value, tensors, objects, _slices_itself)
    if not tensors and not any(_slices_itself(item) for item in objects):
        return [value] * count
    divided = [_divide(name, tensor, count, axis) for tensor in tensors]
    return [
        rebuild(
            structure,
            [chunks[number] for chunks in divided],
            [
                item.smp_slice(count, number, axis) if _slices_itself(item) else item
                for item in objects
            ],
        )
        for number in range(count)
    ]


def _slices_itself(value: Any) -> bool:
    return hasattr(value, "smp_slice")


def _divide(name: str, tensor: torch.Tensor, count: int, axis: int) -> list[torch.Tensor]:
    if tensor.dim() == 0:
        if count == 1:
            return [tensor]
        raise SMPUsageError(
            f"argument {name!r} has a tensor without dimensions. {not_of_the_batch(name)}."
        )
    drop_last = "drop_last=True in the DataLoader"
    check_divisible(name, tuple(tensor.shape), count, axis, drop_last)
    length = tensor.shape[axis] // count
    parts = [tensor.narrow(axis, number * length, length) for number in range(count)]
    # Each counts its own changes in place. Views of one tensor count them together, so a change of
    # one would look to autograd, and to smp, like a change of all.
    return parts if tensor.requires_grad else [part.data for part in parts]


def collect(results: Sequence[Any], detach: bool) -> Any:
    """Returns what the caller of a step gets from what the microbatches returned.

    The structure is that of the results; each tensor becomes a StepOutput, each other value a
    list with an entry per microbatch.

    Args:
        results: by microbatch.
        detach: return the tensors without their autograd graphs.

    Raises:
        SMPUsageError: the results differ in structure.
    """
    parts = []
    for result in results:
        tensors: list[torch.Tensor] = []
        objects: list[Any] = []
        parts.append((flatten(result, tensors, objects), tensors, objects))
    structures = {_outline(structure) for structure, _, _ in parts}
    if len(structures) > 1:
        raise SMPUsageError(
            "smp.step: the microbatches returned values of different structures: "
            f"{[type(result).__name__ for result in results]}"
        )
    if results and results[0] is None and all(result is None for result in results):
        return None
    return _combine(parts, detach)


def _outline(structure: Any) -> Any:
    """Returns a structure without the values of its constants."""
    if structure[0] == "t":
        return "t"
    if structure[0] in "co":
        return "c"
    if structure[0] in "da":
        return (*structure[:3], tuple(_outline(child) for child in structure[3]))
    return (structure[0], tuple(_outline(child) for child in structure[-1]))


def _combine(parts: list[tuple[Any, list[torch.Tensor], list[Any]]], detach: bool) -> Any:
    """Builds the combined value in the structure of the first part."""
    first = parts[0][0]
    letter = first[0]
    if letter == "t":
        values = [tensors[structure[1]] for structure, tensors, _ in parts]
        return StepOutput([value.detach() if detach else value for value in values])
    if letter == "c" or letter == "o":
        return [rebuild(structure, tensors, objects) for structure, tensors, objects in parts]
    children = []
    for position in range(len(first[-1])):
        children.append(_combine([(s[-1][position], t, o) for s, t, o in parts], detach))
    placeholders = [("o", position) for position in range(len(children))]
    return rebuild((*first[:-1], tuple(placeholders)), [], children)
