"""Measures the time from `import torch` to the end of the first collective, with smddp and gloo.

    python benchmarks/startup.py --ranks 4 --trials 25 --json FILE
    python benchmarks/startup.py --ranks 32 --nodes 2 --trials 5

The backends take turns. A trial starts all ranks as new processes. They import torch and wait until
all are ready; then the clock starts. As with torchrun, the launcher serves the store. If a rank
served it, ranks that start earlier would wait for up to a second, with any backend. Each figure is
the time of the slowest rank, as a median over the trials:

    import   `import smddp`; gloo is part of torch
    init     init_process_group(): the store, the rendezvous, and the backend's resources
    first    one all_reduce of one element; a backend that connects lazily does so here

`total` is the time until the last rank has its first result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

BACKENDS = ("smddp", "gloo")
PHASES = ("import", "init", "first")
TIMEOUT = 120.0


def rank_main(backend: str) -> None:
    """Runs as a rank: waits for a line on stdin, starts up, prints the end time of each phase."""
    import torch
    import torch.distributed as dist

    print("ready", flush=True)
    sys.stdin.readline()
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
    print(json.dumps(times), flush=True)
    dist.destroy_process_group()


def trial(backend: str, size: int, nodes: int = 1) -> dict[str, float]:
    """Starts `size` ranks once; returns the milliseconds of each phase, and in total.

    Args:
        backend: one of BACKENDS.
        size: number of ranks.
        nodes: number of nodes that the ranks play, in blocks of equal size.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        # Lets Python cache bytecode, as for an installed package. Empty means unset.
        "PYTHONDONTWRITEBYTECODE": "",
        # So that `import smddp` registers the backend, after the clock starts.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size // nodes),
    }
    ranks = []
    for rank in range(size):
        node, local = divmod(rank, size // nodes)
        own = {"RANK": str(rank), "LOCAL_RANK": str(local), "SMDDP_NODE_ID": f"node{node}"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, __file__, "--as-rank", backend],
                env={**common, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for rank in ranks:
            assert rank.stdout is not None
            if rank.stdout.readline() != "ready\n":
                raise RuntimeError(f"a rank with {backend} ended before it was ready")
        begin = time.monotonic()
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        # Not before communicate(), which closes stdin first.
        times = [json.loads(rank.communicate(timeout=TIMEOUT)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    result = {
        phase: max(each[i + 1] - each[i] for each in times) * 1e3 for i, phase in enumerate(PHASES)
    }
    return {**result, "total": (max(each[-1] for each in times) - begin) * 1e3}


def main() -> int:
    """Runs the trials and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (%(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="that the ranks play (%(default)s)")
    parser.add_argument("--trials", type=int, default=25, help="of each backend (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures of every trial to this file")
    parser.add_argument("--as-rank", choices=BACKENDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks % options.nodes:
        parser.error("--ranks must be a multiple of --nodes")
    if options.as_rank:
        rank_main(options.as_rank)
        return 0
    trials: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
    for number in range(-1, options.trials):
        for backend in BACKENDS if number % 2 else reversed(BACKENDS):
            figures = trial(backend, options.ranks, options.nodes)
            if number >= 0:  # the first trial only fills the file system's cache
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
