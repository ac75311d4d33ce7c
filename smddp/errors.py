"""What a collective raises when it fails. All are `torch.distributed.DistBackendError`.

After any of them the process group is broken on every rank: destroy it, and make a new one without
the rank at fault, or end the job. Wrong arguments are no such errors: they raise ValueError,
TypeError or NotImplementedError before anything moves. DDP's C++ code hands errors on as the base
class, with their text: who trains with it catches DistBackendError.
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
    """The time-out passed while ranks were missing. The text names them."""


class AbortedError(DistBackendError):
    """abort() or shutdown() was called while the operation was in flight."""


class TransportError(DistBackendError):
    """The network or shared memory failed."""


class ResourceError(DistBackendError):
    """The machine refused memory, descriptors or threads. The text says how much was needed."""


class InternalError(DistBackendError):
    """smddp broke one of its own rules; please report it."""


def by_name() -> dict[str, type[DistBackendError]]:
    """Returns every class of this module by its name, as the compiled module wants it."""
    return {name: globals()[name] for name in __all__}
