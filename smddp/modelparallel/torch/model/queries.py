"""What scripts ask a DistributedModel: what lives on this rank, and what is divided."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.model.runtime import ModelRuntime
from smddp.modelparallel.torch.tensor.division import division_of
from smddp.modelparallel.torch.tensor.module import DistributedModule

__all__ = ["ModelQueries"]


class ModelQueries(nn.Module):
    """The queries. Those for "local" things raise SMPUsageError until `partitioned` is true.

    Attributes:
        runtime: knows the answers.
        module: a level between this one and the model that was wrapped.
    """

    runtime: ModelRuntime
    module: nn.Module

    @property
    def partitioned(self) -> bool:
        """Whether it has been decided where each module lives."""
        return self.runtime.divided

    def get_module(self) -> nn.Module:
        """Returns the model that was wrapped."""
        return self.module.get_submodule("module")

    def local_modules(self) -> Iterator[nn.Module]:
        """Yields the modules that live on this rank."""
        for _, module in self.local_named_modules():
            yield module

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields name and module of those that live on this rank."""
        self._require_partition("local modules")
        for name, module in self.get_module().named_modules():
            if self.runtime.placement.is_local(module):
                yield name, module

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters that live on this rank."""
        for _, parameter in self.local_named_parameters():
            yield parameter

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields name and parameter of those that live on this rank."""
        self._require_partition("local parameters")
        for name, parameter in self.get_module().named_parameters():
            if self.runtime.placement.owns(parameter):
                yield name, parameter

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Yields the buffers that live on this rank."""
        for _, buffer in self.local_named_buffers():
            yield buffer

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and buffer of those that live on this rank."""
        self._require_partition("local buffers")
        for name, buffer in self.get_module().named_buffers():
            if self.runtime.placement.owns_buffer(name):
                yield name, buffer

    # --- tensor parallelism -----------------------------------------------------------------------

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Yields the modules that are divided over tensor-parallel ranks."""
        for module in self.get_module().modules():
            if isinstance(module, DistributedModule):
                yield module

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Says whether a parameter is divided over tensor-parallel ranks."""
        return division_of(parameter) is not None

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Says whether a buffer is divided over tensor-parallel ranks: none is."""
        return False

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        """Says whether a parameter sees the batches of all tensor-parallel ranks.

        Those that are divided do. With `prescaled_batch` there is one batch for all of these ranks.
        """
        return self.is_distributed_parameter(parameter)

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Says whether a buffer sees the batches of all tensor-parallel ranks: none does."""
        return False

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the local parameters whose gradients are averaged over `smp.DP_GROUP`."""
        for name, parameter in self.local_named_parameters():
            if not self.is_scaled_batch_parameter(parameter):
                yield name, parameter

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the local parameters whose gradients are averaged over `smp.RDP_GROUP` only."""
        for name, parameter in self.local_named_parameters():
            if self.is_scaled_batch_parameter(parameter):
                yield name, parameter

    def _require_partition(self, what: str) -> None:
        if not self.partitioned:
            raise SMPUsageError(f"{what} are known only when the first step has begun")
