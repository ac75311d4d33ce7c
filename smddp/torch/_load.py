"""Finds and loads the compiled module that was built for the installed torch."""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from pathlib import Path
from typing import Any

# One module for each release of torch, and what they share.
_PACKAGE = Path(__file__).parents[1]
_FOLDER = _PACKAGE / "lib"


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _modules() -> dict[str, Path]:
    """Returns the modules for this Python, by release of torch."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    found = {}
    for path in _FOLDER.glob(f"_C_torch*{suffix}"):
        if name := re.fullmatch(r"_C_torch(\d+)_(\d+)", path.name.removesuffix(suffix)):
            found[f"{name[1]}.{name[2]}"] = path
    return dict(sorted(found.items(), key=lambda item: [int(part) for part in item[0].split(".")]))


@functools.cache
def check() -> Path:
    """Returns the path of the compiled module for the installed torch.

    C++ classes of another torch release have another layout in memory. In the folder of a clone
    Python finds the sources before an installed smddp; they may have no compiled module.

    Raises:
        ImportError: there is no such module; the text says what to do.
    """
    import torch

    modules = _modules()
    if not modules:
        raise ImportError(
            f"{_PACKAGE.resolve()} has no compiled part, as in sources that were not "
            "built: run Python in another folder to use an installed smddp, or build these with "
            "`make setup`."
        )
    running = _release(torch.__version__)
    if running not in modules:
        raise ImportError(
            f"smddp was built for torch {' and '.join(modules)} and cannot be used with torch "
            f"{running}: install such a torch, or build smddp for torch {running} from its sources "
            "with `pip install --no-build-isolation .`."
        )
    return modules[running]


def load() -> Any:
    """Returns smddp.torch._C, after check().

    Raises:
        ImportError: see check().
    """
    check()
    # Distributions link libfabric with the PSM libraries. When these are loaded, they install
    # handlers for fatal signals that write backtrace files, unless these variables are set.
    os.environ.setdefault("IPATH_NO_BACKTRACE", "1")
    os.environ.setdefault("HFI_NO_BACKTRACE", "1")
    from smddp.torch import _C, errors

    _C.set_error_types(errors.by_name())
    return _C


def cuda_part() -> str:
    """Returns the path of the CUDA part, a library beside the module; "" if it was not built."""
    part = check().with_name("libsmddp_cuda.so")
    return str(part.resolve()) if part.exists() else ""
