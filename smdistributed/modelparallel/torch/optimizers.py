"""`smp.optimizers`."""

from smddp.modelparallel.optimizer.fused import FusedAdam, FusedLAMB, FusedLamb, FusedNovoGrad

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]
