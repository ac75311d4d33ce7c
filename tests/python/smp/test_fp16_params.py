"""`fp16_params`: divided modules in fp16, for scripts that have a half-precision optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from ranks import check_ranks
from smp.test_tensor import MICROBATCHES, STEPS, WIDTH, WORDS, Model, batch_of, loss_of, ordinary
from smp.zoo import device
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPUsageError

pytestmark = pytest.mark.multiprocess

SCALE, MAX_NORM = 128.0, 0.5


class HalfModule(nn.Module):
    """A script's wrapper; it converts only what smp does not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for part in module.modules():
            if isinstance(part, nn.LayerNorm):
                part.half()

    def forward(self, ids: Tensor) -> Tensor:
        return self.module(ids).float()


class HalfOptimizer:
    """A script's optimizer with master weights, as in NVIDIA Apex; it is none of torch.optim."""

    def __init__(self, model: Any, inner: torch.optim.Optimizer) -> None:
        self.model, self.inner = model, inner
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def init_master_params(self, local: Any) -> None:
        here = {id(parameter) for parameter in local}
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in here:
                    assert parameter.dtype == torch.float16
                    master = nn.Parameter(parameter.detach().float())
                    group["params"][place] = master
                    self.pairs.append((parameter, master))

    def backward(self, loss: Tensor, update_master_grads: bool = True) -> None:
        self.model.backward(loss * SCALE)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float() / SCALE

    def clip_master_grads(self, max_norm: float) -> float:
        squares = torch.zeros(2, device=device())
        for parameter, master in self.pairs:
            if master.grad is not None:
                divided = hasattr(self.model, "is_distributed_parameter") and (
                    self.model.is_distributed_parameter(parameter)
                )
                squares[int(divided)] += master.grad.square().sum()
        if smp.is_initialized() and smp.tp_size() > 1:
            torch.distributed.all_reduce(squares[1:], group=smp.get_tp_process_group())
        if smp.is_initialized() and smp.pp_size() > 1:
            torch.distributed.all_reduce(squares, group=smp.get_pp_process_group())
        norm = float(squares.sum().sqrt())
        for _, master in self.pairs:
            if master.grad is not None and norm > max_norm:
                master.grad *= max_norm / norm
        return norm

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for parameter, master in self.pairs:
            with torch.no_grad():
                parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter, master in self.pairs:
            parameter.grad = master.grad = None

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class ApexOptimizer(HalfOptimizer):
    """Its state dict has no "state", as that of NVIDIA Apex's FP16_Optimizer."""

    def state_dict(self) -> Any:
        masters = [master.detach() for _, master in self.pairs]
        return {"optimizer_state_dict": self.inner.state_dict(), "masters": masters}

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state["optimizer_state_dict"])
        with torch.no_grad():
            for (_, master), saved in zip(self.pairs, state["masters"], strict=True):
                master.copy_(saved)


Found = tuple[dict[str, Tensor], list[float], list[float], dict[int, Any]]


def whole(batches: int) -> Found:
    """The oracle: trains in one process, without smp."""
    module = ordinary().half().to(device())
    model: Any = HalfModule(module)
    model.backward = torch.autograd.backward
    optimizer = HalfOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    optimizer.init_master_params(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = []
        for number in range(batches):
            for ids in batch_of(step, number).to(device()).chunk(MICROBATCHES):
                found.append(loss_of(model(ids), ids))
                optimizer.backward(found[-1] / (batches * MICROBATCHES), update_master_grads=False)
        optimizer.update_master_grads()
        norms.append(optimizer.clip_master_grads(MAX_NORM))
        optimizer.step()
        losses.append(float(sum(found).detach()) / len(found))
    state = {n: v.float().cpu() for n, v in module.state_dict().items()}
    return state, losses, norms, optimizer.state_dict()["state"]


@smp.step
def train(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
    loss = loss_of(model(ids), ids)
    optimizer.backward(loss, update_master_grads=False)
    return loss


def divided(config: dict[str, Any], early: bool) -> Found:
    smp.init({"ddp": True, "fp16_params": True, "_match_weights": True, **config})
    torch.manual_seed(3)
    # With tensor parallelism the optimizer has to come after the model.
    with smp.model_creation(tensor_parallelism=not early):
        module = Model(nn.Linear, nn.Embedding)
    net: Any = HalfModule(module.half() if early else module)
    if not early:
        net = model = smp.DistributedModel(net)
    inner = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    optimizer = smp.DistributedOptimizer(HalfOptimizer(net, inner))
    if early:
        optimizer.model = model = smp.DistributedModel(net)
    model.register_post_step_hook(lambda m, o: o.init_master_params(m.local_parameters()))
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        output = train(model, optimizer, batch_of(step, smp.dp_rank()).to(device()))
        optimizer.update_master_grads()
        norms.append(optimizer.clip_master_grads(MAX_NORM))
        optimizer.step()
        losses += smp.allgather(float(output.reduce_mean()), smp.DP_GROUP)
    size = smp.dp_size()
    means = [sum(losses[i : i + size]) / size for i in range(0, len(losses), size)]
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    assert {value.dtype for value in state.values()} == {torch.float16}
    # The script has put its masters in place of parameters, whose state it still is.
    partial, full = optimizer.local_state_dict(), optimizer.state_dict()["state"]
    optimizer.load_state_dict(partial)
    torch.testing.assert_close(optimizer.state_dict()["state"], full, rtol=0, atol=0)
    return {n: v.float().cpu() for n, v in state.items()}, means, norms, full


@pytest.mark.parametrize(
    ("config", "ranks", "early"),
    [
        ({"tensor_parallel_degree": 2}, 2, False),
        ({"tensor_parallel_degree": 2, "delayed_parameter_initialization": True}, 2, False),
        ({"tensor_parallel_degree": 2, "partitions": 2}, 4, False),
        ({}, 2, False),
        ({"partitions": 2}, 2, True),
    ],
    ids=["tp", "delayed", "tp and pp", "degree 1", "optimizer first"],
)
def test_a_half_precision_optimizer_of_the_script(
    config: dict[str, Any], ranks: int, early: bool
) -> None:
    expected, losses, norms, momenta = whole(ranks // config.get("partitions", 1))
    assert max(norms) > MAX_NORM
    config = {"microbatches": MICROBATCHES, **config}
    for found in check_ranks(divided, str(ranks), config, early):
        assert found[1] == pytest.approx(losses, rel=1e-2)
        assert found[2] == pytest.approx(norms, rel=1e-2)
        torch.testing.assert_close(found[0], expected, rtol=1e-2, atol=2e-3)
        torch.testing.assert_close(found[3], momenta, rtol=5e-2, atol=5e-3)


def of_its_own(partitions: int, path: str, saves: bool) -> None:
    smp.init({"ddp": True, "partitions": partitions})
    torch.manual_seed(3)
    net: Any = HalfModule(ordinary().half())
    inner = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    optimizer = smp.DistributedOptimizer(ApexOptimizer(net, inner))
    optimizer.model = model = smp.DistributedModel(net)
    model.register_post_step_hook(
        lambda m, o: o.pairs or o.init_master_params(m.local_parameters())
    )

    def step(number: int) -> list[Tensor]:
        optimizer.zero_grad()
        train(model, optimizer, batch_of(number, 0).to(device()))
        optimizer.update_master_grads()
        optimizer.step()
        return [parameter.detach().clone() for parameter, _ in optimizer.pairs]

    step(0)
    if not saves:
        with pytest.raises(SMPUsageError, match='has no "state"'):
            smp.resume_from_checkpoint(path)
        return
    kept = copy.deepcopy(optimizer.local_state_dict())
    smp.save_checkpoint(path, "own", model=model, optimizer=optimizer)
    expected = step(1)
    optimizer.load_state_dict(kept)
    for parameter, master in optimizer.pairs:
        with torch.no_grad():
            parameter.copy_(master)
    assert all(map(torch.equal, step(1), expected))
    smp.resume_from_checkpoint(path)
    assert all(map(torch.equal, step(1), expected))


def test_a_state_dict_of_the_script_s_own_form_loads_where_it_was_saved(tmp_path: Path) -> None:
    check_ranks(of_its_own, "2", 2, str(tmp_path), True)
    check_ranks(of_its_own, "2", 1, str(tmp_path), False)


class Normed(smp.nn.DistributedLinear):
    """Has more than its class: a norm of each kind, and buffers."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        # What comes after the inherited `__init__` still finds the parameters as they were made.
        assert self.weight.dtype == torch.float32
        self.layer_norm, self.batch_norm = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.register_buffer("scales", torch.ones(width))
        self.register_buffer("places", torch.arange(width))


class Inherited(Normed):
    """Adds nothing."""


@pytest.mark.parametrize("degree", [2, 1])
@on_ranks("2")
def test_divided_modules_are_made_in_half_precision(degree: int) -> None:
    smp.init({"ddp": True, "tensor_parallel_degree": degree, "fp16_params": True})
    half, single = torch.float16, torch.float32
    for kind in (Normed, Inherited):
        made = kind(WIDTH)
        found = {name: value.dtype for name, value in made.state_dict().items()}
        integers = {"places": torch.int64, "batch_norm.num_batches_tracked": torch.int64}
        assert found.items() >= integers.items()
        for name in found.keys() - integers.keys():
            assert found[name] == (single if name.startswith("batch_norm") else half), name
    values = torch.full((WORDS, WIDTH), 0.1)
    words = smp.nn.DistributedEmbedding(WORDS, WIDTH, _weight=values)
    assert torch.equal(words.weight, values[:, : WIDTH // degree].half())
    layer = smp.nn.DistributedTransformerLayer(2, 4, WIDTH, 2 * WIDTH)
    assert {value.dtype for value in layer.parameters()} == {half}
    # Ordinary modules keep their dtype; marked ones are replaced at any degree.
    with smp.tensor_parallelism():
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    assert module[0].weight.dtype == single
    model = smp.DistributedModel(module)
    found = [p.dtype for p in model.parameters()]
    assert found == [half, half, single, single]
    assert list(model.distributed_modules()) == [module[0]]
