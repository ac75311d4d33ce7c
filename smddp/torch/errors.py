"""The errors of a collective that fails: subclasses of `torch.distributed.DistBackendError`.

After such an error the process group is broken on every rank. Destroy it and create a new one
without the rank at fault, or end the job. Wrong arguments raise ValueError, TypeError or
NotImplementedError instead, before any data moves. DDP's C++ code keeps the text of an error, but
not its class: programs that train with DDP have to catch DistBackendError.

Launchers of SageMaker search the standard error of a job for the names of these classes, so they
are long and begin with SMDDP. Scripts may use the short names, which mean the same classes.
"""

from __future__ import annotations

import threading

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


# torch.distributed.checkpoint gives this name to the threads that save beside the training.
_SAVING_THREAD = "AsyncCheckpointExecutor"
_SAVING = (
    "; this process has used torch.distributed.checkpoint.async_save, whose thread makes calls, "
    "too: give it a group of its own, process_group=torch.distributed.new_group()"
)


class SMDDPCollectiveMismatchError(DistBackendError):
    """Ranks made different calls: another collective, dtype, size, reduce operation or root.

    If a checkpoint is being saved in a thread, the text says that this needs a group of its own.
    """

    # The thread ends with its own error, and the next error of the process shall say it, too.
    _was_saving = False

    def __init__(self, *arguments: object) -> None:
        mine = SMDDPCollectiveMismatchError
        mine._was_saving |= any(
            thread.name.startswith(_SAVING_THREAD) for thread in threading.enumerate()
        )
        text = str(arguments[0]) if arguments else ""
        if mine._was_saving and _SAVING not in text:
            arguments = (text + _SAVING, *arguments[1:])
        super().__init__(*arguments)


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
