"""The errors that may end a job; launchers search the log for these names."""

from smddp.modelparallel.core.errors import SMPInitializationError, SMPPeerError

__all__ = ["SMPInitializationError", "SMPPeerError"]
