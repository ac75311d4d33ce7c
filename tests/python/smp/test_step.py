"""Steps on real processes: results, modes, hooks, random numbers, gradients, memory."""

from __future__ import annotations

import functools
import gc
import json
import re
import threading
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from on_ranks import on_ranks
from ranks import check_ranks
from smp.common import sums
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPError, SMPUsageError
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.step import step as step_by_path

pytestmark = pytest.mark.multiprocess


class Base(nn.Sequential):
    """A module; its subclass extends its forward as the guide of the original library says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Child(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super()._orig_forward(x)


class Net(nn.Module):
    """Two layers that may be on different ranks, with dropout in both."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(0):
            self.one = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
        with smp.partition(smp.pp_size() - 1):
            self.two = Child(nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.5))
        self.three = nn.Linear(8, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.three(self.two(self.one(x)))


MANUAL = {"auto_partition": False, "default_partition": 0, "ddp": True, "microbatches": 4}


def build(seed: int = 0, kind: Any = torch.optim.SGD, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(kind(model.parameters(), lr=0.1, **options))
    return model, optimizer


@smp.step
def plain(model: Any, x: torch.Tensor) -> Any:
    output = model(x)
    loss = output.square().mean()
    model.backward(loss)
    return output, loss


def various(pp: int, folder: str) -> dict[str, Any]:
    """Many small checks in one job, because starting a job takes longer than each of them."""
    assert step_by_path is smp.step
    smp.init({"partitions": pp, **MANUAL})
    model, optimizer = build()
    assert isinstance(model, DistributedModel)
    assert isinstance(optimizer, smp.DistributedOptimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert model.partitioned == (pp == 1)
    assert model.get_module() is model.module.module
    assert model.module.one is model.get_module().one
    inner = model
    while hasattr(inner, "module"):  # as model libraries look for the model
        inner = inner.module
    assert inner is model.get_module()
    found: dict[str, Any] = {}
    events: list[str] = []
    model.register_post_partition_hook(lambda m, o: events.append(f"partition {o is optimizer}"))
    model.register_post_step_hook(lambda m, o: events.append(f"step {m is model}"))
    x = torch.arange(32.0).reshape(8, 4) / 32
    # Only rank 0 of the pipeline needs the values.
    output, loss = plain(model, x if smp.pp_rank() == 0 else torch.zeros(8, 4))
    plain(model, x)
    assert events == ["partition True", "step True"]
    found["dropout"] = [o.tolist() for o in output.outputs]
    found["loss"] = float(loss.reduce_mean())
    assert not loss.outputs[0].requires_grad
    # Gradients accumulate until they are cleared.
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.local_parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.local_parameters())

    # Evaluation: no gradients, modes on all ranks, other structures, keywords, scalars.
    @smp.step(non_split_inputs=["scale"], input_split_axes={"y": 1})
    def evaluate(model: Any, x: Any, *, y: Any, scale: Any, flag: bool) -> Any:
        assert flag
        assert y.shape == (3, 2)
        return {"out": model(x) * scale, "rows": len(x), "pair": [y.sum(), "text"]}

    model.eval()
    with torch.no_grad():
        one = evaluate(model, x, y=torch.ones(3, 8), scale=torch.tensor(2.0), flag=True)
        two = evaluate(model, x, y=torch.ones(3, 8), scale=torch.tensor(2.0), flag=True)
    assert torch.equal(one["out"].concat(), two["out"].concat()), "dropout in evaluation"
    assert one["rows"] == [2, 2, 2, 2]
    assert one["pair"][0].reduce_sum() == 24
    assert one["pair"][1] == ["text"] * 4
    found["evaluated"] = one["out"].concat().tolist()
    assert all(parameter.grad is None for parameter in model.local_parameters())
    model.train()

    # A step that is only a forward pass leaves nothing behind, with gradients enabled too.
    @smp.step()
    def forward_only(model: Any, x: Any) -> Any:
        return model(x).sum()

    for _ in range(2):
        forward_only(model, x)

    # Autocast holds on other ranks.
    @smp.step
    def cast(model: Any, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        model.backward(output.float().sum())
        return output

    found["dtype"] = str(cast(model, x).outputs[0].dtype)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        assert forward_only(model, x).outputs[0].dtype == torch.bfloat16

    # A loss may be changed in place, as scripts do that accumulate gradients.
    @smp.step
    def divided(model: Any, x: Any) -> Any:
        loss = model(x).square().mean()
        loss /= 2
        model.backward(loss)
        return loss

    model.eval()
    plain(model, x)
    twice = [2 * parameter.grad for parameter in model.local_parameters()]
    optimizer.zero_grad()
    found["halved"] = [divided(model, x).reduce_sum().item(), divided(model, x).reduce_sum().item()]
    for parameter, grad in zip(model.local_parameters(), twice, strict=True):
        torch.testing.assert_close(2 * parameter.grad, grad)
    model.train()
    optimizer.zero_grad()

    # Each rank has exactly one part.
    names = [name for name, _ in model.local_named_parameters()]
    everything = [name for part in smp.allgather(names, smp.PP_GROUP) for name in part]
    assert sorted(everything) == sorted(name for name, _ in model.get_module().named_parameters())
    assert all(p.device.type == "cpu" for p in model.local_parameters())
    elsewhere = [p for n, p in model.get_module().named_parameters() if n not in names]
    assert all(parameter.is_meta for parameter in elsewhere)
    found["calls"] = model.module.calls
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plain(model, x)
    optimizer.step()
    scheduler.step()
    norm = smp.clip_grad_norm(1e-3)
    found["norm"] = float(norm)
    clipped = smp.clip_grad_norm(1.0)
    assert float(clipped) == pytest.approx(1e-3, rel=1e-2)
    found["explain"] = smp.explain()
    report = smp.timeline()
    assert len(report.spans) == pp
    assert 0 < report.busy <= 1.0
    if pp > 1:
        assert {span.name for span in report.spans[0]} == {""}
        assert {span.name for span in report.spans[-1]} == {"two"}
    assert "without delays" in str(report)
    smp.timeline(f"{folder}/step-{pp}.json")
    smp.timeline(f"{folder}/step-{pp}.svg")
    smp.explain(f"{folder}/partition-{pp}.svg")
    smp.barrier()
    events = json.loads(Path(folder, f"step-{pp}.json").read_text())["traceEvents"]
    spans = [span for rank in report.spans for span in rank]
    assert len(events) == len(spans)
    assert {event["tid"] for event in events} == {0, pp - 1}
    assert min(event["dur"] for event in events) >= 0
    for name in (f"step-{pp}.svg", f"partition-{pp}.svg"):
        ElementTree.parse(Path(folder, name))
    found["state"] = {key: value.tolist() for key, value in model.state_dict().items()}
    assert smp.state.cfg.microbatches == 4
    assert torch.initial_seed() == 0
    found["random"] = float(torch.rand(())) if smp.pp_rank() == 0 else None
    return found


def test_steps_are_the_same_for_any_number_of_partitions(tmp_path: Path) -> None:
    by_degree = {pp: check_ranks(various, str(pp), pp, str(tmp_path)) for pp in (1, 2, 3)}
    whole = by_degree[1][0]
    assert whole["dtype"] == "torch.bfloat16"
    for pp, ranks in by_degree.items():
        for rank, result in enumerate(ranks):
            for key in ("dropout", "loss", "evaluated", "dtype", "state", "halved"):
                assert result[key] == whole[key], f"{key} on rank {rank} of {pp}"
            assert result["norm"] == pytest.approx(whole["norm"], rel=1e-5)
            assert "manual" in result["explain"] or pp == 1
            shares = [float(share) for share in re.findall(r"([\d.]+) %", result["explain"])]
            assert len(shares) == pp
            assert sum(shares) == pytest.approx(100, abs=1)
        # A step draws one number from the script's generator, on rank 0.
        assert ranks[0]["random"] == whole["random"]
        # The body and the root run on rank 0 only.
        assert [result["calls"] > 0 for result in ranks] == [True] + [False] * (pp - 1)
    rows = [tuple(row) for mb in whole["dropout"] for row in mb]
    assert len(set(rows)) == len(rows), "microbatches share random numbers"


def scaled(pp: int, kind: Any, options: dict[str, Any]) -> list[Any]:
    """After an overflow on one rank all ranks skip the step, and have equal scales."""
    smp.init({"partitions": pp, **MANUAL})
    model, optimizer = build(0, kind, **options)
    scaler = smp.amp.GradScaler(init_scale=2.0**10, growth_interval=2)

    @smp.step
    def train(model: Any, x: torch.Tensor, bad: bool) -> Any:
        loss = model(x).square().mean()
        model.backward(scaler.scale(loss))
        return loss

    seen: list[Any] = []
    norms: list[float] = []
    x = torch.ones(8, 4)
    for number in range(4):
        optimizer.zero_grad()
        train(model, x, False)
        if number == 1 and smp.pp_rank() == pp - 1:
            next(p for p in model.local_parameters()).grad.fill_(float("inf"))
        if number > 1:
            # Clipping needs unscaled gradients; unscaling them twice is an error.
            scaler.unscale_(optimizer)
            norms.append(float(smp.clip_grad_norm(0.1)))
        before = model.state_dict()
        scaler.step(optimizer)
        scaler.update()
        after = model.state_dict()
        changed = any(not torch.equal(after[key], before[key]) for key in after)
        seen.append((changed, scaler.get_scale()))
    assert smp.allgather(norms, smp.PP_GROUP) == [norms] * pp
    assert all(0.01 < norm < 100 for norm in norms), "the scale is in the gradients"
    again = smp.amp.GradScaler()
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == scaler.get_scale()
    return seen


# A fused optimizer of torch has its own way to look for infinite gradients.
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.AdamW, {"fused": True}),
        (smp.optimizers.FusedAdam, {}),
    ],
    ids=["sgd", "fused", "FusedAdam"],
)
def test_grad_scaler_skips_together(kind: Any, options: dict[str, Any]) -> None:
    expected = [(True, 1024.0), (False, 512.0), (True, 512.0), (True, 1024.0)]
    for rank in check_ranks(scaled, "2", 2, kind, options):
        assert rank == expected


class Counts:
    """The microbatches of which a probe holds activations, and the most at a time."""

    held, most = 0, 0


# Behind a cache, where smp does not look: microbatches do not overlap if objects change that the
# code of modules can get to.
counts = functools.cache(Counts)


class Probe(nn.Module):
    """Counts the microbatches of which it holds activations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        class Hold(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                counts().held += 1
                counts().most = max(counts().most, counts().held)
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                counts().held -= 1
                return gradient

        return Hold.apply(x * self.weight)


class Gated(Probe):
    """The last stage: in every step, its first call waits until rank 0 can do no more work."""

    step, opened = 0, 0

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Gated.opened < Gated.step:
            Gated.opened = Gated.step
            self.store.wait([f"rank 0 can do no more in step {Gated.step}"])
        return super().forward(x)


def open_when_idle(executor: Any, store: dist.Store) -> None:
    """Opens the gate when all microbatches that rank 0 has begun wait for the last stage."""
    take = executor.mail.take

    def watched(block: bool) -> Any:
        # A rank waits for messages only if no task can run. The driver has counted a microbatch
        # before it makes the task, so none is about to come.
        driver = executor.step.driver if executor.step is not None else None
        if block and driver is not None and 0 < driver._progress._started == counts().held:
            store.set(f"rank 0 can do no more in step {Gated.step}", "")
        return take(block)

    executor.mail.take = watched


def memory(active: int, pipeline: str) -> int:
    options = {"microbatches": 8, "active_microbatches": active, "pipeline": pipeline}
    smp.init({**MANUAL, "partitions": 2, **options})
    store = dist.distributed_c10d._get_default_store()
    with smp.partition(0):
        first = Probe()
    with smp.partition(1):
        last = Gated(store)
    model = smp.DistributedModel(nn.Sequential(first, last))
    if smp.pp_rank() == 0:
        open_when_idle(model.runtime.executor, store)
    for _ in range(3):  # the first two are watched, so nothing overlaps in them
        Gated.step += 1
        plain(model, torch.ones(8, 4))
    assert counts().held == 0
    return counts().most


@pytest.mark.parametrize(
    ("active", "pipeline"),
    [(3, "interleaved"), (3, "simple"), (4, "simple")],  # partitions + 2 is a number like any other
)
def test_no_rank_holds_more_than_the_active_microbatches(active: int, pipeline: str) -> None:
    held = check_ranks(memory, "2", active, pipeline)
    # All that rank 0 begins without an answer; the last stage has waited for that.
    assert held[0] == active
    assert held[1] <= active


def numbers_of_the_script() -> list[list[float]]:
    smp.init({"partitions": 2, **MANUAL})
    model, _ = build()
    torch.manual_seed(1 + smp.rank())
    found = []
    for _ in range(2):
        sums(model, torch.ones(8, 4))
        found.append(torch.rand(2).tolist())
    return found


def test_what_is_served_leaves_the_random_numbers_of_the_script_alone() -> None:
    first, second = check_ranks(numbers_of_the_script, "2")
    torch.manual_seed(2)
    # Rank 0 draws a number for each step; segments on rank 1 leave its generator as it was.
    assert second == [torch.rand(2).tolist() for _ in range(2)]
    torch.manual_seed(1)
    assert first != [torch.rand(2).tolist() for _ in range(2)]


@smp.step
def squared_or_failing(model: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
    if fails:
        raise ValueError("the body")
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def jobs_one_after_another() -> tuple[list[int], list[int]]:
    """Returns how many threads there were after each job, and how many executors are left."""
    threads = []
    for number in range(4):
        smp.init({**MANUAL, "partitions": 2, "microbatches": 2})
        model, _ = build()
        x = torch.ones(4, 4)
        squared_or_failing(model, x, False)
        if number % 2:
            with pytest.raises(SMPError):
                squared_or_failing(model, x, True)
        del model
        smp.shutdown()
        gc.collect()
        # Those that were told to end may take a moment.
        deadline = time.monotonic() + 30
        while threading.active_count() > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        threads.append(threading.active_count())
    executors = [type(one) for one in gc.get_objects() if type(one).__name__ == "Executor"]
    return threads, [len(executors)]


def test_jobs_one_after_another_leave_no_threads() -> None:
    for threads, (executors,) in check_ranks(jobs_one_after_another, "2"):
        assert len(set(threads)) == 1, threads
        assert executors <= 1


class Places(nn.Module):
    """Notes where a tensor is made that does not say where."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.places: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.places.append(torch.ones(1).device.type)
        return self.linear(x)


@smp.step
def placing(model: Any, x: torch.Tensor) -> str:
    model.backward(model(x).sum())
    return torch.ones(1).device.type


def placed(pp: int) -> tuple[Any, Any]:
    smp.init({**MANUAL, "partitions": pp, "microbatches": 1})
    with smp.partition(pp - 1):
        last = Places()
    model = smp.DistributedModel(nn.Sequential(Places(), last))
    x = torch.ones(2, 4)
    bodies = placing(model, x)
    torch.set_default_device("meta")
    try:
        bodies += placing(model, x)
    finally:
        torch.set_default_device(None)
    bodies += placing(model, x)
    assert all(p.grad.device.type == "cpu" for p in model.local_parameters())
    return bodies, last.places


@pytest.mark.parametrize("pp", [1, 2])
def test_tasks_have_the_default_device_of_the_script(pp: int) -> None:
    found = check_ranks(placed, str(pp), pp)
    assert [bodies for bodies, _ in found] == [["cpu", "meta", "cpu"]] * pp
    assert found[-1][1] == ["cpu", "meta", "cpu"]


class Trains:
    """An object that can be called."""

    def __call__(self, factor: float, model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum() * factor
        model.backward(loss)
        return loss


@on_ranks("1")
def test_a_step_function_needs_no_name() -> None:
    smp.init({**MANUAL, "ddp": False})
    model = smp.DistributedModel(nn.Linear(4, 4))
    x = torch.ones(4, 4)
    for one in (Trains(), functools.partial(Trains().__call__, 2.0)):
        step = smp.step(one)
        arguments = (model, x) if isinstance(one, functools.partial) else (2.0, model, x)
        loss = step(*arguments)
        assert loss.reduce_sum().item() == pytest.approx(2 * model(x).sum().item())
        with pytest.raises(SMPUsageError, match=r"smp.step: .*missing a required argument"):
            step(*arguments[:-1])
