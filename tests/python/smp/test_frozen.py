"""Parameters that the script freezes and unfreezes between steps learn as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import check_ranks
from smp.common import close, shards, squares
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess

STEPS, MICROBATCHES = 5, 2
ONE_REPLICA: dict[str, Any] = {"partitions": 2}
SHARDED = {"ddp": True, **shards(2, 10)}


def layers() -> nn.Sequential:
    """Returns four layers; the first one is frozen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    net[0].requires_grad_(False)
    return net


def freeze(net: nn.Module, step: int) -> None:
    """Unfreezes the first layer; freezes the third for a step."""
    if step == 2:
        net[0].requires_grad_()
    net[2].requires_grad_(step != 3)


def batch(step: int, replica: int) -> Tensor:
    """Returns the examples of a replica."""
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + replica))


def divided(config: dict[str, Any], in_steps: bool) -> dict[str, Tensor]:
    """Trains in a job; returns the state dict."""
    smp.init({"microbatches": MICROBATCHES, **config})
    model = smp.DistributedModel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = smp.DistributedOptimizer(optimizer)
    for step in range(STEPS):
        freeze(model.get_module(), step)
        optimizer.zero_grad()
        x = batch(step, smp.dp_rank())
        if in_steps:
            squares(model, x)
        else:
            model(x).square().mean().backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def whole(replicas: int) -> dict[str, Tensor]:
    """Trains in one process."""
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(STEPS):
        freeze(net, step)
        optimizer.zero_grad()
        net(
            torch.cat([batch(step, replica) for replica in range(replicas)])
        ).square().mean().backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize(
    ("config", "in_steps", "tolerance"),
    [
        (ONE_REPLICA, True, 1e-5),
        ({"ddp": True}, True, 1e-5),
        ({"ddp": True}, False, 1e-5),
        ({"ddp": True, "shard_optimizer_state": True}, True, 1e-5),
        (SHARDED, True, 1e-5),
        ({**SHARDED, "bf16": True, "_fp32_grad_accumulation": True}, True, 0.01),
    ],
    ids=["partitions", "replicas", "outside steps", "optimizer", "sharded", "sharded bf16"],
)
def test_unfrozen_parameters_learn(
    config: dict[str, Any], in_steps: bool, tolerance: float
) -> None:
    expected = whole(1 if config is ONE_REPLICA else 2)
    for found in check_ranks(divided, "2", config, in_steps):
        values = {name: value.float() for name, value in found.items()}
        close(values, dict(expected), tolerance=tolerance)
