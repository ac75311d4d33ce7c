"""Delayed initialization gives the values of ordinary creation, and memory only where they live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import check_ranks
from smp.zoo import ZOO, arguments, batch_of
from torch import Tensor

import smdistributed.modelparallel.torch as smp

STEPS = 2


@smp.step
def train(model: Any, name: str, batch: tuple[Tensor, ...]) -> Any:
    """Runs one step."""
    entry = ZOO[name]
    loss = entry.loss(model(*arguments(entry, batch)), *batch)
    model.backward(loss)
    return loss


def zoo(delay: bool, names: list[str], parts: int) -> Any:
    smp.init({"partitions": parts, "microbatches": 2, "ddp": True})
    found = {}
    for name in names:
        torch.manual_seed(0)
        with smp.delay_param_initialization(enabled=delay):
            net = ZOO[name].make()
        drawn = torch.rand(1)
        optimizer = torch.optim.Adam(net.parameters())
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(optimizer)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            losses.append(train(model, name, batch_of(name, step, smp.dp_rank())).outputs)
            optimizer.step()
        found[name] = drawn, losses, dict(model.state_dict())
        del model, optimizer, net
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("parts", [1, 2])
def test_training_is_bit_equal(parts: int) -> None:
    names = list(ZOO)
    expected = check_ranks(zoo, "2", False, names, parts)
    for one, other in zip(check_ranks(zoo, "2", True, names, parts), expected, strict=True):
        for name in names:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)
