"""The errors that smp raises, where all of smddp.modelparallel takes them from."""

from smddp_smp.errors import (
    SMPConfigurationError,
    SMPError,
    SMPInitializationError,
    SMPMicrobatchError,
    SMPPartitionError,
    SMPPeerError,
    SMPUsageError,
)

__all__ = [
    "SMPConfigurationError",
    "SMPError",
    "SMPInitializationError",
    "SMPMicrobatchError",
    "SMPPartitionError",
    "SMPPeerError",
    "SMPUsageError",
]
