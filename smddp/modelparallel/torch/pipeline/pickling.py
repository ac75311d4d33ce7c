"""Pickles what messages have besides tensors; objects of the script may hold tensors, too.

Gradients go back along the tensors of a message only. A tensor inside an object arrives as a leaf,
whose gradient nobody would fetch. So a backward pass that reaches it raises. Objects may hold
tensors that need no gradient there: a cache of keys and values has those of other layers.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from smddp.modelparallel.core.errors import SMPUsageError

__all__ = ["dumps"]


def dumps(value: Any) -> bytes:
    """Returns what `pickle.loads` turns into a copy of the value."""
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(value)
    return data.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.requires_grad):
            return NotImplemented
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        make, arguments, *_ = reduced
        return _made, (make, arguments)


def _made(make: Callable[..., torch.Tensor], arguments: Any) -> torch.Tensor:
    tensor = make(*arguments)
    if tensor.requires_grad:
        tensor.register_hook(_refuse)  # type: ignore[no-untyped-call]
    return tensor


@unserializable_hook  # type: ignore[untyped-decorator]  # it may go on to another rank
def _refuse(_: torch.Tensor) -> None:
    raise SMPUsageError(
        "a gradient reaches a tensor that came from another rank inside an object, and would be "
        "lost there. smp sends gradients of tensors in tuples, lists, sets, dicts, named tuples "
        "and dataclasses. Put the tensor into one of these where a module passes or returns it, or "
        "detach() it"
    )
