"""Effects of configuration keys and arguments, each compared with what happens without it."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from ranks import check_ranks
from smp.common import close, gradients, squares, sums
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.config import configure
from smddp.modelparallel.torch.common.buffers import Buffers
from smddp.modelparallel.torch.partition.decide import decide
from smddp.modelparallel.torch.partition.placement import Decision, Placement
from smddp.modelparallel.torch.pipeline.modules import Modules

MANUAL = {"auto_partition": False, "default_partition": 0, "ddp": True}


# --- the partitioner ------------------------------------------------------------------------------


class Uneven(nn.Module):
    """The first layer has most of the parameters, the last ones do most of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20000, 8)
        self.layers = nn.Sequential(*[nn.Conv1d(8, 8, 3, padding=1) for _ in range(4)])

    def forward(self, words: Tensor) -> Tensor:
        return self.layers(self.words(words).transpose(1, 2))


def decision(config: dict[str, Any], times: bool = False) -> Decision:
    torch.manual_seed(0)
    model = Uneven()
    modules, nobody = Modules(model, 0), types.SimpleNamespace()
    cfg = configure({"partitions": 2, **config}, {})
    placement = Placement(modules, nobody, 0, 2)  # type: ignore[arg-type]
    return decide(cfg, model, modules, placement, (torch.zeros(4, 500).long(),), {}, times)


def second_part(found: Decision) -> int:
    """Returns how many of the last layers are in it."""
    return sum(bool(owner) for owner in found.owners[-4:])


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"memory_weight": 1.0}, 4),
        ({"memory_weight": 0.0}, 2),
        ({"memory_weight": 0.0, "use_times": False}, 4),
        ({"memory_weight": 0.0, "skip_tracing": True}, 4),
    ],
)
def test_the_weight_of_memory_decides_where_the_border_is(
    config: dict[str, Any], layers: int
) -> None:
    assert second_part(decision(config)) == layers


def test_without_a_weight_the_goal_decides() -> None:
    for goal, weight in (("memory", 0.8), ("speed", 0.2)):
        found, expected = decision({"optimize": goal}), decision({"memory_weight": weight})
        assert found == expected
    assert decision({"optimize": "memory"}).costs != decision({"optimize": "speed"}).costs


def test_what_a_decision_is_made_from() -> None:
    assert decision({}).method == "exact, traced with fake tensors"
    assert decision({}, times=True).method == "exact, traced with real data"
    assert decision({"skip_tracing": True}).method == "exact, traced with parameters only"


# --- the pipeline ---------------------------------------------------------------------------------


def order(pipeline: str) -> list[bool]:
    """Returns of each rank: did any backward work begin before the last forward pass had begun?

    What the body does after `model.backward` is forward work, but of no forward pass.
    """
    smp.init({**MANUAL, "partitions": 2, "microbatches": 6, "pipeline": pipeline})
    first = nn.Linear(4, 4)
    with smp.partition(0), smp.partition(1):  # the innermost counts
        last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(first, last))
    for _ in range(3):  # the first two are watched, so nothing overlaps in them
        squares(model, torch.ones(12, 4))
    assert [name for name, _ in model.local_named_modules()] == [["", "0"], ["1"]][smp.pp_rank()]
    found = []
    for rank in smp.timeline().spans:
        backward = [
            min(span.start for span in rank if not span.forward and span.microbatch == number)
            for number in range(6)
        ]
        found.append(
            min(backward)
            < max(s.start for s in rank if s.forward and s.start < backward[s.microbatch])
        )
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_when_backward_work_begins(pipeline: str) -> None:
    assert check_ranks(order, "2", pipeline) == [[pipeline == "interleaved"] * 2] * 2


# --- model and optimizer --------------------------------------------------------------------------


class Normed(nn.Sequential):
    """Two parts; the buffers of the first are those of a batch norm."""

    def __init__(self) -> None:
        first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        with smp.partition(1):
            last = nn.Linear(4, 4)
        super().__init__(first, last)


def replicated(options: dict[str, Any], config: dict[str, Any]) -> Any:
    smp.init({**MANUAL, "partitions": 2, "microbatches": 2, **config})
    torch.manual_seed(smp.dp_rank())  # all replicas get the parameters of the first one
    model = smp.DistributedModel(Normed(), **options)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 + smp.dp_rank()))
    for _ in range(2):
        squares(model, x)
    means = {name: b.clone() for name, b in model.local_named_buffers() if "mean" in name}
    return gradients(model), means


@pytest.mark.multiprocess
def test_ways_to_reduce_give_the_same_gradients() -> None:
    plain, *others = [
        check_ranks(replicated, "4", options, config)
        for options, config in (
            ({}, {}),
            ({"overlapping_allreduce": False}, {}),
            ({}, {"overlapping_allreduce": False}),
            ({"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True}, {}),
        )
    ]
    for ranks in (plain, *others):
        for rank, (found, _) in enumerate(ranks):
            close(found, plain[rank][0])
            close(found, ranks[(rank + 2) % 4][0], "another replica")
    # The oracle is one process: gradients of the first step, then with those of the second added.
    torch.manual_seed(0)
    whole = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)]
    net = nn.Sequential(*whole)
    for replica in range(2):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 + replica))
        for part in x.chunk(2):
            (net(part).square().mean() / 2).backward()
    found = {**plain[0][0], **plain[1][0]}
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.multiprocess
def test_buffers_are_those_of_the_first_replica_unless_told_otherwise() -> None:
    for broadcast in (True, False):
        ranks = check_ranks(replicated, "4", {"broadcast_buffers": broadcast}, {})
        ((_, one), (_, other)) = ranks[0], ranks[2]
        # After the last training step each replica has the statistics of its own data.
        assert not torch.equal(one["0.1.running_mean"], other["0.1.running_mean"])
        x = [torch.randn(8, 4, generator=torch.Generator().manual_seed(10 + r)) for r in range(2)]
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        norms = [nn.BatchNorm1d(4) for _ in range(2)]
        for _ in range(2):
            if broadcast:
                norms[1].load_state_dict(norms[0].state_dict())
            for norm, rows in zip(norms, x, strict=True):
                for part in rows.chunk(2):
                    norm(layer(part))
        torch.testing.assert_close(one["0.1.running_mean"], norms[0].running_mean)
        torch.testing.assert_close(other["0.1.running_mean"], norms[1].running_mean)


class Repeats(nn.Module):
    """Has a buffer that `expand` has made: it has one element, many times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((1, 1), 2.0).expand(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale[0]


def repeated() -> list[Any]:
    smp.init({**MANUAL, "partitions": 2, "microbatches": 2})
    module = Repeats()
    model = smp.DistributedModel(nn.Sequential(module, nn.Linear(4, 4)))
    smp.set_partition(model.get_module()[1], 1)

    found = []
    for value in (3.0, 5.0):
        with torch.no_grad():
            module.scale[:1, :1].fill_(value + smp.dp_rank())
        if smp.pp_rank() == 0:
            buffers = Buffers(module)
            buffers.save()
            with torch.no_grad():
                module.scale[:1, :1].fill_(7.0)
            buffers.restore()
        sums(model, torch.ones(4, 4))
        if smp.pp_rank() == 0:
            found.append(module.scale.tolist())
    return found


@pytest.mark.multiprocess
def test_buffers_may_repeat_elements() -> None:
    ranks = check_ranks(repeated, "4")
    for found in (ranks[0], ranks[2]):
        assert found == [[[value] * 4] * 3 for value in (3.0, 5.0)]


@smp.step
def several_roots(model: Any, x: Tensor) -> None:
    output = model(x)
    model.backward([output.sum(1), output.square().sum()], [torch.arange(len(x)).float(), None])


def roots() -> Any:
    smp.init({**MANUAL, "partitions": 2, "microbatches": 2})
    torch.manual_seed(0)
    model = smp.DistributedModel(Normed())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    several_roots(model, torch.ones(8, 4))
    found = gradients(model)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.local_parameters())
    before = [p.detach().clone() for p in model.local_parameters()]
    # The closure calls the step; the optimizer calls the closure, outside any step.
    loss = optimizer.step(lambda: squares(model, torch.ones(8, 4)).reduce_mean())
    assert float(loss) > 0
    moved = [p.grad * -0.5 + old for p, old in zip(model.local_parameters(), before, strict=True)]
    for parameter, expected in zip(model.local_parameters(), moved, strict=True):
        torch.testing.assert_close(parameter.detach(), expected)
    return found


@pytest.mark.multiprocess
def test_backward_of_several_tensors() -> None:
    first, second = check_ranks(roots, "2")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    for part in torch.ones(8, 4).chunk(2):
        output = net(part)
        weights = torch.arange(4).float()
        ((output.sum(1) * weights).sum() + output.square().sum()).div(2).backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close({**first, **second}[name], parameter.grad, rtol=1e-4, atol=1e-4)


# --- mixed precision ------------------------------------------------------------------------------

AMP_STEPS = 6


def layers(parts: int) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
    with smp.partition(parts - 1):
        last = nn.Linear(16, 4)
    return nn.Sequential(first, last)


def classes(step: int, replica: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(8, 8, generator=source), torch.randint(4, (8,), generator=source)


def amp(parts: int, dtype: torch.dtype) -> Any:
    smp.init({**MANUAL, "partitions": parts, "microbatches": 4})
    net = layers(parts)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    model, optimizer = smp.DistributedModel(net), smp.DistributedOptimizer(optimizer)
    scaler = smp.amp.GradScaler(init_scale=2.0**17, growth_interval=3)

    @smp.step
    def train(model: Any, scaler: Any, x: Tensor, y: Tensor) -> Any:
        with torch.autocast("cpu", dtype):
            output = model(x)
            assert output.dtype == dtype
            loss = F.cross_entropy(output.float(), y)
        model.backward(scaler.scale(loss))

    scales = []
    for step in range(AMP_STEPS):
        optimizer.zero_grad()
        train(model, scaler, *classes(step, smp.dp_rank()))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, dict(model.state_dict())


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("dtype", "parts", "replicas"),
    [(torch.float16, 2, 1), (torch.float16, 2, 2), (torch.bfloat16, 2, 1)],
)
def test_autocast_with_a_scaler_is_what_torch_does(
    dtype: torch.dtype, parts: int, replicas: int
) -> None:
    """The scale makes fp16 overflow in some steps; all ranks leave those out."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=3)
    scales = []
    for step in range(AMP_STEPS):
        optimizer.zero_grad()
        for replica in range(replicas):
            for x, y in zip(*(part.chunk(4) for part in classes(step, replica)), strict=True):
                with torch.autocast("cpu", dtype):
                    loss = F.cross_entropy(net(x).float(), y)
                scaler.scale(loss).backward()
        for parameter in net.parameters():
            parameter.grad /= 4 * replicas
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert (min(scales) < 2.0**17) == (dtype == torch.float16)
    assert len(set(scales)) > 1
    for found, state in check_ranks(amp, str(parts * replicas), parts, dtype):
        assert found == scales
        torch.testing.assert_close(state, dict(net.state_dict()), rtol=2e-2, atol=2e-3)
