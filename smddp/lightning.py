"""Registers `strategy="smddp"` with Lightning; see smddp.torch.lightning."""

from smddp.torch.lightning import register_strategies

__all__ = ["register_strategies"]
