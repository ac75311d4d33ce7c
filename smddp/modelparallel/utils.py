"""Small helpers that scripts written for the original library import."""

from __future__ import annotations

from torch import nn

from smddp.modelparallel.runtime import state

__all__ = ["get_distribution_axis", "rmsg"]


def rmsg(message: str) -> str:
    """Returns a message with the number of this rank in front."""
    rank = state.topology.rank if state.initialized else "?"
    return f"[{rank}] {message}"


def get_distribution_axis(parameter: nn.Parameter) -> int | None:
    """Returns along which dimension tensor parallelism divides a parameter; None if it does not."""
    return None
