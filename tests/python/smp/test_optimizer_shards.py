"""Dividing the optimizer's state over replicas changes no result, and only where the state is."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from on_ranks import on_ranks
from ranks import check_ranks
from smp.zoo import device
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPPeerError, SMPUsageError

pytestmark = pytest.mark.multiprocess

STEPS = 3
CONFIG = {"auto_partition": False, "default_partition": 0, "microbatches": 2, "ddp": True}
DYNAMIC = {"init_scale": 2.0**17, "scale_window": 2, "min_scale": 2.0}

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),  # has state from the beginning
    "lamb": lambda p: smp.optimizers.FusedLAMB(p, lr=0.1, max_grad_norm=0.01),
    "novograd": lambda p: smp.optimizers.FusedNovoGrad(p, lr=0.1),
}


class Net(nn.Module):
    """Has a parameter without gradients, one that is never used, and layers of unequal size."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 7))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        with smp.partition(last):
            self.second = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.frozen(self.first(x)))


@smp.step
def train_step(model: Any, x: Tensor) -> Any:
    loss = (model(x) - x).square().mean()
    model.backward(loss)
    return loss


def batch(step: int) -> Tensor:
    source = torch.Generator().manual_seed(10 * step + smp.rdp_rank())
    return torch.randn(8, 6, generator=source).to(device())


def begin(parts: int, name: str, seed: int = 0, **config: Any) -> tuple[Any, Any, Any]:
    """Returns a model, its optimizer and a schedule of learning rates."""
    if not smp.is_initialized():
        smp.init({"partitions": parts, **CONFIG, **config})
    torch.manual_seed(seed)
    net = Net(parts - 1)
    groups = [{"params": list(net.first.parameters()), "lr": 0.05}]
    known = {id(p) for p in groups[0]["params"]}
    groups.append({"params": [p for p in net.parameters() if id(p) not in known]})
    inner = OPTIMIZERS[name](groups)
    arguments = {"dynamic_loss_scale": True, **DYNAMIC} if smp.state.cfg.fp16 else {}
    if name == "sgd":  # the optimizer may come first
        optimizer = smp.DistributedOptimizer(inner, **arguments)
        model = smp.DistributedModel(net)
    else:
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(inner, **arguments)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def go_on(model: Any, optimizer: Any, schedule: Any, steps: range) -> list[Any]:
    """Trains; returns losses and norms."""
    told = []
    for step in steps:
        optimizer.zero_grad()
        loss = train_step(model, batch(step)).reduce_mean()
        told += [loss, smp.clip_grad_norm(0.5), getattr(optimizer, "overflow", False)]
        optimizer.step()
        schedule.step()
    return told


def values(model: Any) -> dict[str, Tensor]:
    """Returns copies of the parameters; statistics of replicas differ until the next step."""
    return {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if "running" not in name and "num_batches" not in name
    }


def owned(optimizer: Any) -> set[int]:
    return set(optimizer.orig_state_dict()["state"])


def trained(parts: int, names: list[str], config: dict[str, Any]) -> Any:
    gc.freeze()  # so that collecting a model does not visit all objects of torch
    found = []
    for name in names:
        model, optimizer, schedule = begin(parts, name, **config)
        told = go_on(model, optimizer, schedule, range(STEPS))
        numbers = optimizer._param_id_to_index()
        local = [p for p in model.local_parameters() if p.requires_grad]
        sizes = {numbers[id(p)]: p.numel() for p in local if p.grad is not None}
        masters = [m.numel() for g in getattr(optimizer, "fp32_from_fp16_groups", []) for m in g]
        places = {numbers[id(p)] for p in local}
        found.append((told, values(model), owned(optimizer) & places, sizes, sum(masters)))
        del model, optimizer, schedule
        gc.collect()
    return smp.pp_rank(), found


CASES = [
    ("2", 1, list(OPTIMIZERS), {}),
    ("4", 2, ["adam"], {}),
    ("3", 1, ["lamb"], {"fp16": True}),
    ("4", 2, ["adam"], {"fp16": True, "_fp32_grad_accumulation": True}),
]


@pytest.mark.parametrize(("ranks", "parts", "names", "config"), CASES)
@pytest.mark.costly
def test_results_are_those_of_undivided_state(
    ranks: str, parts: int, names: list[str], config: dict[str, Any]
) -> None:
    whole = check_ranks(trained, ranks, parts, names, config)
    divided = check_ranks(trained, ranks, parts, names, {**config, "shard_optimizer_state": True})
    for number, name in enumerate(names):
        # By partition: the numbers of parameters with state, of each replica.
        states: dict[int, list[set[int]]] = {}
        for (_, expected), (part, found) in zip(whole, divided, strict=True):
            told, state, everything, sizes, masters = expected[number]
            torch.testing.assert_close(found[number][0], told, rtol=0, atol=0)
            torch.testing.assert_close(found[number][1], state, rtol=0, atol=0, msg=name)
            states.setdefault(part, []).append(found[number][2])
            if config:
                assert found[number][4] < masters
                assert any(told[2::3]), "no overflow"
        for part, replicas in states.items():
            everything, sizes = next((e[number][2], e[number][3]) for p, e in whole if p == part)
            assert set().union(*replicas) == everything
            assert sum(map(len, replicas)) == len(everything)
            # No replica has more than its share and the largest parameter.
            loads = [sum(sizes.get(one, 0) for one in replica) for replica in replicas]
            assert max(loads) <= sum(sizes.values()) / len(replicas) + max(sizes.values())
            assert min(loads) > 0


def save(parts: int, config: dict[str, Any], path: str) -> Any:
    model, optimizer, schedule = begin(parts, "adam", **config)
    go_on(model, optimizer, schedule, range(STEPS))
    smp.save_checkpoint(path, "sharded", model=model, optimizer=optimizer)
    smp.save(
        optimizer.local_state_dict(gather_if_shard=False),
        f"{path}/own.pt",
        v3=smp.state.cfg.shard_optimizer_state,
    )
    smp.save(model.local_state_dict(), f"{path}/model.pt")
    if smp.state.cfg.shard_optimizer_state:
        gathered = optimizer.local_state_dict()
        assert gathered["_smp_is_partial"]
        assert isinstance(gathered["state"], list) == (smp.rdp_rank() == 0)
        if smp.rdp_rank() == 0:
            assert len(gathered["state"]) == smp.rdp_size()
            assert set(gathered["state"][0]) == owned(optimizer)
        with pytest.raises(SMPUsageError, match="no full state of the optimizer"):
            optimizer.state_dict()
        # It can be loaded again, in both forms.
        optimizer.load_state_dict(gathered)
        optimizer.load_state_dict(optimizer.local_state_dict(gather_if_shard=False))
    rate = schedule.state_dict()
    told = go_on(model, optimizer, schedule, range(STEPS, 2 * STEPS))
    return told, values(model), rate


def resume(parts: int, config: dict[str, Any], path: str, rate: Any, how: str) -> Any:
    model, optimizer, schedule = begin(parts, "adam", 7, **config)
    if how == "late":
        go_on(model, optimizer, schedule, range(1))
    if how == "own":
        model.load_state_dict(smp.load(f"{path}/model.pt"))
        optimizer.load_state_dict(smp.load(f"{path}/own.pt"))
    else:
        smp.resume_from_checkpoint(path, "sharded")
    schedule.load_state_dict(rate)
    return go_on(model, optimizer, schedule, range(STEPS, 2 * STEPS)), values(model), None


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.costly
def test_checkpoints_load_with_other_numbers_of_replicas(fp16: bool, tmp_path: Path) -> None:
    config = {"fp16": fp16, "shard_optimizer_state": True}
    _, state, rate = check_ranks(save, "4", 2, config, str(tmp_path))[0]
    files = {file.name for file in (tmp_path / "sharded_partial").glob("*_*_*.pt")}
    assert {f"optimizer_{pp}_0_{rdp}.pt" for pp in (0, 1) for rdp in (0, 1)} <= files
    assert {file.name for file in tmp_path.glob("own.pt*")} == {
        f"own.pt_{pp}_0_{rdp}" for pp in (0, 1) for rdp in (0, 1)
    }
    undivided = {"fp16": fp16}
    ways: list[tuple[str, int, dict[str, Any], str]] = [
        ("4", 2, config, "own"),
        ("4", 2, config, "early"),
        ("4", 2, undivided, "late"),
        ("2", 1, config, "late"),
    ]
    for ranks, parts, loaded, how in ways:
        for found in check_ranks(resume, ranks, parts, loaded, str(tmp_path), rate, how):
            # A norm is a sum over partitions, which rounds differently with one partition.
            exact = {"rtol": 0, "atol": 0} if parts == 2 else {"rtol": 1e-3, "atol": 1e-4}
            torch.testing.assert_close(found[1], state, **exact)
    # Fewer and more replicas than parts.
    for ranks in ("2", "6"):
        for found in check_ranks(resume, ranks, 2, config, str(tmp_path), rate, "early"):
            assert len(found[0]) == 3 * STEPS


def loads_states(path: str) -> dict[int, Any]:
    """Returns the state of all parameters of a checkpoint, in a job with another shape."""
    _kept, optimizer, _ = begin(1, "adam", 7, shard_optimizer_state=True)
    smp.resume_from_checkpoint(path, "sharded")
    state = optimizer.local_state_dict()["state"]
    return {n: e for part in state for n, e in part.items()} if smp.rdp_rank() == 0 else {}


def saves_states(path: str, config: dict[str, Any]) -> Any:
    model, optimizer, schedule = begin(2, "adam", **config)
    go_on(model, optimizer, schedule, range(STEPS))
    smp.save_checkpoint(path, "sharded", model=model, optimizer=optimizer)
    return None if config else optimizer.state_dict()["state"]


@pytest.mark.parametrize("divided", [True, False])
def test_loaded_states_are_complete(divided: bool, tmp_path: Path) -> None:
    """Also from a checkpoint whose state was not divided, and with three replicas for two."""
    expected = check_ranks(saves_states, "2", str(tmp_path), {})[0]
    if divided:
        config = {"shard_optimizer_state": True}
        check_ranks(saves_states, "2", str(tmp_path), config)
    found = check_ranks(loads_states, "3", str(tmp_path))[0]
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def later_group() -> Any:
    """Parameters that are added later are divided, too; a closure sees complete groups."""
    found = []
    for divided in (False, True):
        smp.init({**CONFIG, "partitions": 1, "shard_optimizer_state": divided})
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(net[0].parameters(), lr=0.1))

        def closure(optimizer: Any = optimizer, model: Any = model) -> Any:
            assert sum(len(group["params"]) for group in optimizer.param_groups) in (2, 4)
            optimizer.zero_grad()
            return train_step(model, batch(0)).reduce_mean()

        losses = [optimizer.step(closure)]
        optimizer.add_param_group({"params": net[1].parameters(), "lr": 0.01})
        losses += [optimizer.step(closure) for _ in range(2)]
        found.append((losses, values(model)))
        states = owned(optimizer)
        del model, optimizer, net, closure
        gc.collect()
        smp.shutdown()
    assert 0 < len(states) < 4
    return found


def test_groups_may_be_added_and_closures_used() -> None:
    for whole, divided in check_ranks(later_group, "2"):
        torch.testing.assert_close(divided, whole, rtol=0, atol=0)


def frozen_late(half: bool) -> list[dict[str, Tensor]]:
    """A layer is frozen after the backward pass, so the optimizer steps it once more."""
    found = []
    for divided in (False, True):
        smp.init({**CONFIG, "partitions": 1, "shard_optimizer_state": divided, "fp16": half})
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        for step in range(2):
            train_step(model, batch(step))
            net[0].requires_grad_(False)
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(model))
        del model, optimizer, net
        gc.collect()
        smp.shutdown()
    return found


@pytest.mark.parametrize("half", [False, True])
def test_what_is_frozen_before_the_step_is_the_same_on_all_replicas(half: bool) -> None:
    for whole, divided in check_ranks(frozen_late, "2", half):
        torch.testing.assert_close(divided, whole, rtol=0, atol=0)


class Fragile(torch.optim.SGD):
    """Fails on one rank."""

    broken = False

    def step(self, closure: Any = None) -> Any:
        if Fragile.broken and smp.rank() == 1:
            raise ValueError("broken")
        return super().step(closure)


@on_ranks("2")
def test_misuse_is_refused_on_all_ranks() -> None:
    smp.init({**CONFIG, "partitions": 1, "shard_optimizer_state": True})
    net = nn.Linear(6, 6)
    model = smp.DistributedModel(net)
    with pytest.raises(SMPUsageError, match="does not work with LBFGS"):
        smp.DistributedOptimizer(torch.optim.LBFGS(net.parameters()))
    with pytest.raises(SMPUsageError, match=r"join\(\) does not work with shard_optimizer_state"):
        model.join()
    optimizer = smp.DistributedOptimizer(Fragile(net.parameters(), lr=0.1, momentum=0.9))
    train_step(model, batch(0))
    optimizer.step()
    Fragile.broken = True
    kind, text = (ValueError, "broken") if smp.rank() else (SMPPeerError, "on another replica")
    with pytest.raises(kind, match=text):
        optimizer.step()
    Fragile.broken = False
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    whole = smp.allgather(net.weight.detach().clone(), smp.WORLD)
    assert torch.equal(*whole)
    own = optimizer.local_state_dict(gather_if_shard=False)
    own["_smp_optimizer_shard"] = (smp.rank(), 3)
    with pytest.raises(SMPUsageError, match=r"divided over 3 replicas, and its parts 2 were not"):
        optimizer.load_state_dict(own)
