"""What the classes of the family share: checks of arguments, activations, masks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smddp.modelparallel.core.errors import SMPUsageError

__all__ = [
    "MASKED",
    "activation_function",
    "additive",
    "arguments_of",
    "at_least_fp32",
    "check_divides",
    "check_ids",
    "check_mask",
    "unpack",
]

# Added to a score, it leaves a weight of 0. Where all keys of a query are masked, the sums still
# hold the scores, so there are weights and gradients. With much larger numbers the kernels of flash
# attention compute wrong gradients for such a query, and -inf makes them NaN.
MASKED = -1e4

_TANH = partial(F.gelu, approximate="tanh")
# Names as in Hugging Face's configurations.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_fast": _TANH,
    "gelu_new": _TANH,
    "gelu_pytorch_tanh": _TANH,
    "relu": F.relu,
}


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the activation function of a name.

    "gelu" is exact; the other names that begin with it are the approximation by tanh.

    Raises:
        SMPUsageError: there is none of this name.
    """
    function = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if function is None:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise SMPUsageError(f"activation={name!r} is not known; use one of {known}")
    return function


def check_divides(owner: str, name: str, value: int, size: int) -> None:
    """Checks that the ranks of a tensor-parallel group can have equal parts.

    Raises:
        SMPUsageError: they cannot.
    """
    if value <= 0 or value % size:
        raise SMPUsageError(
            f"{owner}: {name}={value} must be a positive multiple of the tensor_parallel_degree, "
            f"{size}"
        )


def arguments_of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the given values that are arguments of a class, by name."""
    names = inspect.signature(kind).parameters
    return {name: given[name] for name in names if name in given}


def unpack(
    owner: str,
    inputs: Any,
    named: Mapping[str, Any],
    names: tuple[str, ...],
    *others: tuple[str, ...],
) -> tuple[Any, ...]:
    """Returns the values of a tuple of inputs.

    Args:
        owner: takes them, for the text of an error.
        inputs: the tuple.
        named: named arguments of the call, which are not allowed.
        names: of the inputs.
        others: other such names, of tuples with other lengths.

    Raises:
        SMPUsageError: it is no tuple, or has another length, or there are named arguments.
    """
    wanted = f"one tuple ({', '.join(names)})"
    if named:
        raise SMPUsageError(f"{owner} takes {wanted}, and no named argument {next(iter(named))!r}")
    if not isinstance(inputs, (tuple, list)):
        raise SMPUsageError(f"{owner} takes {wanted}, not a {type(inputs).__name__}")
    if len(inputs) not in map(len, (names, *others)):
        raise SMPUsageError(f"{owner} takes {wanted}, not one of length {len(inputs)}")
    return tuple(inputs)


def check_mask(
    owner: str, name: str, mask: Any, shape: tuple[int, ...], text: str, added: bool = False
) -> None:
    """Checks the shape of a mask, and its dtype if it is added to scores.

    Args:
        owner: takes it, for the text of an error.
        name: of the mask.
        mask: None is right.
        shape: that it has to have; in all dimensions but the last one, it may have 1.
        text: explains the shape: the names of dimensions, and what values mean.
        added: is it added to scores? True would add 1 to them.

    Raises:
        SMPUsageError: it has another one.
    """
    if mask is None:
        return
    found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    if (
        not isinstance(mask, Tensor)
        or mask.dim() != len(shape)
        or mask.shape[-1] != shape[-1]
        or any(own not in (1, wanted) for own, wanted in zip(mask.shape, shape, strict=True))
    ):
        raise SMPUsageError(f"{owner}: {name} has to be {list(shape)}, {text}; it is {found}")
    if added and mask.dtype == torch.bool:
        raise SMPUsageError(
            f"{owner}: {name} is added to the scores, and cannot be of bool: pass 0 where a "
            f"position is seen, and {MASKED:g} where it is masked"
        )


def check_ids(
    owner: str, name: str, ids: Any, shape: tuple[int, ...], whole: bool = False, real: bool = False
) -> None:
    """Checks numbers of tokens, of their types or of positions.

    Args:
        owner: takes them, for the text of an error.
        name: of the argument.
        ids: None is right.
        shape: [B, S]. Without `whole`, they only have to broadcast to it, with all of S.
        whole: they are labels: of this shape and int64. Otherwise they may also be int32.
        real: they may have any dtype.

    Raises:
        SMPUsageError: they have another shape or dtype.
    """
    if ids is None:
        return
    kinds = (torch.int64,) if whole else (torch.int32, torch.int64)
    text = " or ".join(str(kind).removeprefix("torch.") for kind in kinds)
    found: Any = type(ids).__name__
    if isinstance(ids, Tensor):
        found = f"{list(ids.shape)}, {str(ids.dtype).removeprefix('torch.')}"
        begin = len(shape) - ids.dim()
        broadcasts = (
            not whole
            and 0 < ids.dim() <= len(shape)
            and ids.shape[-1] == shape[-1]
            and all(own in (1, n) for own, n in zip(ids.shape, shape[begin:], strict=True))
        )
        if (broadcasts or tuple(ids.shape) == shape) and (real or ids.dtype in kinds):
            return
    wanted = f"{list(shape)}, [B, S]" + ("" if real else f", {text}")
    raise SMPUsageError(f"{owner}: {name} has to be {wanted}; it is {found}")


def at_least_fp32(x: Tensor) -> Tensor:
    """Returns a tensor in fp32, or as it is if its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def additive(masked: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what to add to scores where 1 or True means masked: a large negative number, or 0."""
    result = torch.zeros(masked.shape, dtype=dtype, device=masked.device)
    return result.masked_fill(masked.bool(), MASKED)
