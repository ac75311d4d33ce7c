"""Half precision with master weights gives the results of a plain loop without smp."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from ranks import check_ranks
from smp.common import shards, squares, sums
from smp.zoo import device
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # before smp.init, as scripts do

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.optimizer.loss_scale import (
    DynamicLossScaler,
    LossScaler,
    make_scaler,
)

WIDTH, MICROBATCHES, STEPS = 8, 2, 6
# At the first scale gradients overflow fp16; the window ends within the test.
DYNAMIC = {"init_scale": 2.0**20, "scale_window": 2, "min_scale": 2.0}
DYNAMIC_SCALE = {"dynamic_loss_scale": True, **DYNAMIC}
SHARDED = shards(2, 1)


class Net(nn.Module):
    """Takes integers and floats, has a batch norm; the last part may be another partition."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(5, WIDTH)
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
        if parts > 1:
            with smp.partition(1):
                self.last = nn.Linear(WIDTH, WIDTH)
        else:
            self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor, x: Tensor) -> Tensor:
        assert self.words.weight.dtype == x.dtype != torch.float32
        assert self.first[1].running_var.dtype == torch.float32
        return self.last(self.first(self.words(words) + x))


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * step + replica)
    words = torch.randint(5, (4 * MICROBATCHES,), generator=source)
    x = torch.randn(4 * MICROBATCHES, WIDTH, generator=source)
    return words.to(device()), x.to(device())


def loss_of(output: Tensor, x: Tensor) -> Tensor:
    assert output.dtype == x.dtype == torch.float32
    return F.mse_loss(output, x)


def plainly(
    dtype: torch.dtype,
    scale: float,
    dynamic: bool,
    replicas: int,
    steps: int = STEPS,
    degree: int = 1,
) -> tuple[dict[str, Tensor], list[Any]]:
    """The oracle: returns the model's state and, per step, (overflow, scale after it, norm).

    With a degree, gradients of each microbatch are added over so many replicas first.
    """
    torch.manual_seed(0)
    models = [Net().to(device())]
    for module in models[0].modules():
        if not isinstance(module, nn.BatchNorm1d):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    models += [copy.deepcopy(models[0]) for _ in range(replicas - 1)]
    parameters = list(models[0].parameters())
    masters = [parameter.detach().float().clone() for parameter in parameters]
    optimizer = torch.optim.Adam(masters, lr=0.1)
    good, told = 0, []
    for step in range(steps):
        sums: list[list[Tensor]] = [[] for _ in range(replicas // degree)]
        for model in models:
            model.load_state_dict(models[0].state_dict())
            model.zero_grad()
        for part in range(MICROBATCHES):
            for replica, model in enumerate(models):
                words, x = batch(step, replica)
                rows = slice(4 * part, 4 * part + 4)
                output = model(words[rows], x[rows].to(dtype)).float()
                (loss_of(output, x[rows]) * scale).backward()
            if degree == 1 and part < MICROBATCHES - 1:
                continue
            for group, total in enumerate(sums):
                mine = models[group * degree : (group + 1) * degree]
                same = zip(*(model.parameters() for model in mine), strict=True)
                means = [sum((p.grad for p in ps[1:]), ps[0].grad) / degree for ps in same]
                total[:] = [a + b for a, b in zip(total, means, strict=True)] if total else means
                for model in mine:
                    model.zero_grad()
        for number, master in enumerate(masters):
            grads = [total[number] / MICROBATCHES for total in sums]
            master.grad = sum(grads[1:], grads[0]).div(len(grads)).float() / scale
        overflow = not all(bool(master.grad.isfinite().all()) for master in masters)
        norm = -1.0
        if not overflow:
            norm = float(torch.nn.utils.clip_grad_norm_(masters, 0.5))
            optimizer.step()
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.data.copy_(master)
        good = 0 if overflow else good + 1
        if dynamic:
            scale *= 0.5 if overflow else 2.0 if good % 2 == 0 else 1.0
        told.append((overflow, scale, pytest.approx(norm, rel=1e-5)))
        optimizer.param_groups[0]["lr"] *= 0.9
    return {name: value.clone() for name, value in models[0].state_dict().items()}, told


@smp.step
def train_step(model: Any, optimizer: Any, words: Tensor, x: Tensor) -> Any:
    loss = loss_of(model(words, x), x)
    if optimizer is None:
        model.backward(loss)
    else:  # as scripts for Apex do
        optimizer.backward(loss, update_master_grads=False)
    return loss


@pytest.mark.multiprocess
@pytest.mark.parametrize("first", [True, False], ids=["optimizers first", "model first"])
@on_ranks("1")
def test_half_precision_takes_one_optimizer(first: bool) -> None:
    """An optimizer for each part of a model in half precision."""
    smp.init({"partitions": 1, "ddp": True, "microbatches": MICROBATCHES, "fp16": True})
    net = Net()
    inner = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (net.first, net.last)]
    if first:
        one, other = map(smp.DistributedOptimizer, inner)
    model = smp.DistributedModel(net)
    if not first:
        one, other = map(smp.DistributedOptimizer, inner)
    train_step(model, None, *batch(0, 0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SMPUsageError, match=r"only the last smp.DistributedOptimizer has master"):
        one.step()
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    other.step()
    changed = [n for n, value in model.state_dict().items() if not torch.equal(value, before[n])]
    assert changed == ["last.weight", "last.bias"]


class Waves(nn.Module):
    """Has a complex parameter, which keeps its dtype in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wave = nn.Parameter(torch.full((WIDTH,), 1 + 2j))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float() * (self.wave * self.wave.conj()).real


def waves(divided: bool) -> list[Any]:
    """Returns the norm of gradients and the complex parameter, after an overflow and a step."""
    config = {"ddp": True, "microbatches": MICROBATCHES, "fp16": True}
    smp.init({"partitions": 1, **config, "shard_optimizer_state": divided})
    torch.manual_seed(0)
    model = smp.DistributedModel(Waves())
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = smp.DistributedOptimizer(inner, static_loss_scale=64.0)
    found: list[Any] = []
    for spoils in (True, False):
        optimizer.zero_grad()
        squares(model, batch(0, 0)[1])
        if spoils:
            model.get_module().wave.grad[0] = complex(0, math.inf)
        found.append(float(optimizer.clip_master_grads(0.5)))
        optimizer.step()
        found.append(model.get_module().wave.detach().cpu().clone())
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("divided", [False, True])
def test_complex_parameters_step_with_unscaled_gradients(divided: bool) -> None:
    torch.manual_seed(0)
    model = Waves().to(device())
    model(batch(0, 0)[1]).square().mean().backward()
    norm = float(clip_grad_norm_(model.parameters(), 0.5))
    before = model.wave.detach().cpu().clone()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    wanted = [-1.0, before, norm, model.wave.detach().cpu()]
    for found in check_ranks(waves, "2", divided):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.multiprocess
@pytest.mark.parametrize("config", [{"fp16": True}, SHARDED])
@on_ranks("2")
def test_a_parameter_is_in_one_group(config: dict[str, Any]) -> None:
    smp.init({"partitions": 1, "ddp": True, "microbatches": MICROBATCHES, **config})
    net = Net()
    model = smp.DistributedModel(net)
    inner = torch.optim.SGD(net.first.parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(inner)
    for again in (net.first[0].weight, optimizer.param_groups[0]["params"][0]):
        with pytest.raises(ValueError, match="appear in more than one parameter group"):
            optimizer.add_param_group({"params": [net.words.weight, again]})
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": net.last.parameters(), "lr": 0.01})
    own = [id(p) for part in (net.first, net.last) for p in part.parameters()]
    assert optimizer._param_id_to_index() == {key: number for number, key in enumerate(own)}
    assert model.partitioned


@pytest.mark.multiprocess
@on_ranks("1")
def test_state_that_is_made_at_once_is_that_of_masters() -> None:
    """Adagrad makes its state when it is created; the squares of small gradients are 0 in fp16."""
    smp.init({"partitions": 1, "ddp": True, "microbatches": MICROBATCHES, "fp16": True})
    model = smp.DistributedModel(Net())
    inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(inner, static_loss_scale=128.0)
    train_step(model, None, *batch(0, 0))
    optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))
    for master, own in optimizer.state.items():
        torch.testing.assert_close(own["sum"], master.grad.square())


def begin(parts: int, seed: int = 0, **config: Any) -> tuple[Any, Any, Any]:
    config = {"ddp": True, "microbatches": MICROBATCHES, "fp16": True, **config}
    arguments, divided = config.pop("arguments", {}), config.pop("divided", parts)
    smp.init({"partitions": parts, "auto_partition": False, "default_partition": 0, **config})
    torch.manual_seed(seed)
    with smp.model_creation(dtype=torch.float16 if seed else None):
        net = Net(divided)
    model = smp.DistributedModel(net)
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(inner, **arguments)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9)
    return model, optimizer, schedule


def train(
    model: Any, optimizer: Any, schedule: Any, steps: range, apex: bool = False, clips: str = ""
) -> list[Any]:
    told = []
    for step in steps:
        optimizer.zero_grad()
        train_step(model, optimizer if apex else None, *batch(step, smp.rdp_rank()))
        norm = -2.0
        if apex:
            optimizer.update_master_grads()
        if clips:  # by torch's function
            given = {
                "parameters": model.parameters(),
                "masters": (p for group in optimizer.param_groups for p in group["params"]),
                "used": [p for p in model.local_parameters() if p.grad is not None],
            }[clips]
            norm = float(clip_grad_norm_(given, 0.5))
            assert math.isfinite(norm) != optimizer.overflow
            norm = -1.0 if optimizer.overflow else norm
        elif smp.state.cfg.fp16:
            norm = float(optimizer.clip_master_grads(0.5))
        optimizer.step()
        if smp.state.cfg.bf16:
            norm = float(optimizer._global_grad_norm)
        told.append((optimizer.overflow, optimizer.loss_scale, norm))
        schedule.step()
    return told


def half(parts: int, apex: bool, config: dict[str, Any]) -> Any:
    model, optimizer, schedule = begin(parts, **config)
    assert optimizer.loss_scaler.loss_scale == optimizer.loss_scale
    told = train(model, optimizer, schedule, range(STEPS), apex)
    (masters,) = optimizer.fp32_from_fp16_groups
    mine = list(model.local_parameters())
    assert len(masters) == sum(p.dtype != torch.float32 for p in mine)
    assert all(master.dtype == torch.float32 for master in masters)
    numbers = optimizer._param_id_to_index()
    assert {id(p) for p in mine} <= numbers.keys()
    optimizer.zero_grad()
    assert all(tensor.grad is None for tensor in (*masters, *mine))
    with pytest.raises(SMPUsageError, match="takes no closure"):
        optimizer.step(lambda: None)
    return state_of(model), told


def state_of(model: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = dict(model.state_dict())
    if smp.rdp_rank():
        # Each replica has its own statistics until the next step begins.
        state = {name: value for name, value in state.items() if "running" not in name}
    return state


def clipped_by_torch(parts: int, clips: str, config: dict[str, Any]) -> Any:
    model, optimizer, schedule = begin(parts, **config)
    told = train(model, optimizer, schedule, range(STEPS), clips=clips)
    return state_of(model), told


def check_state(found: Any, expected: dict[str, Tensor], **tolerances: float) -> None:
    assert found.keys() | {"first.1.running_mean", "first.1.running_var"} == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], **tolerances)


@pytest.mark.multiprocess
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("parts", "replicas"), [(1, 1), (2, 1), (2, 2)])
def test_fp16_is_what_a_plain_loop_computes(parts: int, replicas: int, dynamic: bool) -> None:
    scale = DYNAMIC["init_scale"] if dynamic else 128.0
    expected, told = plainly(torch.float16, scale, dynamic, replicas)
    assert any(overflow for overflow, *_ in told) == dynamic
    assert not all(overflow for overflow, *_ in told)
    arguments: dict[str, Any] = {"static_loss_scale": 128.0}
    if dynamic:
        # Both ways in which scripts write it.
        named = {"dynamic_loss_args": DYNAMIC} if parts == 1 else DYNAMIC
        arguments = {"dynamic_loss_scale": True, **named}
    ranks = str(parts * replicas)
    for state, found in check_ranks(half, ranks, parts, parts == 1, {"arguments": arguments}):
        assert found == told
        # The norm is a sum of those of the partitions, which rounds differently.
        check_state(state, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.multiprocess
def test_a_rank_without_parameters_goes_along() -> None:
    expected, told = plainly(torch.float16, DYNAMIC["init_scale"], True, 1)
    for state, found in check_ranks(half, "2", 2, True, {"arguments": DYNAMIC_SCALE, "divided": 1}):
        assert found == told
        check_state(state, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("clips", "parts", "config"),
    [
        *[("parameters", 2, {}), ("masters", 2, {}), ("used", 2, {})],
        ("parameters", 1, {"shard_optimizer_state": True}),
        ("masters", 1, {"shard_optimizer_state": True}),
        ("parameters", 1, SHARDED),
        ("masters", 1, SHARDED),
    ],
)
def test_torch_clips_what_the_optimizer_uses(
    clips: str, parts: int, config: dict[str, Any]
) -> None:
    degree = config.get("sharded_data_parallel_degree", 1)
    expected, told = plainly(torch.float16, DYNAMIC["init_scale"], True, 2 // parts, degree=degree)
    given = {"arguments": DYNAMIC_SCALE, **config}
    for state, found in check_ranks(clipped_by_torch, "2", parts, clips, given):
        assert found == told
        check_state(state, expected, rtol=1e-3, atol=1e-4)


def clipped_by_value(parts: int, config: dict[str, Any]) -> Any:
    """Returns the gradients that the optimizer uses, and how many values were clipped."""
    config = {**MANUAL_HALF, "fp16": True, **config}
    smp.init({**config, "partitions": parts, "ddp": config.get("ddp", False)})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    smp.set_partition(model.get_module()[1], parts - 1)
    # The learning rate is 1, so the change of a parameter is its gradient.
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = smp.DistributedOptimizer(inner, static_loss_scale=1024.0)

    @smp.step
    def step(model: Any, x: Tensor) -> None:
        model.backward(model(x).square().mean())
        with pytest.raises(SMPUsageError, match="clipped only outside the function"):
            clip_grad_value_(model.parameters(), 0.05)

    found = []
    for number in range(2):
        before = model.state_dict()
        before = {name: value.float().clone() for name, value in before.items()}
        optimizer.zero_grad()
        step(model, torch.linspace(-1, 1 + number, 8).view(2, 4))
        clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        found.append({n: before[n] - value.float() for n, value in model.state_dict().items()})
    # Others are clipped as ever.
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.tensor([-3.0, 0.5])
    clip_grad_value_([other], 1.0)
    assert other.grad.tolist() == [-1.0, 0.5]
    return found


MANUAL_HALF = {"auto_partition": False, "default_partition": 0}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("parts", "ranks", "config"),
    [
        *[(1, 1, {}), (2, 2, {}), (1, 2, {"ddp": True, "shard_optimizer_state": True})],
        (1, 2, {**SHARDED, "ddp": True}),
        (2, 2, {"fp16": False}),
    ],
)
def test_torch_clips_the_values_that_the_optimizer_uses(
    parts: int, ranks: int, config: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = []
    for number in range(2):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.zero_grad()
        model(torch.linspace(-1, 1 + number, 8).view(2, 4)).square().mean().backward()
        clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        expected.append({n: before[n] - value for n, value in model.state_dict().items()})
    largest = max(float(change.abs().max()) for change in expected[0].values())
    assert largest == pytest.approx(0.05)
    for found in check_ranks(clipped_by_value, str(ranks), parts, config):
        for one, other in zip(found, expected, strict=True):
            for name, change in other.items():
                torch.testing.assert_close(one[name].cpu(), change, rtol=1e-2, atol=2e-3)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("replicas", "sharded"), [(2, False), (2, True), (4, True)])
def test_bf16_is_the_same_without_a_scale(replicas: int, sharded: bool) -> None:
    """bf16 needs sharded data parallelism, which clips in the optimizer's step."""
    degree = 2 if sharded else 1
    expected, told = plainly(torch.bfloat16, 1.0, False, replicas, degree=degree)
    sdp = {"sdp_param_persistence_threshold": 1 if sharded else 1000, "sdp_gradient_clipping": 0.5}
    config = {"bf16": True, "fp16": False, "sharded_data_parallel_degree": 2, **sdp}
    for state, found in check_ranks(half, str(replicas), 1, False, config):
        assert found == told
        check_state(state, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.multiprocess
def test_fp16_with_shards_is_what_a_plain_loop_computes() -> None:
    expected, told = plainly(torch.float16, DYNAMIC["init_scale"], True, 4, degree=2)
    assert any(overflow for overflow, *_ in told)
    for state, found in check_ranks(half, "4", 1, True, {"arguments": DYNAMIC_SCALE, **SHARDED}):
        assert found == told
        check_state(state, expected, rtol=1e-3, atol=1e-4)


@smp.step
def updating_step(model: Any, optimizer: Any, words: Tensor, x: Tensor, update: bool) -> None:
    loss = loss_of(model(words, x), x)
    if update:
        optimizer.backward(loss)
    else:
        optimizer.backward(loss, update_master_grads=False)


@pytest.mark.multiprocess
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("scale", [128.0, 2.0**30])
@on_ranks("{parts}")
def test_backward_updates_the_masters(parts: int, scale: float) -> None:
    """Apex copies gradients to the masters in `backward`, unless the script does not want that."""
    model, optimizer, _ = begin(parts, arguments={"static_loss_scale": scale})
    overflows = scale > 1e6
    seen: list[bool] = []

    def grads() -> list[Tensor | None]:
        return [master.grad for master in optimizer.fp32_from_fp16_groups[0]]

    for step, update in enumerate((True, False, True)):
        optimizer.zero_grad()
        model.register_post_step_hook(lambda *_: seen.append(None not in grads()))
        updating_step(model, optimizer, *batch(step, 0), update)
        assert seen.pop() == update
        if not update:
            assert set(grads()) == {None}
            assert not optimizer.overflow
            continue
        assert optimizer.overflow == overflows
        found = [grad.clone() for grad in grads()]
        halves = [p for p in model.local_parameters() if p.dtype == torch.float16]
        if not overflows:
            expected = [half.grad.float() / scale for half in halves]
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        optimizer.update_master_grads()
        torch.testing.assert_close(grads(), found, rtol=0, atol=0, equal_nan=True)
        optimizer.overflow = False  # so that the next step has to find it
    if parts == 1:
        optimizer.zero_grad()
        words, x = batch(0, 0)
        optimizer.backward(loss_of(model(words, x), x))
        assert None not in grads()


def fp32_sums() -> tuple[int, list[Tensor]]:
    """Runs one step; returns the partition of this rank, and its gradients."""
    model, _, _ = begin(2, _fp32_grad_accumulation=True, arguments={"static_loss_scale": 8.0})
    train_step(model, None, *batch(0, smp.rdp_rank()))
    mine = list(model.local_parameters())
    assert torch.float16 in {p.dtype for p in mine}
    return smp.pp_rank(), [p.grad.clone() for p in mine]


@pytest.mark.multiprocess
def test_gradients_are_summed_in_fp32_if_asked() -> None:
    torch.manual_seed(0)
    model = Net().to(device())
    for module in (model.words, model.first[0], model.last):
        module.half()
    sums = [[torch.zeros(p.shape, device=p.device) for p in model.parameters()] for _ in range(2)]
    for replica, mine in enumerate(sums):
        words, x = batch(0, replica)
        for part in range(MICROBATCHES):
            rows = slice(4 * part, 4 * part + 4)
            model.zero_grad()
            (8.0 * loss_of(model(words[rows], x[rows].half()).float(), x[rows])).backward()
            for one, parameter in zip(mine, model.parameters(), strict=True):
                one += parameter.grad.float()
    total = [(a / MICROBATCHES + b / MICROBATCHES) / 2 for a, b in zip(*sums, strict=True)]
    assert any(not torch.equal(one, one.half().float()) for one in total), "half would do"
    for part, gradients in check_ranks(fp32_sums, "4"):
        expected = total[-2:] if part else total[:-2]
        for gradient, one in zip(gradients, expected, strict=True):
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, one)


def save(parts: int, path: str) -> Any:
    model, optimizer, schedule = begin(parts, arguments=DYNAMIC_SCALE)
    train(model, optimizer, schedule, range(STEPS))
    smp.save_checkpoint(path, "half", model=model, optimizer=optimizer)
    local = copy.deepcopy((model.local_state_dict(), optimizer.local_state_dict()))
    full = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    rate = schedule.state_dict()
    further = train(model, optimizer, schedule, range(STEPS, 2 * STEPS)), model.state_dict()
    results = [further]
    for model_state, optimizer_state in (local, full):
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        schedule.load_state_dict(rate)
        again = train(model, optimizer, schedule, range(STEPS, 2 * STEPS)), model.state_dict()
        results.append(again)
    return results


def resume(parts: int, path: str, late: bool) -> Any:
    """Goes on from a checkpoint that is loaded before or after the partition."""
    model, optimizer, schedule = begin(parts, 7, arguments=DYNAMIC_SCALE)
    if late:
        train(model, optimizer, schedule, range(1))
    smp.resume_from_checkpoint(path, "half")
    schedule.last_epoch = STEPS
    return train(model, optimizer, schedule, range(STEPS, 2 * STEPS)), model.state_dict()


@pytest.mark.multiprocess
def test_masters_and_scales_are_part_of_checkpoints(tmp_path: Path) -> None:
    ranks = check_ranks(save, "2", 2, str(tmp_path))
    told, state = ranks[0][0]
    assert {file.name for file in (tmp_path / "half_partial").glob("fp16_states_*")} == {
        "fp16_states_0.pt",
        "fp16_states_1.pt",
    }
    everybody = [result for rank in ranks for result in rank]
    for parts, late in ((2, False), (2, True), (1, True)):
        everybody += check_ranks(resume, str(parts), parts, str(tmp_path), late)
    for found, whole in everybody:
        for (overflow, scale, norm), expected in zip(found, told, strict=True):
            assert (overflow, scale) == expected[:2]
            assert norm == pytest.approx(expected[2], rel=1e-4)
        check_state(whole, state, rtol=1e-3, atol=1e-4)


def weights_win() -> Any:
    """Masters are set to the loaded weights if a file has no masters, as whole models have."""
    model, optimizer, schedule = begin(1)
    train(model, optimizer, schedule, range(1))
    file = io.BytesIO()
    torch.save({name: 2 * value for name, value in model.state_dict().items()}, file)
    file.seek(0)
    twice = torch.load(file)
    model.load_state_dict({**twice, "_smp_is_partial": False})
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train_step(model, None, *batch(0, 0))
    optimizer.step()
    return {name: (model.state_dict()[name], value) for name, value in twice.items()}


@pytest.mark.multiprocess
def test_masters_follow_weights_that_are_loaded() -> None:
    (pairs,) = check_ranks(weights_win, "1")
    for name, (found, expected) in pairs.items():
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(found, expected), name


@pytest.mark.multiprocess
@on_ranks("1")
def test_groups_may_be_added() -> None:
    """Parameters that the optimizer gets later have masters, too."""
    smp.init({"fp16": True})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    model = smp.DistributedModel(net)
    inner = torch.optim.SGD(net[0].parameters(), lr=0.5)
    optimizer = smp.DistributedOptimizer(inner, static_loss_scale=64.0)
    optimizer.add_param_group({"params": net[1].parameters()})
    x = torch.ones(1, 2, device=device())
    expected = net[1].weight.float() - 0.5 * net[0](x.half()).float().detach()
    model.backward(model(x).sum())  # one partition: it needs no step function
    optimizer.step()
    assert [len(group) for group in optimizer.fp32_from_fp16_groups] == [2, 1]
    torch.testing.assert_close(optimizer.fp32_from_fp16_groups[1][0], expected)
    assert torch.equal(net[1].weight, expected.half())


def scales(scaler: LossScaler, overflows: str) -> list[float]:
    """Returns the scales after each step; "!" is one with an overflow."""
    found = []
    for letter in overflows:
        scaler.update_scale(letter == "!")
        found.append(scaler.loss_scale)
    return found


@pytest.mark.parametrize(
    ("arguments", "overflows", "expected"),
    [
        ({}, "!.!", [2.0**31, 2.0**31, 2.0**30]),
        ({}, "!" * 40, [*(2.0**power for power in range(31, -1, -1)), *[1.0] * 8]),
        ({}, "." * 1000, [*[2.0**32] * 999, 2.0**33]),
        ({"init_scale": 4}, "." * 500 + "!" + "." * 1000, [*[4] * 500, *[2] * 1000, 4]),
        ({"init_scale": 4, "scale_window": 2}, "....", [4, 8, 8, 16]),
        ({"init_scale": 4, "scale_window": 2}, ".!...", [4, 2, 2, 4, 4]),
        ({"init_scale": 4, "scale_factor": 4, "min_scale": 0.5}, "!!!", [1, 0.5, 0.5]),
        # The second overflow lowers the scale, and all after it until it grows.
        (
            {"init_scale": 8, "delayed_shift": 2, "scale_window": 2},
            "!!!..!!",
            [8, 4, 2, 2, 4, 4, 2],
        ),
        ({"init_scale": 8, "delayed_shift": 2}, "!.!", [8, 8, 4]),
        (
            {"init_scale": 8, "delayed_shift": 2, "consecutive_hysteresis": True},
            "!.!!",
            [8, 8, 8, 4],
        ),
    ],
)
def test_scales_follow_overflows(arguments: Any, overflows: str, expected: list[float]) -> None:
    assert scales(DynamicLossScaler(**arguments), overflows) == expected


def test_scalers_are_what_the_arguments_say() -> None:
    assert scales(make_scaler(8.0, False, {}), "!..") == [8.0] * 3
    scaler = make_scaler(1.0, True, {"dynamic_loss_args": {"init_scale": 16}, "min_scale": 4})
    assert scales(scaler, "!!!") == [8, 4, 4]
    again = make_scaler(1.0, True, {"dynamic_loss_args": None})
    again.load_state_dict(scaler.state_dict())
    assert again.loss_scale == 4
    # Another kind of scaler keeps what the arguments say.
    static = make_scaler(8.0, False, {})
    static.load_state_dict(scaler.state_dict())
    again.load_state_dict(static.state_dict())
    again.load_state_dict({"loss_scale": 1.0})
    assert (static.loss_scale, again.loss_scale) == (8, 4)
    with pytest.raises(SMPUsageError, match="no argument windows; those of dynamic loss scales"):
        make_scaler(1.0, True, {"windows": 3})
    with pytest.raises(SMPUsageError, match="scale_factor must be more than 1"):
        make_scaler(1.0, True, {"scale_factor": 0.5})
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(SMPUsageError, match="static_loss_scale must be positive, not"):
            make_scaler(wrong, False, {})
        with pytest.raises(SMPUsageError, match="init_scale must be positive, not"):
            make_scaler(1.0, True, {"init_scale": wrong})


LARGE = 40000.0  # two of these are too large for float16


def averages_large_gradients(config: dict[str, Any], use: str) -> list[float]:
    smp.init({"ddp": True, **config})
    model = smp.DistributedModel(nn.Linear(8, 1, bias=False).half())

    x = torch.full((1, 8), LARGE, dtype=torch.float16)
    for _ in range(3):  # from the second step on, sharded gradients are reduced ahead
        model.zero_grad(set_to_none=True)
        if use == "step":
            sums(model, x)
        else:
            model(x).sum().backward()
    return [float(p.grad.float().max()) for p in model.local_parameters()]


@pytest.mark.parametrize(
    ("config", "use"),
    [
        ({}, "step"),
        ({}, "backward"),
        # One parameter is a bucket of its own, and over 4 ranks shards are averaged again.
        ({"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}, "step"),
    ],
)
def test_the_mean_of_large_gradients_is_finite(config: dict[str, Any], use: str) -> None:
    assert check_ranks(averages_large_gradients, "4", config, use) == [[LARGE]] * 4
