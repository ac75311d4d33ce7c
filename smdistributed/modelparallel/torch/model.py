"""`smp.model`."""

from smddp.modelparallel.model import DistributedModel

__all__ = ["DistributedModel"]
