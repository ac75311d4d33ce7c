"""Measures training steps: wraps the model once per backend, takes turns, checks gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import smddp
from smddp._torch_internals import register_fake_backend
from smddp.bench.measure import spread
from smddp.bench.models import Trainee
from smddp.bench.torch_calls import encoding

__all__ = ["FAKE", "NOTHING", "Amount", "Row", "hidden_share", "measure"]

NOTHING = "none"  # no communication
FAKE = "fake"  # a backend that does nothing, which shows the cost of DDP or FSDP itself
_ROUNDS = 5
_PROFILED = 3
_SEED = 1234


@dataclasses.dataclass(frozen=True)
class Amount:
    """How the model is wrapped, and how many steps are measured."""

    cases: Sequence[tuple[str, str]]  # backend, and the wire of smddp as in GroupOptions or ""
    parallel: str  # "ddp" or "fsdp"
    bucket_mib: float | None  # None: torch's default
    seconds: float  # per backend, approximately
    steps: int | None  # number of steps instead of `seconds`


@dataclasses.dataclass
class Row:
    """The measurement of one model with one backend."""

    model: str
    parameters: int
    ranks: int
    backend: str
    milliseconds: list[float]  # of each step, on its slowest rank
    hidden: float | None = None  # share of the communication's time that overlaps with compute
    right: bool | None = None  # whether the gradients of the first step were right
    wire: str = ""
    description: str = ""  # of the group, if it is of smddp

    @property
    def step(self) -> float:
        """The median in milliseconds."""
        return statistics.median(self.milliseconds)


class _Contender:
    """The model wrapped for one backend. Needs a default group."""

    def __init__(self, trainee: Trainee, backend: str, wire: str, amount: Amount) -> None:
        self.trainee = trainee
        self.backend = backend
        self.wire = wire
        self.synchronised = backend != NOTHING
        self.group = _group(backend, wire, amount.parallel)
        self.model: nn.Module
        if amount.parallel == "ddp":
            # Also used without communication: then the rest of DDP's work is the same.
            self.model = DistributedDataParallel(
                trainee.model,
                process_group=self.group,
                gradient_as_bucket_view=True,
                bucket_cap_mb=amount.bucket_mib,
            )
            if backend == FAKE:
                self.model.register_comm_hook(None, _leave)
        elif self.synchronised:
            self.model = _sharded(trainee.model, self.group)
        else:
            self.model = trainee.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        """Runs one training step."""
        self.optimizer.zero_grad()
        quiet = isinstance(self.model, DistributedDataParallel) and not self.synchronised
        with self.model.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
            output = self.model(self.trainee.batch)
            self.trainee.loss(output).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def gradients(self) -> list[torch.Tensor]:
        """Returns copies of the last step's gradients, unsharded."""
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
        return [gradient.detach().clone() for gradient in whole]


def _group(backend: str, wire: str, parallel: str) -> Any:
    if backend == FAKE and parallel == "fsdp":
        register_fake_backend()
        return dist.new_group(backend=FAKE)
    # torch's fake backend returns work without the result that DDP reads. For DDP, FAKE is a
    # communication hook instead, on a group of gloo.
    return dist.new_group(
        backend="gloo" if backend in (NOTHING, FAKE) else backend,
        pg_options=smddp.GroupOptions(wire=wire) if wire else None,
    )


# A communication hook that returns the bucket unchanged. It has no annotations: DDP checks them,
# and rejects the strings that `from __future__ import annotations` makes of them.
def _leave(state, bucket):  # type: ignore[no-untyped-def]
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _sharded(model: nn.Module, group: Any) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _union(ranges: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def hidden_share(
    communication: Sequence[tuple[float, float]], compute: Sequence[tuple[float, float]]
) -> float | None:
    """Returns the share of the communication's time that overlaps with compute.

    Args:
        communication: begin and end of each operation.
        compute: begin and end of each function that computes.

    Returns:
        Between 0 and 1; None if there was no communication.
    """
    total = covered = 0.0
    busy = _union(compute)
    for begin, end in _union(communication):
        total += end - begin
        covered += sum(max(0.0, min(end, e) - max(begin, b)) for b, e in busy)
    return covered / total if total > 0 else None


def _profile(contender: _Contender) -> float | None:
    """Runs a few steps under the profiler; returns their hidden share."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(_PROFILED):
            contender.step()
    communication, compute = [], []
    for event in profiler.events() or []:
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith(f"{contender.backend}:"):
            communication.append(span)
        # AccumulateGrad calls DDP's hook, which communicates, so it does not count as compute.
        elif "evaluate_function" in event.name and "AccumulateGrad" not in event.name:
            compute.append(span)
    return hidden_share(communication, compute)


def _right(
    contender: _Contender, oracle: Sequence[torch.Tensor], magnitudes: Sequence[float]
) -> bool:
    """Returns whether the gradients are the mean over all ranks.

    Args:
        contender: has made a step.
        oracle: the means.
        magnitudes: for each gradient, the largest magnitude on a rank, as the mean over the ranks.
    """
    gradients = contender.gradients()
    wire, step = encoding(contender.group) if contender.backend == "smddp" else ("", 0.0)
    # Each contribution is encoded at most once, and the result once. In int8 neighbours share a
    # scale, which may belong to another gradient.
    largest = max(magnitudes)
    shares = wire == "int8"
    same = len(gradients) == len(oracle) and all(
        torch.allclose(
            mine,
            right,
            rtol=1e-4,
            atol=1e-6
            + 1e-4 * float(right.abs().max())
            + step * 2.1 * (largest if shares else magnitude),
        )
        for mine, right, magnitude in zip(gradients, oracle, magnitudes, strict=False)
    )
    worst = torch.tensor(int(same))
    dist.all_reduce(worst, dist.ReduceOp.MIN)
    return bool(worst)


def _check_first_step(contenders: Sequence[_Contender]) -> list[bool | None]:
    """Runs one step; returns for each contender whether the gradients are the mean over all ranks.

    gloo computes the mean.
    """
    for contender in contenders:
        contender.step()
    oracle = next(c for c in contenders if not c.synchronised).gradients()
    magnitudes = torch.stack([gradient.abs().max() for gradient in oracle])
    for value in (*oracle, magnitudes):
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return [
        None if c.backend in (NOTHING, FAKE) else _right(c, oracle, magnitudes.tolist())
        for c in contenders
    ]


def _time(contender: _Contender, steps: int) -> list[float]:
    dist.barrier()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        contender.step()
        times.append((time.perf_counter() - start) * 1e3)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(value) for value in slowest]


def measure(name: str, make: Callable[[], Trainee], amount: Amount) -> list[Row]:
    """Measures one model with every backend and without communication; all ranks call it.

    Args:
        name: of the model.
        make: creates the model and its batch.
        amount: how it is wrapped, and how many steps are measured.
    """
    contenders = []
    for backend, wire in [*amount.cases, (NOTHING, "")]:
        torch.manual_seed(_SEED)  # the same model on all ranks
        trainee = make()
        torch.manual_seed(_SEED + 1 + dist.get_rank())  # different data on each rank
        batch = trainee.batch
        trainee.batch = (
            torch.randn_like(batch)
            if batch.is_floating_point()
            else torch.randint_like(batch, 0, 8192)
        ).requires_grad_(batch.requires_grad)
        contenders.append(_Contender(trainee, backend, wire, amount))
    parameters = sum(p.numel() for p in contenders[-1].trainee.model.parameters())
    right = _check_first_step(contenders)
    rows = [
        Row(
            name,
            parameters,
            dist.get_world_size(),
            c.backend,
            [],
            right=are_right,
            wire=c.wire,
            description=smddp.describe(c.group) if c.backend == "smddp" else "",
        )
        for c, are_right in zip(contenders, right, strict=True)
    ]
    # The first steps allocate memory; the time of the third one determines the number of steps.
    steps = [_steps(amount, _time(c, 3)[-1]) for c in contenders]
    for counts in zip(*steps, strict=True):
        for contender, row, count in zip(contenders, rows, counts, strict=True):
            row.milliseconds += _time(contender, count)
    for contender, row in zip(contenders, rows, strict=True):
        if contender.synchronised and amount.parallel == "ddp":
            row.hidden = _profile(contender)
    return rows


def _steps(amount: Amount, milliseconds: float) -> list[int]:
    """Returns the number of steps of each round."""
    if amount.steps is not None:
        return spread(amount.steps, _ROUNDS)
    return [max(1, int(amount.seconds * 1e3 / milliseconds / _ROUNDS))] * _ROUNDS
