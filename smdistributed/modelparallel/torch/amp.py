"""Mixed precision."""

from smddp.modelparallel.torch.optimizer.amp import GradScaler

__all__ = ["GradScaler"]
