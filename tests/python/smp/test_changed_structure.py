"""Modules whose results change their structure give the same numbers as in one process."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import check_ranks
from smp.common import BY_HAND
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess

WIDTH, STEPS, MICROBATCHES = 8, 12, 4


class Fickle(nn.Module):
    """Returns a structure that depends on its mood or input; draws random numbers, has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)
        # A buffer that is replaced by another tensor, not changed in place.
        self.register_buffer("average", torch.zeros(WIDTH))
        self.mood = "tensor"

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.dropout(self.norm(self.linear(x))))
        self.average = 0.9 * self.average + y.detach().mean(0)
        y = y + self.average
        mood = self.mood
        if mood == "data":
            mood = "pair" if bool(x.sum() > 0) else "dict"
        return {"tensor": y, "pair": (y, 2 * y), "dict": {"y": y, "none": None}}[mood]


class Model(nn.Module):
    """Accepts any structure; unpacks a pair without a check, as scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        with smp.partition(1 if smp.pp_size() > 1 else 0):
            self.fickle = Fickle()
            self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mood: str) -> Tensor:
        x = self.first(x)
        if mood == "pair":
            y, z = self.fickle(x)
            return self.last(y + z)
        y = self.fickle(x)
        if isinstance(y, dict):
            y = y["y"]
        elif isinstance(y, tuple):
            y = y[0] + y[1]
        return x + self.last(y)


@smp.step
def train(model: Any, x: Tensor, mood: str) -> Any:
    loss = F.mse_loss(model(x, mood), x)
    model.backward(loss)
    return loss


def run(
    partitions: int, pipeline: str, passes: int, ends: tuple[int, ...] = (STEPS, STEPS)
) -> tuple[int, list[float], dict[str, Tensor], int]:
    """Trains; returns which replica this is, its losses, its whole state, and steps run again.

    Args:
        partitions: of the model.
        pipeline: "simple" or "interleaved".
        passes: steps per update.
        ends: how many batches each replica has.
    """
    config = {"microbatches": MICROBATCHES, "pipeline": pipeline, "ddp": True}
    smp.init({**BY_HAND, "partitions": partitions, **config})
    torch.manual_seed(1)
    inner = Model()
    model = smp.DistributedModel(inner, backward_passes_per_step=passes)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    source = torch.Generator().manual_seed(smp.dp_rank())
    losses = []
    again = _count_repetitions(model.runtime)
    with model.join() if len(set(ends)) > 1 else contextlib.nullcontext():
        for number in range(ends[smp.dp_rank()]):
            # Replicas change at different times only if the second one has other data.
            mood = ["tensor", "tensor", "pair", "dict", "pair", "data"][min(number // 2, 5)]
            inner.fickle.mood = mood
            if number % passes == 0:
                optimizer.zero_grad()
            loss = train(model, torch.randn(4 * MICROBATCHES, WIDTH, generator=source), mood)
            losses.append(float(loss.reduce_mean()))
            if (number + 1) % passes == 0:
                optimizer.step()
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return smp.dp_rank(), losses, whole, len(again)


def _count_repetitions(runtime: Any) -> list[int]:
    """Returns a list that gets an entry for each step that is run again."""
    again: list[int] = []
    begin = runtime.step.prepare

    def counted(*args: Any) -> Any:
        repeated = args[-1]
        if repeated:
            again.append(runtime.step.number)
        return begin(*args)

    runtime.step.prepare = counted
    return again


def check_same(expected: list[Any], found: list[Any]) -> None:
    """Compares ranks of a divided model with those of a whole one, by replica."""
    of_replica = {replica: rest for replica, *rest in expected}
    for replica, losses, whole, _ in found:
        expected_losses, expected_whole, never = of_replica[replica]
        assert never == 0
        assert losses == pytest.approx(expected_losses, abs=1e-6)
        torch.testing.assert_close(whole, expected_whole, atol=1e-6, rtol=0)
    assert any(again for *_, again in found), "nothing was run again"


@pytest.mark.parametrize(
    ("replicas", "pipeline", "passes"),
    [(1, "interleaved", 1), (1, "simple", 1), (2, "interleaved", 1), (2, "interleaved", 2)],
)
def test_changes_nothing_else(replicas: int, pipeline: str, passes: int) -> None:
    expected = check_ranks(run, str(replicas), 1, pipeline, passes)
    check_same(expected, check_ranks(run, str(2 * replicas), 2, pipeline, passes))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("ends", [(5, STEPS), (STEPS, 3)])
def test_a_replica_that_has_ended_goes_along(ends: tuple[int, ...], passes: int) -> None:
    expected = check_ranks(run, "2", 1, "interleaved", passes, ends)
    check_same(expected, check_ranks(run, "4", 2, "interleaved", passes, ends))
    for _, _, whole, _ in expected:
        # Statistics come from the replica that had more batches.
        assert whole["fickle.norm.num_batches_tracked"] == MICROBATCHES * max(ends)
