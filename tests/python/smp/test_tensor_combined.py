"""Tensor parallelism together with other features, against one process without any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import check_ranks
from smp.common import close, squares
from smp.test_tensor import MICROBATCHES, SHARDED, STEPS, batch_of, ordinary, train, whole
from smp.zoo import device
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.activations import offload

pytestmark = pytest.mark.multiprocess

# Name, ranks, the configuration, and how far results may be off. The state of the model is in the
# dtype of the parameters.
CASES: dict[str, tuple[int, dict[str, Any], float]] = {
    "sharded optimizer": (4, {"shard_optimizer_state": True}, 1e-5),
    "sharded optimizer, fp16": (4, {"shard_optimizer_state": True, "fp16": True}, 4e-3),
    "checkpoints": (2, {}, 1e-5),
    "checkpoints, 2 partitions": (4, {"partitions": 2}, 1e-5),
    "offload": (2, {"offload_activations": True}, 1e-5),
    "offload, 2 partitions": (4, {"offload_activations": True, "partitions": 2}, 1e-5),
    "fp16": (2, {"fp16": True, "prescaled_batch": True}, 4e-3),
    "fp16, 2 partitions": (4, {"fp16": True, "partitions": 2}, 4e-3),
    "fp16, sharded": (4, {"fp16": True, **SHARDED}, 4e-3),
    "bf16, sharded": (4, {"bf16": True, **SHARDED}, 3e-2),
    "one order": (4, {"deterministic_server": True, "partitions": 2}, 1e-5),
    "delayed": (2, {"delayed_parameter_initialization": True}, 1e-5),
    "delayed, 2 partitions": (4, {"delayed_parameter_initialization": True, "partitions": 2}, 1e-5),
    "delayed, sharded": (4, {"delayed_parameter_initialization": True, **SHARDED}, 1e-5),
    "accumulated": (2, {"backward_passes_per_step": 2}, 1e-5),
}


def trained(config: dict[str, Any], checkpoints: bool) -> dict[str, Any]:
    """Trains on the ranks of a job; the modules are marked, and keep their weights."""
    passes = config.pop("backward_passes_per_step", 1)
    common = {"ddp": True, "microbatches": MICROBATCHES, "tensor_parallel_degree": 2}
    smp.init({**common, "_match_weights": True, **config})
    offload.SMALL = 0
    with smp.model_creation(tensor_parallelism=True):
        module = ordinary()
    model = smp.DistributedModel(module, backward_passes_per_step=passes)
    assert len(list(model.distributed_modules())) == 8
    assert {parameter.device.type for parameter in model.parameters()} == {device().type}
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = smp.DistributedOptimizer(inner, static_loss_scale=64.0)
    if checkpoints:
        for block in model.get_module().blocks:
            smp.set_activation_checkpointing(block)
    number = smp.rdp_rank() if config.get("prescaled_batch") else smp.dp_rank()
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(passes):
            output = train(model, batch_of(step, number).to(device()))
        losses.append(float(output.reduce_mean()))
        norms.append(float(smp.clip_grad_norm(0.5)) / passes)
        optimizer.step()
    state = {name: value.float().cpu() for name, value in model.state_dict().items()}
    return {"number": number, "losses": losses, "norms": norms, "state": state}


def check(name: str, train_on_a_rank: Callable[..., Any]) -> None:
    """Compares a case of CASES to one process."""
    size, config, tolerance = CASES[name]
    checkpoints = "checkpoints" in name or "offload" in name
    results = check_ranks(train_on_a_rank, str(size), config, checkpoints)
    expected = whole(1 + max(result["number"] for result in results))
    for rank, result in enumerate(results):
        losses = [of_all[result["number"]] for of_all in expected["losses"]]
        found = result["losses"], result["norms"], result["state"]
        wanted = losses, expected["norms"], expected["state"]
        close(found, wanted, f"{name}, rank {rank}", tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.costly
def test_training_is_that_of_one_process(name: str) -> None:
    check(name, trained)


class Masked(nn.Module):
    """Layers that take a mask for some batches only, as those of model libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (Shifted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(len(x), 1) if x[0, 0] > 0 else None
        found: Tensor = self.third(self.second(self.first(x, mask), mask))
        return found


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.linear(x)
        return y if mask is None else y + mask


def with_masks(config: dict[str, Any], divided: str, other: int, since: int) -> int:
    """Compares losses to those of a whole model; returns how many steps were run again."""
    smp.init({**MASKED, **config})
    torch.manual_seed(0)
    net, whole_net = Masked(), Masked()
    whole_net.load_state_dict(net.state_dict())
    if divided:
        smp.set_tensor_parallelism(net.get_submodule(divided))
    model = smp.DistributedModel(net)
    smp.set_partition(net.second, 1)
    smp.set_partition(net.third, 1)
    for step in range(5):
        x = torch.ones(4, 8)
        if smp.dp_rank() == other and step >= since:
            x[:2] *= -1  # it passes no mask with the first microbatch from now on
        loss = squares(model, x).reduce_mean()
        expected = torch.stack([whole_net(half).square().mean() for half in x.chunk(2)]).mean()
        torch.testing.assert_close(loss, expected)
    return model.runtime.step.number - 5


MASKED = {
    "ddp": True,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
    "partitions": 2,
}
TENSOR = {"tensor_parallel_degree": 2, "_match_weights": True}


@pytest.mark.parametrize("since", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize(
    ("config", "divided"),
    [
        *(
            pytest.param(TENSOR, layer, marks=pytest.mark.exhaustive)
            for layer in ("first", "second")
        ),
        (TENSOR, "third"),
        (SHARDED, ""),
        pytest.param({"deterministic_server": True}, "", marks=pytest.mark.exhaustive),
    ],
)
def test_replicas_in_one_order_may_pass_other_arguments(
    config: dict[str, Any], divided: str, other: int, since: int
) -> None:
    again = check_ranks(with_masks, "4", config, divided, other, since, timeout=60)
    assert again == [int(since > 0)] * 4
