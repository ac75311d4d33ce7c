"""Where something was measured: what goes into every JSON file."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smddp import _load

__all__ = ["about", "say_written", "write_file"]

_PREFIXES = ("SMDDP_", "OMP_", "NCCL_", "GLOO_")
# Files are passed on.
_SECRETS = ("SMDDP_JOB_TOKEN",)


def about(start: str, **config: Any) -> dict[str, Any]:
    """Returns the keys that come before the results.

    Args:
        start: when the run began.
        config: what else is worth knowing about it.
    """
    nccl = None
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "start_time": start,
        "args": ["smddp.bench", *sys.argv[1:]],
        "env": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and name not in _SECRETS
        },
        "nccl_version": nccl,
        "config": {
            "ranks": dist.get_world_size(),
            "cores": os.cpu_count(),
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
