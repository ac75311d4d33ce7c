"""Sharded data parallelism gives the results of one process, and of replicas that keep everything.

The first oracle is a plain loop in one process, without any of our code. The second is the same job
with a persistence threshold that keeps every parameter whole.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interpreters
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import (
    arrive,
    await_ranks,
    check_ranks,
    listen,
    reserved_port,
    rotating_or_all,
    run_ranks,
)
from smp import test_random_models
from smp.census import Census, UnmappedCensus
from smp.zoo import ZOO, arguments, batch_of, device, make, train_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import (
    SMPError,
    SMPMicrobatchError,
    SMPPeerError,
    SMPUsageError,
)
from smddp.modelparallel.torch.checkpoint import safetensors
from smddp.modelparallel.torch.delayed.record import Call
from smddp.modelparallel.torch.model.runtime import ModelRuntime
from smddp.modelparallel.torch.optimizer.distributed_optimizer import FP16_STATES
from smddp.modelparallel.torch.sharding.gathers import Gathers

pytestmark = pytest.mark.multiprocess

MICROBATCHES, STEPS = 2, 5
# Smaller parameters stay whole. Most models of the zoo have some of both kinds.
THRESHOLD = 20
# "mixture of experts" has control flow that differs between replicas; it is refused below.
NAMES = [name for name in ZOO if name != "mixture of experts"]


def whole(
    name: str, replicas: int, clip: float, passes: int = 1
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Trains a model the ordinary way; returns losses, state and the norms of the gradients."""
    entry = ZOO[name]
    models = [make(name).to(device())]
    models += [copy.deepcopy(models[0]) for _ in range(replicas - 1)]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS * passes):
        if step % passes == 0:
            for model in models:
                model.load_state_dict(models[0].state_dict())
                model.zero_grad()
        for replica, model in enumerate(models):
            for mine, first in zip(model.buffers(), models[0].buffers(), strict=True):
                mine.copy_(first)
            chunks = [t.to(device()).chunk(MICROBATCHES) for t in batch_of(name, step, replica)]
            total = 0.0
            for part in zip(*chunks, strict=True):
                loss = entry.loss(model(*arguments(entry, part)), *part)
                (loss / MICROBATCHES).backward()
                total += loss.item()
            if replica == 0:
                losses.append(total / MICROBATCHES)
        if step % passes == passes - 1:
            for mine in zip(*(model.parameters() for model in models), strict=True):
                found = [p.grad for p in mine if p.grad is not None]
                mine[0].grad = sum(found[1:], found[0]) / replicas if found else None
            norms.append(float(nn.utils.clip_grad_norm_(models[0].parameters(), clip)))
            optimizer.step()
    return losses, {n: v.clone() for n, v in models[0].state_dict().items()}, norms


@smp.step
def squares(model: Any, x: Tensor) -> Any:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def sharded(config: dict[str, Any], names: list[str], passes: int = 1) -> dict[str, Any]:
    """Trains models; returns losses, state dicts, norms and the number of shards by name."""
    gc.freeze()
    smp.init({"ddp": True, "microbatches": MICROBATCHES, **config})
    results = {}
    for name in names:
        module = make(name)
        inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        model = smp.DistributedModel(module, backward_passes_per_step=passes)
        optimizer = smp.DistributedOptimizer(inner)
        if config.get("offload_activations"):
            for child in module.children():
                for part in child if isinstance(child, nn.ModuleList) else [child]:
                    smp.set_activation_checkpointing(part)
        losses, norms = [], []
        for step in range(STEPS * passes):
            if step % passes == 0:
                optimizer.zero_grad()
            batch = [tensor.to(device()) for tensor in batch_of(name, step, smp.dp_rank())]
            output = train_step(model, name, *batch)
            losses.append(float(output.reduce_mean()))
            # Only the first step compares its gathers among ranks. It runs twice if a parameter
            # gets several gradients. No other step does.
            twice = int(name == "checkpointed" and bool(model.runtime.sharding.entries))
            assert model.runtime.steps == step + 1 + twice or smp.pp_size() > 1
            if step % passes == passes - 1:
                optimizer.step()
                norms.append(float(optimizer._global_grad_norm))
        state = {n: v.clone() for n, v in model.state_dict().items()}
        results[name] = losses, state, norms, len(model.runtime.sharding.entries)
        del model, optimizer, module, inner
        gc.collect()
    return results


def check_state(found: Any, expected: Any, exact: bool, first: bool, where: str) -> None:
    assert found.keys() == expected.keys(), where
    for key, value in expected.items():
        if not first and "running" in key:
            continue  # each replica has its own statistics until the next step begins
        tolerance = 0 if exact else 1e-6
        torch.testing.assert_close(
            found[key],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, key=key: f"{where}, {key}: {m}",
        )


# Ranks, the degree, further configuration.
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("2", 2, {}),
    ("4", 2, {"sdp_reduce_bucket_size": 100}),
    ("2x2", 4, {"sdp_max_live_parameters": 1}),
    ("4", 2, {"partitions": 2}),
    ("4", 2, {"partitions": 2, "pipeline": "simple"}),
    ("2", 2, {"offload_activations": True}),
    ("4", 2, {"offload_activations": True, "partitions": 2}),
]
IDS = [
    "2",
    "2 of 4",
    "4",
    "2 partitions",
    "2 partitions, simple",
    "offload",
    "offload, 2 partitions",
]


@pytest.mark.parametrize(("ranks", "degree", "more"), LAYOUTS, ids=IDS)
@pytest.mark.timeout(170)
@pytest.mark.costly
def test_sharded_models_learn_the_same(ranks: str, degree: int, more: dict[str, Any]) -> None:
    clip = 0.5
    config = {
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": THRESHOLD,
        "sdp_gradient_clipping": clip,
        **more,
    }
    # With four ranks half of the models each, as the sums of all are tested with two.
    turn = LAYOUTS.index((ranks, degree, more))
    names = NAMES if turn == 0 else NAMES[(turn - 1) % 2 :: 2]
    found = check_ranks(sharded, ranks, config, names, timeout=150)
    partitions = more.get("partitions", 1)
    for name in names:
        losses, state, norms = whole(name, len(found) // partitions, clip)
        assert any(result[name][3] for result in found), name
        for rank, result in enumerate(found):
            found_losses, found_state, found_norms, shards = result[name]
            where = f"{name} on rank {rank}"
            assert shards or partitions > 1, where
            check_state(found_state, state, False, rank < partitions, where)
            assert found_norms == pytest.approx(norms, rel=1e-5), where
            if rank == 0:
                assert found_losses == pytest.approx(losses, rel=1e-6, abs=1e-6), where


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_two_ranks_give_the_bits_of_whole_replicas(dtype: str) -> None:
    """The sum of two numbers does not depend on their order, so every bit is the same."""
    config: dict[str, Any] = {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e9}
    config["microbatches"] = 1
    if dtype != "fp32":
        config[dtype] = True
    names = NAMES[["fp32", "fp16", "bf16"].index(dtype) :: 3]
    half = {"sdp_param_persistence_threshold": THRESHOLD, "sdp_reduce_bucket_size": 300}
    found = check_ranks(sharded, "2", {**config, **half}, names, timeout=100)
    expected = check_ranks(sharded, "2", config, names, timeout=100)
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in names:
            assert mine[name][3] > theirs[name][3] == 0
            assert mine[name][0] == theirs[name][0], name
            check_state(mine[name][1], theirs[name][1], True, True, f"{name} on rank {rank}")


def test_gradients_of_several_steps_are_added() -> None:
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": THRESHOLD}
    names = ["mlp", "shared layer"]
    found = check_ranks(sharded, "4", config, names, 2)
    for name in names:
        losses, state, norms = whole(name, 4, 1.0, 2)
        for rank, result in enumerate(found):
            found_losses, found_state, found_norms, _ = result[name]
            check_state(found_state, state, False, rank == 0, f"{name} on rank {rank}")
            assert found_norms == pytest.approx(norms, rel=1e-5)
            if rank == 0:
                assert found_losses == pytest.approx(losses, abs=1e-6)


def random_models(seeds: list[int], degree: int, partitions: int = 1) -> dict[int, list[Any]]:
    """Trains the models of test_random_models; all replicas have the same batches."""
    gc.freeze()
    sdp = {"sdp_param_persistence_threshold": 5, "sdp_max_live_parameters": 50}
    manual = {"auto_partition": False, "default_partition": 0, "partitions": partitions}
    sdp["sharded_data_parallel_degree"] = degree
    smp.init({"ddp": True, "microbatches": 4, **manual, **sdp})
    results: dict[int, list[Any]] = {}
    for seed in seeds:
        module = test_random_models.make(seed)
        model = smp.DistributedModel(module)
        source = random.Random(1000 + seed)
        for part in list(module.modules())[1:] if partitions > 1 else []:
            if source.random() < 0.6:
                smp.set_partition(part, source.randrange(partitions))
        results[seed] = []
        for step in range(4):
            for parameter in module.parameters():
                parameter.grad = None
            generator = torch.Generator().manual_seed(100 * seed + step)
            x = torch.randn(8, test_random_models.WIDTH, generator=generator)
            torch.manual_seed(step)
            losses = [float(loss) for loss in test_random_models.train(model, x).outputs]
            grads = {}
            for name, parameter in model.local_named_parameters():
                whole_gradient = parameter.grad
                if hasattr(parameter, "ds_param_shard_group") and whole_gradient is not None:
                    parts = [torch.empty_like(whole_gradient) for _ in range(degree)]
                    dist.all_gather(parts, whole_gradient, group=parameter.ds_param_shard_group)
                    whole_gradient = torch.cat(parts)[: parameter.numel()].view(parameter.shape)
                grads[name] = whole_gradient
            buffers = {name: buffer.clone() for name, buffer in model.local_named_buffers()}
            results[seed].append((losses, grads, buffers, model.runtime.steps))
        del model, module
        gc.collect()
    return results


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.timeout(170)
@pytest.mark.costly
def test_models_made_at_random(partitions: int) -> None:
    """Their order of calls changes between steps, with the data."""
    seeds = [3, 7, 34, *rotating_or_all(list(range(20, 34)), 4 // partitions)]
    expected = check_ranks(random_models, "1", seeds, 1)[0]
    again = 0
    ranks = check_ranks(random_models, str(2 * partitions), seeds, 2, partitions, timeout=150)
    for replica in range(2):
        found: dict[int, list[Any]] = {}
        for seed in seeds:
            found[seed] = []
            for of_step in zip(
                *(rank[seed] for rank in ranks[replica * partitions :][:partitions]), strict=True
            ):
                grads, buffers = (
                    {k: v for one in of_step for k, v in one[part].items()} for part in (1, 2)
                )
                found[seed].append((of_step[0][0], grads, buffers, of_step[0][3]))
        for seed in seeds:
            for step, (losses, *tensors, _) in enumerate(expected[seed]):
                where = f"seed {seed}, step {step}, replica {replica}"
                assert found[seed][step][0] == pytest.approx(losses, abs=1e-6), where
                for mine, theirs in zip(found[seed][step][1:3], tensors, strict=True):
                    assert mine.keys() == theirs.keys()
                    for name, tensor in theirs.items():
                        assert (mine[name] is None) == (tensor is None), f"{where}: {name}"
                        if tensor is not None:
                            torch.testing.assert_close(
                                mine[name],
                                tensor,
                                rtol=1e-5,
                                atol=1e-6,
                                msg=lambda m, at=f"{where}, {name}": f"{at}: {m}",
                            )
            again += found[seed][-1][3] - 4
    # Some steps were run twice; not with partitions, where plans are there from the third step on.
    assert again or partitions > 1


class Kept(nn.Module):
    """Other code keeps what the backward pass needs; half of the layers are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3)) for _ in range(6)]
        )
        for layer in self.layers[::2]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for first, last in zip(self.layers[0::2], self.layers[1::2], strict=True):
            number = list(self.layers).index(first)
            if number == 0:
                x = checkpoint(lambda y: last(first(y)), x, use_reentrant=False)  # noqa: B023
            elif number == 2:
                with torch.autograd.graph.save_on_cpu():
                    x = last(first(x))
            else:
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                    x = last(first(x))
        return x


def kept_elsewhere() -> Any:
    sdp = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1}
    smp.init({"ddp": True, "sdp_gradient_clipping": 1e9, **sdp})
    torch.manual_seed(0)
    model = smp.DistributedModel(Kept())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    source = torch.Generator().manual_seed(0)  # the same for all
    for _ in range(3):
        optimizer.zero_grad()
        squares(model, torch.randn(4, 3, 5, generator=source))
        optimizer.step()
    return model.state_dict()


def test_hooks_of_other_code_keep_values() -> None:
    torch.manual_seed(0)
    model = Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = torch.Generator().manual_seed(0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 5, generator=source)).square().mean().backward()
        optimizer.step()
    # A checkpoint runs a batch norm twice.
    for rank, state in enumerate(check_ranks(kept_elsewhere, "2")):
        check_state(state, model.state_dict(), False, True, f"rank {rank}")


# --- memory ---------------------------------------------------------------------------------------

WIDTH, DEPTH = 32, 6


class Watched(nn.Module):
    """A chain of linear layers, some in checkpoints; notes the gathered elements at each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
        self.seen: list[int] = []

    def look(self, *_: Any) -> None:
        storages = {p.untyped_storage() for p in self.parameters() if type(p) is nn.Parameter}
        self.seen.append(sum(s.nbytes() // 4 for s in storages if s.nbytes() > 4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number % 3:
                x = torch.tanh(layer(x))
            else:
                x = checkpoint(layer, x, use_reentrant=number == 0)
        return x


def memory(degree: int, limit: int) -> Any:
    smp.init(
        {
            "ddp": True,
            "microbatches": 2,
            "sharded_data_parallel_degree": degree,
            "sdp_param_persistence_threshold": WIDTH + 1,
            "sdp_max_live_parameters": limit,
        }
    )
    net = Watched()
    model = smp.DistributedModel(net)
    for layer in net.layers:
        layer.register_forward_hook(net.look)
        layer.register_full_backward_hook(net.look)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    peaks = []
    for _ in range(3):
        squares(model, torch.randn(8, WIDTH, requires_grad=True))
        peaks.append(model.runtime.sharding.gathers.peak)
        optimizer.step()
    rest = sum(p.untyped_storage().nbytes() for p in net.parameters())
    kept = [p.ds_tensor.untyped_storage().nbytes() for p in net.parameters() if p.dim() == 2]
    states = [t.numel() for own in optimizer.state.values() for t in own.values() if t.dim()]
    storages = [p.grad.untyped_storage() for p in net.parameters() if p.dim() == 2]
    gradients = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    return rest, kept, gradients, max(net.seen), peaks, sum(states)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_rank_keeps_its_share(ahead: bool, degree: int) -> None:
    weight = WIDTH * WIDTH
    limit = 3 * weight if ahead else weight
    found = check_ranks(memory, str(degree), degree, limit)
    for rest, kept, gradients, seen, peaks, states in found:
        # The element that stands for each weight, and the biases.
        assert rest == DEPTH * 4 + DEPTH * WIDTH * 4
        assert kept == [weight // degree * 4] * DEPTH
        assert gradients == DEPTH * weight // degree * 4
        # No layer runs in another, so only what was gathered ahead comes to the layer's own.
        assert seen == weight
        # In the first step nobody knows what to gather ahead.
        assert peaks == ([weight, 3 * weight, 3 * weight] if ahead else [weight] * 3)
        assert states == 2 * DEPTH * (weight // degree + WIDTH)


def gathers_ahead() -> list[tuple[int, int]]:
    said: list[int] = []
    original = Gathers._said

    def counted(self: Gathers, number: int) -> list[int]:
        said.append(number)
        return original(self, number)

    Gathers._said = counted  # type: ignore[method-assign]
    smp.init(
        {
            "ddp": True,
            "partitions": 2,
            "microbatches": 4,
            "auto_partition": False,
            "default_partition": 0,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": THRESHOLD,
            "sdp_gradient_clipping": 1e9,
        }
    )
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    model = smp.DistributedModel(net)
    for part in net[3:]:
        smp.set_partition(part, 1)
    found = []
    for _ in range(5):
        said.clear()
        squares(model, torch.randn(8, 8))
        found.append((len(said), model.runtime.sharding.gathers.ahead))
    assert model.runtime.steps == len(found), "no step was run again"
    return found


def test_partitions_gather_ahead() -> None:
    for found in check_ranks(gathers_ahead, "4"):
        # In the first step calls are sent one by one, in the second in graphs.
        assert found[0][0] > 0 == found[0][1]
        for agreed, ahead in found[2:]:
            assert agreed == 0, found
            # Each of 4 microbatches gathers 3 parameters forward and at least 2 backward, because
            # the input of the first layer needs no gradient. The first of a task may not be ahead.
            assert ahead >= 12, found


# --- failure --------------------------------------------------------------------------------------


class Fails(nn.Module):
    """Raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor, where: str) -> Tensor:
        for number, layer in enumerate(self.layers):
            if where == "forward" and number == 2:
                raise ValueError("as told")
            x = torch.tanh(layer(x))
            if where == "backward" and number == 1:
                x = Stops.apply(x)
        return x


class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("as told")


@smp.step
def failing(model: Any, x: Tensor, where: str) -> Any:
    loss = model(x, where).square().mean()
    model.backward(loss)
    return loss


def small(module: Callable[[], nn.Module] = Fails, **config: Any) -> tuple[Any, Any]:
    smp.init(
        {
            "ddp": True,
            "microbatches": 2,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": THRESHOLD,
            "sdp_gradient_clipping": 1e9,
            **config,
        }
    )
    torch.manual_seed(0)
    model = smp.DistributedModel(module())
    return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def some_steps_fail(failures: dict[int, str]) -> Any:
    model, optimizer = small()
    source = torch.Generator().manual_seed(smp.rank())
    told = []
    for step in range(6):
        where = failures.get(step, "")
        x = torch.randn(4, 8, generator=source)
        optimizer.zero_grad()
        try:
            failing(model, x, where if smp.rank() == 1 else "")
        except SMPError as error:
            told.append((step, type(error), str(error).split("\n")[0]))
        else:
            optimizer.step()
    return told, {name: value.clone() for name, value in model.state_dict().items()}


def test_all_replicas_learn_of_a_failure_and_go_on() -> None:
    failures = {0: "forward", 1: "backward", 3: "forward", 4: "backward"}
    found = check_ranks(some_steps_fail, "4", failures)
    for rank, (told, _) in enumerate(found):
        assert [step for step, *_ in told] == list(failures)
        for _, kind, text in told:
            assert "as told" in text or rank != 1
            assert kind is (SMPMicrobatchError if rank == 1 else SMPPeerError)
            assert rank == 1 or "on rank 1 of the job" in text
    # Only the steps 2 and 5 have changed anything.
    torch.manual_seed(0)
    model = Fails()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sources = [torch.Generator().manual_seed(rank) for rank in range(4)]
    for step in range(6):
        xs = [torch.randn(4, 8, generator=source) for source in sources]
        if step not in failures:
            optimizer.zero_grad()
            model(torch.cat(xs), "").square().mean().backward()
            optimizer.step()
    for rank, (_, state) in enumerate(found):
        check_state(state, model.state_dict(), False, True, f"rank {rank}")


class Breaks(nn.Linear):
    """Takes a random time, and raises where it is told to.

    Attributes:
        told: which replica, layer and pass fail in this step; None if none does.
        delays: draws how long a call takes.
    """

    told: tuple[int, int, str] | None = None
    delays = random.Random()

    def __init__(self, number: int) -> None:
        super().__init__(8, 8)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(Breaks.delays.random() * 0.002)
        for kind in ("forward", "backward"):
            if Breaks.told is not None and Breaks.told == (smp.dp_rank(), self.number, kind):
                if kind == "forward":
                    raise ValueError("as told")
                x = Stops.apply(x)
        return torch.tanh(super().forward(x))


RANDOM_STEPS = 24


def layers_fail(partitions: int, seed: int) -> Any:
    smp.init(
        {
            "ddp": True,
            "partitions": partitions,
            "microbatches": 4,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": THRESHOLD,
            "sdp_gradient_clipping": 1e9,
        }
    )
    Breaks.delays = random.Random(f"{seed} {smp.rank()}")
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*[Breaks(number) for number in range(6)]))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    source = torch.Generator().manual_seed(smp.dp_rank())
    told = []
    for step, Breaks.told in enumerate(failures_at_random(seed)):
        x = torch.randn(8, 8, generator=source)
        optimizer.zero_grad()
        try:
            squares(model, x)
        except SMPError as error:
            assert Breaks.told is not None
            there = smp.dp_rank() != Breaks.told[0] and "the step failed on rank" in str(error)
            told.append((step, "as told" in str(error) or there))
        else:
            optimizer.step()
    return smp.dp_rank(), told, model.state_dict()


def failures_at_random(seed: int) -> list[tuple[int, int, str] | None]:
    draws = random.Random(seed)
    return [
        # The input of the first layer needs no gradient.
        (draws.randrange(2), draws.randrange(1, 6), draws.choice(["forward", "backward"]))
        if draws.random() < 0.4
        else None
        for _ in range(RANDOM_STEPS)
    ]


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.timeout(170)
def test_failures_at_random_moments(partitions: int) -> None:
    seed = int(os.environ.get("TEST_TURN", "0"))
    found = check_ranks(layers_fail, str(2 * partitions), partitions, seed, timeout=150)
    failures = failures_at_random(seed)
    torch.manual_seed(0)
    model = nn.Sequential(*[Breaks(number) for number in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sources = [torch.Generator().manual_seed(replica) for replica in range(2)]
    for failure in failures:
        xs = [torch.randn(8, 8, generator=source) for source in sources]
        if failure is None:
            optimizer.zero_grad()
            torch.nn.Sequential.forward(model, torch.cat(xs)).square().mean().backward()
            optimizer.step()
    for replica, told, state in found:
        assert told == [(step, True) for step, one in enumerate(failures) if one is not None]
        check_state(state, model.state_dict(), False, True, f"replica {replica}")


def memory_is_short(partitions: int, always: bool, moment: int) -> tuple[list[str], float]:
    """Lets allocations of rank 0 fail in the second step: one, or all from a moment on.

    Returns:
        What the steps have raised here, and how many seconds the second one took.
    """
    smp.init(
        {
            "ddp": True,
            "partitions": partitions,
            "microbatches": 2,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": THRESHOLD,
        }
    )
    model = smp.DistributedModel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]))
    x, raised, took = torch.ones(4, 8), [], 0.0
    empty = torch.empty
    for step in range(4):
        count = itertools.count()

        def short(*sizes: Any, step: int = step, count: Any = count, **options: Any) -> Tensor:
            here = sys._getframe(1).f_code.co_filename.endswith("sharding/gathers.py")
            if here and options.get("dtype") == torch.float32 and step == 1 and smp.rank() == 0:
                number = next(count)
                if number == moment or (always and number > moment):
                    raise RuntimeError("can't allocate memory")
            return empty(*sizes, **options)

        torch.empty = short  # type: ignore[assignment]
        began = time.monotonic()
        try:
            squares(model, x)
            raised.append("")
        except SMPError as error:
            raised.append(str(error))
        if step == 1:
            took = time.monotonic() - began
    return raised, took


@pytest.mark.parametrize("moment", [0, 3, 7])
@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("partitions", [1, 2])
def test_no_rank_waits_for_one_without_memory(partitions: int, always: bool, moment: int) -> None:
    for raised, took in check_ranks(
        memory_is_short, str(2 * partitions), partitions, always, moment
    ):
        first, second, third, fourth = raised
        assert not first
        assert "can't allocate memory" in second
        assert took < 20
        if not always:
            assert not third + fourth
        assert bool(third) == bool(fourth)


class Detour(nn.Module):
    """Passes some examples several times through a layer, which lives on another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = self.far(x)
        return self.far(self.near(x))


@smp.step
def detours(model: Any, x: Tensor) -> None:
    model.backward(model(x, 4 if x[0, 0] == 1 else 0).square().mean())


DETOUR_STEPS = 5


def some_take_longer() -> dict[str, Tensor]:
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1}
    smp.init(
        {
            **config,
            **{"ddp": True, "partitions": 2, "microbatches": 2, "sdp_gradient_clipping": 1e9},
            **{"auto_partition": False, "default_partition": 0},
        }
    )
    torch.manual_seed(0)
    model = smp.DistributedModel(Detour())
    smp.set_partition(model.get_module().far, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for _ in range(DETOUR_STEPS):
        optimizer.zero_grad()
        detours(model, two_lengths())
        optimizer.step()
    return model.state_dict()


def two_lengths() -> Tensor:
    """Returns a batch whose first microbatch takes longer, and ends after the second."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    x[:2, 0], x[2:, 0] = 1, 0
    return x


def test_no_gradient_is_lost_if_a_later_microbatch_ends_first() -> None:
    torch.manual_seed(0)
    model = Detour()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(DETOUR_STEPS):
        optimizer.zero_grad()
        for x in two_lengths().chunk(2):
            (model(x, 4 if x[0, 0] == 1 else 0).square().mean() / 2).backward()
        optimizer.step()
    for state in check_ranks(some_take_longer, "4"):
        check_state(state, model.state_dict(), False, True, "")


class Skips(nn.Module):
    """Leaves out a layer in some steps, by a flag that all replicas share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        self.calls += 1
        for number, layer in enumerate(self.layers):
            if number != left_out:
                x = torch.tanh(layer(x))
        return x


LEFT_OUT = [-1, -1, 1, 3, -1, -1, 0]


def order_changes() -> Any:
    model, optimizer = small(Skips)
    source = torch.Generator().manual_seed(smp.rank())
    for left_out in LEFT_OUT:
        optimizer.zero_grad()
        failing(model, torch.randn(4, 8, generator=source), left_out)
        optimizer.step()
    return model.runtime.steps, model.state_dict()


def test_a_step_is_run_again_if_the_order_of_parameters_changes() -> None:
    torch.manual_seed(0)
    model = Skips()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sources = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for left_out in LEFT_OUT:
        optimizer.zero_grad()
        x = torch.cat([torch.randn(4, 8, generator=source) for source in sources])
        model(x, left_out).square().mean().backward()
        optimizer.step()
    model.calls.fill_(2 * len(LEFT_OUT))  # one for each microbatch, and none twice
    for rank, (steps, state) in enumerate(check_ranks(order_changes, "2")):
        assert steps == len(LEFT_OUT) + 2  # then the order counts as unknown
        check_state(state, model.state_dict(), False, True, f"rank {rank}")


# --- misuse ---------------------------------------------------------------------------------------


class Changes(nn.Module):
    """Does with its parameter what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor, what: str) -> Tensor:
        if what == "own":
            with torch.no_grad():
                self.weight.mul_(2)
        if what == "other":
            with torch.no_grad():
                self.inner.weight.mul_(2)
        if what == "differs" and smp.rank() == 1:
            x = self.inner(x)
        x = F.linear(x, self.weight)
        return self.inner(x) if what == "" else x


@smp.step
def changing(model: Any, x: Tensor, what: str) -> Any:
    loss = model(x, what).square().mean()
    model.backward(loss)
    return loss


def misuse() -> None:
    config = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20}
    smp.init(config)
    net = Changes()
    model = smp.DistributedModel(net)
    with pytest.raises(SMPUsageError, match="LBFGS needs whole parameters"):
        smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(2, 8)
    for what in ("own", "other"):
        name = "inner.weight" if what == "other" else "weight"
        with pytest.raises(SMPMicrobatchError, match=f"'{name}' was changed in place"):
            changing(model, x, what)
    # One rank needs it in a microbatch, the other has none left.
    kinds = SMPMicrobatchError, SMPUsageError
    with pytest.raises(kinds, match=r"same parameters in the same order.*needs 'inner.weight'"):
        changing(model, x, "differs")
    for values in (
        lambda: net.weight + 1,
        lambda: net.weight.sum().item(),
        lambda: net.weight.data,
        lambda: net.weight.mul_(2),
        lambda: copy.deepcopy(net),
    ):
        with pytest.raises(SMPUsageError, match=r"is divided over 2 ranks.*parameter.ds_tensor"):
            values()
    with pytest.raises(SMPUsageError, match="inside a function decorated"):
        model(x, "").sum().backward()
    with pytest.raises(SMPUsageError, match=r"join\(\) does not work with sharded"):
        model.join()
    with pytest.raises(SMPUsageError, match="register_comm_hook does not work with sharded"):
        model.register_comm_hook(None, lambda *_: None)
    with pytest.raises(SMPUsageError, match="dtype and device cannot change"):
        model.half()
    model.to(device())
    # After all that, training goes on.
    optimizer.zero_grad()
    changing(model, x, "")
    before = model.state_dict()["weight"]
    optimizer.step()
    assert not torch.equal(model.state_dict()["weight"], before)


def test_misuse_raises_on_all_ranks() -> None:
    check_ranks(misuse, "2")


def experts() -> None:
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 8}
    smp.init({"ddp": True, "microbatches": 4, **config})
    model = smp.DistributedModel(make("mixture of experts"))
    batch = batch_of("mixture of experts", 0, smp.rank())
    with pytest.raises(SMPMicrobatchError, match=r"control flow that depends on data"):
        train_step(model, "mixture of experts", *batch)


def test_control_flow_that_differs_is_refused() -> None:
    check_ranks(experts, "2")


def one_dies(step_of_death: int) -> list[str]:
    model, _ = small()
    told = []
    for step in range(3):
        if smp.rank() == 1 and step == step_of_death:
            os._exit(3)
        try:
            failing(model, torch.ones(4, 8), "")
        except Exception as error:  # smddp's, or one of smp with it as its cause
            told.append(str(error))
            break
    return told


@pytest.mark.parametrize("step", [0, 2])
def test_nobody_waits_for_a_rank_that_is_gone(step: int) -> None:
    outcomes = run_ranks(one_dies, "2", step, timeout=40)
    assert [outcome.status for outcome in outcomes] == [0, 3]
    assert "is gone" in outcomes[0].value[0]


# --- optimizers and attributes --------------------------------------------------------------------


def optimizers(threshold: int) -> Any:
    smp.init(
        {
            "ddp": True,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": threshold,
            "sdp_gradient_clipping": 0.1,
        }
    )
    found = []
    for make_optimizer in (
        smp.optimizers.FusedLAMB,
        smp.optimizers.FusedNovoGrad,
        smp.optimizers.FusedAdam,
        torch.optim.Adagrad,
    ):
        torch.manual_seed(0)
        model = smp.DistributedModel(Fails())
        optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters(), lr=0.01))
        scaler = smp.amp.GradScaler("cpu", init_scale=1024.0)
        source = torch.Generator().manual_seed(smp.rank())
        norms = []
        for step in range(4):
            model.zero_grad()  # clears what the optimizer works on, too
            failing(model, torch.randn(4, 8, generator=source), "")
            norms += [float(smp.clip_grad_norm(1e9, p)) for p in (0.0, 1.0, 2.0, float("inf"))]
            if step == 2:  # the gradient of one rank's part is infinite: no rank steps
                scaler.scale(torch.ones(()))
                parameter = model.get_module().layers[0].weight
                if smp.rank() == 0:
                    parameter.grad.view(-1)[0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        found.append((norms, model.state_dict()))
        del model, optimizer
        gc.collect()
    return found


@pytest.mark.costly
def test_norms_and_optimizers_see_whole_parameters() -> None:
    expected = check_ranks(optimizers, "2", 1000)
    for rank, found in enumerate(check_ranks(optimizers, "2", THRESHOLD)):
        for (norms, state), (whole_norms, whole_state) in zip(found, expected[0], strict=True):
            assert norms == pytest.approx(whole_norms, rel=1e-4), rank
            check_state(state, whole_state, False, True, f"rank {rank}")


def sum_over_group(value: Tensor) -> float:
    """Returns what scripts print of a parameter: a sum over the ranks that share it."""
    total = value.double().square().sum()
    dist.all_reduce(total)
    return float(total)


def attributes(half: bool) -> None:
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


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def attributes_with_partitions() -> None:
    smp.init(
        {
            "ddp": True,
            "partitions": 2,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 20,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
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


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_attributes_that_scripts_read(half: bool) -> None:
    check_ranks(attributes, "2", half)


def reading_a_group(reads: bool) -> dict[str, Tensor]:
    """Trains a batch norm, which stays in full precision: its master shares its memory."""
    smp.init(
        {
            "ddp": True,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 20,
            "fp16": True,
        }
    )
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
        check_state(found, expected, True, True, "")


def test_attributes_before_it_is_decided_where_parameters_live() -> None:
    check_ranks(attributes_with_partitions, "4")


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


# --- checkpoints ----------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters whose sizes are no multiples of anything, one of them shared."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.inner = nn.Linear(5, 5)
        self.last = nn.Linear(5, 7, bias=False)
        self.last.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.inner(self.norm(self.words(words))))


@smp.step
def words_step(model: Any, words: Tensor) -> Any:
    loss = F.cross_entropy(model(words), words)
    model.backward(loss)
    return loss


def odd(config: dict[str, Any], seed: int) -> tuple[Any, Any]:
    # Each job computes the same: every rank has the same batch.
    sdp = {"sdp_param_persistence_threshold": 20, "sdp_gradient_clipping": 1e9}
    smp.init({"ddp": True, **sdp, **config})
    torch.manual_seed(seed)
    model = smp.DistributedModel(Odd())
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    if not config.get("fp16"):
        return model, smp.DistributedOptimizer(inner)
    scale = {"init_scale": 2.0**12, "scale_window": 2}
    return model, smp.DistributedOptimizer(inner, dynamic_loss_scale=True, **scale)


def train(model: Any, optimizer: Any, steps: range) -> dict[str, Tensor]:
    for step in steps:
        optimizer.zero_grad()
        source = torch.Generator().manual_seed(step)
        words_step(model, torch.randint(7, (6,), generator=source).to(device()))
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


# One file, or one for each partition.
WHOLE = ("whole.pt", "whole.safetensors.index.json")


def saving(config: dict[str, Any], path: str) -> Any:
    model, optimizer = odd(config, 0)
    train(model, optimizer, range(3))
    smp.save_checkpoint(path, "parts", True, model, optimizer, {"step": 3})
    for tag in WHOLE:
        smp.save_checkpoint(path, tag, False, model)
    torch.save(optimizer.state_dict(), Path(path) / f"optimizer_{smp.rank()}.pt")
    kept = copy.deepcopy((model.local_state_dict(), optimizer.local_state_dict()))
    expected = train(model, optimizer, range(3, 5))
    model.load_state_dict(kept[0], same_partition_load=True)
    optimizer.load_state_dict(kept[1])
    again = train(model, optimizer, range(3, 5))
    check_state(again, expected, True, True, "loaded from local state dicts")
    return expected


def check_half(optimizer: Any, saved: Any) -> None:
    """Checks that masters and the loss scale are those that were saved, and not new ones."""
    found = optimizer.state_dict()
    assert found.keys() & {FP16_STATES} == saved.keys() & {FP16_STATES}
    if FP16_STATES not in saved:
        return
    masters, expected = found[FP16_STATES]["masters"], saved[FP16_STATES]["masters"]
    torch.testing.assert_close(masters, expected, rtol=0, atol=0)
    dtype = torch.float16 if smp.state.cfg.fp16 else torch.bfloat16
    assert any(not torch.equal(one, one.to(dtype).float()) for one in expected.values())
    assert found[FP16_STATES]["loss_scaler"] == saved[FP16_STATES]["loss_scaler"]
    assert optimizer.loss_scale == (2.0**13 if smp.state.cfg.fp16 else 1.0)


def loading(config: dict[str, Any], path: str, how: str) -> Any:
    model, optimizer = odd(config, 1)
    if config["sharded_data_parallel_degree"] > 1:
        before = optimizer.orig_state_dict()["param_groups"]
        smp.resume_from_checkpoint(path, load_sharded_optimizer_state=False)
        assert optimizer.orig_state_dict() == {"state": {}, "param_groups": before}
        check_half(optimizer, torch.load(Path(path) / "optimizer_0.pt"))
    if how == "parts":
        assert smp.resume_from_checkpoint(path) == {"step": 3}
    else:
        smp.resume_from_checkpoint(path, how, partial=False)
        optimizer.load_state_dict(torch.load(Path(path) / "optimizer_0.pt"))
    return train(model, optimizer, range(3, 5))


@pytest.mark.parametrize("half", ["", "fp16", "bf16"])
@pytest.mark.costly
def test_checkpoints_load_at_any_degree(tmp_path: Path, half: str) -> None:
    def config(degree: int) -> dict[str, Any]:
        return {"sharded_data_parallel_degree": degree, **({half: True} if half else {})}

    before = [("4", 2), ("2", 2)] if half == "" else [("2", 2)]
    after = [("2", 2), ("4", 4), ("2", 1)] if half == "" else [("4", 2), ("1", 1)]
    for number, (ranks, degree) in enumerate(before):
        path = str(tmp_path / str(number))
        expected = check_ranks(saving, ranks, config(degree), path)[0]
        if half == "bf16":
            after = [("4", 2)]  # bf16 needs sharding
        for later, other in after if number == 0 else [("4", 2)]:
            for how in ("parts", *WHOLE):
                for rank, state in enumerate(check_ranks(loading, later, config(other), path, how)):
                    where = f"{later} ranks, degree {other}, {how}, rank {rank}"
                    assert state.keys() == expected.keys()
                    for name, value in expected.items():
                        # Gradients are sums over more or fewer ranks.
                        tolerance = 1e-2 if half else 1e-5
                        torch.testing.assert_close(
                            state[name],
                            value,
                            rtol=tolerance,
                            atol=tolerance,
                            msg=lambda m, at=f"{where}, {name}": f"{at}: {m}",
                        )


SAVED_LAYERS = 16


def saving_one_by_one(config: dict[str, Any], path: str) -> tuple[int, int]:
    """Returns the bytes of what lives here, and the peak of tensors while the whole is saved."""
    smp.init({"ddp": True, "microbatches": 1, "sdp_param_persistence_threshold": 200, **config})
    net = nn.Sequential(*(nn.Linear(150, 150) for _ in range(SAVED_LAYERS)))
    if config.get("tensor_parallel_degree"):
        for layer in net:
            smp.set_tensor_parallelism(layer)
    model = smp.DistributedModel(net)
    squares(model, torch.ones(8, 150))
    gc.collect()
    Census.storages.clear()
    Census.peak = 0
    with Census():
        smp.save_checkpoint(path, "model.safetensors.index.json", False, model)
    mine = sum(p.nbytes for p in model.runtime.optimised())
    return mine, Census.peak


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        ("4", {"sharded_data_parallel_degree": 4}),
        ("4", {"sharded_data_parallel_degree": 2, "partitions": 2}),
        ("2", {"tensor_parallel_degree": 2}),
    ],
    ids=["sharding", "partitions", "tensor parallelism"],
)
def test_a_rank_that_saves_the_whole_has_one_whole_parameter_at_a_time(
    tmp_path: Path, ranks: str, config: dict[str, Any]
) -> None:
    weight = 150 * 150 * 4
    for mine, peak in check_ranks(saving_one_by_one, ranks, config, str(tmp_path)):
        # To unite what tensor parallelism divides takes its parts, and the whole.
        copies = 2 if "tensor_parallel_degree" in config else 1
        # smddp frees what a call has read on a thread of its own, so the one before may still live.
        copies += 1
        assert peak < mine + copies * weight + 2**14, (mine, peak)
        assert mine + copies * weight < SAVED_LAYERS * weight
    found: dict[str, Tensor] = {}
    for file in sorted(tmp_path.glob("model-*.safetensors")):
        found |= safetensors.read(file)
    assert len(found) == 2 * SAVED_LAYERS
    assert all(t.shape == ((150, 150) if "weight" in n else (150,)) for n, t in found.items())


RESUMED_LAYERS, RESUMED_WIDTH = 8, 300


def with_adam(config: dict[str, Any]) -> tuple[Any, Any]:
    smp.init({"ddp": True, "microbatches": 1, "sdp_param_persistence_threshold": 1000, **config})
    torch.manual_seed(0)
    with smp.delay_param_initialization():
        width = RESUMED_WIDTH
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(RESUMED_LAYERS)))
    model = smp.DistributedModel(net)
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


def saving_for_one_by_one(config: dict[str, Any], path: str) -> Any:
    model, optimizer = with_adam(config)
    squares(model, torch.ones(8, RESUMED_WIDTH))
    optimizer.step()
    smp.save_checkpoint(path, "model.safetensors.index.json", False, model)
    smp.save_checkpoint(path, "parts", True, model, optimizer)
    return model.state_dict(), optimizer.state_dict()


def counted(function: Any) -> Any:
    def inner(*args: Any, **kwargs: Any) -> Any:
        with UnmappedCensus():
            return function(*args, **kwargs)

    return inner


def resuming_one_by_one(config: dict[str, Any], path: str, partial: bool) -> Any:
    # A mode does not see what is done within an operation on delayed tensors, or on other threads.
    Call.run = counted(Call.run)  # type: ignore[method-assign]
    ModelRuntime._apply = counted(ModelRuntime._apply)  # type: ignore[method-assign]
    model, optimizer = with_adam(config)
    found = []

    def count(model: Any, _: Any) -> None:
        gc.collect()
        parts, state = model.runtime.optimised(), optimizer._smp_state.tensors()[0]
        mine = sum(tensor.nbytes for tensor in (*parts, *state))
        found.append((mine, Census.peak, bool(state)))

    gc.collect()
    Census.storages.clear()
    Census.peak = 0
    tag = "parts" if partial else "model.safetensors.index.json"
    counted(smp.resume_from_checkpoint)(path, tag, partial)
    model.register_post_partition_hook(count)
    if not found:
        squares(model, torch.ones(8, RESUMED_WIDTH))
    return found, model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (("4", {"sharded_data_parallel_degree": 4}),) * 2,
        (("4", {"sharded_data_parallel_degree": 2, "partitions": 2}),) * 2,
        (
            ("2", {"sharded_data_parallel_degree": 2}),
            ("4", {"sharded_data_parallel_degree": 4}),
        ),
    ],
    ids=["sharding", "partitions", "more ranks"],
)
@pytest.mark.costly
def test_a_rank_that_resumes_has_one_whole_parameter_at_a_time(
    tmp_path: Path, saved: tuple[str, dict[str, Any]], resumed: tuple[str, dict[str, Any]]
) -> None:
    path, weight = str(tmp_path), RESUMED_WIDTH**2 * 4
    expected = check_ranks(saving_for_one_by_one, *saved, path)[0]
    for partial in (True, False):
        for found, model, optimizer in check_ranks(resuming_one_by_one, *resumed, path, partial):
            ((mine, peak, state),) = found
            assert state == partial
            assert peak < mine + 3 * weight + 2**16, (mine, peak)  # a parameter with its state
            assert mine + 3 * weight < RESUMED_LAYERS * weight * (3 if partial else 1)
            torch.testing.assert_close(model, expected[0], rtol=0, atol=0)
            if partial:
                assert optimizer["state"].keys() == expected[1]["state"].keys()
                torch.testing.assert_close(optimizer["state"], expected[1]["state"], rtol=0, atol=0)


@smp.step
def squares_step(model: Any, x: Tensor) -> None:
    model.backward(model(x).square().mean())


def told(parts: int, threshold: int) -> list[str]:
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": threshold}
    manual = {"auto_partition": False, "default_partition": 0}
    smp.init({"ddp": True, "partitions": parts, **manual, **config})
    said = listen()
    with smp.partition(parts - 1):
        last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 4), last))
    squares_step(model, torch.ones(2, 1024, device=device()))
    return [text for text in said if "sharding" in text]


@pytest.mark.parametrize(
    ("parts", "threshold", "text"),
    [
        (1, 2048, "6 parameters here, 2 are divided, those of at least 2048 elements; each rank "),
        (2, 2048, "4 parameters here, 2 are divided, those of at least 2048 elements; each rank "),
        (1, 10**6, "6 parameters here, 0 are divided, those of at least 1000000 elements; each r"),
    ],
)
def test_the_log_says_what_is_divided(parts: int, threshold: int, text: str) -> None:
    first, *others = check_ranks(told, str(2 * parts), parts, threshold)
    (line,) = first
    assert line.startswith(f"smp: sharding over 2 ranks: of {text}")
    assert line.endswith("keeps 1.01 of 2.01 MiB" if "2 are" in text else "keeps 2.01 of 2.01 MiB")
    assert others == [[]] * len(others)


@smp.step
def waiting(model: Any, x: Tensor) -> Any:
    arrive("body")  # before it is decided where modules live
    loss = model(x, "").square().mean()
    model.backward(loss)
    return loss


def await_division(model: Any) -> None:
    deadline = time.monotonic() + 20
    while not model.partitioned and time.monotonic() < deadline:
        time.sleep(0.01)


def one_calls_another_step(other: int) -> str:
    """In the first step, one rank that is not the first of its pipeline calls another function."""
    model, _ = small(partitions=2, auto_partition=False, default_partition=0)
    for layer in model.get_module().layers[2:]:
        smp.set_partition(layer, 1)
    executor = model.runtime.executor
    if smp.rank() == other:
        # Rank 0 of each pipeline divides before it looks for messages.
        fail = executor.ending.fail
        executor.ending.fail = lambda *why: (await_ranks("body", 2), fail(*why))
    elif smp.pp_rank() == 1:
        # The news of the failure take longer than the division.
        on_stop = executor.on_stop
        executor.on_stop = lambda failure: (await_division(model), on_stop(failure))
    x = torch.ones(4, 8)
    step = functools.partial(changing, what="") if smp.rank() == other else waiting
    with pytest.raises(SMPError) as caught:
        step(model, x)
    assert model.partitioned
    waiting(model, x)
    return str(caught.value)


@pytest.mark.parametrize("other", [1, 3])
def test_a_rank_fails_before_it_knows_which_parameters_live_there(other: int) -> None:
    """The other members of its sharding group may gather parameters by then."""
    for text in check_ranks(one_calls_another_step, "4", other, timeout=40):
        assert "call the same steps" in text or "the step failed on rank" in text, text


class ChangesInPlace(nn.Module):
    """Changes an activation that autograd needs, after a layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        z: Tensor = self.second(y)
        with torch.no_grad():
            y.mul_(2)
        return z


def changes_in_place(degree: int) -> None:
    sdp = {"sharded_data_parallel_degree": degree, "sdp_param_persistence_threshold": 1}
    smp.init({"ddp": True, **(sdp if degree > 1 else {})})
    model = smp.DistributedModel(ChangesInPlace())
    with pytest.raises(SMPMicrobatchError, match="has been modified by an inplace operation"):
        squares(model, torch.ones(2, 8))


@pytest.mark.parametrize("degree", [1, 2])
def test_autograd_refuses_an_activation_that_has_changed_as_without_sharding(degree: int) -> None:
    check_ranks(changes_in_place, "2", degree)


def backward_outside_a_step() -> None:
    said = listen()
    config = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 9}
    smp.init(config)
    smp.init()
    smp.init(config)
    assert not any("a second call" in text for text in said)
    smp.init({**config, "microbatches": 2})
    assert any("a second call does nothing" in text for text in said)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    with pytest.raises(SMPUsageError, match=r"call the model and model\.backward inside"):
        model(torch.ones(2, 8)).sum().backward()
    # Neither have the parameters that are not sharded.
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        model(torch.ones(2, 8))
    squares(model, torch.ones(2, 8))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_backward_pass_outside_a_step_changes_no_gradient() -> None:
    check_ranks(backward_outside_a_step, "2")


_FAILS_OUTSIDE = """
import torch
from torch import nn
import smdistributed.modelparallel.torch as smp
smp.init({"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1})
model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
try:
    model.get_module()(torch.ones(2, 8)).sum().backward()
except smp.SMPUsageError:
    print("refused")
"""


@pytest.mark.costly
def test_a_backward_pass_that_fails_leaves_nothing_that_crashes_at_the_end() -> None:
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with reserved_port() as port:
        variables["MASTER_PORT"] = str(port)
        environments = [
            interpreters.environment(**variables, RANK=rank, LOCAL_RANK=rank) for rank in "01"
        ]
        for rank in interpreters.run_together(["-c", _FAILS_OUTSIDE], environments):
            assert (rank.returncode, rank.stdout) == (0, "refused\n"), rank.stderr
