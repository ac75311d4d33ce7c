"""Small helpers that scripts written for the original library import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from smddp.modelparallel.job.state import state

__all__ = ["dump_model", "get_distribution_axis", "rmsg", "same_state_dict", "verify"]


def rmsg(message: str) -> str:
    """Returns a message with the number of this rank in front."""
    rank = state.topology.rank if state.initialized else "?"
    return f"[{rank}] {message}"


def get_distribution_axis(parameter: nn.Parameter) -> int | None:
    """Returns along which dimension tensor parallelism divides a parameter; None if it does not."""
    return None


def same_state_dict(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> Mapping[str, Any]:
    """Translates a state dict from or to that of a tensor-parallel model, which has the same names.

    Args:
        state_dict: of a model or a part of it.
        max_seq_len: accepted; no buffer was left out that would have to be made again.
    """
    return state_dict


def dump_model(model: Any, file: str) -> None:
    """Saves a divided model's parameters and buffers as one file; all ranks have to call it."""
    entries = model.state_dict()
    if state.topology.rank == 0:
        torch.save(entries, file)


def verify(model: Any, file: str, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Raises AssertionError if a model differs from one that `dump_model` has saved."""
    expected = torch.load(file, "cpu", weights_only=True)
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
