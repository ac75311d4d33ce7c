"""Activation checkpoints."""

from smddp.modelparallel.torch.api.activations import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
