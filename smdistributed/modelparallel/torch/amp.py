"""Mixed precision."""

from smddp.modelparallel.optimizer.amp import GradScaler

__all__ = ["GradScaler"]
