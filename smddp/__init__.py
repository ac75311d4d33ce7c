"""smddp: collective communication for PyTorch, as the c10d backend "smddp".

Where smddp is installed, `import torch` registers the backend, and no import is needed::

    torch.distributed.init_process_group(backend="smddp")

Importing this package loads neither torch nor anything compiled, sets no environment variable and
does not raise: the names below are found when they are first used. That raises an ImportError where
smddp was not built for the installed torch. Only where torch does not find the backend by itself
(TORCH_DEVICE_BACKEND_AUTOLOAD=0, or a clone that is not installed) does the import register it, and
load torch for that.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smddp._version import __version__
    from smddp.torch.functions import (
        AbortedError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        GroupOptions,
        InternalError,
        PeerLostError,
        ResourceError,
        TransportError,
        describe,
        empty,
        statistics,
    )

__all__ = [
    "AbortedError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "GroupOptions",
    "InternalError",
    "PeerLostError",
    "ResourceError",
    "TransportError",
    "__version__",
    "describe",
    "empty",
    "statistics",
]


def __getattr__(name: str) -> Any:
    """Finds a name at its first use; all but the version need torch."""
    from importlib import import_module

    if name in ("elastic", "errors"):
        return import_module(f"smddp.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'smddp' has no attribute {name!r}")
    module = import_module("smddp._version" if name == "__version__" else "smddp.torch.functions")
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _torch_loads_backends() -> bool:
    return os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"


def _is_installed() -> bool:
    """Returns whether torch finds the entry points; not in a clone that is only on sys.path."""
    if not os.path.exists(os.path.join(os.path.dirname(os.path.dirname(__file__)), "setup.py")):
        return True
    # A development install has them elsewhere. importlib.metadata would take 30 ms to load.
    for folder in filter(os.path.isdir, sys.path):
        for name in os.listdir(folder):
            if name.startswith("smddp-") and name.endswith(".dist-info"):
                file = os.path.join(folder, name, "entry_points.txt")
                if not os.path.exists(file):
                    return False
                with open(file) as lines:
                    return "[torch.backends]" in lines.read()
    return False


def _register() -> None:
    """Registers the backend where torch does not."""
    if "torch" not in sys.modules:
        if _is_installed():
            if _torch_loads_backends():
                return
            from smddp._registration import can_wait

            if can_wait():
                return
        else:
            from importlib.util import find_spec

            if find_spec("torch") is None:
                return
    from smddp._autoload import register

    register()


try:
    _register()
except Exception as _error:  # `import torch` imports this package
    if not _torch_loads_backends():  # else torch calls what says so
        sys.stderr.write(f"smddp: the backend could not be registered: {_error}\n")
