"""What may end a job; launchers look these names up in the log."""

from smddp.modelparallel.common.errors import SMPInitializationError, SMPPeerError

__all__ = ["SMPInitializationError", "SMPPeerError"]
