"""What smp raises. Launchers look these names up in the log: each is long and unlike any word."""

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
    """Base of everything that smp raises on purpose."""


class SMPConfigurationError(SMPError, ValueError):
    """A configuration key has a value that cannot be used. The text names the key."""


class SMPInitializationError(SMPError):
    """smp was used before `smp.init`, or the job does not fit the configuration."""


class SMPUsageError(SMPError):
    """A call that is not allowed at this point, or with these arguments."""


class SMPPartitionError(SMPError):
    """The model cannot be divided as asked."""


class SMPMicrobatchError(SMPError):
    """The code of a microbatch failed. The text names rank and microbatch, on every rank.

    On the rank where it happened the original exception is the `__cause__`.
    """


class SMPPeerError(SMPError):
    """The connection to another rank of the pipeline broke. The text names it."""
