"""Helpers for tests that compare models; some scripts import them."""

from smddp.modelparallel.torch.compatibility.utils import dump_model, verify

__all__ = ["dump_model", "verify"]
