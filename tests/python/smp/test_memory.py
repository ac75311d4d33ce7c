"""A rank needs memory for what it owns, and activations of only the active microbatches."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import pytest
import torch
from ranks import check_ranks
from smp.census import Census, counting_tasks
from smp.common import BY_HAND, sums
from torch import nn

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess

MICROBATCHES = 12


class Activation:
    """An activation that counts itself."""


class Counter:
    """Counts the activations that are kept in this process, and the most at a time."""

    def __init__(self) -> None:
        self.kept, self.most = 0, 0
        self._lock = threading.Lock()

    def count(self, change: int) -> None:
        with self._lock:
            self.kept += change
            self.most = max(self.most, self.kept)


# Behind a cache, where smp does not look: microbatches do not overlap if objects change that the
# code of modules can get to.
counter = functools.cache(Counter)


class Keep(torch.autograd.Function):
    """Copies its input and keeps an activation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Keeps an activation until autograd frees it."""
        ctx.activation = Activation()
        counter().count(1)
        weakref.finalize(ctx.activation, counter().count, -1)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Stage(nn.Module):
    """One partition."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Keep.apply(x * self.weight)
        return result


def kept_activations(partitions: int, pipeline: str, active: int) -> list[int]:
    """Returns per step the largest number of activations on this rank, and how many are left."""
    options = {"pipeline": pipeline, "active_microbatches": active}
    smp.init({**BY_HAND, "partitions": partitions, "microbatches": MICROBATCHES, **options})
    stages = []
    for index in range(partitions):
        with smp.partition(index):
            stages.append(Stage())
    model = smp.DistributedModel(nn.Sequential(*stages))
    seen = []
    for _ in range(3):
        counter().most = 0
        sums(model, torch.ones(MICROBATCHES, 4))
        seen.append(counter().most)
    return [*seen, counter().kept]


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
        assert seen[2:] == [MICROBATCHES]  # the first two steps are watched: nothing overlaps


def waiting_gradients() -> list[tuple[int, int]]:
    """Returns the microbatches whose gradients come, and whose turn it is, in a later step."""
    smp.init({**BY_HAND, "partitions": 2, "microbatches": 4, "pipeline": "simple"})
    stages = []
    for index in range(2):
        with smp.partition(index):
            stages.append(Stage())
    model = smp.DistributedModel(nn.Sequential(*stages))
    account = model.runtime.gradients.sum
    add, found = account.add, []

    def note(parameter: Any, microbatch: int, *rest: Any) -> None:
        found.append((microbatch, account._account(parameter).turn))
        add(parameter, microbatch, *rest)

    for _ in range(2):
        sums(model, torch.ones(MICROBATCHES, 4))
    account.add = note
    sums(model, torch.ones(MICROBATCHES, 4))
    return found


def test_gradients_of_the_simple_pipeline_do_not_wait() -> None:
    # Each that waits is one more copy of all gradients.
    for found in check_ranks(waiting_gradients, "2"):
        assert found == [(number, number) for number in range(4)]


LAYERS, WIDTH, ROWS = 24, 32, 8


def measured(active: int) -> Any:
    """Returns the peak of each step, what lives between steps, and the bytes of the parameters."""
    config = {"microbatches": MICROBATCHES, "active_microbatches": active}
    smp.init({**BY_HAND, "partitions": 2, **config})
    parts = []
    for index in range(2):
        with smp.partition(index):
            layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
            parts.append(nn.Sequential(*layers))
    model = smp.DistributedModel(nn.Sequential(*parts))
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)
    )

    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).square().sum())

    peaks, between = [], []
    x = torch.ones(MICROBATCHES * ROWS, WIDTH)
    with counting_tasks(model.runtime.executor.baton):
        for _ in range(4):
            with Census():
                optimizer.zero_grad()
                Census.peak = 0
                train(model, x)
                peaks.append(Census.peak)
                optimizer.step()
            between.append(Census.live())
    parameters = sum(p.numel() * p.element_size() for p in model.local_parameters())
    given = x.nbytes if smp.pp_rank() == 0 else 0
    return peaks[1:], between[1:], parameters, given


@pytest.mark.parametrize("active", [1, 4])
@pytest.mark.costly
def test_memory_is_that_of_the_model_and_the_active_microbatches(active: int) -> None:
    # Each layer keeps its output; the first one its input, too.
    activations = (LAYERS + 1) * ROWS * WIDTH * 4
    for peaks, between, parameters, given in check_ranks(measured, "2", active):
        model = 3 * parameters + given  # with gradients and momentum
        for peak in peaks:
            assert peak <= 1.05 * (model + active * activations), (peak, model, activations)
        for live in between:
            assert 3 * parameters <= live <= 1.05 * model, (live, model)
