"""Precision that a script changes between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import check_ranks
from smp.common import squares
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess
DTYPES = [torch.float32, torch.float64, torch.float32, torch.bfloat16]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(dtype: torch.dtype) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).to(dtype)


def converted(config: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Trains a step in each dtype; returns the weights after each of them."""
    smp.init({"ddp": True, "microbatches": 2, "_match_weights": True, **config})
    with smp.tensor_parallelism(config.get("tensor_parallel_degree", 1) > 1):
        module = net()
    model = smp.DistributedModel(module, average_grads_across_microbatches=True)
    if config.get("partitions") == 2:
        smp.set_partition(module[2], 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for dtype in DTYPES:
        model.to(dtype)
        squares(model, batch(dtype).chunk(smp.dp_size())[smp.dp_rank()])
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {}),
        (2, {"tensor_parallel_degree": 2}),
        (4, {"partitions": 2}),
        (4, {"partitions": 2, "tensor_parallel_degree": 2}),
    ],
    ids=["dp2", "tp2", "pp2xdp2", "pp2xtp2"],
)
def test_a_model_may_change_its_dtype_between_steps(ranks: int, config: dict[str, Any]) -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    results = check_ranks(converted, str(ranks), config)
    for step, dtype in enumerate(DTYPES):
        module.to(dtype)
        module(batch(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
        for found in results:
            expected = dict(module.state_dict())
            torch.testing.assert_close(found[step], expected, atol=tolerance, rtol=0)
