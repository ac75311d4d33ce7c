"""Where some scripts look for `smp.state`."""

from smddp.modelparallel.torch.job.state import state

__all__ = ["state"]
