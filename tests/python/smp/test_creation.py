"""Models that `smp.model_creation` gives a dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import check_ranks
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPUsageError


@smp.step
def train(model: Any, x: Tensor) -> Any:
    """Runs one step; the loss is in full precision, as usual."""
    loss = model(x).float().square().mean()
    model.backward(loss)
    return loss


def run(partitions: int, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """Trains; returns losses and parameters."""
    cfg = {"partitions": partitions, "microbatches": 2, "auto_partition": False}
    smp.init({**cfg, "default_partition": 0})
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=False, dtype=dtype, zero_init=True):
        layers = [nn.Linear(8, 16), nn.ReLU()]
        with smp.partition(partitions - 1):
            layers.append(nn.Linear(16, 8))
    model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(train(model, torch.randn(4, 8).to(dtype)).reduce_mean()))
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.multiprocess
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_trains_in_that_dtype(dtype: torch.dtype) -> None:
    ((losses, whole),) = check_ranks(run, "1", 1, dtype)
    for found, parameters in check_ranks(run, "2", 2, dtype):
        assert found == losses
        for name, tensor in whole.items():
            assert tensor.dtype == dtype
            assert torch.equal(parameters[name], tensor)


def test_the_default_comes_back() -> None:
    before = torch.get_default_dtype()
    with smp.model_creation():
        assert nn.Linear(1, 1).weight.dtype == before
    with pytest.raises(ZeroDivisionError), smp.model_creation(dtype=torch.float64):
        raise ZeroDivisionError
    assert torch.get_default_dtype() == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"dtype": torch.int8}, "floating-point")],
)
def test_what_it_cannot_do(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(SMPUsageError, match=text), smp.model_creation(**arguments):
        pass
