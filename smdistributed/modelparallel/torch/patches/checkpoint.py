"""Activation checkpoints."""

from smddp.modelparallel.recompute import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
