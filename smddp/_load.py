"""Loads the compiled module, after making sure that it fits the torch that runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def check() -> None:
    """Refuses a torch other than the one built for: the C++ classes of another have another layout.

    And sources alone, which Python finds before an installed smddp when it runs beside them.

    Raises:
        ImportError: with one sentence that says what to do.
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
    """Returns smddp._C, after check()."""
    check()
    # Distributions link libfabric with the PSM libraries, which install handlers for fatal signals
    # when they are loaded and leave backtrace files behind. They read these variables then.
    os.environ.setdefault("IPATH_NO_BACKTRACE", "1")
    os.environ.setdefault("HFI_NO_BACKTRACE", "1")
    from smddp import _C, errors

    _C.set_error_types(errors.by_name())
    return _C


def cuda_part() -> str:
    """Returns the file of the CUDA part, which lies beside the module; "" if it was not built."""
    part = Path(load().__file__).resolve().parent / "libsmddp_cuda.so"
    return str(part) if part.exists() else ""
