"""Tensors that stand for values which are elsewhere, or do not exist yet.

Lazy, remote and sharded ones decide at each function of torch, by its name, whether they answer
without values, fetch them, or refuse. Delayed ones decide at each operation of ATen, because they
record all; they are fake tensors of torch. "Placeholders" in docs/model-parallel-design.md has a
table.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from smddp._torch_internals import DisableTorchFunctionSubclass, tree_leaves

__all__ = ["WITHOUT", "About", "Placeholder", "about", "force"]

# A context in which functions of torch do not call `__torch_function__` of subclasses.
WITHOUT = DisableTorchFunctionSubclass

# Kind of answer -> the functions and attributes of tensors for which a placeholder gives it.
_NAMES = {
    # What does not depend on the values: functions, and attributes (torch.autograd.grad does).
    "describes": (
        "is_floating_point is_complex is_signed is_inference is_contiguous is_same_size is_tensor "
        "is_storage is_conj is_neg is_shared is_pinned numel nelement dim ndimension size stride "
        "element_size storage_offset get_device has_names data_ptr register_hook requires_grad_ "
        "register_post_accumulate_grad_hook retain_grad _use_count _is_view __len__ __hash__ "
        "__repr__ __format__ __dir__ __deepcopy__ __reduce_ex__ __copy__"
    ),
    "attribute_describes": (
        "shape dtype device ndim requires_grad grad grad_fn grad_dtype layout names output_nr "
        "retains_grad itemsize nbytes"
    ),
    # Of that, what is different once a module has put another tensor in the place of a buffer.
    "form": (
        "shape dtype ndim itemsize nbytes is_floating_point is_complex is_signed is_contiguous "
        "is_same_size numel nelement dim ndimension size stride element_size storage_offset __len__"
    ),
    # What takes effect where a parameter lives.
    "of_gradients": (
        "requires_grad requires_grad_ register_hook register_post_accumulate_grad_hook"
    ),
    # What makes another tensor of the same form.
    "like": "untyped_storage zeros_like ones_like empty_like full_like rand_like randn_like",
    # What needs values, and does not return a tensor.
    "reads": ("item tolist numpy is_nonzero __array__ __bool__ __int__ __float__ __index__ equal"),
    # What changes its first argument; other names that end with "_" do, too.
    "changes": (
        "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ "
        "__iand__ __ior__ __ixor__ __ilshift__ __irshift__ __imatmul__"
    ),
    # What may change an argument without a change of its version counter.
    "changes_unseen": "batch_norm instance_norm",
    # What writes each element of its first argument, and does not depend on its values.
    "overwrites": (
        "copy_ fill_ zero_ uniform_ normal_ random_ bernoulli_ exponential_ geometric_ cauchy_ "
        "log_normal_"
    ),
}
_KINDS = {kind: frozenset(names.split()) for kind, names in _NAMES.items()}


class About(NamedTuple):
    """What is known about a function of torch.

    Attributes:
        name: its own, or that of the attribute that it reads, sets or deletes.
        is_attribute: does it read, set or delete an attribute?
        others: what the kinds of `_NAMES` say.
    """

    name: str
    is_attribute: bool
    describes: bool
    form: bool
    of_gradients: bool
    like: bool
    reads: bool
    changes: bool
    changes_unseen: bool
    overwrites: bool


@functools.lru_cache(1024)
def about(func: Any) -> About:
    """Returns what is known about a function or method of torch, or an operator of ATen."""
    name: str = getattr(func, "__name__", "").partition(".")[0]  # without the overload
    is_attribute = name in ("__get__", "__set__", "__delete__")
    if is_attribute:
        access, name = name, getattr(func.__self__, "__name__", "")
    found = {kind: name in names for kind, names in _KINDS.items()}
    described = found.pop("attribute_describes")
    if is_attribute:
        found["describes"] = described or name.startswith(("is_", "_"))
        found["changes"] = access == "__set__"
    else:
        found["changes"] |= name.endswith("_") and not name.endswith("__")
    return About(name, is_attribute, **found)


class Placeholder(torch.Tensor):
    """A tensor without values of its own."""

    def resolved(self) -> Any:
        """Returns the values, which are fetched if need be; itself where it stays what it is."""
        return self

    def ordinary(self) -> torch.Tensor:
        """Returns the tensor as which it is pickled: an empty one of the same shape and dtype."""
        with WITHOUT():
            return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def called(self, known: About, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns what a function of torch gives; this is the first placeholder that it gets."""
        with WITHOUT():
            return func(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets the first placeholder of the class decide."""
        kwargs = kwargs or {}
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        return first.called(about(func), func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is pickled as an ordinary tensor."""
        plain: Any = self.ordinary()
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)


def force(value: Any) -> Any:
    """Returns the values of a placeholder; fetches them if they are not here.

    Any other argument is returned unchanged.
    """
    return value.resolved() if isinstance(value, Placeholder) else value
