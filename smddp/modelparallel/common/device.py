"""The device on which a rank computes."""

from __future__ import annotations

import torch

__all__ = ["current", "use"]


def current() -> torch.device:
    """Returns the device of this thread: the current GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def use(device: torch.device) -> None:
    """Makes `device` that of the calling thread: CUDA gives a new thread the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
