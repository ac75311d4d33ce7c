"""Trains the same model with smddp and with gloo, and compares the trained parameters.

Each run has four ranks, which play two nodes on this machine: they use shared memory inside a node
and TCP between the nodes. A torchrun per node starts the ranks, as on two hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
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


def mebibytes(count: int) -> str:
    """Returns a number of bytes in MiB."""
    return f"{count / 2**20:.2f}"


def report(console: Console, results: dict[str, dict[str, Any]]) -> None:
    """Prints the results of the training, and the bytes that smddp moved."""
    learned = Table(title="What was learned (float64, the same seed)")
    for column in ("backend", "accuracy", "last loss", "training, s"):
        learned.add_column(column, justify="left" if column == "backend" else "right")
    for backend, result in results.items():
        last = f"{result['losses'][-1]:.6f}"
        learned.add_row(backend, f"{result['accuracy']:.4f}", last, f"{result['seconds']:.2f}")
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


def main() -> int:
    """Runs both trainings; returns 1 if one failed or the parameters differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", type=Path, default=HERE / "output", help="folder for results")
    parser.add_argument("--limit", type=float, default=300, help="time limit of a run in seconds")
    arguments = parser.parse_args()
    if replaced := os.environ.get("SMDDP_INSTEAD_OF"):
        parser.error(f"unset SMDDP_INSTEAD_OF={replaced}: with it, smddp would be beside itself")
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
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    report(console, results)
    picture = folder / "loss.png"
    draw(results, picture)
    apart = difference(results["smddp"], results["gloo"])
    console.print(f"Loss curves: {picture}", highlight=False, soft_wrap=True)
    console.print(f"Largest difference between the final parameters: {apart:.1e}", highlight=False)
    if not apart <= TOLERANCE:  # also true for NaN
        print(f"demo: the backends differ by more than {TOLERANCE:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
