"""The state of torch's random generators, to restore it later."""

from __future__ import annotations

import torch

__all__ = ["RandomState", "uses_cuda"]


class RandomState:
    """The state of torch's default generators, of the CPU and the current GPU, when it was made."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if uses_cuda() else None

    def restore(self) -> None:
        """Gives the generators that state again."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def uses_cuda() -> bool:
    """Says whether this process uses a GPU of CUDA."""
    # False without a GPU, too; `is_available` takes much longer.
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call,no-any-return]
