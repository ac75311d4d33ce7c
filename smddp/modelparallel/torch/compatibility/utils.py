"""Small functions that scripts for the original library import."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.tensor.division import division_of

__all__ = ["dump_model", "get_distribution_axis", "rmsg", "verify"]


def rmsg(message: str) -> str:
    """Returns a message with the rank of this process in front."""
    rank = state.topology.rank if state.initialized else "?"
    return f"[{rank}] {message}"


def get_distribution_axis(parameter: nn.Parameter) -> int | None:
    """Returns the dimension along which a parameter is divided; None if it is whole."""
    division = division_of(parameter)
    return None if division is None else division.dimension


def dump_model(model: Any, file: str) -> None:
    """Saves parameters and buffers of a divided model as one file of torch.save.

    All ranks have to call it; rank 0 of the job writes the file.

    Args:
        model: a smp.DistributedModel.
        file: the path.
    """
    entries = model.state_dict()
    if state.topology.rank == 0:
        torch.save(entries, file)


def verify(model: Any, file: str, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Compares a model with a file of `dump_model`; all ranks have to call it.

    Args:
        model: a smp.DistributedModel.
        file: of `dump_model`.
        rtol: relative tolerance.
        atol: absolute tolerance.

    Raises:
        AssertionError: names or values differ.
    """
    expected = torch.load(file, "cpu", weights_only=True)
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
