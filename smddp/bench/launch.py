"""Starts the ranks of a run on this machine, or sets the rendezvous for ranks of mpirun."""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from smddp.launch import environment, rendezvous, slurm
from smddp.tools import _files
from smddp.tools._local_ranks import leaving_at_signals, python_command, reserved_port, start_ranks
from smddp.tools.plan import parse_nodes

__all__ = [
    "DEFAULT_RANKS",
    "complete_rendezvous",
    "is_rank",
    "launch",
    "layout_of",
    "require_files",
    "require_own_backends",
    "require_positive",
    "reserved_port",
]

DEFAULT_RANKS = 2

_TIMEOUT = 60.0


def is_rank() -> bool:
    """Returns whether a launcher started this process: torchrun, mpirun or srun."""
    environment.complete_from_launcher()
    if os.environ.get("WORLD_SIZE") == "1" and slurm.is_shell_of_slurm():
        return False
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def layout_of(ranks: int | None, nodes: str | None) -> list[int]:
    """Returns the number of ranks of each node.

    Args:
        ranks: of --ranks, None if it was not given.
        nodes: of --nodes, None if it was not given.

    Raises:
        ValueError: both were given, one is invalid, or a launcher started another number of ranks.
    """
    if ranks is not None and nodes is not None:
        raise ValueError(
            f"--nodes {nodes} says how many ranks there are: leave out --ranks {ranks}"
        )
    if ranks is not None and ranks < 1:
        raise ValueError("--ranks must be at least 1")
    if nodes is not None:
        layout = [len(node) for node in parse_nodes(nodes)]
    else:
        layout = [DEFAULT_RANKS if ranks is None else ranks]
    asked = f"--ranks {ranks}" if nodes is None else f"--nodes {nodes}"
    if is_rank() and (ranks or nodes) and sum(layout) != int(os.environ["WORLD_SIZE"]):
        raise ValueError(
            f"{asked}, but the launcher has started {os.environ['WORLD_SIZE']} ranks: leave it out"
        )
    return layout


def require_own_backends() -> None:
    """Refuses an environment in which groups of gloo would be groups of smddp.

    Raises:
        ValueError: SMDDP_INSTEAD_OF is set.
    """
    if asked := os.environ.get("SMDDP_INSTEAD_OF"):
        raise ValueError(
            f"unset SMDDP_INSTEAD_OF={asked}: with it, the rows of gloo would measure smddp"
        )


def require_positive(options: argparse.Namespace, *names: str) -> None:
    """Checks that options are positive numbers.

    Args:
        options: the parsed arguments.
        names: attributes of `options`; None is allowed as a value.

    Raises:
        ValueError: one of the options is not a positive, finite number.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{name.replace('_', '-')} must be positive, not {value:g}")


def require_files(*files: Path | None) -> None:
    """Checks that rank 0 can write files, before anything is measured.

    Args:
        files: that were asked for; None where none was.

    Raises:
        ValueError: it cannot write one.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    for file in filter(None, files):
        if why := _files.unwritable(file):
            raise ValueError(why)


def complete_rendezvous() -> None:
    """Sets MASTER_ADDR and MASTER_PORT, because mpirun does not.

    Raises:
        OSError: nothing says on which of several hosts rank 0 is, or it did not start in time.
        ValueError: a variable of the launcher is wrong.
    """
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) != size:
        if not rendezvous.complete_rendezvous():
            raise OSError(rendezvous.UNKNOWN_HOST)
        return
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    # A socket in the abstract namespace. Only ranks of the same mpirun know its name, and it
    # vanishes with its last user.
    name = f"\0smddp.bench.{os.getuid()}.{os.getppid()}"
    if rank == 0:
        with reserved_port() as port, socket.socket(socket.AF_UNIX) as server:
            os.environ["MASTER_PORT"] = str(port)
            server.bind(name)
            server.listen(size)
            server.settimeout(_TIMEOUT)
            for _ in range(size - 1):
                with server.accept()[0] as other:
                    other.sendall(os.environ["MASTER_PORT"].encode())
    else:
        os.environ["MASTER_PORT"] = _ask(name)


def _ask(name: str) -> str:
    deadline = time.monotonic() + _TIMEOUT
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT)
            try:
                connection.connect(name)
                return connection.recv(16).decode()
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise OSError(f"rank 0 did not start within {_TIMEOUT:.0f} s") from None
        time.sleep(0.05)


def launch(layout: Sequence[int], arguments: Sequence[str], seconds: float) -> int:
    """Runs `python -m smddp.bench` once per rank and waits for all.

    Args:
        layout: the number of ranks of each node; with several nodes SMDDP_NODE_ID is set.
        arguments: the command line that every rank gets.
        seconds: the limit after which all ranks are killed.

    Returns:
        0, or the exit status of a rank that failed, as a shell tells it; then the other ranks were
        killed.
    """
    with leaving_at_signals(), reserved_port() as port:
        try:
            ranks = start_ranks(layout, [*python_command("smddp.bench"), *arguments], port)
        except OSError as error:  # such as too many processes
            print(f"smddp.bench: the ranks cannot be started: {error}", file=sys.stderr)
            return 1
        try:
            return _wait(ranks, time.monotonic() + seconds, seconds)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float, seconds: float) -> int:
    failed: list[subprocess.Popen[bytes]] = []
    while any(rank.poll() is None for rank in ranks):
        failed = [rank for rank in ranks if rank.poll()]
        if failed:
            _wait_for_others(ranks)
            break
        if time.monotonic() > deadline:
            print(f"smddp.bench: ended after {seconds:.0f} s (see --limit)", file=sys.stderr)
            return 1
        time.sleep(0.05)
    # A rank that a signal has ended has printed nothing. Others may abort because it is gone, but
    # nothing else than a lack of memory kills one.
    killed = [rank for rank in ranks if rank.poll() == -signal.SIGKILL]
    for rank in [*killed, *(rank for rank in failed or ranks if (rank.poll() or 0) < 0)]:
        name = signal.Signals(-rank.returncode).name
        why = ": is there enough memory?" if killed else ""
        print(f"smddp.bench: rank {ranks.index(rank)} was ended by {name}{why}", file=sys.stderr)
        return 128 - int(rank.returncode)
    return next((rank.returncode for rank in ranks if rank.poll()), 0)


def _wait_for_others(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits up to 5 s: the rank that ended first often only reports the failure of another one."""
    deadline = time.monotonic() + 5
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
