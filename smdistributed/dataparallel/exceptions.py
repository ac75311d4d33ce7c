"""What may end a job; launchers look these names up in the log."""

from smddp.errors import (
    AbortedError as SMDDPAbortedError,
)
from smddp.errors import (
    CollectiveMismatchError as SMDDPCollectiveMismatchError,
)
from smddp.errors import (
    CollectiveTimeoutError as SMDDPCollectiveTimeoutError,
)
from smddp.errors import (
    PeerLostError as SMDDPPeerLostError,
)
from smddp.errors import (
    ResourceError as SMDDPResourceError,
)
from smddp.errors import (
    TransportError as SMDDPTransportError,
)

__all__ = [
    "SMDDPAbortedError",
    "SMDDPCollectiveMismatchError",
    "SMDDPCollectiveTimeoutError",
    "SMDDPPeerLostError",
    "SMDDPResourceError",
    "SMDDPTransportError",
]
