"""The module; the name `smp.step` is the decorator in it."""

from smddp.modelparallel.api.step import StepOutput, step

__all__ = ["StepOutput", "step"]
