"""The functions of the entry points through which torch registers the backend by itself.

`autoload` runs at the end of every `import torch` (entry points of the group ``torch.backends``),
also in programs that never use smddp. For these nothing may change: it registers a function that
creates groups, imports no more of smddp, and sets no environment variable. It must not raise,
because that would break every `import torch` on the machine. Therefore this module imports the rest
of smddp where errors are caught.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smddp.torch._C import ProcessGroup

__all__ = ["autoload", "register"]


def autoload() -> None:
    """Registers backend "smddp"; warns if that fails. Called by torch at the end of its import."""
    try:
        register()
    except Exception as error:  # torch must stay usable after any error
        text = f"smddp: the backend could not be registered: {error}"
        try:
            warnings.warn(text, stacklevel=2)
        except Warning:  # the user has made warnings errors
            sys.stderr.write(f"{text}\n")


def register() -> None:
    """Registers backend "smddp". Called by torch when the name is first asked for (2.14 on)."""
    from smddp._registration import register_backend

    register_backend(_create_process_group)


def _create_process_group(options: Any, group_options: Any) -> ProcessGroup:
    from smddp.torch.backend import create_process_group

    return create_process_group(options, group_options)
