"""The errors that may end a job; launchers search the log for these names."""

from smddp.modelparallel.common.errors import SMPInitializationError, SMPPeerError

__all__ = ["SMPInitializationError", "SMPPeerError"]
