"""The errors that may end a job; launchers search the log for these names."""

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
