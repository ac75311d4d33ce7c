"""`smp.optimizers`."""

from smddp.modelparallel.torch.optimizer.fused import FusedAdam, FusedLAMB, FusedLamb, FusedNovoGrad

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]
