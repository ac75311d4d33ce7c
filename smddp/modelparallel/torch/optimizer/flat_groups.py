"""What scripts for the original library read of an optimizer with sharded data parallelism.

These are `fp16_groups`, the parameters of each group, and `fp32_partitioned_groups_flat`, what this
rank optimises of them, as one tensor for each group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.partition.placement import Placement
from smddp.modelparallel.torch.sharding.shard import ParameterShard
from smddp.modelparallel.torch.sharding.sharding import Sharding

__all__ = ["FlatGroups", "OriginalGroups"]


class _Groups(Sequence[Any]):
    """A sequence with an element for each group of an optimizer, made when it is read."""

    def __init__(self, optimizer: Any, original: Callable[[Any], nn.Parameter]) -> None:
        """Begins.

        Args:
            optimizer: is not kept alive.
            original: returns the model's parameter for one of the optimizer.
        """
        self._optimizer = weakref.ref(optimizer)
        self._original = original

    def __len__(self) -> int:
        return len(self._param_groups())

    @overload
    def __getitem__(self, number: int) -> Any: ...
    @overload
    def __getitem__(self, number: slice) -> list[Any]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(len(self))[number]]
        number = range(len(self))[number]
        return self._read(number, self._param_groups()[number]["params"])

    def _param_groups(self) -> list[dict[str, Any]]:
        optimizer: Any = self._optimizer()
        groups: list[dict[str, Any]] = optimizer.param_groups
        return groups

    def _read(self, number: int, parameters: Sequence[nn.Parameter]) -> Any:
        raise NotImplementedError


class OriginalGroups(_Groups):
    """The model's parameters of each group."""

    def _read(self, number: int, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [self._original(parameter) for parameter in parameters]


class FlatGroups(_Groups):
    """What this rank optimises of each group: a tensor of one dimension, with present values.

    It has the parts of the group's parameters (see sharding/part.py) in their order. Scripts read
    it once, and expect later values in it. So the first reading moves what the optimizer works on
    into this tensor. Until it is decided which parameters live here, it is NaN.
    """

    def __init__(
        self,
        optimizer: Any,
        original: Callable[[Any], nn.Parameter],
        aliases: Callable[[Any], list[nn.Parameter]],
    ) -> None:
        """Begins; it is not decided yet what lives here.

        Args:
            optimizer: is not kept alive.
            original: returns the model's parameter for one of the optimizer.
            aliases: returns what shares memory with one of the optimizer's parameters.
        """
        super().__init__(optimizer, original)
        self._aliases = aliases
        self._placement: Placement | None = None
        self._sharding: Sharding | None = None
        self._flats: dict[int, torch.Tensor] = {}

    def adopt(self, placement: Placement, sharding: Sharding) -> None:
        """Notes what lives here."""
        self._placement, self._sharding = placement, sharding

    def _read(self, number: int, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        if self._sharding is None:
            return self._unknown(parameters)
        mine = [parameter for parameter in parameters if self._has(parameter)]
        flat = self._flats.get(number)
        if flat is None or not _lie_in(mine, flat):
            flat = self._flats[number] = self._moved(mine)
        return flat

    def _unknown(self, parameters: Sequence[Any]) -> torch.Tensor:
        try:
            count = sum(parameter.ds_tensor.ds_numel for parameter in parameters)
        except AttributeError:
            raise SMPUsageError(
                "optimizer.fp32_partitioned_groups_flat exists only for the parameters of a "
                "smp.DistributedModel: wrap the model before you read it"
            ) from None
        return torch.full((1,), float("nan")).expand(count)

    def _has(self, parameter: nn.Parameter) -> bool:
        """Says whether this rank has a part of a parameter of the optimizer."""
        assert self._placement is not None
        assert self._sharding is not None
        if not self._placement.owns(self._original(parameter)):
            return False
        return isinstance(parameter, ParameterShard) or self._sharding.groups.parameters.rank() == 0

    def _moved(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Moves parameters into one tensor, and returns it."""
        assert self._placement is not None
        assert self._sharding is not None
        if not parameters:
            return torch.empty(0, device=self._placement.device)
        if len({parameter.dtype for parameter in parameters}) > 1:
            raise SMPUsageError(
                "optimizer.fp32_partitioned_groups_flat: the parameters of a group have different "
                "dtypes, so they do not fit one tensor; give each dtype a group of its own"
            )
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        begin = 0
        for parameter in parameters:
            end = begin + parameter.numel()
            for one in (parameter, *self._aliases(parameter)):
                one.data = flat[begin:end].view(parameter.shape)
            self._sharding.renew(self._original(parameter))
            begin = end
        return flat


def _lie_in(parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> bool:
    """Says whether parameters fill a tensor, one behind the other."""
    address = flat.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != address or parameter.dtype != flat.dtype:
            return False
        address += parameter.numel() * flat.element_size()
    return address == flat.data_ptr() + flat.numel() * flat.element_size()
