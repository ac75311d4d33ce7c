"""DistributedDataParallel of versions 1.0 to 1.3; deprecated."""

from smddp.torch.dataparallel import DistributedDataParallel, announce_deprecation
from smdistributed.dataparallel.torch import torch_smddp  # noqa: F401, as in later versions

__all__ = ["DistributedDataParallel"]

announce_deprecation()
