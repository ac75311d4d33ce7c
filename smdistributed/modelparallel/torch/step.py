"""The module `step`; as an attribute of `smp`, the name `step` is the decorator."""

from smddp.modelparallel.torch.api.step import StepOutput, step

__all__ = ["StepOutput", "step"]
