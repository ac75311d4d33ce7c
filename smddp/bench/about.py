"""Where something was measured: what goes into every JSON file."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smddp import _load

__all__ = ["Beginning", "about", "begin", "say_written", "write_file"]

_PREFIXES = ("SMDDP_", "OMP_", "NCCL_", "GLOO_")
# Files are passed on.
_SECRETS = ("SMDDP_JOB_TOKEN",)
_BUSY = 0.5


@dataclasses.dataclass(frozen=True)
class Beginning:
    """When a run began, and what else its hosts were doing."""

    time: str
    # Of each host, over 1, 5 and 15 minutes. The ranks themselves, which have just started, are in
    # the first with one or two tenths.
    load_averages: list[list[float]]
    ranks: list[int]  # of each host
    cores: int | None

    def __str__(self) -> str:
        busiest = max(self.load_averages)
        numbers = " ".join(f"{load:.2f}" for load in busiest)
        hosts = len(self.load_averages)
        where = "" if hosts == 1 else f" on the busiest of {hosts} hosts"
        return f"load average at the start: {numbers} (1, 5, 15 minutes; {self.cores} cores){where}"

    @property
    def warning(self) -> str:
        """What is to be said where other programs leave some rank no core of its own; or ""."""
        for (load, *_), ranks in zip(self.load_averages, self.ranks, strict=True):
            # Less may be the ranks themselves; and more ranks than cores are the user's choice.
            if self.cores is not None and load > _BUSY and load + ranks > self.cores:
                return (
                    f"WARNING: other programs are at work (load average {load:.2f}): with {ranks} "
                    f"ranks on {self.cores} cores the times below are too long, and ratios between "
                    "backends wrong; measure again when they have ended"
                )
        return ""

    def lines(self) -> list[str]:
        """Returns what the head of a table says of it."""
        return [str(self), *filter(None, [self.warning])]


def begin() -> Beginning:
    """Asks all ranks; to be called on all of them, before anything is measured."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (socket.gethostname(), os.getloadavg()))
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    hosts = [host for host, _ in of_ranks]
    # A host's ranks have looked at the same file, at about the same time.
    loads = {host: list(load) for host, load in of_ranks}
    ranks = [hosts.count(host) for host in loads]
    return Beginning(now, list(loads.values()), ranks, os.cpu_count())


def about(start: Beginning, **config: Any) -> dict[str, Any]:
    """Returns the keys that come before the results.

    Args:
        start: when the run began.
        config: what else is worth knowing about it.
    """
    nccl = None
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "start_time": start.time,
        "args": ["smddp.bench", *sys.argv[1:]],
        "env": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and name not in _SECRETS
        },
        "nccl_version": nccl,
        "config": {
            "ranks": dist.get_world_size(),
            "cores": start.cores,
            "load_averages": start.load_averages,
            "machine": platform.machine(),
            "torch": torch.__version__,
            "smddp": _load.load().build_info(),
            **config,
        },
    }


def say_written(path: Path) -> None:
    """Prints which file has been written."""
    print(f"# wrote {path}", flush=True)


def write_file(path: Path, text: str) -> None:
    """Writes a file, and says so."""
    path.write_text(text)
    say_written(path)
