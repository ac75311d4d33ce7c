"""Starts the ranks of a run on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

__all__ = ["launch"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(layout: Sequence[int], arguments: Sequence[str], seconds: float) -> int:
    """Runs this module once per rank.

    Args:
        layout: the ranks of each node; several nodes are told apart by SMDDP_NODE_ID.
        arguments: of the command line; every rank gets them.
        seconds: after which all are ended.

    Returns:
        0, or the exit status of a rank that failed; then the others have been ended.
    """
    common = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(sum(layout)),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    for node, size in enumerate(layout):
        for local in range(size):
            own = {
                "RANK": str(len(ranks)),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(size),
            }
            if len(layout) > 1:
                own["SMDDP_NODE_ID"] = f"node{node}"
            command = [sys.executable, "-m", "smddp.bench", *arguments]
            ranks.append(subprocess.Popen(command, env={**common, **own}))
    try:
        return _wait(ranks, time.monotonic() + seconds, seconds)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float, seconds: float) -> int:
    while any(rank.poll() is None for rank in ranks):
        failed = next((rank for rank in ranks if rank.poll()), None)
        if failed is not None:
            _let_others_speak(ranks)
            break
        if time.monotonic() > deadline:
            print(f"smddp.bench: ended after {seconds:.0f} s (see --limit)", file=sys.stderr)
            return 1
        time.sleep(0.05)
    return next((rank.returncode for rank in ranks if rank.poll()), 0)


def _let_others_speak(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """The rank that ended first often only noticed what another one did."""
    deadline = time.monotonic() + 5
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
