"""The functions of the entry points through which torch registers the backend by itself.

`autoload` runs at the end of every `import torch` (entry points of the group ``torch.backends``).
It must be quick: it registers a function that creates groups, and does not load the compiled
module. It must not raise, because that would break every `import torch` on the machine. Therefore
this module is not part of the package smddp, whose import raises if it was built for another torch.
"""

from __future__ import annotations

import warnings


def autoload() -> None:
    """Registers backend "smddp"; warns if that fails. Called by torch at the end of its import."""
    try:
        register()
    except Exception as error:  # torch must stay usable after any error
        warnings.warn(f"smddp: the backend could not be registered: {error}", stacklevel=2)


def register() -> None:
    """Registers backend "smddp". Called by torch when the name is first asked for (2.14 on)."""
    from smddp.backend import register_backend

    register_backend()
