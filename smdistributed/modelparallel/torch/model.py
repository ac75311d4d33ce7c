"""`smp.model`."""

from smddp.modelparallel.torch.model.distributed_model import DistributedModel

__all__ = ["DistributedModel"]
