"""The errors that may end a job; launchers search the log for these names."""

from smddp.modelparallel.core.errors import (
    SMPConfigurationError,
    SMPMicrobatchError,
    SMPPartitionError,
    SMPUsageError,
)

__all__ = ["SMPConfigurationError", "SMPMicrobatchError", "SMPPartitionError", "SMPUsageError"]
