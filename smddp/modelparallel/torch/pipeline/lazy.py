"""Values that another rank has not computed yet.

A call of a module on another rank usually returns at once, with `Lazy` tensors. If the code passes
them to other remote modules and then drops them, the values never come here: they go from owner to
owner. A local module fetches them.
As soon as the code uses a lazy tensor in any other way (any function, method or attribute of a
tensor), smp fetches the value, and the code goes on with that.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import torch

from smddp._torch_internals import (
    FUNCTION_APPLY,
    make_wrapper_subclass,
    set_backward_hooks,
    tree_map,
)
from smddp.modelparallel.torch.common.placeholder import WITHOUT, Placeholder, force

__all__ = ["Lazy", "patch_function_apply"]

# Where a lazy tensor may be inside the arguments of a function of torch.
_CONTAINERS = (list, tuple, dict)


def _misused(_: torch.Tensor) -> None:
    raise RuntimeError(
        "a value of another rank was used in a way that smp cannot see; put the code that takes a "
        "module's output into a module of its own, or set direct_forwarding: False in the smp "
        "configuration"
    )


# What `register_hook(_misused)` would store in each lazy tensor.
_HOOKS: Any = collections.OrderedDict({0: _misused})


class Lazy(Placeholder):
    """Stands for a tensor that a call of an open call graph returns.

    Attributes:
        tensor_id: which tensor of the call graph; see `TensorId`.
        collector: the call graph, a `Collector`.
        fetch: gets the value from its owner, and sets `value`; None once that is done.
        value: the tensor, once it is fetched.
    """

    fetch: Callable[[], object] | None
    tensor_id: tuple[int, int]
    collector: Any
    value: torch.Tensor

    @classmethod
    def of(cls, collector: Any, tensor_id: tuple[int, int], fetch: Callable[[], object]) -> Lazy:
        """Returns a tensor without memory that stands for a value."""
        with WITHOUT():
            self: Lazy = make_wrapper_subclass(cls, (0,), requires_grad=True)
            # If autograd ever reaches it, smp has not seen its use. The hook raises then, because
            # the gradient would be lost.
            set_backward_hooks(self, _HOOKS)
            self.collector, self.tensor_id, self.fetch = collector, tensor_id, fetch
        return self

    def resolved(self) -> torch.Tensor:
        """Returns the value."""
        if self.fetch is not None:
            with WITHOUT():
                if self.grad_fn is not None:
                    _misused(self)
            self.fetch()
            assert self.fetch is None
        return self.value

    ordinary = resolved

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Lazy{self.tensor_id}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch with the values in place of lazy tensors."""
        if kwargs or any(isinstance(value, _CONTAINERS) for value in args):
            return func(*tree_map(force, args), **tree_map(force, kwargs or {}))
        return func(*[force(value) for value in args])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuses: only code that bypasses __torch_function__ comes here."""
        _misused(args[0])


def patch_function_apply() -> None:
    """Makes `torch.autograd.Function.apply` fetch lazy tensors, too."""
    FUNCTION_APPLY.install(_fetching)


def _fetching(original: Any) -> Any:
    @functools.wraps(torch.autograd.Function.apply)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Placeholder) for arg in args):
            args = tuple(map(force, args))
        return original.__get__(None, cls)(*args, **kwargs)

    return classmethod(apply)
