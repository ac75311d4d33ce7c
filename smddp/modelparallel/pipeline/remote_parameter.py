"""Parameters that live on another rank.

Such a parameter keeps its shape and dtype, and has no memory: it is a tensor on "meta". In a step,
code that reads it gets the values from their owner, by a call that returns them, so a gradient goes
back the same way. Outside a step there is nobody to answer. There each rank works on what it has:
whatever is computed from a remote parameter is empty, too, so that code which treats all parameters
alike runs on every rank; and asking for its values raises an error that names the parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves, tree_map

from smddp.modelparallel.common.errors import SMPUsageError
from smddp.modelparallel.pipeline.lazy import force, substitute

__all__ = ["Home", "RemoteParameter", "empty", "fill", "patch_averaged_model"]

_WITHOUT = torch._C.DisableTorchFunctionSubclass

# What does not depend on the values: attributes, besides those that begin with "is_" or "_"; and
# methods.
_ATTRIBUTES = frozenset(
    (  # noqa: SIM905
        "shape dtype device ndim requires_grad grad grad_fn grad_dtype layout names output_nr "
        "retains_grad itemsize nbytes"
    ).split()
)
_METHODS = frozenset(
    (  # noqa: SIM905
        "is_floating_point is_complex is_signed is_inference is_contiguous is_same_size is_tensor "
        "is_storage is_conj is_neg is_shared is_pinned numel nelement dim ndimension size stride "
        "element_size storage_offset get_device has_names data_ptr register_hook requires_grad_ "
        "register_post_accumulate_grad_hook retain_grad _use_count _is_view __len__ __hash__ "
        "__repr__ __format__ __dir__ __deepcopy__ __reduce_ex__ __copy__"
    ).split()
)
# What needs values and is not an operation.
_READS = frozenset(
    (  # noqa: SIM905
        "item tolist numpy is_nonzero __array__ __bool__ __int__ __float__ __index__ equal"
    ).split()
)
# What changes its first argument; besides names that end with "_".
_CHANGES = frozenset(
    (  # noqa: SIM905
        "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ "
        "__iand__ __ior__ __ixor__ __ilshift__ __irshift__ __imatmul__"
    ).split()
)


class Home(NamedTuple):
    """Where a parameter lives.

    Attributes:
        name: of the parameter in the model.
        owner: rank of the pipeline.
        device: of what lives on this rank.
        read: in a step, returns the values, a lazy tensor; None outside. The argument is the
            parameter's name.
        copied: it is a copy of the model's parameter, as `copy.deepcopy` makes.
    """

    name: str
    owner: int
    device: torch.device
    read: Callable[[str], torch.Tensor | None]
    copied: bool = False

    def error(self) -> SMPUsageError:
        """Returns what is raised where the values are needed and cannot be had."""
        if self.copied:
            return SMPUsageError(
                f"this is a copy of parameter {self.name!r}, which lives on rank {self.owner} of "
                "the pipeline, and so does its copy there. A copy of the model has on each rank "
                "only what lives there. Copy its parameters back into the model's, on all ranks, "
                "and call the model"
            )
        return SMPUsageError(
            f"parameter {self.name!r} lives on rank {self.owner} of the pipeline, and this rank "
            "does not have its values. Read it within a function decorated with smp.step; or use "
            "model.state_dict(), which gathers all values; or model.local_parameters() for what "
            "lives here"
        )

    def refusal(self, name: str) -> SMPUsageError:
        """Returns what is raised if code in a step wants to change the values."""
        return SMPUsageError(
            f"parameter {self.name!r} lives on rank {self.owner} of the pipeline: {name} would "
            "change a copy of it only. Change it in the forward method of its module, or outside "
            "the step on all ranks"
        )


@functools.lru_cache(1024)
def _kind(func: Any) -> tuple[str, bool, bool]:
    """Returns the name of a function of torch; does it not need values; does it change them?"""
    name: str = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__", "__delete__"):
        changes = name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
        return name, name in _METHODS, changes
    attribute: str = getattr(func.__self__, "__name__", "")
    describes = attribute in _ATTRIBUTES or attribute.startswith(("is_", "_"))
    return attribute, describes, name == "__set__"


class RemoteParameter(nn.Parameter):
    """A parameter of a module on another rank.

    Attributes:
        home: where it lives.
    """

    home: Home

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch with the values if they can be had, else without."""
        kwargs = kwargs or {}
        name, describes, changes = _kind(func)
        if describes:
            if name == "device" and args[0].home.read(""):
                return args[0].home.device
            with _WITHOUT():
                return func(*args, **kwargs)
        home = next(
            value.home for value in tree_leaves((args, kwargs)) if type(value) is RemoteParameter
        )
        if func is torch.autograd.grad:
            raise SMPUsageError(
                f"torch.autograd.grad cannot return the gradient of parameter {home.name!r}, which "
                f"lives on rank {home.owner} of the pipeline: call model.backward, and read its "
                "`grad` on that rank after the step"
            )
        if home.read("") is None:
            return _without_values(home, name, func, args, kwargs)
        if changes and any(type(one) is RemoteParameter for one in tree_leaves(args[:1])):
            raise home.refusal(name)
        args, kwargs = tree_map(_lazily, (args, kwargs))
        args, kwargs = tree_map(force, (args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteParameter:
        """Returns another empty parameter."""
        if id(self) not in memo:
            memo[id(self)] = _hollow(self, self.home._replace(copied=True, read=_nothing))
        copied: RemoteParameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is pickled as an ordinary empty parameter."""
        with _WITHOUT():
            plain: Any = nn.Parameter(_shape(self), self.requires_grad)
            return plain.__reduce_ex__(protocol)


class _RemoteValue(torch.Tensor):
    """What was computed from a remote parameter without values."""

    home: Home

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        home = next(
            value.home
            for value in tree_leaves((args, kwargs))
            if type(value) in (_RemoteValue, RemoteParameter)
        )
        return _without_values(home, getattr(func, "__name__", ""), func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _WITHOUT():
            copied = memo[id(self)] = _marked(self.home, torch.empty_like(_shape(self)))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _WITHOUT():
            plain: Any = _shape(self)
            return plain.__reduce_ex__(protocol)


def empty(parameter: nn.Parameter, home: Home) -> None:
    """Frees the memory of a parameter, which becomes a `RemoteParameter`; the object stays."""
    _refuse_gradients(parameter, home)
    hollow = _hollow(parameter, home)
    hollow.__dict__.update(parameter.__dict__)
    hollow.home = home
    parameter.grad = None
    try:
        with _WITHOUT():
            torch.utils.swap_tensors(parameter, hollow)  # type: ignore[no-untyped-call]
    except RuntimeError:
        # There are weak references to it, as in recurrent layers. Its memory can still be freed:
        # one element, NaN if possible, stands for all of them.
        value = float("nan") if parameter.is_floating_point() else 0
        one = torch.full((1,) * parameter.dim(), value, dtype=parameter.dtype)
        parameter.data = one.to(parameter.device).expand(parameter.shape)
        parameter.__class__ = RemoteParameter
        parameter.home = home  # type: ignore[attr-defined]


def fill(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Gives a parameter values; a remote one becomes an ordinary parameter, the object stays."""
    if not isinstance(parameter, RemoteParameter):
        parameter.data = value
        return
    fresh = nn.Parameter(value, parameter.requires_grad)
    try:
        with _WITHOUT():
            torch.utils.swap_tensors(parameter, fresh)  # type: ignore[no-untyped-call]
    except RuntimeError:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        parameter.data = value


def patch_averaged_model() -> None:
    """Lets `torch.optim.swa_utils.AveragedModel` average on each rank what lives there.

    A copy from before the first step has all parameters. As there is nothing to average with, those
    of other ranks become empty in it, too.
    """
    AveragedModel.update_parameters = _update_parameters  # type: ignore[method-assign]


_original_update = AveragedModel.update_parameters


@functools.wraps(_original_update)
def _update_parameters(self: AveragedModel, model: nn.Module) -> None:
    for average, parameter in zip(self.module.parameters(), model.parameters(), strict=False):
        if isinstance(parameter, RemoteParameter) and not isinstance(average, RemoteParameter):
            empty(average, parameter.home._replace(copied=True, read=_nothing))
    _original_update(self, model)


def _nothing(_: str) -> None:
    """Reads the values of a copy: there are none."""


def _lazily(value: Any) -> Any:
    return value.home.read(value.home.name) if type(value) is RemoteParameter else value


@substitute(RemoteParameter)
def _values(parameter: RemoteParameter) -> Any:
    """Returns the values in a step; outside, the parameter."""
    found = parameter.home.read(parameter.home.name)
    return parameter if found is None else force(found)


def _without_values(home: Home, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    if name in _READS:
        raise home.error()
    try:
        with _WITHOUT():
            result = func(*args, **kwargs)
    except Exception as error:
        if "meta" not in str(error).lower():
            raise
        raise home.error() from error
    return tree_map(functools.partial(_marked, home), result)


def _marked(home: Home, value: Any) -> Any:
    if type(value) is not torch.Tensor:
        return value
    with _WITHOUT():
        marked = value.as_subclass(_RemoteValue)
    marked.home = home
    return marked


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an ordinary empty tensor of the same shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _hollow(parameter: nn.Parameter, home: Home) -> RemoteParameter:
    with _WITHOUT():
        shape = torch.empty_strided(
            parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta"
        )
        hollow = RemoteParameter(shape, parameter.requires_grad)
    hollow.home = home
    return hollow


def _refuse_gradients(parameter: nn.Parameter, home: Home) -> None:
    """Lets backward passes through earlier uses of a parameter on this rank raise."""
    if not parameter.requires_grad:
        return

    def refuse(_: Any) -> None:
        raise SMPUsageError(
            f"parameter {home.name!r}, which lives on rank {home.owner} of the pipeline, was used "
            "in the body before the first call of the model in the first step: call the model first"
        )

    torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(refuse)
