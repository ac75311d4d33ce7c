"""Runs a function of a test module as the ranks of a job, without torch."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(
    function: Callable[..., Any],
    layout: str,
    *arguments: Any,
    env: dict[str, str] | None = None,
    timeout: float = 300,
) -> list[Any]:
    """Returns what each rank returned; None for a rank that has ended without a result.

    Args:
        function: of a module beside this file.
        layout: number of ranks; "2x2" for 2 nodes of 2 ranks.
        arguments: of the function.
        env: variables of the ranks.
        timeout: seconds.
    """
    nodes, per_node = (int(part) for part in f"1x{layout}".split("x")[-2:])
    size = nodes * per_node
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    call = pickle.dumps((function.__module__, function.__name__, arguments))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = []
        for rank in range(size):
            log = stack.enter_context((Path(folder) / f"log{rank}").open("w+"))
            place = {
                **{"RANK": str(rank), "WORLD_SIZE": str(size)},
                **{"LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                **{"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1"},
                "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'tf'}",
            }
            if nodes > 1:
                place["SMDDP_NODE_ID"] = str(rank // per_node)
            command = [sys.executable, __file__, str(Path(folder) / f"result{rank}"), call.hex()]
            processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **place, **(env or {})},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
            stack.callback(processes[-1].kill)
        for process in processes:
            process.wait(timeout)
        results = []
        for rank, process in enumerate(processes):
            made = Path(folder) / f"result{rank}"
            said = (Path(folder) / f"log{rank}").read_text()
            assert process.returncode in (0, -9), f"rank {rank}:\n{said[-6000:]}"
            results.append(pickle.loads(made.read_bytes()) if made.exists() else None)
        return results


if __name__ == "__main__":
    module, name, given = pickle.loads(bytes.fromhex(sys.argv[2]))
    result = getattr(importlib.import_module(module), name)(*given)
    assert "torch" not in sys.modules
    Path(sys.argv[1]).write_bytes(pickle.dumps(result))
