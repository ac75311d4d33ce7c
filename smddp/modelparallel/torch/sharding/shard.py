"""One parameter that is divided over the ranks of a sharding group, and the part of this rank.

The `nn.Parameter` of the model stays the same object. While it is not gathered, its memory is one
element, NaN, which stands for all, and its class is `FreedParameter`, so that no code reads that by
accident. A gathered parameter gets new memory. It is not the parameter that keeps this memory but
whatever refers to it, as always in torch; so views of a parameter, and what user code or autograd
keeps of it, stay right when the parameter is freed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn

from smddp._torch_internals import tree_leaves, version_of_tensor
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common.placeholder import WITHOUT, About, Placeholder
from smddp.modelparallel.torch.sharding.part import set_part
from smddp.modelparallel.torch.sharding.rules import part_of
from smddp.modelparallel.torch.tensor.division import copy_division

__all__ = ["FreedParameter", "Gatherer", "ParameterShard", "ShardedParameter"]


class ParameterShard(nn.Parameter):
    """The part of a parameter that this rank keeps and optimises, of one dimension.

    Attributes:
        group: the ranks that hold all parts.
    """

    group: dist.ProcessGroup

    @staticmethod
    def of(data: torch.Tensor, parameter: nn.Parameter, group: dist.ProcessGroup) -> ParameterShard:
        """Returns a shard of a parameter with the memory of a tensor.

        If the parameter is one rank's part, divided over tensor-parallel ranks, so is the shard.
        """
        shard = ParameterShard(data, parameter.requires_grad)
        shard.group = group
        copy_division(parameter, shard)
        return shard


class Gatherer(Protocol):
    """Gathers parameters; `Sharding` implements it."""

    def reads(self) -> bool:
        """Says whether parameters can be gathered now, because all ranks of the group do so."""

    def hold(self, entry: ShardedParameter) -> None:
        """Gathers a parameter, unless it is gathered already, until `release` is called."""

    def release(self, entry: ShardedParameter) -> None:
        """Ends one `hold`; the last one frees the parameter."""


class ShardedParameter:
    """A parameter and its shard.

    Attributes:
        number: among the sharded parameters, the same on all ranks.
        name: in the model.
        parameter: that of the model.
        shape, numel: of the whole parameter.
        shard: the part of this rank; the last ranks' parts end with zeros if numel is no multiple.
        rank, degree: of this process in the group, and the size of the group.
        holds: how many tasks need it gathered now.
        flat: the memory of the gathered parameter, of `degree` equal parts; None if it is freed.
    """

    def __init__(
        self,
        number: int,
        name: str,
        parameter: nn.Parameter,
        group: dist.ProcessGroup,
        gatherer: Gatherer,
    ) -> None:
        """Cuts a whole parameter, and frees it."""
        self.number, self.name, self.parameter = number, name, parameter
        self.shape, self.numel = parameter.shape, parameter.numel()
        self.rank, self.degree = group.rank(), group.size()
        self.holds = 0
        self.flat: torch.Tensor | None = None
        self._version = 0
        part = self.cut(parameter.detach())
        self.shard = ParameterShard.of(part, parameter, group)
        self.shard.grad_dtype = parameter.grad_dtype
        one = torch.full((1,), float("nan"), dtype=parameter.dtype, device=parameter.device)
        self._placeholder = one.expand(self.shape) if self.shape else one.view(())
        parameter.entry = self  # type: ignore[attr-defined]
        parameter.gatherer = gatherer  # type: ignore[attr-defined]
        set_part(parameter, self.shard)
        parameter.ds_param_shard_group = group  # type: ignore[attr-defined]
        self.reshard()

    @property
    def padded(self) -> int:
        """How many elements the gathered parameter takes, with those that fill it up."""
        return self.shard.numel() * self.degree

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a tensor of the parameter's shape, as a copy."""
        size = part_of(self.numel, self.degree)
        part = whole.reshape(-1)[self.rank * size : (self.rank + 1) * size]
        return torch.nn.functional.pad(part, (0, size - part.numel()))  # a copy, also of all

    def cut_state(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state of an optimizer for the whole parameter as that of the shard."""
        return {name: self.cut(v) if self._is_whole(v) else v for name, v in entries.items()}

    def _is_whole(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self.shape and value.dim() > 0

    def flattened(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the parameter's shape in one dimension, filled up with zeros."""
        flat = whole.reshape(-1)
        rest = -self.numel % self.degree
        return torch.nn.functional.pad(flat, (0, rest)) if rest else flat

    def unshard(self, flat: torch.Tensor) -> None:
        """Gives the parameter its values.

        Args:
            flat: the shards of all ranks, in their order.
        """
        parameter = self.parameter
        parameter.__class__ = nn.Parameter
        parameter.data = flat[: self.numel].view(self.shape)
        self.flat, self._version = flat, version_of_tensor(parameter)

    def reshard(self) -> bool:
        """Takes the values from the parameter.

        Returns:
            Whether code has changed the values; the change is lost.
        """
        parameter = self.parameter
        changed = self.flat is not None and version_of_tensor(parameter) != self._version
        if type(parameter) is nn.Parameter:
            parameter.data = self._placeholder
            parameter.__class__ = FreedParameter
        self.flat = None
        return changed

    def change_error(self) -> SMPUsageError:
        """Returns the error for code that has changed the values in a step."""
        return SMPUsageError(
            f"parameter {self.name!r} was changed in place in a step. With sharded data "
            "parallelism such a change is lost: let the optimizer change parameters, or keep "
            "this one whole with a larger sdp_param_persistence_threshold"
        )

    def placeholder_address(self) -> int:
        """Returns the address of the one element that stands for a freed parameter."""
        return self._placeholder.untyped_storage().data_ptr()

    def load(self, whole: torch.Tensor) -> None:
        """Sets this rank's part from a tensor of the parameter's shape."""
        with torch.no_grad(), WITHOUT():
            self.shard.copy_(self.cut(whole.detach()))

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Applies a function such as `to(memory_format=…)` to the shard.

        Raises:
            SMPUsageError: it changes the dtype or the device.
        """
        found = function(self.shard.data)
        if (found.dtype, found.device) != (self.shard.dtype, self.shard.device):
            raise SMPUsageError(
                f"parameter {self.name!r} is divided over ranks, and its dtype and device cannot "
                "change: convert the model before smp.DistributedModel"
            )
        self.shard.data = found
        set_part(self.parameter, self.shard)
        if self.shard.grad is not None:
            self.shard.grad = function(self.shard.grad)

    def take_gradient(self) -> torch.Tensor | None:
        """Takes the gradient that autograd has left in the parameter, of its shape, if any."""
        with WITHOUT():
            gradient, self.parameter.grad = self.parameter.grad, None
        return gradient

    def error(self) -> SMPUsageError:
        """Returns the error for code that needs the values where they cannot be gathered."""
        return SMPUsageError(
            f"parameter {self.name!r} is divided over {self.degree} ranks, and has values only in "
            "a step. Use model.state_dict() on all ranks for the whole, or parameter.ds_tensor for "
            "the part of this rank. An optimizer needs smp.DistributedOptimizer around it"
        )


class FreedParameter(Placeholder, nn.Parameter):
    """The class of a sharded parameter while it is not gathered.

    A function of torch that needs its values gathers it, for that one function, where all ranks of
    the group do the same: in a step. Elsewhere it raises. `grad` is the gradient of the shard.
    """

    entry: ShardedParameter
    gatherer: Gatherer

    def called(self, known: About, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function of torch with the values."""
        if known.is_attribute and known.name == "grad":
            return _gradient(func, *args)
        if known.describes or known.like:
            return super().called(known, func, args, kwargs)
        gatherer = self.gatherer
        if known.name == "copy_" and type(args[0]) is FreedParameter and not gatherer.reads():
            source = args[1] if len(args) > 1 else kwargs["src"]
            if source.shape != args[0].entry.shape:
                source = source.expand(args[0].entry.shape)
            args[0].entry.load(source)
            return args[0]
        if not gatherer.reads():
            raise self.entry.error()
        leaves = tree_leaves((args, kwargs))
        found = {id(leaf): leaf for leaf in leaves if type(leaf) is FreedParameter}
        with contextlib.ExitStack() as stack:
            for one in found.values():
                gatherer.hold(one.entry)
                stack.callback(gatherer.release, one.entry)
            return func(*args, **kwargs)

    def ordinary(self) -> NoReturn:
        """Raises SMPUsageError."""
        raise self.entry.error()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise self.entry.error()


def _gradient(func: Any, parameter: Any, value: Any = None) -> Any:
    """Reads or sets `grad` of a parameter that is not gathered: that of its shard."""
    shard = parameter.entry.shard
    if func.__name__ == "__get__":
        return shard.grad
    shard.grad = value if func.__name__ == "__set__" else None
    return None
