"""The errors that may end a job; launchers search the log for these names."""

from smddp.torch.errors import (
    SMDDPAbortedError,
    SMDDPCollectiveMismatchError,
    SMDDPCollectiveTimeoutError,
    SMDDPInternalError,
    SMDDPPeerLostError,
    SMDDPResourceError,
    SMDDPTransportError,
)

__all__ = [
    "SMDDPAbortedError",
    "SMDDPCollectiveMismatchError",
    "SMDDPCollectiveTimeoutError",
    "SMDDPInternalError",
    "SMDDPPeerLostError",
    "SMDDPResourceError",
    "SMDDPTransportError",
]
