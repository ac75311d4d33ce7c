"""Helpers that scripts import."""

from smddp.modelparallel.torch.compatibility.utils import get_distribution_axis, rmsg

__all__ = ["get_distribution_axis", "rmsg"]
