"""What may end a job; launchers look these names up in the log."""

from smddp.modelparallel.errors import SMPInitializationError, SMPPeerError

__all__ = ["SMPInitializationError", "SMPPeerError"]
