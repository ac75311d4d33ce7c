"""`smp.partition` and `smp.set_partition`, by which a script says where modules live."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from smddp.modelparallel.core.errors import SMPPartitionError, SMPUsageError
from smddp.modelparallel.core.logs import warn_user
from smddp.modelparallel.torch.common.creation import PARTITION, each_new_module
from smddp.modelparallel.torch.job.state import state

__all__ = ["partition", "set_partition"]


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Returns a context that assigns modules created inside it to a partition.

    The innermost context counts. It has no effect if the division comes from `load_partition` or
    from a checkpoint. With auto_partition, the default, it has no effect either, and warns if there
    are several partitions.

    Args:
        index: of the partition, from 0.

    Raises:
        SMPInitializationError: `smp.init` has not been called.
        SMPPartitionError: there is no such partition.
    """
    count = state.cfg.pipeline_parallel_degree
    if not isinstance(index, int) or not 0 <= index < count:
        raise SMPPartitionError(
            f"smp.partition({index!r}): there are {count} partitions, numbered from 0"
        )
    if state.cfg.auto_partition and count > 1:
        warn_user(
            "smp.partition has no effect while auto_partition is on, as it is by default; it works "
            "with auto_partition: False and a default_partition in the configuration"
        )
    with each_new_module(lambda module: module.__dict__.__setitem__(PARTITION, index)):
        yield


def set_partition(module: nn.Module, index: int) -> None:
    """Assigns a module and everything inside it to a partition, with or without auto_partition.

    It has no effect if the division comes from `load_partition` or from a checkpoint.

    Args:
        module: of the model that smp.DistributedModel has wrapped.
        index: of the partition.

    Raises:
        SMPUsageError: there is no smp.DistributedModel yet, or the first step has begun.
        SMPPartitionError: there is no such partition, or the module is not of the model.
    """
    model = state.current_model()
    if model is None:
        raise SMPUsageError("create smp.DistributedModel before set_partition")
    model.runtime.division.pin(module, index)
