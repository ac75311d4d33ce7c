"""What scripts read of a sharded model between steps, and evaluation."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from ranks import check_ranks
from smp.common import BY_HAND, check_state, squares
from smp.sharded_models import Fails, failing, small
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPUsageError

pytestmark = pytest.mark.multiprocess


def sum_over_group(value: Tensor) -> float:
    """Returns what scripts print of a parameter: a sum over the ranks that share it."""
    total = value.double().square().sum()
    dist.all_reduce(total)
    return float(total)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@on_ranks("2")
def test_attributes_that_scripts_read(half: bool) -> None:
    model, optimizer = small(fp16=half)
    net = model.get_module()
    weight, bias = net.layers[0].weight, net.layers[0].bias
    assert weight.ds_numel == 64
    assert weight.ds_shape == weight.shape == (8, 8)
    assert weight.ds_tensor.ds_numel == weight.ds_tensor.data.numel() == 32
    assert weight.ds_param_shard_group.size() == optimizer.ds_param_shard_group.size() == 2
    # What every rank has whole counts as the first rank's.
    assert (bias.ds_numel, bias.ds_shape) == (8, (8,))
    first = smp.rank() == 0
    assert bias.ds_tensor.ds_numel == bias.ds_tensor.numel() == (8 if first else 0)
    assert optimizer._global_grad_norm == 0
    assert [list(map(id, g)) for g in optimizer.fp16_groups] == [list(map(id, net.parameters()))]
    flat = optimizer.fp32_partitioned_groups_flat
    assert len(flat) == len(optimizer.param_groups) == 1
    assert flat[0].dtype == torch.float32
    assert flat[0].numel() == 4 * (32 + (8 if first else 0))
    torch.manual_seed(0)
    expected = Fails().layers[0].weight.to(weight.dtype).view(2, -1)[smp.rank()]
    assert torch.equal(weight.ds_tensor, expected)
    assert torch.equal(flat[0][:32], expected.float())
    assert weight.grad is None
    # Scripts keep parts of it, and read later values there.
    values, offsets = flat[0], {}
    begin = 0
    for parameter in net.parameters():
        offsets[parameter] = values.narrow(0, begin, parameter.ds_tensor.ds_numel)
        begin += parameter.ds_tensor.ds_numel
    for step in range(2):
        failing(model, torch.randn(4, 8), "")
        assert weight.grad.shape == (32,)
        optimizer.step()
        optimizer.zero_grad()
        assert float(optimizer._global_grad_norm) > 0
        if step == 0:
            model.load_state_dict({n: v * 2 for n, v in model.state_dict().items()})
    assert flat[0] is values
    for name, parameter in net.named_parameters():
        whole = model.state_dict()[name].double().square().sum()
        assert sum_over_group(parameter.ds_tensor) == pytest.approx(float(whole), rel=1e-6)
        kept = sum_over_group(offsets[parameter].to(parameter.dtype))
        assert kept == pytest.approx(float(whole), rel=1e-6), name
    assert model.state_dict()["layers.0.weight"].shape == (8, 8)
    pickled = torch.load(io.BytesIO(saved(bias)), weights_only=True)
    assert torch.equal(pickled, bias)


def reading_a_group(reads: bool) -> dict[str, Tensor]:
    """Trains a batch norm, which stays in full precision: its master shares its memory."""
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20}
    smp.init({"ddp": True, "fp16": True, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = smp.DistributedOptimizer(sgd)
    for _ in range(3):
        squares(model, torch.randn(4, 8))
        if reads:
            assert optimizer.fp32_partitioned_groups_flat[0].dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_reading_a_group_changes_nothing() -> None:
    for found, expected in zip(
        check_ranks(reading_a_group, "2", True),
        check_ranks(reading_a_group, "2", False),
        strict=True,
    ):
        assert not torch.equal(found["1.weight"], torch.ones(8))
        check_state(found, expected, 0.0, True, "")


@on_ranks("4")
def test_attributes_before_it_is_decided_where_parameters_live() -> None:
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20}
    smp.init({**BY_HAND, "ddp": True, "partitions": 2, **config})
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(sgd)
    with pytest.raises(SMPUsageError, match="wrap the model before you read it"):
        optimizer.fp32_partitioned_groups_flat[0]
    model = smp.DistributedModel(net)
    smp.set_partition(net[1], 1)
    first = smp.dp_rank() == 0
    counts = [parameter.ds_tensor.ds_numel for parameter in net.parameters()]
    assert counts == [32, 8 if first else 0] * 2
    before = optimizer.fp32_partitioned_groups_flat[0]
    assert before.numel() == sum(counts)
    assert before.isnan().all()
    assert all(parameter.ds_tensor.isnan().all() for parameter in net.parameters())
    squares(model, torch.ones(2, 8))
    optimizer.step()
    here = list(model.local_parameters())
    for parameter in net.parameters():
        count = counts.pop(0) if any(parameter is one for one in here) else counts.pop(0) * 0
        assert parameter.ds_tensor.ds_numel == parameter.ds_tensor.numel() == count
        assert not parameter.ds_tensor.isnan().any()
    flat = optimizer.fp32_partitioned_groups_flat[0]
    assert torch.equal(flat, torch.cat([parameter.ds_tensor.reshape(-1) for parameter in here]))


def evaluation() -> Any:
    model, _ = small()
    with torch.no_grad():
        outside = model(torch.ones(2, 8), "")
        losses = [float(evaluate(model, torch.ones(2, 8)).reduce_mean()) for _ in range(3)]
    return float(outside.square().mean()), losses


@smp.step
def evaluate(model: Any, x: Tensor) -> Any:
    return model(x, "").square().mean()


def test_evaluation_in_a_step_and_outside() -> None:
    torch.manual_seed(0)
    expected = Fails()(torch.ones(2, 8), "").square().mean().item()
    for outside, losses in check_ranks(evaluation, "2"):
        assert [outside, *losses] == pytest.approx([expected] * 4, rel=1e-6)


class Dropping(Fails):
    """Knows whether it is trained."""

    def forward(self, x: Tensor, where: str) -> Tensor:
        return F.dropout(super().forward(x, where), 0.5, self.training)


def modes() -> tuple[list[float], Tensor]:
    """Evaluates between steps, in a step and outside, and trains again."""
    model, optimizer = small(Dropping)
    x = torch.ones(2, 8)
    found = []
    for _ in range(3):
        model.eval()
        with torch.no_grad():
            found.append(model(x, "").square().mean().item())
            found.append(float(evaluate(model, x).reduce_mean()))
        with torch.inference_mode():
            found.append(model(x, "").square().mean().item())
        found.append(model(x, "").square().mean().item())  # with a graph, which is dropped
        model.train()
        torch.manual_seed(0)
        optimizer.zero_grad()
        failing(model, x, "")
        optimizer.step()
    return found, model.state_dict()["layers.0.weight"]


def test_evaluation_between_steps() -> None:
    for found, weight in check_ranks(modes, "2"):
        torch.manual_seed(0)
        model = Dropping()
        # The values of an evaluation are those of the parameters before the step, and no others.
        model.eval()
        first = model(torch.ones(2, 8), "").square().mean().item()
        assert found[:4] == pytest.approx([first] * 4, rel=1e-6)
        for number in (4, 8):
            later = found[number : number + 4]
            assert later == pytest.approx([later[0]] * 4, rel=1e-6)
            assert later[0] != pytest.approx(found[number - 4], rel=1e-6)
        assert not torch.equal(weight, model.layers[0].weight)


def evaluated_by_one(steps: int) -> list[str]:
    """Rank 0 evaluates the model, as in `if rank == 0: evaluate()`; rank 1 makes the next step."""
    model, _ = small()
    x = torch.ones(4, 8)
    for _ in range(steps):
        failing(model, x, "")
    with pytest.raises(RuntimeError) as caught:
        only_on_rank_0(model, x)
    # The last one may be of smddp, because the other rank has ended.
    said, error = [], caught.value
    while error is not None:
        said.append(f"{type(error).__name__}: {error}")
        error = error.__context__
    return said


def only_on_rank_0(model: Any, x: Tensor) -> None:
    if smp.rank() == 0:
        with torch.no_grad():
            model(x, "")
    failing(model, x, "")


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_evaluation_on_one_rank_alone_is_an_error_on_all(steps: int) -> None:
    """Without plans the ranks find it at the first difference; with plans, at the first gather."""
    alone, other = check_ranks(evaluated_by_one, "2", steps)
    if steps == 0:
        for said in (alone, other):
            assert "have to use the same parameters in the same order" in said[0]
    else:
        assert alone[0].startswith("SMPPeerError: parameter 'layers.0.weight' is needed outside a ")
        assert "the ranks 0, 1 of the job, which share it, have to make this call" in alone[0]
        assert any("must make the same calls in the same order" in text for text in other)
