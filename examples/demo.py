"""Trains the same model with smddp and with gloo, then measures both by turns.

In the trainings four ranks play two nodes on this machine: they use shared memory inside a node and
TCP between the nodes. A torchrun per node starts the ranks, as on two hosts. The trained parameters
have to be equal.

Then `smddp bench` measures training steps of a larger model, and sums of several sizes, on one node
and on two. The backends take turns there, so other programs on the machine disturb both alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
NODES = 2
RANKS_PER_NODE = 2
# The backends sum in different orders, so the last bits differ, and training amplifies the
# differences. In double precision they stay far below this tolerance. In single precision no two
# backends agree.
TOLERANCE = 1e-6
# What is measured, by the name of the layout: arguments of `smddp bench`.
LAYOUTS = {"one node, 2 ranks": ["--ranks=2"], "2 nodes x 1 rank": ["--nodes=2x1"]}
STEPS = ["ddp", "--models=mlp", "--backends=smddp,gloo"]
SUMS = ["allreduce", "--backends=smddp,gloo", "--memory=communication", "--place=in"]
SUMS += ["--min-bytes=1KiB", "--max-bytes=16MiB", "--factor=8"]
# Seconds for torchrun to end its ranks. It kills those that run 30 seconds after SIGTERM.
PATIENCE = 40


class DemoError(Exception):
    """A run failed. The text says in one sentence how."""


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a TCP port that the kernel does not assign until the with statement ends."""
    with socket.socket() as holder:
        # This socket does not listen. A server with SO_REUSEADDR, such as torch's, can bind the
        # port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def start_node(node: int, port: int, script: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Starts the ranks of one node. Only node 0 prints to the terminal; errors go to the log."""
    environment = {**os.environ, "SMDDP_NODE_ID": f"node{node}", "OMP_NUM_THREADS": "1"}
    # Lets the ranks import smddp if it was built here but not installed.
    paths = [str(HERE.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += [f"--nnodes={NODES}", f"--node-rank={node}", f"--nproc-per-node={RANKS_PER_NODE}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}", *script]
    errors = log.open("wb")
    output = None if node == 0 else errors
    return subprocess.Popen(
        command, env=environment, stdout=output, stderr=errors, start_new_session=True
    )


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends each torchrun that still runs, with its ranks.

    Each rank has a session of its own. torchrun ends it on SIGTERM, but not if it is killed itself.
    """
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + PATIENCE
    for process in running:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_error(log: Path) -> str:
    """Returns the last error in a log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return errors[-1] if errors else f"see {log}"


def run(backend: str, epochs: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Trains on two nodes; returns the results that rank 0 wrote.

    Args:
        backend: "smddp" or "gloo".
        epochs: number of epochs.
        folder: for the results and the logs.
        seconds: time limit of the run.

    Raises:
        DemoError: a rank failed, or the time limit passed.
    """
    out = folder / f"{backend}.pt"
    out.unlink(missing_ok=True)
    script = [str(HERE / "train_digits.py"), f"--backend={backend}", f"--epochs={epochs}"]
    script += ["--dtype=float64", f"--out={out}"]
    logs = [folder / f"{backend}-node{node}.log" for node in range(NODES)]
    with reserved_port() as port:
        processes = [start_node(node, port, script, log) for node, log in enumerate(logs)]
        deadline = time.monotonic() + seconds
        try:
            while any(process.poll() is None for process in processes):
                if time.monotonic() > deadline:
                    raise DemoError(f"the run with {backend} took longer than {seconds:.0f} s")
                for process, log in zip(processes, logs, strict=True):
                    if process.poll() not in (None, 0):
                        raise DemoError(f"the run with {backend} failed: {last_error(log)}")
                time.sleep(0.1)
        finally:
            stop(processes)
    if any(process.returncode for process in processes) or not out.exists():
        raise DemoError(f"the run with {backend} failed: {last_error(logs[0])}")
    result: dict[str, Any] = torch.load(out)
    return result


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Returns the largest difference between the final parameters."""
    mine, theirs = a["parameters"], b["parameters"]
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def measure(arguments: list[str], file: Path, seconds: float, limit: float) -> dict[str, Any]:
    """Runs `smddp bench`; returns what it wrote.

    Args:
        arguments: of the benchmark.
        file: for the results.
        seconds: for each row.
        limit: time limit in seconds.

    Raises:
        DemoError: a rank failed, or the time limit passed.
    """
    command = [sys.executable, "-m", "smddp.bench", *arguments]
    command += [f"--seconds={seconds}", f"--json={file}", f"--limit={limit}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    paths = [str(HERE.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
        raise DemoError(f"the benchmark failed: {last}")
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def draw(results: dict[str, dict[str, Any]], file: Path) -> None:
    """Draws the loss curves of all backends into a file."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (backend, result), style in zip(results.items(), ["-", "--"], strict=True):
        axes.plot(result["losses"], style, label=backend)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="Digits, 2 nodes x 2 ranks")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def draw_speed(
    steps: dict[str, dict[str, Any]], sums: dict[str, dict[str, Any]], file: Path
) -> None:
    """Draws how long a step takes, and an allreduce of each size, into a file."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for position, result in enumerate(steps.values()):
        for offset, (backend, color) in enumerate((("smddp", "C0"), ("gloo", "C1"))):
            times = times_of_steps(result, backend)
            box = left.boxplot(
                times, positions=[position + 0.35 * offset], widths=0.3, showfliers=False,
                patch_artist=True, medianprops={"color": "black"},
            )  # fmt: skip
            box["boxes"][0].set_facecolor(color)
    left.set_xticks([position + 0.175 for position in range(len(steps))], list(steps))
    left.set(ylabel="ms", title="A training step (64 MiB of gradients)", ylim=(0, None))
    for (layout, result), style in zip(sums.items(), ("-", "--"), strict=True):
        for backend, color in (("smddp", "C0"), ("gloo", "C1")):
            rows = [row for row in result["results"] if row["backend"] == backend]
            right.plot(
                [row["size"] for row in rows], [row["in_place"]["p50"] for row in rows],
                style, color=color, marker=".", label=f"{backend}, {layout}",
            )  # fmt: skip
    right.set(yscale="log", xlabel="bytes", ylabel="µs", title="An allreduce")
    right.set_xscale("log", base=2)
    right.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def times_of_steps(result: dict[str, Any], backend: str) -> list[float]:
    """Returns the milliseconds of the steps that `smddp bench ddp` has measured."""
    rows = [row["milliseconds"] for row in result["results"] if row["backend"] == backend]
    return [time for row in rows for time in row]


def mebibytes(count: int) -> str:
    """Returns a number of bytes in MiB."""
    return f"{count / 2**20:.2f}"


def report(console: Console, results: dict[str, dict[str, Any]]) -> None:
    """Prints the results of the training, and the bytes that smddp moved."""
    learned = Table(title="What was learned (float64, the same seed)")
    for column in ("backend", "accuracy", "last loss"):
        learned.add_column(column, justify="left" if column == "backend" else "right")
    for backend, result in results.items():
        last = f"{result['losses'][-1]:.6f}"
        learned.add_row(backend, f"{result['accuracy']:.4f}", last)
    console.print(learned)

    moved = Table(title="Where smddp's bytes went (all ranks together, MiB)")
    moved.add_column("algorithm", no_wrap=True)
    for column in ("calls", "zero copy", "vectors", "shared memory", "fabric"):
        moved.add_column(column, justify="right")
    for algorithm, use in sorted(results["smddp"]["statistics"].items()):
        amounts = [mebibytes(use[key]) for key in ("bytes", "memory_bytes", "fabric_bytes")]
        moved.add_row(algorithm, str(use["calls"]), str(use["zero_copy"]), *amounts)
    console.print(moved)
    console.print(results["smddp"]["description"], highlight=False)


def report_speed(
    console: Console, steps: dict[str, dict[str, Any]], sums: dict[str, dict[str, Any]]
) -> None:
    """Prints the medians of what was measured, and how many times as long gloo takes."""
    table = Table(title="How fast (medians; by turns; the model has 64 MiB of gradients)")
    for column in ("", "where"):
        table.add_column(column)
    for column in ("smddp", "gloo", "gloo / smddp"):
        table.add_column(column, justify="right")
    for layout, result in steps.items():
        mine, theirs = (statistics.median(times_of_steps(result, b)) for b in ("smddp", "gloo"))
        row = [f"{mine:.1f} ms", f"{theirs:.1f} ms", f"{theirs / mine:.2f}"]
        table.add_row("training step", layout, *row)
    for layout, result in sums.items():
        times = {(row["backend"], row["size"]): row["in_place"]["p50"] for row in result["results"]}
        for size, name in ((1 << 10, "1 KiB"), (1 << 16, "64 KiB"), (1 << 22, "4 MiB")):
            mine, theirs = times["smddp", size], times["gloo", size]
            row = [f"{mine:.0f} µs", f"{theirs:.0f} µs", f"{theirs / mine:.2f}"]
            table.add_row(f"allreduce of {name}", layout, *row)
    console.print(table)
    busy = max(max(one["config"]["busy_cores"]) for one in (*steps.values(), *sums.values()))
    cores = next(iter(steps.values()))["config"]["cores"]
    if busy > 0.2:
        console.print(
            f"Other programs used {busy:.1f} of {cores} cores: the times are longer than they need "
            "to be, and the ratios less certain.", highlight=False,
        )  # fmt: skip


def main() -> int:
    """Runs both trainings and the measurements; returns 1 if one failed or parameters differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3, help="for each measured step")
    parser.add_argument("--output", type=Path, default=HERE / "output", help="folder for results")
    parser.add_argument("--limit", type=float, default=300, help="time limit of a run in seconds")
    arguments = parser.parse_args()
    if replaced := os.environ.get("SMDDP_INSTEAD_OF"):
        parser.error(f"unset SMDDP_INSTEAD_OF={replaced}: with it, smddp would be beside itself")
    if not arguments.seconds > 0:
        parser.error("--seconds must be more than 0")
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    # Also when another signal than Ctrl-C ends this process, the ranks have to be ended.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = arguments.output.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output: {error}")
    console = Console()
    results = {}
    try:
        for backend in ("smddp", "gloo"):
            console.print(f"Training over {backend}: 2 nodes x 2 ranks ...")
            results[backend] = run(backend, arguments.epochs, folder, arguments.limit)
        report(console, results)
        steps, sums = {}, {}
        for layout, where in LAYOUTS.items():
            console.print(f"Measuring both by turns: {layout} ...")
            seconds, limit = arguments.seconds, arguments.limit
            file = folder / "measured.json"
            steps[layout] = measure([*STEPS, *where], file, seconds, limit)
            sums[layout] = measure([*SUMS, *where], file, seconds / 30, limit)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    report_speed(console, steps, sums)
    picture, speed = folder / "loss.png", folder / "speed.png"
    draw(results, picture)
    draw_speed(steps, sums, speed)
    apart = difference(results["smddp"], results["gloo"])
    console.print(f"Loss curves: {picture}", highlight=False, soft_wrap=True)
    console.print(f"Times: {speed}", highlight=False, soft_wrap=True)
    console.print(f"Largest difference between the final parameters: {apart:.1e}", highlight=False)
    if not apart <= TOLERANCE:  # also true for NaN
        print(f"demo: the backends differ by more than {TOLERANCE:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
