"""Measures the time from `import torch` to the end of the first collective, with smddp and gloo.

    python benchmarks/startup.py --ranks 4 --trials 25 --json FILE
    python benchmarks/startup.py --ranks 32 --nodes 2 --trials 5

The backends take turns. A trial forks its ranks from this process, which has imported torch: that
takes each rank a second and more of a core, with any backend. When all are ready, the clock starts.
As with torchrun, the launcher serves the store. If a rank served it, ranks that start earlier would
wait for up to a second, with any backend. Each figure is the time of the slowest rank, as a median
over the trials:

    import   `import smddp`; gloo is part of torch
    init     init_process_group(): the store, the rendezvous, and the backend's resources
    first    one all_reduce of one element; a backend that connects lazily does so here

`total` is the time until the last rank has its first result.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import importlib.util
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Torch reads these when it is imported. So `import smddp` registers the backend, after the clock
# starts; and this process has no threads, with which it could not be forked.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist

BACKENDS = ("smddp", "gloo")
PHASES = ("import", "init", "first")
TIMEOUT = 120.0


def _compile() -> None:
    """Writes the bytecode of smddp's modules, as an installation does."""
    spec = importlib.util.find_spec("smddp")
    assert spec is not None
    assert spec.origin is not None
    for room in (".", "launch", "torch"):
        compileall.compile_dir(Path(spec.origin).parent / room, maxlevels=0, quiet=1)


def _rank_main(backend: str, environment: dict[str, str], launcher: Connection) -> None:
    """Runs as a rank: waits for the launcher, starts up, sends it the end time of each phase."""
    os.environ.update(environment)
    launcher.send("ready")
    launcher.recv()
    times = [time.monotonic()]
    if backend == "smddp":
        import smddp  # noqa: F401  registers the backend
    times.append(time.monotonic())
    dist.init_process_group(backend)
    times.append(time.monotonic())
    value = torch.ones(1)
    dist.all_reduce(value)
    times.append(time.monotonic())
    assert value.item() == dist.get_world_size(), f"a sum of ones is {value.item()}"
    launcher.send(times)
    dist.destroy_process_group()


def _store_main(launcher: Connection) -> None:
    """Serves the store until the launcher says that the trial is over."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher.send(store.port)
    launcher.recv()


def trial(backend: str, size: int, nodes: int = 1) -> dict[str, float]:
    """Starts `size` ranks once; returns the milliseconds of each phase, and in total.

    Args:
        backend: one of BACKENDS.
        size: number of ranks.
        nodes: number of nodes that the ranks play, in blocks of equal size.
    """
    # Its threads must not be in this process, which forks.
    context = multiprocessing.get_context("fork")
    children = []

    def start(function: Callable[..., None], *arguments: Any) -> Connection:
        mine, theirs = context.Pipe()
        child = context.Process(target=function, args=(*arguments, theirs), daemon=True)
        child.start()
        theirs.close()
        children.append(child)
        return mine

    try:
        store = start(_store_main)
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_receive(store)),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size // nodes),
        }
        ranks = []
        for rank in range(size):
            node, local = divmod(rank, size // nodes)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local), "SMDDP_NODE_ID": f"node{node}"}
            ranks.append(start(_rank_main, backend, {**common, **own}))
        for connection in ranks:
            _receive(connection)
        begin = time.monotonic()
        for connection in ranks:
            connection.send("go")
        times = [_receive(connection) for connection in ranks]
        store.send("over")
        for child in children:
            child.join(TIMEOUT)
    finally:
        for child in children:
            child.kill()
            child.join()
    result = {
        phase: max(each[i + 1] - each[i] for each in times) * 1e3 for i, phase in enumerate(PHASES)
    }
    return {**result, "total": (max(each[-1] for each in times) - begin) * 1e3}


def _receive(connection: Connection) -> Any:
    if not connection.poll(TIMEOUT):
        raise TimeoutError(f"no answer for {TIMEOUT:.0f} s")
    return connection.recv()


def main() -> int:
    """Runs the trials and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (%(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="that the ranks play (%(default)s)")
    parser.add_argument("--trials", type=int, default=25, help="of each backend (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures of every trial to this file")
    options = parser.parse_args()
    if options.ranks % options.nodes:
        parser.error("--ranks must be a multiple of --nodes")
    _compile()
    # Or a collection of garbage in a rank would copy all pages that it shares with this process.
    gc.freeze()
    trials: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
    for number in range(-1, options.trials):
        for backend in BACKENDS if number % 2 else reversed(BACKENDS):
            figures = trial(backend, options.ranks, options.nodes)
            if number >= 0:  # the first trial only fills the file system's cache
                print(backend, *(f"{name} {ms:.0f}" for name, ms in figures.items()), flush=True)
                trials[backend].append(figures)
    medians = {
        backend: {key: statistics.median(each[key] for each in figures) for key in figures[0]}
        for backend, figures in trials.items()
    }
    print(f"{'ms':>8}" + "".join(f"{key:>10}" for key in medians[BACKENDS[0]]))
    for backend, figures in medians.items():
        print(f"{backend:>8}" + "".join(f"{figures[key]:>10.1f}" for key in figures))
    ratio = medians["smddp"]["total"] / medians["gloo"]["total"]
    print(f"smddp takes {ratio:.2f} times as long as gloo")
    if options.json:
        from smddp.bench.about import write_json

        about = {
            "command": " ".join(["benchmarks/startup.py", *sys.argv[1:]]),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        }
        write_json(options.json, {**about, "medians_ms": medians, "trials_ms": trials})
    return 0


if __name__ == "__main__":
    sys.exit(main())
