"""What the entry points name: cheap, and never in the way of `import torch`.

`autoload` runs at the end of every `import torch` (group ``torch.backends``), so it only registers
a creator; the compiled module is loaded when a group is created. It must not raise: that would
break every `import torch` on the machine. Hence a module beside the package: to import the package
raises where torch is another one than it was built for.
"""

from __future__ import annotations

import warnings


def autoload() -> None:
    """Makes the backend name "smddp" known. Called by torch at the end of its import."""
    try:
        register()
    except Exception as error:  # whatever it is, torch itself must stay usable
        warnings.warn(f"smddp: the backend could not be registered: {error}", stacklevel=2)


def register() -> None:
    """Registers backend "smddp". Called by torch when the name is first asked for (2.14 on)."""
    from smddp.backend import register_backend

    register_backend()
