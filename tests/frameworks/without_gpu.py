"""Runs a script that is written for GPUs and their libraries on a machine without them.

python without_gpu.py script.py [argument ...]

Calls of torch.cuda that set or ask something do nothing. Modules that the script only imports for
GPUs, or for data that it does not read, are empty.
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch

# Names of torch.cuda; functions that return a number return 0.
_CALLS = (
    "set_device synchronize empty_cache memory_allocated max_memory_allocated memory_reserved "
    "max_memory_reserved reset_max_memory_cached reset_max_memory_allocated"
)
_MODULES = ("amp_C", "apex", "apex.multi_tensor_apply", "h5py", "torch._six")


def nothing(name: str) -> Any:
    """Returns a function that does nothing; torch wants a function of its own for each name."""

    def call(*_: Any, **__: Any) -> int:
        return 0

    call.__name__ = name
    return call


def main() -> None:
    """Runs the script as Python does."""
    for name in _CALLS.split():
        setattr(torch.cuda, name, nothing(name))
    for name in _MODULES:
        sys.modules.setdefault(name, types.ModuleType(name))
    named: Any = sys.modules
    named["torch._six"].inf = float("inf")
    named["apex.multi_tensor_apply"].multi_tensor_applier = None
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
