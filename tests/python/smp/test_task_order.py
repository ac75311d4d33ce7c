"""Replicas that run their tasks in one order: collectives in modules, and what breaks the order."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import check_ranks
from torch import nn

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess

WIDTH = 4


class Share(torch.autograd.Function):
    """The mean over the replicas; so is the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return mean(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return mean(gradient)


def mean(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, group=smp.get_dp_process_group())
    return x / smp.dp_size()


class Delayed(nn.Module):
    """A layer whose result depends on all replicas, and that takes a random time."""

    delays = random.Random(0)
    longest = 0.0

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shares = shares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.delays.random() * self.longest)
        y = torch.tanh(self.linear(x))
        return Share.apply(y) + y if self.shares else y


@smp.step
def train(model: Any, x: torch.Tensor) -> Any:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def scheduled(pp, steps, config):
    smp.init(
        {
            "partitions": pp,
            "ddp": True,
            "auto_partition": False,
            "default_partition": 0,
            "microbatches": 4,
            **config,
        }
    )
    torch.manual_seed(0)
    parts = []
    for index in range(pp * 2):
        with smp.partition(index % pp):
            parts.append(Delayed(True))
    model = smp.DistributedModel(nn.Sequential(*parts))
    Delayed.delays = random.Random(smp.rank())
    Delayed.longest = 0.003
    out = []
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        out.append(train(model, x).reduce_mean().item())
    return out


@pytest.mark.parametrize("on", [False, True])
def test_try(on):
    t = time.time()
    r = check_ranks(scheduled, "4", 2, 30, {"deterministic_server": on}, timeout=60)
    print(time.time() - t, r[0][:3])
