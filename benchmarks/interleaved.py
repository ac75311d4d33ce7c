"""Jobs that exist at the same time and take turns: what benchmarks of training steps share.

Each variant of a benchmark is a job of its own. The jobs take turns of a few steps, so that what
else the machine does meets all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from smddp.bench.about import write_json
from smddp.bench.launch import require_own_backends, reserved_port

# Makes, on a rank, a function that runs one step, from the options and the variant.
Make = Callable[[Any, dict[str, Any]], Callable[[], None]]


_PROFILED = 50  # steps


class Sleep(torch.autograd.Function):
    """Sleeps instead of computing, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Sleeps, and returns a copy."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Sleeps."""
        time.sleep(ctx.seconds)
        return gradient, None


def _work(
    rank: int, size: int, port: int, make: Make, options: Any, variant: dict[str, Any], pipe: Any
) -> None:
    """Is one rank of a job: does what it is told to."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group(variant["backend"])
    step = make(options, variant)
    while (what := pipe.recv()) is not None:
        if callable(what):
            pipe.send(what(step))
            continue
        seconds, processor = [], time.process_time()
        for _ in range(what):
            dist.barrier()
            begun = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begun)
        pipe.send((seconds, (time.process_time() - processor) / what))
    if options.profile:
        profile = cProfile.Profile()
        with profile if rank == 0 else contextlib.nullcontext():
            for _ in range(_PROFILED):
                step()
        if rank == 0:
            profile.dump_stats(f"{options.profile}.{variant['name']}".replace(" ", "_"))
    dist.barrier()
    dist.destroy_process_group()


class Job:
    """The ranks that train one variant."""

    def __init__(self, make: Make, options: Any, variant: dict[str, Any]) -> None:
        context = mp.get_context("fork")
        self.pipes, self.processes = [], []
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self._name = variant["name"]
        self._stack = contextlib.ExitStack()
        port = self._stack.enter_context(reserved_port())
        for rank in range(variant["ranks"]):
            mine, theirs = context.Pipe()
            arguments = rank, variant["ranks"], port, make, options, variant, theirs
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that the end of a rank is noticed
            self.pipes.append(mine)
            self.processes.append(process)

    def ask(self, what: Any) -> list[Any]:
        """Tells all ranks what to do; returns what they say.

        Args:
            what: how many steps to run; or a function of a module, which gets the step of the rank.

        Raises:
            SystemExit: a rank has ended.
        """
        try:
            for pipe in self.pipes:
                pipe.send(what)
            return [pipe.recv() for pipe in self.pipes]
        except (EOFError, OSError):
            raise SystemExit(f"a rank of {self._name} has ended; what it wrote says why") from None

    def turn(self, count: int) -> None:
        """Runs some steps."""
        found = self.ask(count)
        self.seconds += [max(times) for times in zip(*(one[0] for one in found), strict=True)]
        self.processor += [one[1] for one in found]

    def close(self) -> None:
        """Ends the ranks."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(60)
        self._stack.close()


def measure(
    make: Make,
    options: Any,
    variants: dict[str, dict[str, Any]],
    **further: Callable[[Callable[[], None]], float],
) -> list[dict[str, Any]]:
    """Runs variants in turns; a step takes as long as its slowest rank.

    Args:
        make: makes the step on a rank.
        options: parsed; see `add_arguments`.
        variants: by name; each has its "backend" and how many "ranks" it has.
        further: by key of the rows, a function of a module, which gets the step of a rank; the
            largest result of all ranks counts.

    Returns:
        A row for each variant, with medians over all steps of all turns.
    """
    jobs = {
        name: Job(make, options, {"name": name, **variant}) for name, variant in variants.items()
    }
    for job in jobs.values():
        job.ask(5)  # before these, smp does not know the structures of results
    for _ in range(options.turns):
        for job in jobs.values():
            job.turn(options.steps)
    rows = []
    for name, job in jobs.items():
        row = {
            "ranks": len(job.pipes),
            "variant": name,
            "step_ms": 1000 * statistics.median(job.seconds),
            "processor_ms": 1000 * statistics.median(job.processor),
        }
        rows.append(row | {key: max(job.ask(what)) for key, what in further.items()})
        job.close()
    return rows


def add_arguments(parser: argparse.ArgumentParser, turns: int = 5, steps: int = 4) -> None:
    """Adds the arguments that all these benchmarks have."""
    parser.add_argument("--turns", type=int, default=turns)
    parser.add_argument("--steps", type=int, default=steps, help="of a turn")
    parser.add_argument(
        "--profile",
        default="",
        help="begin files of cProfile's figures of rank 0 so",
    )
    parser.add_argument("--json", default="")


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the parsed arguments, unless the environment would make gloo another backend."""
    options = parser.parse_args()
    try:
        require_own_backends()
    except ValueError as error:
        parser.error(str(error))
    return options


def write(options: Any, rows: list[dict[str, Any]]) -> None:
    """Writes the rows into a file, if the arguments ask for one."""
    if options.json:
        about = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        write_json(Path(options.json), {"about": about, "options": vars(options), "rows": rows})
