"""Runs a script that is written for GPUs and their libraries on a machine without them.

python without_gpu.py script.py [argument ...]

Calls of torch.cuda that set or ask something do nothing. Modules that the script only imports for
GPUs, or for data that it does not read, are empty. In modules next to the script that have classes
for half precision, the names of devices are changed to the CPU's.
"""

from __future__ import annotations

import re
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader
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


# What names a GPU in source text, and its replacement.
_DEVICES = (
    (r"torch\.cuda\.(\w+Tensor)", r"torch.\1"),
    (r'torch\.device\("cuda"(, smp\.local_rank\(\))?\)', 'torch.device("cpu")'),
    (r'device\.type == "cpu"', "is_meta"),  # where parameters of other ranks are
)


def scale(overflow: torch.Tensor, lists: Any, factor: float) -> None:
    """Does what apex's multi_tensor_scale does."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)
        overflow |= int(not target.isfinite().all())


def norm(_: torch.Tensor, lists: Any, per_tensor: bool) -> tuple[torch.Tensor, None]:
    """Does what apex's multi_tensor_l2norm does for all tensors together."""
    assert not per_tensor
    return torch.stack([tensor.norm() for tensor in lists[0]]).norm(), None


def use_the_cpu(folder: Path) -> None:
    """Lets the loader of Python change names of devices in the modules of a folder."""
    original = SourceFileLoader.source_to_code

    def source_to_code(self: Any, data: Any, path: Any, **options: Any) -> Any:
        if folder in Path(str(path)).parents:
            text = data.decode()
            for pattern, replacement in _DEVICES:
                text = re.sub(pattern, replacement, text)
            data = text.encode()
        return original(self, data, path, **options)

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]


def main() -> None:
    """Runs the script as Python does."""
    for name in _CALLS.split():
        setattr(torch.cuda, name, nothing(name))
    for name in _MODULES:
        sys.modules.setdefault(name, types.ModuleType(name))
    named: Any = sys.modules
    named["torch._six"].inf = float("inf")
    named["apex.multi_tensor_apply"].multi_tensor_applier = lambda call, *given: call(*given)
    named["amp_C"].multi_tensor_scale, named["amp_C"].multi_tensor_l2norm = scale, norm
    script = Path(sys.argv[1]).resolve()
    sys.dont_write_bytecode = True
    use_the_cpu(script.parent / "fp16")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
