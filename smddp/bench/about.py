"""Records the machine, the versions and the arguments of a measurement, and writes JSON files."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smddp.tools import _files
from smddp.torch import _load

__all__ = [
    "RunStart",
    "about",
    "given",
    "json_text",
    "nodes_of_ranks",
    "print_written",
    "record_start",
    "write_file",
    "write_json",
    "written",
]

_PREFIXES = ("SMDDP_", "OMP_", "NCCL_", "GLOO_")
# Not written into files, which people publish.
_SECRETS = ("SMDDP_JOB_TOKEN",)
# In cores. An idle system uses less.
_BUSY = 0.3
_SAMPLE = 0.25  # seconds


@dataclasses.dataclass(frozen=True)
class RunStart:
    """When a run began, and how busy its hosts were."""

    time: str  # ISO 8601, UTC
    busy_cores: list[float]  # cores that other programs used while the ranks slept, per host
    ranks: list[int]  # number of ranks, per host
    cores: int | None  # of this host

    def __str__(self) -> str:
        hosts = len(self.busy_cores)
        where = "" if hosts == 1 else f" on the busiest of {hosts} hosts"
        return (
            f"other programs at the start: {max(self.busy_cores):.2f} of {self.cores} cores{where}"
        )

    @property
    def warning(self) -> str:
        """A warning if other programs leave some rank without a core of its own; else ""."""
        for busy, ranks in zip(self.busy_cores, self.ranks, strict=True):
            # More ranks than cores are the user's choice.
            if self.cores is not None and busy > _BUSY and busy + ranks > self.cores:
                return (
                    f"WARNING: other programs are at work on {busy:.2f} cores: with {ranks} ranks "
                    f"on {self.cores} cores the times below are too long, and ratios between "
                    "backends wrong; measure again when they have ended"
                )
        return ""

    def lines(self) -> list[str]:
        """Returns the lines about it for the head of a table."""
        return [str(self), *filter(None, [self.warning])]


def record_start() -> RunStart:
    """Measures how busy the hosts are; all ranks call it, before they measure anything else."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, None)  # wait until no rank is still starting
    used, looked = _cpu_seconds(), time.monotonic()
    time.sleep(_SAMPLE)
    busy = (_cpu_seconds() - used) / (time.monotonic() - looked)
    dist.all_gather_object(of_ranks, (socket.gethostname(), busy))
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    hosts = [host for host, _ in of_ranks]
    # Ranks that wake early are counted as busy by those that still sleep: take the smallest value.
    least = {host: min(busy for name, busy in of_ranks if name == host) for host in hosts}
    ranks = [hosts.count(host) for host in least]
    return RunStart(now, list(least.values()), ranks, os.cpu_count())


def _cpu_seconds() -> float:
    """Returns the busy time of all cores of the host together, in seconds; see proc_stat(5)."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _idle, _iowait, *interrupts = map(int, file.readline().split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def nodes_of_ranks() -> list[int]:
    """Returns the node of each rank, by the host's name and SMDDP_NODE_ID; all ranks call it."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, (socket.gethostname(), os.environ.get("SMDDP_NODE_ID")))
    order = list(dict.fromkeys(names))
    return [order.index(name) for name in names]


def given() -> list[str]:
    """Returns the arguments of the benchmark; without the word `bench` of `smddp bench`."""
    words = sys.argv[1:]
    return words[1:] if Path(sys.argv[0]).name == "smddp" and words[:1] == ["bench"] else words


def about(start: RunStart, **config: Any) -> dict[str, Any]:
    """Returns the part of a JSON file that comes before the results.

    Args:
        start: from record_start().
        config: further values for the key "config".
    """
    nccl = None
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "start_time": start.time,
        "args": ["smddp.bench", *given()],
        "env": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and name not in _SECRETS
        },
        "nccl_version": nccl,
        "config": {
            "ranks": dist.get_world_size(),
            "cores": start.cores,
            "busy_cores": start.busy_cores,
            "machine": platform.machine(),
            "torch": torch.__version__,
            "smddp": _load.load().build_info(),
            "congestion_control": _load.load().congestion_control(),
            **config,
        },
    }


def print_written(path: Path) -> None:
    """Prints which file has been written."""
    print(f"# wrote {path}", flush=True)


def written(write: Callable[[], None]) -> bool:
    """Writes a file at the end of a measurement; prints why and returns False if it cannot be."""
    try:
        write()
    except OSError as error:
        print(f"smddp.bench: {error}", file=sys.stderr)
        return False
    return True


def write_file(path: Path, text: str) -> None:
    """Writes a file, and prints its name."""
    _files.write(path, text)
    print_written(path)


def json_text(value: Any, indent: str = "") -> str:
    """Returns JSON with one row per line, so that a change of one row is a change of one line.

    Args:
        value: what is written. A list of objects takes one line per object. Outside such lists an
            object takes one line per key, if it is `value` itself or if all its values are objects
            or lists of objects.
        indent: what stands before a line of this value, except the first.
    """
    inner = indent + " "
    if _is_table(value):
        lines = [f"{inner}{json.dumps(row)}" for row in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    if isinstance(value, dict) and value and (not indent or _has_rows(value)):
        lines = [
            f"{inner}{json.dumps(key)}: {json_text(each, inner)}" for key, each in value.items()
        ]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return json.dumps(value)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _has_rows(value: dict[str, Any]) -> bool:
    return all(isinstance(each, dict) or _is_table(each) for each in value.values())


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file with one row per line, and prints its name."""
    write_file(path, json_text(value) + "\n")
