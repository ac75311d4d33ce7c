"""What may end a job; launchers look these names up in the log."""

from smddp.modelparallel.common.errors import (
    SMPConfigurationError,
    SMPMicrobatchError,
    SMPPartitionError,
    SMPUsageError,
)

__all__ = ["SMPConfigurationError", "SMPMicrobatchError", "SMPPartitionError", "SMPUsageError"]
