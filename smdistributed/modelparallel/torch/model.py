"""`smp.model`."""

from smddp.modelparallel.model.distributed_model import DistributedModel

__all__ = ["DistributedModel"]
