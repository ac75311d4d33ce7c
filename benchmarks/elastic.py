"""Measures how soon an elastic job goes on when a rank is killed, and whether it is exact.

    python benchmarks/elastic.py --kills 100 --json FILE
    python benchmarks/elastic.py --kills 20 --layouts 3 --replace at-once

`smddprun --elastic` starts a job that trains with DDP (25 MB of gradients, torch's defaults, so
with the Flight Recorder). Again and again, at a random moment, a random rank gets SIGKILL. Measured
is the time from the kill until all survivors have committed the next step in their new group; a
step's median is taken off. The replacement imports torch on the same cores: `--replace later` lets
it begin two seconds after the kill, `at-once` at once. In the end the weights must be equal on all
ranks, and each sample must have been taken once.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH = 24
PAUSE = 2.0  # seconds that a replacement waits in the mode "later"


# --- in a rank ------------------------------------------------------------------------------------


def _train(folder: Path) -> None:
    if os.environ["SMDDP_ELASTIC"] != "0" and os.environ["BENCH_REPLACE"] == "later":
        time.sleep(PAUSE)
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    from smddp import elastic

    class Numbers(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, index: int) -> int:
            return index

    job = elastic.init(min_ranks=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2560, 2560))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampler = elastic.Sampler(1 << 20, BATCH, shuffle=False)
    batches = job.batches(DataLoader(Numbers(), batch_sampler=sampler))
    job.keep(model, optimizer, sampler)
    with (folder / f"steps.{os.getpid()}").open("w", buffering=1) as log:
        for step in job.steps(1 << 30):
            with step:
                ids = next(batches)
                loss = model(ids[:, None].expand(-1, 2560) / 1e6).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if step.committed:
                now = time.monotonic()
                log.write(f"{now} {step.index} {job.size} {int(ids.sum())}\n")
                if (folder / "end").exists():
                    break
        # All break behind one step: the file is looked at behind a vote, but not at one moment.
        parameters = sum(float(p.detach().double().sum()) for p in model.parameters())
        log.write(f"end {step.index} {parameters!r}\n")
        log.flush()
    os._exit(0)


# --- the script -----------------------------------------------------------------------------------


class _Job:
    def __init__(self, layout: str, replace: str, folder: Path) -> None:
        self.folder, self.size = folder, sum(map(int, layout.split("+")))
        nodes = ["--nodes", layout] if "+" in layout else []
        environment = {**os.environ, "BENCH_FOLDER": str(folder), "BENCH_REPLACE": replace}
        environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, "-m", "smddp.launch", "--elastic", "-n", str(self.size), *nodes]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--max-restarts", "1000", __file__],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.ended: set[int] = set()

    def logs(self) -> dict[int, list[list[str]]]:
        """Returns the lines of each process that has not been killed."""
        lines = {}
        for path in self.folder.glob("steps.*"):
            pid = int(path.suffix[1:])
            text = path.read_text()
            lines[pid] = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        return lines

    def living(self) -> dict[int, list[list[str]]]:
        return {pid: lines for pid, lines in self.logs().items() if pid not in self.ended}

    def until(self, what: str, seconds: float, condition) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{what}\n{(self.folder / 'log').read_text()[-4000:]}")
            time.sleep(0.002)

    def is_complete(self) -> bool:
        living = self.living()
        return len(living) == self.size and all(
            lines and int(lines[-1][2]) == self.size for lines in living.values()
        )

    def kill_one(self, rng: random.Random) -> float:
        """Kills a rank; returns the milliseconds until the others went on, beyond a step."""
        self.until("the job is not complete", 120, self.is_complete)
        time.sleep(rng.uniform(0.3, 0.8))
        before = self.living()
        victim = rng.choice(sorted(before))
        times = [float(line[0]) for line in before[victim][-40:] if int(line[2]) == self.size]
        step = statistics.median(b - a for a, b in itertools.pairwise(times))
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        self.ended.add(victim)
        first: dict[int, float] = {}

        def went_on() -> bool:
            for pid, lines in self.living().items():
                for line in reversed(lines):
                    if float(line[0]) < killed:
                        break
                    if pid in before and int(line[2]) == self.size - 1:
                        first[pid] = float(line[0])
            return len(first) == self.size - 1

        self.until("the others do not go on", 60, went_on)
        return (max(first.values()) - killed - step) * 1e3

    def end(self) -> None:
        """Checks the result.

        Raises:
            SystemExit: it is wrong.
        """
        self.until("the job is not complete", 120, self.is_complete)
        (self.folder / "end").touch()
        self.process.wait(60)
        sums: dict[int, dict[int, int]] = collections.defaultdict(dict)
        ends = set()
        for pid, lines in self.logs().items():
            for line in lines:
                if line[0] == "end":
                    ends.add((line[1], line[2]))
                else:
                    sums[int(line[1])][pid] = int(line[3])
        last = {step for step, _ in ends}
        assert len(ends) == len(last), f"the weights differ: {ends}"
        for index in range(min(map(int, last))):
            expected = sum(range(index * BATCH, (index + 1) * BATCH))
            found = sum(sums[index].values())
            # Who was killed behind its vote may not have written what it took.
            assert found == expected or len(sums[index]) < self.size, (index, found, expected)
            assert found <= expected, f"step {index} took samples twice"


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=100, help="of each layout")
    parser.add_argument("--layouts", nargs="+", default=["3", "1+1+1", "2+2"])
    parser.add_argument("--replace", nargs="+", default=["later"], choices=["later", "at-once"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = []
    for replace in options.replace:
        for layout in options.layouts:
            with tempfile.TemporaryDirectory() as folder:
                job = _Job(layout, replace, Path(folder))
                try:
                    rng = random.Random(options.seed)
                    times = [job.kill_one(rng) for _ in range(options.kills)]
                    job.end()
                finally:
                    if job.process.poll() is None:
                        job.process.terminate()
                        job.process.wait(60)
            row = {
                "layout": layout,
                "replace": replace,
                "kills": len(times),
                "p50_ms": statistics.median(times),
                "p90_ms": _quantile(times, 0.9),
                "max_ms": max(times),
                "over_250_ms": sum(time > 250 for time in times),
            }
            print(json.dumps(row), flush=True)
            rows.append({**row, "times_ms": [round(time, 1) for time in times]})
    if options.json:
        Path(options.json).write_text(json.dumps({"results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if "BENCH_FOLDER" in os.environ:
        _train(Path(os.environ["BENCH_FOLDER"]))
    else:
        main()
