"""Mixed precision."""

from smddp.modelparallel.amp import GradScaler

__all__ = ["GradScaler"]
