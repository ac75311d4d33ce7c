"""A pipeline keeps activations of only the microbatches that are under way."""

from __future__ import annotations

import threading
import weakref
from typing import Any, ClassVar

import pytest
import torch
from ranks import check_ranks
from torch import nn

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess

MICROBATCHES = 12


class Keep(torch.autograd.Function):
    """Copies its input and keeps an activation; counts those kept in this process."""

    kept = 0
    most = 0
    lock: ClassVar[threading.Lock] = threading.Lock()

    class Activation:
        """An activation that counts itself."""

    @classmethod
    def count(cls, change: int) -> None:
        """Counts one more, or one less."""
        with cls.lock:
            cls.kept += change
            cls.most = max(cls.most, cls.kept)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Keeps an activation until autograd frees it."""
        ctx.activation = Keep.Activation()
        Keep.count(1)
        weakref.finalize(ctx.activation, Keep.count, -1)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Passes the gradient on."""
        return gradient


class Stage(nn.Module):
    """One partition."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies, and keeps an activation."""
        result: torch.Tensor = Keep.apply(x * self.weight)
        return result


@smp.step
def train(model: Any, x: torch.Tensor) -> Any:
    """The step."""
    loss = model(x).sum()
    model.backward(loss)
    return loss


def kept_activations(partitions: int, pipeline: str, active: int) -> list[int]:
    """Returns per step the largest number of activations on this rank, and how many are left."""
    smp.init(
        {
            "partitions": partitions,
            "microbatches": MICROBATCHES,
            "pipeline": pipeline,
            "active_microbatches": active,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    stages = []
    for index in range(partitions):
        with smp.partition(index):
            stages.append(Stage())
    model = smp.DistributedModel(nn.Sequential(*stages))
    seen = []
    for _ in range(3):
        Keep.most = 0
        train(model, torch.ones(MICROBATCHES, 4))
        seen.append(Keep.most)
    return [*seen, Keep.kept]


@pytest.mark.parametrize("partitions", [2, 3])
@pytest.mark.parametrize("active", [1, 2, 4])
def test_no_rank_keeps_more_activations_than_microbatches_are_active(
    partitions: int, active: int
) -> None:
    for *seen, left in check_ranks(
        kept_activations, str(partitions), partitions, "interleaved", active
    ):
        assert left == 0
        assert all(1 <= most <= active for most in seen), seen


def test_without_that_limit_they_are_all_kept() -> None:
    # The simple pipeline keeps all of them; this shows that the test above can fail.
    for *seen, left in check_ranks(kept_activations, "2", 2, "simple", MICROBATCHES):
        assert left == 0
        assert seen[1:] == [MICROBATCHES, MICROBATCHES]
