"""Measures pipelines of stages that sleep, in % of their bound. Many ranks fit on few cores.

    python benchmarks/pipeline.py --partitions 2 4 8 --microbatches 4 8 16 32 --json FILE
    python benchmarks/pipeline.py --calls 4096

A step of m microbatches on p equal stages takes at least (m + p - 1) * (forward + backward). With
m = 8, p = 4 and 25 ms forward and backward each, that is 11 * 50 = 550 ms. The same stages run
under `@smp.step` and under torch.distributed.pipelining: GPipe for the simple pipeline, 1F1B and
Interleaved1F1B for the interleaved one. Interleaved1F1B splits each stage into two halves, so its
bound is (2 * m + p - 1) halves.

The time of a stage has two parts. The benchmark measures the sleeps in the step itself, because
they take a little longer than requested. It measures the rest, the stage's own operations and
autograd, in plain torch without a pipeline, on all ranks at the same time. The rest matters,
because the caches are cold after a sleep. In brackets it prints the share of a bound that counts
the sleeps only.

With --calls it measures the round trip of a call of a module on another rank, with gradients. The
next call starts when the value has arrived, so nothing hides the cost of a call.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from interleaved import parsed
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import smdistributed.modelparallel.torch as smp
from smddp.bench.about import write_json

WIDTH = 8


class Sleep(torch.autograd.Function):
    """Sleeps instead of computing, forward and backward; sums the real times of the sleeps."""

    slept = 0.0
    count = 0

    @staticmethod
    def pause(seconds: float) -> None:
        """Sleeps."""
        begun = time.perf_counter()
        time.sleep(seconds)
        Sleep.slept += time.perf_counter() - begun
        Sleep.count += 1

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Sleeps, and returns a copy."""
        ctx.seconds = seconds
        Sleep.pause(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Sleeps."""
        Sleep.pause(ctx.seconds)
        return gradient, None


class Stage(nn.Module):
    """A stage of the pipeline: a weight, and a sleep."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleeps, and multiplies by the weight."""
        result: torch.Tensor = Sleep.apply(x * self.weight, self.seconds)
        return result


def stage_overhead(seconds: float) -> float:
    """Returns the seconds that a stage takes in plain torch, forward and backward, without sleeps.

    Args:
        seconds: of each sleep.
    """
    stage, x = Stage(seconds), torch.ones(1, WIDTH, requires_grad=True)
    gradient = torch.ones(1, WIDTH)
    found = []
    for _ in range(10):
        Sleep.slept = 0.0
        begun = time.perf_counter()
        stage(x).backward(gradient)
        found.append(time.perf_counter() - begun - Sleep.slept)
    return statistics.median(found)


@smp.step
def train_step(model: Any, x: torch.Tensor) -> Any:
    """One training step."""
    loss = model(x).sum()
    model.backward(loss)
    return loss


def smp_pipeline(options: Any, rank: int, size: int, microbatches: int, pipeline: str) -> Any:
    """Returns a function that runs one step under smp."""
    smp.init(
        {
            "partitions": size,
            "microbatches": microbatches,
            "pipeline": pipeline,
            "active_microbatches": microbatches
            if pipeline == "simple"
            else options.active_of(size),
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    stages = []
    for index in range(size):
        with smp.partition(index):
            stages.append(Stage(options.seconds))
    model = smp.DistributedModel(nn.Sequential(*stages))
    x = torch.ones(microbatches, WIDTH)
    return lambda: train_step(model, x)


def torch_pipeline(options: Any, rank: int, size: int, microbatches: int, pipeline: str) -> Any:
    """Returns a function that runs one step under torch.distributed.pipelining."""
    stage = PipelineStage(Stage(options.seconds), rank, size, torch.device("cpu"))
    kind = {"simple": ScheduleGPipe, "interleaved": Schedule1F1B}[pipeline]
    schedule = kind(stage, microbatches, loss_fn=lambda y, _: y.sum())
    x = torch.ones(microbatches, WIDTH)

    def step() -> None:
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=x)
        else:
            schedule.step()

    return step


# Number of stages that Interleaved1F1B has on each rank.
HALVES = 2


def torch_interleaved(options: Any, rank: int, size: int, microbatches: int, pipeline: str) -> Any:
    """Returns a function that runs one step under torch's Interleaved1F1B."""
    count, device = HALVES * size, torch.device("cpu")
    stages = [
        PipelineStage(Stage(options.seconds / HALVES), rank + size * half, count, device)
        for half in range(HALVES)
    ]
    schedule = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=lambda y, _: y.sum())  # type: ignore[arg-type]
    x = torch.ones(microbatches, WIDTH)
    given: dict[str, Any] = {"target": x} if rank == size - 1 else {}
    return lambda: schedule.step(*([x] if rank == 0 else []), **given)


class Caller(nn.Module):
    """Calls a module that does almost nothing, many times."""

    CALLS = 200

    def __init__(self, remote: bool) -> None:
        super().__init__()
        self.here = nn.Parameter(torch.ones(()))
        with smp.partition(1 if remote else 0):
            self.scale = Scale()
        self.seconds: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Makes CALLS calls and records the time of each."""
        x = x * self.here
        self.seconds = []
        for _ in range(self.CALLS):
            begun = time.perf_counter()
            x = self.scale(x)
            float(x[0])
            self.seconds.append(time.perf_counter() - begun)
        return x


class Scale(nn.Module):
    """Multiplies by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies."""
        return x * self.weight


def calls_main(rank: int, options: Any, job: tuple[Any, ...], port: int, queue: Any) -> None:
    """Runs one rank of the benchmark of calls; `job` is (None, 2 ranks, whether it is remote)."""
    begin(rank, 2, port, options.backend)
    smp.init({"partitions": 2, "microbatches": 1, "auto_partition": False, "default_partition": 0})
    caller = Caller(job[2])
    model = smp.DistributedModel(caller)
    x = torch.ones(options.calls // 4)
    forward, backward = [], []
    for number in range(7):
        dist.barrier()
        Timing.backward = 0.0
        timed_step(model, x)
        if number >= 2:
            forward.append(statistics.median(caller.seconds or [0.0]))
            backward.append(Timing.backward / Caller.CALLS)
    if rank == 0:
        queue.put((statistics.median(forward), statistics.median(backward)))
    dist.barrier()
    dist.destroy_process_group()


class Timing:
    """Holds the seconds of the last backward pass."""

    backward = 0.0


@smp.step
def timed_step(model: Any, x: torch.Tensor) -> Any:
    """Runs forward and backward, and times backward."""
    loss = model(x).sum()
    begun = time.perf_counter()
    model.backward(loss)
    Timing.backward = time.perf_counter() - begun
    return loss


def messages_main(rank: int, options: Any, job: tuple[Any, ...], port: int, queue: Any) -> None:
    """Sends the same bytes there and back by send and recv, the lower limit of a call."""
    begin(rank, 2, port, options.backend)
    x, y = torch.ones(options.calls // 4), torch.ones(options.calls // 4)
    seconds = []
    for _ in range(1000):
        begun = time.perf_counter()
        if rank == 0:
            dist.send(x, 1)
            dist.recv(y, 1)
        else:
            dist.recv(y, 0)
            dist.send(x, 0)
        seconds.append(time.perf_counter() - begun)
    if rank == 0:
        queue.put((statistics.median(seconds), 0.0))
    dist.barrier()
    dist.destroy_process_group()


def begin(rank: int, size: int, port: int, backend: str) -> None:
    """Initialises a rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend)


def measure(
    step: Callable[[], Any], size: int, tasks: int, steps: int, overhead: float
) -> tuple[float, float]:
    """Returns the share of the bound that the best step reaches, with and without overhead.

    Args:
        step: runs one step.
        size: number of ranks.
        tasks: forward passes of a stage per rank and step.
        steps: number of steps to measure.
        overhead: seconds of a stage without its sleeps, from stage_overhead().

    Returns:
        The share of the bound of whole stages, and of the bound of sleeps only.
    """
    for _ in range(2):
        step()
    shares = []
    for _ in range(steps):
        dist.barrier()
        Sleep.slept, Sleep.count = 0.0, 0
        begun = time.perf_counter()
        step()
        took = torch.tensor([time.perf_counter() - begun, Sleep.slept / Sleep.count, overhead])
        every = [torch.zeros(3) for _ in range(size)]
        dist.all_gather(every, took)
        wall = max(float(one[0]) for one in every)
        slept = 2 * statistics.mean(float(one[1]) for one in every)
        stage = slept + statistics.mean(float(one[2]) for one in every)
        slots = tasks + size - 1
        shares.append((slots * stage / wall, slots * slept / wall))
    return max(shares)


def rank_main(rank: int, options: Any, job: tuple[Any, ...], port: int, queue: Any) -> None:
    """Runs one rank of one job; `job` is (system, number of ranks, microbatches, pipeline)."""
    who, size, microbatches, pipeline = job
    begin(rank, size, port, options.backend if who is smp_pipeline else "gloo")
    step = who(options, rank, size, microbatches, pipeline)
    parts = HALVES if who is torch_interleaved else 1
    dist.barrier()
    overhead = stage_overhead(options.seconds / parts)
    shares = measure(step, size, microbatches * parts, options.steps, overhead)
    if rank == 0:
        queue.put(shares)
    dist.barrier()
    dist.destroy_process_group()


def run(options: Any, job: tuple[Any, ...], port: int, target: Any = rank_main) -> Any:
    """Runs one job; returns the result of its rank 0."""
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    ranks = [
        context.Process(target=target, args=(rank, options, job, port, queue))
        for rank in range(job[1])
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"a rank of {job} failed")
    return queue.get()


def main() -> None:
    """Measures all combinations and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--pipelines", nargs="+", default=["simple", "interleaved"])
    parser.add_argument(
        "--active", help="active microbatches: an expression in p (default p + 2, as in smp)"
    )
    parser.add_argument("--seconds", type=float, default=0.025, help="seconds of each sleep")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--calls", type=int, help="measure calls, with so many bytes")
    parser.add_argument("--json", help="a file for all figures")
    parser.add_argument("--backend", default="smddp", help="for smp; torch's runs over gloo")
    options = parsed(parser)
    expression = options.active or "p + 2"
    options.active_of = lambda size: int(eval(expression, {"p": size}))
    # Registers the backend, before the ranks are forked.
    from smddp.torch import _load

    figures: dict[str, Any] = {
        "arguments": {k: v for k, v in vars(options).items() if k != "active_of"},
        "versions": {"smddp": _load.load().build_info()["version"], "torch": torch.__version__},
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
        "results": [],
    }
    if options.calls:
        measure_calls(options, figures)
    else:
        measure_shares(options, figures)
    figures["load_after"] = os.getloadavg()
    if options.json:
        write_json(Path(options.json), figures)


def measure_calls(options: Any, figures: dict[str, Any]) -> None:
    """Measures round trips, in microseconds."""
    rows = [
        ("send and recv, there and back", messages_main, None),
        ("module on this rank", calls_main, False),
        ("module on the other rank", calls_main, True),
    ]
    print(f"| {options.calls} B | forward us | backward us |")
    print("|---|---|---|")
    for number, (name, target, remote) in enumerate(rows):
        found = run(options, (None, 2, remote), 29650 + number, target)
        forward, backward = (round(1e6 * seconds, 1) for seconds in found)
        print(f"| {name} | {forward} | {backward or ''} |", flush=True)
        figures["results"].append({"what": name, "forward_us": forward, "backward_us": backward})


def measure_shares(options: Any, figures: dict[str, Any]) -> None:
    """Measures shares of the bound."""
    systems = {
        "smp": smp_pipeline,
        "torch.distributed.pipelining": torch_pipeline,
        "its Interleaved1F1B": torch_interleaved,
    }
    print(f"| partitions | microbatches | pipeline | {' | '.join(systems)} |")
    print("|---|---|---|---|---|---|")
    port = 29700
    for size in options.partitions:
        for microbatches in options.microbatches:
            for pipeline in options.pipelines:
                shares = []
                for name, who in systems.items():
                    if who is torch_interleaved and pipeline == "simple":
                        shares.append("")
                        continue
                    if (
                        who is not smp_pipeline
                        and microbatches < size
                        and pipeline == "interleaved"
                    ):
                        shares.append("needs m >= p")
                        continue
                    port += 1
                    share, of_sleeps = run(options, (who, size, microbatches, pipeline), port)
                    shares.append(f"{100 * share:.1f} % ({100 * of_sleeps:.1f})")
                    figures["results"].append(
                        {
                            "who": name,
                            "partitions": size,
                            "microbatches": microbatches,
                            "pipeline": pipeline,
                            "share_of_bound": round(share, 4),
                            "share_of_bound_of_sleeps": round(of_sleeps, 4),
                        }
                    )
                row = " | ".join([str(size), str(microbatches), pipeline, *shares])
                print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
