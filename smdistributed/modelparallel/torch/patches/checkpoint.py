"""Activation checkpoints."""

from smddp.modelparallel.activations.recompute import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
