"""Where some scripts look for `smp.state`."""

from smddp.modelparallel.job.state import state

__all__ = ["state"]
