"""The errors that smp raises. Their names are unusual, because launchers search logs for them."""

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
    """smp was used before `smp.init`, or the job does not fit the configuration.

    Or a call names a rank that does not exist, or ranks have different configurations.
    """


class SMPUsageError(SMPError):
    """A call is not allowed at this point, or not with these arguments."""


class SMPPartitionError(SMPError):
    """The model cannot be divided as asked."""


class SMPMicrobatchError(SMPError):
    """The code of a microbatch failed. The text names rank and microbatch, on every rank.

    The original exception is the `__cause__`: on the rank where it was raised, and on the others if
    it pickles.
    """


class SMPPeerError(SMPError):
    """Another rank is gone, has not made a call that all ranks have to make, or has failed.

    The text names that rank.
    """
