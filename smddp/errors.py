"""The errors of a collective that fails: subclasses of `torch.distributed.DistBackendError`.

After such an error the process group is broken on every rank. Destroy it and create a new one
without the rank at fault, or end the job. Wrong arguments raise ValueError, TypeError or
NotImplementedError instead, before any data moves. DDP's C++ code keeps the text of an error, but
not its class: programs that train with DDP have to catch DistBackendError.
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
    "TransportError",
]


class PeerLostError(DistBackendError):
    """A rank died, left, or cannot be reached any more. The text names it."""


class CollectiveMismatchError(DistBackendError):
    """Ranks made different calls: another collective, dtype, size, reduce operation or root."""


class CollectiveTimeoutError(DistBackendError):
    """The timeout passed while this rank waited for others. The text names the missing ranks."""


class AbortedError(DistBackendError):
    """abort() or shutdown() was called while the operation was in flight."""


class TransportError(DistBackendError):
    """The network or shared memory failed."""


class ResourceError(DistBackendError):
    """The system refused memory, file descriptors or threads. The text says how much was needed."""


class InternalError(DistBackendError):
    """A bug in smddp. Please report it."""


def by_name() -> dict[str, type[DistBackendError]]:
    """Returns the error classes of this module by name, for the compiled module."""
    return {name: globals()[name] for name in __all__}
