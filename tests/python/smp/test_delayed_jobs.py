"""Delayed creation in a job: training, memory, and what cannot come to life."""

from __future__ import annotations

import copy
import gc
import hashlib
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from on_ranks import on_ranks
from ranks import check_ranks
from smp.census import Census, Highest, give_back_at_once, resident
from smp.common import evaluate, squares
from smp.test_delayed import GPT2, tensors
from smp.zoo import ZOO, arguments, batch_of, device
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError, SMPUsageError
from smddp.modelparallel.torch.delayed.life import is_delayed

STEPS = 2
MANUAL = {"auto_partition": False, "default_partition": 0, "microbatches": 2, "ddp": True}


@smp.step
def train(model: Any, name: str, batch: tuple[Tensor, ...]) -> Any:
    entry = ZOO[name]
    loss = entry.loss(model(*arguments(entry, batch)), *batch)
    model.backward(loss)
    return loss


def zoo(delay: bool, names: list[str], parts: int) -> Any:
    gc.freeze()  # so that collecting a model does not visit all objects of torch
    smp.init({"partitions": parts, "microbatches": 2, "ddp": True})
    found = {}
    for name in names:
        torch.manual_seed(0)
        with smp.delay_param_initialization(enabled=delay):
            net = ZOO[name].make()
        drawn = torch.rand(1)
        inner = torch.optim.Adam(net.parameters())
        model = smp.DistributedModel(net)
        assert any(map(is_delayed, net.parameters())) == (delay and parts > 1)
        optimizer = smp.DistributedOptimizer(inner)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = tuple(one.to(device()) for one in batch_of(name, step, smp.dp_rank()))
            losses.append(train(model, name, batch).outputs)
            optimizer.step()
        assert not any(map(is_delayed, tensors(net).values()))
        found[name] = drawn, losses, dict(model.state_dict())
        del model, optimizer, inner, net
        gc.collect()
    return found


# Fake tensors, values that decide, shared parameters, state that is computed: one model of each.
FEW = ["resnet", "tied gpt", "mixture of experts", "recurrent", "parametrized", "shared layer"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("parts", "names"),
    [(1, FEW), (2, FEW), pytest.param(2, list(ZOO), marks=pytest.mark.exhaustive)],
)
@pytest.mark.costly
def test_training_is_that_of_ordinary_creation(parts: int, names: list[str]) -> None:
    expected = check_ranks(zoo, "2", False, names, parts)
    for one, other in zip(check_ranks(zoo, "2", True, names, parts), expected, strict=True):
        for name in names:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


@smp.step
def language(model: Any, ids: Tensor) -> Any:
    loss = nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
    model.backward(loss)
    return loss


def gpt2(delay: bool, config: dict[str, Any], path: str) -> Any:
    """Uses a model in all ways before it is divided; returns what each of them gives."""
    gc.freeze()
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True, **config})
    assert smp.state.cfg.delayed_parameter_initialization == delay
    half = torch.float16 if config.get("fp16") else None
    results = []
    ids = torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(3)).to(device())
    for use in ("plain", "load", "resume", "state", "hooks"):
        torch.manual_seed(0)
        with smp.model_creation(dtype=half, zero_init=True, flash_attention=True):
            net = GPT2()
        assert is_delayed(net.wte.weight) == delay
        inner = torch.optim.Adagrad(
            net.parameters(), lr=0.1, eps=1e-3
        )  # it has state from the beginning
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(inner, static_loss_scale=4.0)
        if use == "load":
            other = torch.Generator().manual_seed(1)
            given = {
                name: torch.randn(tensor.shape, generator=other).to(tensor.dtype)
                for name, tensor in model.state_dict().items()
                if "lm_head" not in name
            }
            model.load_state_dict(given)
        if use == "resume":
            smp.resume_from_checkpoint(path, "delayed", partial=True)
        if use == "state":
            results.append({n: t.clone() for n, t in model.state_dict().items()})
            results.append(copy.deepcopy(net).state_dict())
            assert is_delayed(net.wte.weight) == delay
        if use == "hooks":
            model.register_post_partition_hook(
                lambda m, _, kept=results: kept.append([p.clone() for p in m.local_parameters()])
            )
        for _ in range(STEPS):
            optimizer.zero_grad()
            results.append(language(model, ids).outputs)
            optimizer.step()
        assert not any(map(is_delayed, tensors(net).values()))
        assert all(
            not entry["sum"].is_meta and not is_delayed(entry["sum"])
            for parameter, entry in optimizer.state.items()
            if not parameter.is_meta
        )
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        results += [state, optimizer.state_dict()["state"]]
        if use == "plain":
            smp.save_checkpoint(path, "delayed", model=model, optimizer=optimizer)
        del model, optimizer, inner, net
        gc.collect()
    return results


@pytest.mark.multiprocess
@pytest.mark.parametrize("config", [{}, {"fp16": True, "_fp32_grad_accumulation": True}])
@pytest.mark.costly
def test_uses_of_a_model_before_it_is_divided(config: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for delay in (False, True):
        path = str(tmp_path / str(delay))
        config = {**config, "delayed_parameter_initialization": delay}
        found.append(check_ranks(gpt2, "2", delay, config, path))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


WIDTH, LAYERS = 1024, 32  # 4 MiB each
SMALL = 2**18  # what biases that are computed, states of random generators and activations need


def large(config: dict[str, int], width: int) -> tuple[int, int, int, int]:
    """Returns the bytes of what is here of parameters; of all storages; and the peaks.

    These are of tensors, and of the process.
    """
    give_back_at_once(2**18)
    smp.init({**MANUAL, **config, "microbatches": 1})
    parts = config.get("partitions", 1)

    def build(width: int) -> Any:
        with smp.delay_param_initialization():
            layers = []
            for number in range(LAYERS):
                with smp.partition(number * parts // LAYERS):
                    layers.append(nn.Linear(width, width))
                    layers[-1].bias = nn.Parameter(torch.randn(width))
            net = nn.Sequential(*layers)
            net.apply(lambda part: part.reset_parameters() if hasattr(part, "bias") else None)
        model = smp.DistributedModel(net)
        model.runtime.executor.baton.watch = Census
        with torch.no_grad():
            evaluate(model, torch.ones(1, width).to(device()))
        return model

    with Census():
        model = build(4)  # imports modules, starts threads
    del model
    gc.collect()
    before = resident("VmRSS")
    Census.peak = 0
    with Highest("VmRSS") as highest, Census():
        model = build(width)
    peak = highest.most - before
    mine = sum(p.nbytes for p in model.runtime.optimised())
    gc.collect()
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if isinstance(one, Tensor) and not one.is_meta
    }
    return mine, sum(storages.values()), Census.peak, peak


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="measures memory of the host")
@pytest.mark.costly
def test_a_rank_needs_memory_for_its_own_part_only() -> None:
    layer = 4 * WIDTH * (WIDTH + 1)
    for mine, storages, others, process in check_ranks(large, "4", {"partitions": 4}, WIDTH):
        assert mine == layer * LAYERS // 4
        assert storages < mine + SMALL
        assert others < mine + layer + SMALL
        assert process < mine + 3 * layer  # messages between ranks, and what torch itself needs


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="measures memory of the host")
@pytest.mark.costly
def test_a_rank_needs_memory_for_its_shards_only() -> None:
    width = WIDTH - 1  # the elements of a layer are no multiple of the degree
    layer = 4 * width * (width + 1)
    config = {"sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": width + 1}
    for mine, storages, others, process in check_ranks(large, "4", config, width):
        assert mine == LAYERS * 4 * (-(-width * width // 4) + width)
        assert storages < mine + SMALL
        # One that is gathered, and the one before: a thread of the backend gives that back, perhaps
        # a moment later.
        assert others < mine + 2 * layer + SMALL
        assert process < mine + 3 * layer  # messages between ranks, and what torch itself needs


LIMIT = 5 * 2**25  # more than a rank needs for its part of `Huge` and a step, and less than `Huge`


class Huge(nn.Sequential):
    """48 layers of 4 MiB, unless the width is another one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(48)))


def digest(tensor: Tensor) -> str:
    """Returns a name for the bits of a tensor."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy()).hexdigest()


def trained_whole(copies: int) -> list[dict[str, list[str]]]:
    """Returns, at creation and after a step, the digests of each parameter whole and in parts."""
    torch.manual_seed(0)
    net = Huge()

    def digests() -> dict[str, list[str]]:
        return {
            name: [digest(p), *map(digest, p.reshape(-1).chunk(4))]
            for name, p in net.named_parameters()
        }

    found = [digests()]
    net(torch.ones(1, WIDTH)).square().mean().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            assert parameter.grad is not None
            mean = sum([parameter.grad] * copies) / copies  # in the order of replicas
            parameter.sub_(mean, alpha=0.5)
    return [*found, digests()]


def trained_within_limit(config: dict[str, Any]) -> list[dict[str, str]]:
    """Returns, at creation and after a step, the digests of what lives here."""
    malloc = give_back_at_once(2**18)

    def train(width: int) -> list[dict[str, str]]:
        fixed = {"ddp": True, "microbatches": 1, "delayed_parameter_initialization": True}
        smp.init({**fixed, **config})
        torch.manual_seed(0)
        with smp.model_creation():
            net = Huge(width)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        found: list[dict[str, str]] = []

        def note(*_: Any) -> None:
            local = model.local_state_dict().items()
            found.append({name: digest(t) for name, t in local if isinstance(t, Tensor)})

        model.register_post_partition_hook(note)
        squares(model, torch.ones(1, width))
        optimizer.step()
        note()
        smp.shutdown()
        return found

    train(8)  # imports modules, starts threads
    gc.collect()
    limit = resident("VmData") + LIMIT
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        Huge()
    gc.collect()
    malloc.malloc_trim(0)
    return train(WIDTH)


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="limits memory of the host")
@pytest.mark.parametrize(
    "config",
    [
        {"partitions": 4},
        {
            "sharded_data_parallel_degree": 4,
            "sdp_param_persistence_threshold": WIDTH + 1,
            "sdp_reduce_bucket_size": WIDTH * WIDTH,
        },
    ],
    ids=["partitions", "sharding"],
)
@pytest.mark.costly
def test_a_model_larger_than_the_memory_of_a_rank(config: dict[str, Any]) -> None:
    layer = 4 * WIDTH * (WIDTH + 1)
    assert 48 * layer > LIMIT
    sharded = "partitions" not in config
    (whole,) = check_ranks(trained_whole, "1", 4 if sharded else 1)
    ranks = check_ranks(trained_within_limit, "4", config)
    for moment, expected in enumerate(whole):
        seen: set[str] = set()
        for rank, found in enumerate(ranks):
            for name, value in found[moment].items():
                part = sharded and name.endswith("weight")
                assert value == expected[name][1 + rank if part else 0], (moment, rank, name)
                seen.add(name)
        assert seen == expected.keys()


@pytest.mark.multiprocess
@on_ranks("2")
def test_tensors_that_are_left_when_the_model_is_divided() -> None:
    smp.init({**MANUAL, "partitions": 2})
    with smp.delay_param_initialization():
        net = nn.Sequential(nn.Linear(2, 2), nn.utils.weight_norm(nn.Linear(2, 2)))
        net.scaled = net[0].weight * 2
        net.attribute = torch.full((2,), 3.0)
    with pytest.raises(SMPUsageError, match="trace_execution_times needs parameters with values"):
        smp.DistributedModel(net, trace_execution_times=True)
    model = smp.DistributedModel(net)
    smp.set_partition(net[1], 1)
    kept = net.attribute[:1]
    for _ in range(2):
        with torch.no_grad():
            evaluate(model, torch.ones(2, 2).to(device()))
    # The attribute belongs to the root, on rank 0; elsewhere it has values when code uses it.
    assert is_delayed(net.attribute) == (smp.rank() == 1)
    assert (net.attribute + 1).tolist() == [4.0, 4.0]
    net.attribute.add_(1)
    assert torch.equal(kept * 1, torch.full((1,), 4.0))
    with smp.delay_param_initialization():  # that of another model
        assert not is_delayed(net.attribute * 2)
        assert (torch.ones(2) + net.attribute).tolist() == [5.0, 5.0]
    with pytest.raises(SMPUsageError, match="computed from parameters, with gradients enabled"):
        net.scaled.sum()


@pytest.mark.multiprocess
@pytest.mark.parametrize("parts", [1, 2])
@on_ranks("2")
def test_all_ranks_raise_if_a_parameter_cannot_come_to_life(parts: int) -> None:
    """All ranks raise when a parameter cannot come to life, and the job can go on."""
    smp.init({**MANUAL, "partitions": parts})
    table = torch.ones(200, 200)
    with torch.no_grad(), smp.delay_param_initialization():
        net = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
        net[0].weight.copy_(table)
    table += 1
    text = r"shape \(200, 200\) was changed after aten::copy_"
    if parts == 1:
        with pytest.raises(SMPUsageError, match=text):
            smp.DistributedModel(net)
        return
    smp.set_partition((model := smp.DistributedModel(net)).get_module()[1], 1)
    with pytest.raises(SMPMicrobatchError, match=text):
        evaluate(model, torch.ones(2, 200).to(device()))
