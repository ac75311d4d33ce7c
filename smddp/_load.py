"""Loads the compiled module, after a check that it was built for the installed torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def check() -> None:
    """Checks that there is a compiled module, and that it was built for the installed torch.

    C++ classes of another torch release have another layout in memory. In the folder of a clone
    Python finds the sources before an installed smddp; they may have no compiled module.

    Raises:
        ImportError: one of the two is not so; the text says what to do.
    """
    import torch

    folder = Path(__file__).resolve().parent
    try:
        from smddp import _build
    except ImportError:
        raise ImportError(
            f"{folder} has no compiled part, as in sources that were not built: run Python in "
            "another folder to use an installed smddp, or build these with `make setup`."
        ) from None

    if _release(_build.TORCH_VERSION) != _release(torch.__version__):
        built = ".".join(_release(_build.TORCH_VERSION))
        running = ".".join(_release(torch.__version__))
        raise ImportError(
            f"smddp was built for torch {built} and cannot be used with torch {running}: install "
            f"the wheel for torch {running}, or build it with `pip install --no-build-isolation .`."
        )


def load() -> Any:
    """Returns smddp._C, after check().

    Raises:
        ImportError: see check().
    """
    check()
    # Distributions link libfabric with the PSM libraries. When these are loaded, they install
    # handlers for fatal signals that write backtrace files, unless these variables are set.
    os.environ.setdefault("IPATH_NO_BACKTRACE", "1")
    os.environ.setdefault("HFI_NO_BACKTRACE", "1")
    from smddp import _C, errors

    _C.set_error_types(errors.by_name())
    return _C


def cuda_part() -> str:
    """Returns the path of the CUDA part, a library beside the module; "" if it was not built."""
    part = Path(load().__file__).resolve().parent / "libsmddp_cuda.so"
    return str(part) if part.exists() else ""
