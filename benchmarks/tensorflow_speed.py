"""Measures smddp under TensorFlow: what an operation costs, and what a step of Keras costs.

    tools/setup.sh tensorflow
    python benchmarks/tensorflow_speed.py --json FILE
    sudo python benchmarks/tensorflow_speed.py --rate 1gbit --json FILE

Operations: allreduce of 4 bytes beside tf.identity, in eager code and in tf.function, with 1 and 2
ranks. Steps: `fit` of a model with 2 ranks, with smddp (Keras 3 and Keras 2) and with TensorFlow's
MultiWorkerMirroredStrategy (RING over gRPC; it works with Keras 2 only), with the same global
batch; `alone` is one rank's share without the other rank. With --rate only the steps are measured,
between two hosts made of namespaces (tools/hosts.py), also with fewer bytes (SMDDP_WIRE=auto).
What is compared takes turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import hosts  # noqa: E402

from smddp.bench.about import json_text, write_file  # noqa: E402

PYTHON = ROOT / "build/tensorflow/bin/python"
# By the size of their gradients: widths of the layers between 784 inputs and 10 outputs.
MODELS = {"0.2 MB": [64], "1.1 MB": [256, 256]}
KERAS_2 = {"TF_USE_LEGACY_KERAS": 1}
# Name: (what runs, ranks, variables).
HOW: dict[str, tuple[str, int, dict[str, Any]]] = {
    "smddp": ("smddp", 2, {}),
    "smddp, Keras 2": ("smddp", 2, KERAS_2),
    "MultiWorkerMirroredStrategy": ("mirrored", 2, KERAS_2),
    "alone": ("alone", 1, {}),
}
BETWEEN_HOSTS = {"smddp, SMDDP_WIRE=auto": ("smddp", 2, {"SMDDP_WIRE": "auto"})}


def run(
    call: tuple[str, list[Any]],
    ranks: int,
    network: hosts.Network | None = None,
    variables: dict[str, Any] | None = None,
) -> list[Any]:
    """Runs a function of tensorflow_ranks.py, and returns what each rank has printed."""
    ports = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            free = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports.append(free.getsockname()[1])
    addresses = (
        ["127.0.0.1"] * ranks if network is None else list(map(network.address, range(ranks)))
    )
    # Ports of one host must differ.
    workers = [f"{address}:{ports[1] + rank}" for rank, address in enumerate(addresses)]
    jobs = []
    for rank in range(ranks):
        local = (rank, ranks) if network is None else (0, 1)
        place: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local[0]}
        place |= {
            "LOCAL_WORLD_SIZE": local[1],
            "MASTER_ADDR": addresses[0],
            "MASTER_PORT": ports[0],
        }
        place |= {"TF_NUM_INTRAOP_THREADS": 1, "TF_CPP_MIN_LOG_LEVEL": 2, "PYTHONPATH": ROOT}
        if "mirrored" in call[1]:
            task = {"type": "worker", "index": rank}
            place["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        if "alone" in call[1]:
            place["WORLD_SIZE"] = 2  # of which this rank does its share
        place |= variables or {}
        command = [str(PYTHON), str(ROOT / "benchmarks/tensorflow_ranks.py"), json.dumps(call)]
        if network is not None:
            command = network.hosts[rank].command(*command)
            place |= {"SMDDP_NODE_ID": f"host{rank}", "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        env = {**os.environ, **{name: str(value) for name, value in place.items()}}
        jobs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    try:
        said = [job.communicate(timeout=300)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    if any(job.returncode for job in jobs):
        raise RuntimeError(f"a rank has failed: {[job.returncode for job in jobs]}")
    return [json.loads(text.splitlines()[-1]) for text in said]


def operations() -> list[dict[str, Any]]:
    """Measures operations; returns a row for each."""
    rows = []
    for ranks in (1, 2):
        found = run(("operations", []), ranks)[0]
        for name, times in found.items():
            base = found[f"identity, {name.split(', ')[1]}"]
            row: dict[str, Any] = {"ranks": ranks, "what": name}
            for which, of in (("median", statistics.median), ("least", min)):
                row |= {
                    which: round(of(times), 1),
                    f"{which}_above": round(of(times) - of(base), 1),
                }
            rows.append(row)
            print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    return rows


def steps(
    model: str, options: argparse.Namespace, network: hosts.Network | None
) -> list[dict[str, Any]]:
    """Measures steps of a model; returns a row for each way to train."""
    compared = HOW if network is None else HOW | BETWEEN_HOSTS
    times: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(options.turns):
        for name, (how, ranks, variables) in compared.items():
            call = [how, MODELS[model], options.batch, options.steps, 3]
            # A step ends when both ranks have made it.
            found = run(("steps", call), ranks, network, variables)
            times[name] += [round(max(epoch), 3) for epoch in zip(*found, strict=True)]
    rows = []
    for name, each in times.items():
        middle = statistics.median(each)
        ratio = middle / statistics.median(times["smddp"])
        rows.append({"model": model, "what": name, "ms": middle, "ms_of_epochs": each})
        print(f"| {model} | {name} | {middle:.2f} | {min(each):.2f} | {ratio:.2f} |", flush=True)
    return rows


def main() -> None:
    """Measures what is asked for, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rate", help="bandwidth of the link between two hosts, such as 1gbit")
    parser.add_argument("--turns", type=int, default=3, help="of the ways to train")
    parser.add_argument("--batch", type=int, default=64, help="rows of both ranks together")
    parser.add_argument("--steps", type=int, default=200, help="of an epoch; three are timed")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        network = None
        if options.rate:
            network = stack.enter_context(hosts.Hosts(2, options.rate))
        else:
            print("| ranks | what | µs (median) | above tf.identity | µs (least) | above |")
            print("|---|---|---|---|---|---|")
            results += operations()
        print("| model | what | ms per step | least | as many times smddp |\n|---|---|---|---|---|")
        for model in MODELS:
            results += steps(model, options, network)
    if options.json:
        config = {"cores": os.cpu_count(), "machine": platform.machine(), "rate": options.rate}
        about = ["tensorflow_speed.py", *sys.argv[1:]]
        written = {"args": about, "config": config, "results": results}
        write_file(options.json, json_text(written) + "\n")


if __name__ == "__main__":
    main()
