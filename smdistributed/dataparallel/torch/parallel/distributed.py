"""The module in which scripts look for it; importing the package has said that it is deprecated."""

from smddp.torch.dataparallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
