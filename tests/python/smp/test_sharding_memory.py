"""A rank of sharded data parallelism keeps its share, and little more while it gathers."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import check_ranks, listen
from smp.census import Census, UnmappedCensus
from smp.common import BY_HAND, shards, squares
from smp.sharded_models import THRESHOLD
from smp.zoo import device
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.checkpoint import safetensors
from smddp.modelparallel.torch.delayed.record import Call
from smddp.modelparallel.torch.model.division import Division
from smddp.modelparallel.torch.sharding.group_calls import GroupCalls

pytestmark = pytest.mark.multiprocess

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
    config = {"sharded_data_parallel_degree": degree, "sdp_max_live_parameters": limit}
    config["sdp_param_persistence_threshold"] = WIDTH + 1
    smp.init({"ddp": True, "microbatches": 2, **config})
    net = Watched()
    model = smp.DistributedModel(net)
    for layer in net.layers:
        layer.register_forward_hook(net.look)
        layer.register_full_backward_hook(net.look)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    peaks = []
    for _ in range(3):
        squares(model, torch.randn(8, WIDTH, requires_grad=True))
        peaks.append(model.runtime.sharding.gathers.calls.peak)
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
    original = GroupCalls._said

    def counted(self: GroupCalls, number: int) -> list[int]:
        said.append(number)
        return original(self, number)

    GroupCalls._said = counted  # type: ignore[method-assign]
    config = {"ddp": True, "partitions": 2, "microbatches": 4}
    smp.init({**BY_HAND, **config, **shards(2, THRESHOLD)})
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    model = smp.DistributedModel(net)
    for part in net[3:]:
        smp.set_partition(part, 1)
    found = []
    for _ in range(5):
        said.clear()
        squares(model, torch.randn(8, 8))
        found.append((len(said), model.runtime.sharding.gathers.prefetched))
    assert model.runtime.step.number == len(found), "no step was run again"
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
    Division._apply = counted(Division._apply)  # type: ignore[method-assign]
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


def told(parts: int, threshold: int) -> list[str]:
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": threshold}
    manual = {"auto_partition": False, "default_partition": 0}
    smp.init({"ddp": True, "partitions": parts, **manual, **config})
    said = listen()
    with smp.partition(parts - 1):
        last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 4), last))
    squares(model, torch.ones(2, 1024, device=device()))
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
