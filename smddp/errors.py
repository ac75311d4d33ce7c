"""The errors of a collective that fails: subclasses of `torch.distributed.DistBackendError`.

After such an error the process group is broken on every rank. Destroy it and create a new one
without the rank at fault, or end the job. Wrong arguments raise ValueError, TypeError or
NotImplementedError instead, before any data moves. DDP's C++ code keeps the text of an error, but
not its class: programs that train with DDP have to catch DistBackendError.

Launchers of SageMaker search the standard error of a job for the names of these classes, so they
are long and begin with SMDDP. Scripts may use the short names, which mean the same classes.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

__all__ = [
    "AbortedError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "InternalError",
    "PeerLostError",
    "ResourceError",
    "SMDDPAbortedError",
    "SMDDPCollectiveMismatchError",
    "SMDDPCollectiveTimeoutError",
    "SMDDPInternalError",
    "SMDDPPeerLostError",
    "SMDDPResourceError",
    "SMDDPTransportError",
    "TransportError",
]


class SMDDPPeerLostError(DistBackendError):
    """A rank died, left, or cannot be reached any more. The text names it."""


class SMDDPCollectiveMismatchError(DistBackendError):
    """Ranks made different calls: another collective, dtype, size, reduce operation or root."""


class SMDDPCollectiveTimeoutError(DistBackendError):
    """The timeout passed while this rank waited for others. The text names the missing ranks."""


class SMDDPAbortedError(DistBackendError):
    """While the operation was in flight, the group was ended, or a signal ended a rank's wait."""


class SMDDPTransportError(DistBackendError):
    """The network or shared memory failed."""


class SMDDPResourceError(DistBackendError):
    """The system refused memory, file descriptors or threads. The text says how much was needed."""


class SMDDPInternalError(DistBackendError):
    """A bug in smddp. Please report it."""


AbortedError = SMDDPAbortedError
CollectiveMismatchError = SMDDPCollectiveMismatchError
CollectiveTimeoutError = SMDDPCollectiveTimeoutError
InternalError = SMDDPInternalError
PeerLostError = SMDDPPeerLostError
ResourceError = SMDDPResourceError
TransportError = SMDDPTransportError


def by_name() -> dict[str, type[DistBackendError]]:
    """Returns the error classes by their short names, for the compiled module."""
    return {name: globals()[name] for name in __all__ if not name.startswith("SMDDP")}
