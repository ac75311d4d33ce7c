"""Where some scripts look for `smp.state`."""

from smddp.modelparallel.runtime import state

__all__ = ["state"]
