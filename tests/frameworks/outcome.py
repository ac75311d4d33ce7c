"""What each script of this folder hands to the test that runs it: loss, weights and seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

BEGAN = time.monotonic()


def start() -> None:
    """Begins to count the seconds: after imports and the start of the ranks."""
    global BEGAN
    BEGAN = time.monotonic()


def network() -> nn.Sequential:
    """Returns the same small network on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    )


def data(samples: int = 256) -> TensorDataset:
    """Returns the same random samples on every rank."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(samples, 32, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].sin() + 0.1)


def used_backend() -> str:
    """Returns the name of what serves CPU tensors in the default group."""
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD._get_backend(torch.device("cpu")).name())


def report(loss: float, weights: Iterable[torch.Tensor], tokens: int = 0) -> None:
    """Prints the result on rank 0, and writes it to the file that FRAMEWORKS_OUTPUT names.

    Every rank has to call it: weights that are DTensors are put together.

    Args:
        loss: the last loss.
        weights: all weights of the model.
        tokens: the tokens that were made, for inference.
    """
    seconds = time.monotonic() - BEGAN
    whole = [
        (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for each in weights
    ]
    if dist.get_rank() != 0:
        return
    backend = used_backend()
    speed = f", {tokens / seconds:.0f} tokens/s" if tokens else ""
    print(f"{backend}: loss {loss:.6f} after {seconds:.2f} s{speed}", flush=True)
    if "FRAMEWORKS_OUTPUT" in os.environ:
        result = {"backend": backend, "loss": loss, "weights": whole, "seconds": seconds}
        torch.save(result | {"tokens": tokens}, os.environ["FRAMEWORKS_OUTPUT"])
