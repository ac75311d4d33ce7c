"""Models that are divided over ranks with a device: here the device made of threads."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import device_cases
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from ranks import check_ranks, rotating
from smp import (
    test_activations,
    test_delayed_jobs,
    test_sharding_array,
    test_tensor_combined,
    test_transparency,
    zoo,
)
from smp.common import BY_HAND
from smp.test_sharding_array import Row
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.activations import offload
from smddp.modelparallel.torch.common import device
from smddp.modelparallel.torch.common.random_state import RandomState
from smddp.modelparallel.torch.pipeline.randomness import seed_all, seeded
from smdistributed.modelparallel.torch.amp import GradScaler

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(device_cases.find_fake() is None, reason="the C++ tests were not built"),
]

NAMES = list(zoo.ZOO)


def begin() -> device_cases.Fake:
    """Makes the device that of this rank, and of the tests whose functions train on it."""
    there = device_cases.Fake()
    dist.init_process_group(there.backend, timeout=timedelta(seconds=60))
    assert device.current() == there.device
    for module in (
        *(zoo, test_transparency, test_activations, test_sharding_array, test_delayed_jobs),
        test_tensor_combined,
    ):
        module.device = lambda: there.device
    for module in (test_transparency, test_activations, test_sharding_array):
        # torch replaces parameters that it moves to such a device; smp keeps those of optimizers.
        module.make = lambda name, make=module.make: make(name).to(there.device)
    return there


def in_memory(found: Any) -> Any:
    """Returns nested values with their tensors in host memory."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, found)


def divided(config: dict[str, Any], names: list[str] = NAMES) -> dict[str, Any]:
    """As in test_transparency, on the device; returns states in host memory."""
    there = begin()
    results = test_transparency.divided(config, names)
    for name, (_, state, _) in results.items():
        assert all(value.device.type == "fake" for value in state.values()), name
    results = in_memory(results)
    there.finish()
    return results


# Those of NAMES whose modules test_activations marks.
MARKED = ["mlp", "encoder-decoder", "parametrized", "shared layer"]


def offloaded() -> dict[str, Any]:
    """As `divided`, with activation checkpointing and offload; returns states in host memory."""
    there = begin()
    offload.SMALL = 0
    config = {"partitions": 2, "offload_activations": True, "activation_loading_horizon": 1}
    moved = []
    move_out = offload._HostMemory.move_out
    offload._HostMemory.move_out = lambda *args: moved.append(1) or move_out(*args)
    results = test_activations.divided({**config, "pipeline": "simple"}, MARKED)
    assert moved
    states = in_memory(results)
    there.finish()
    return states


@pytest.mark.timeout(170)
@pytest.mark.costly
def test_activations_leave_a_device() -> None:
    ranks = check_ranks(offloaded, "2", timeout=160)
    for name in MARKED:
        _, state = test_transparency.whole(name, 1)
        for states in ranks:
            torch.testing.assert_close(states[name], state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("pp", "replicas"), [(2, 1), (2, 2)])
@pytest.mark.parametrize(
    "names",
    [
        # An odd number, so that each layout gets all of them, although it has every other turn.
        pytest.param(rotating(NAMES, 5), id="turn"),
        pytest.param(NAMES, marks=pytest.mark.exhaustive, id="all"),
    ],
)
@pytest.mark.timeout(170)
@pytest.mark.costly
def test_divided_models_learn_the_same_on_a_device(
    pp: int, replicas: int, names: list[str]
) -> None:
    ranks = check_ranks(divided, str(pp * replicas), {"partitions": pp}, names, timeout=160)
    for name in names:
        losses, state = test_transparency.whole(name, replicas)
        for found_losses, found_state, owners in (result[name] for result in ranks[:pp]):
            assert len(owners) == pp, name
            # Attention and LSTMs have other kernels there than on the CPU.
            torch.testing.assert_close(found_state, state, rtol=1e-4, atol=1e-5)
            assert found_losses == pytest.approx(losses, abs=1e-5), name


# Each layout with each precision, and with everything that happens to activations.
ROWS: list[Row] = test_sharding_array.covering(
    test_sharding_array.MODELS,
    ["sdp2", "pp2 x sdp2"],
    ["fp32", "fp16"],
    test_sharding_array.ACTIVATIONS,
)


def sharded(rows: list[Row]) -> tuple[Any, Any]:
    """As in test_sharding_array; trains the models also without smp, on the same device."""
    there = begin()
    results = in_memory(test_sharding_array.trained(rows))
    expected = in_memory([test_sharding_array.whole(row) for row in rows])
    there.finish()
    return results, expected


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(rotating(ROWS, 6), id="turn"),
        *(
            pytest.param(ROWS[part::3], marks=pytest.mark.exhaustive, id=str(part))
            for part in range(3)
        ),
    ],
)
@pytest.mark.timeout(170)
@pytest.mark.costly
def test_sharded_models_learn_the_same_on_a_device(rows: list[Row]) -> None:
    for count in (2, 4):
        mine = [row for row in rows if test_sharding_array.LAYOUTS[row[1]][0] == count]
        ranks = check_ranks(sharded, str(count), mine, timeout=160)
        for place, row in enumerate(mine):
            found = [results[place] for results, _ in ranks]
            test_sharding_array.compare(row, found, ranks[0][1][place])


def tensor_parallel(config: dict[str, Any], checkpoints: bool) -> dict[str, Any]:
    """As in test_tensor_combined, on the device."""
    there = begin()
    ordinary = test_tensor_combined.ordinary
    test_tensor_combined.ordinary = lambda: ordinary().to(there.device)
    results = test_tensor_combined.trained(config, checkpoints)
    there.finish()
    return results


@pytest.mark.parametrize(
    "name", ["checkpoints", "offload, 2 partitions", "fp16, 2 partitions", "bf16, sharded"]
)
@pytest.mark.timeout(170)
@pytest.mark.costly
def test_divided_layers_learn_the_same_on_a_device(name: str) -> None:
    test_tensor_combined.check(name, tensor_parallel)


def delayed(delay: bool, names: list[str]) -> Any:
    """As `zoo` in test_delayed_jobs, on the device, with two partitions."""
    there = begin()
    found = in_memory(test_delayed_jobs.zoo(delay, names, 2))
    there.finish()
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(rotating(NAMES, 4), id="turn"),
        pytest.param(NAMES, marks=pytest.mark.exhaustive, id="all"),
    ],
)
@pytest.mark.timeout(170)
@pytest.mark.costly
def test_delayed_models_get_their_values_on_a_device(names: list[str]) -> None:
    expected = check_ranks(delayed, "2", False, names, timeout=80)
    for one, other in zip(
        check_ranks(delayed, "2", True, names, timeout=80), expected, strict=True
    ):
        for name in names:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


def give_generator(there: device_cases.Fake) -> torch.Generator:
    """Gives the device a generator of random numbers; returns it."""
    module, generator = torch.get_device_module(there.device), torch.Generator().manual_seed(1)
    module.get_rng_state = generator.get_state
    module.set_rng_state = generator.set_state
    module.manual_seed = generator.manual_seed
    return generator


@on_ranks("1")
def test_any_accelerator_of_torch_will_do() -> None:
    """The type of a device, its generator and its index come from torch's generic interface."""
    there = device_cases.Fake()
    generator, module = give_generator(there), torch.get_device_module(there.device)
    before = RandomState()
    first = torch.rand(2, generator=generator)
    seed_all(5)
    assert generator.initial_seed() == 5
    drawn = torch.rand(2, generator=generator)
    with seeded(5):
        assert torch.equal(torch.rand(2, generator=generator), drawn)
    assert not torch.equal(torch.rand(2, generator=generator), drawn)
    before.restore()
    assert torch.equal(torch.rand(2, generator=generator), first)
    # A process that does not use the device does not begin to do so here.
    module.is_initialized = lambda: False
    seed_all(6)
    assert generator.initial_seed() == 1
    assert GradScaler()._device == device.kind() == "fake"
    module.is_available = lambda: False
    assert GradScaler()._device == device.kind() == "cpu"
    assert device.current() == torch.device("cpu")


class Draws(nn.Module):
    """Draws a random number of the CPU and one of the device; adds what they are to its result."""

    def __init__(self, generator: torch.Generator, seen: list[Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.generator, self.seen = generator, seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(threading.get_ident())
        drawn = torch.rand(()) + 2 * torch.rand((), generator=self.generator)
        y = self.linear(x) + drawn.to(x.device)
        y.register_hook(lambda _: self.seen.append(threading.get_ident()))
        return y


@smp.step
def drawing_step(model: Any, x: Tensor, generator: torch.Generator) -> Any:
    before = torch.rand(()) + 2 * torch.rand((), generator=generator)
    y = model(x)
    # While this microbatch waited for the other rank, others have drawn numbers.
    after = torch.rand(()) + 2 * torch.rand((), generator=generator)
    model.backward(y.square().mean())
    return torch.stack([before, after, *y.detach().cpu().flatten()])


def drawing(partitions: int) -> Tensor:
    """Checks that each thread of tasks chooses the device; returns what the microbatches drew."""
    there = begin()
    chosen: dict[int, torch.device] = {}
    use = torch.accelerator.set_device_index
    torch.accelerator.set_device_index = lambda index: (
        use(index),
        chosen.update({threading.get_ident(): index}),
    )
    generator = give_generator(there)
    smp.init({**BY_HAND, "partitions": partitions, "microbatches": 4, "ddp": True})
    torch.manual_seed(0)
    seen: list[int] = []
    parts = []
    for number in range(3):  # the body's rank owns the first and the last one
        with smp.partition(number % partitions):
            parts.append(Draws(generator, seen))
    for part in parts:
        part.linear.to(there.device)
    model = smp.DistributedModel(nn.Sequential(*parts))
    for _ in range(2):  # only in the second step microbatches overlap
        torch.manual_seed(5)
        earlier = len(seen)
        drawn = drawing_step(model, torch.ones(8, 4, device=there.device), generator).stack()
    assert len(seen) > earlier
    for thread in seen[earlier:]:
        assert chosen[thread] == there.device
        assert thread != threading.main_thread().ident
    there.finish()
    return drawn


def test_each_task_has_the_device_and_random_numbers_of_its_own() -> None:
    (expected,) = check_ranks(drawing, "1", 1)
    assert len(set(expected[:, :2].flatten().tolist())) == 8, "microbatches drew the same"
    for drawn in check_ranks(drawing, "2", 2):
        torch.testing.assert_close(drawn, expected, rtol=0, atol=0)
