"""The errors that smp raises. Launchers search logs for these names: each is long and unusual."""

from __future__ import annotations

__all__ = [
    "SMPConfigurationError",
    "SMPError",
    "SMPInitializationError",
    "SMPMicrobatchError",
    "SMPPartitionError",
    "SMPPeerError",
    "SMPUsageError",
]


class SMPError(RuntimeError):
    """Base class of the errors that smp itself raises."""


class SMPConfigurationError(SMPError, ValueError):
    """A configuration key has a wrong value. The text names the key."""


class SMPInitializationError(SMPError):
    """smp was used before `smp.init`, or the job does not fit the configuration."""


class SMPUsageError(SMPError):
    """A call is not allowed at this point, or not with these arguments."""


class SMPPartitionError(SMPError):
    """The model cannot be divided as asked."""


class SMPMicrobatchError(SMPError):
    """The code of a microbatch failed. The text names rank and microbatch, on every rank.

    On the rank where it happened the original exception is the `__cause__`.
    """


class SMPPeerError(SMPError):
    """The connection to another rank of the pipeline broke. The text names it."""
