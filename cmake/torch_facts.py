"""Prints what the build needs to know about the installed torch, one fact per line.

setup.py imports this file, too, so that both report the same facts and the same errors.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig

SUPPORTED_MINORS = range(11, 16)


class UnusableTorchError(RuntimeError):
    """The text is one sentence for the user: what is wrong and what to do."""


def installed_release() -> str:
    """Returns the release of the installed torch, such as "2.15", without importing it."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise UnusableTorchError(
            f"{sys.executable} has no torch. smddp is built for the torch it finds: install torch "
            "first, then run `pip install --no-build-isolation .`"
        ) from None
    major, minor = (int(part) for part in version.split(".")[:2])
    if major != 2 or minor not in SUPPORTED_MINORS:
        first, last = SUPPORTED_MINORS[0], SUPPORTED_MINORS[-1]
        raise UnusableTorchError(
            f"torch {version} is not supported: smddp builds against torch 2.{first} to 2.{last}. "
            "Install one of those and build again."
        )
    return f"{major}.{minor}"


def print_facts() -> None:
    """Prints version, module suffix, include folders, library folders and CUDA version of torch."""
    installed_release()
    # An smddp of earlier sources may be installed, which cannot be loaded until this build is done.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch
    from torch.utils import cpp_extension

    if not torch.distributed.is_available():
        raise UnusableTorchError(
            f"torch {torch.__version__} of {sys.executable} was built without torch.distributed; "
            "install one that has it."
        )
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    print(torch.__version__)
    print(sysconfig.get_config_var("EXT_SUFFIX"))
    print("|".join(dict.fromkeys(includes)))
    print("|".join(cpp_extension.library_paths()))
    print(torch.version.cuda or "none")


if __name__ == "__main__":
    try:
        print_facts()
    except (UnusableTorchError, ImportError) as error:
        sys.exit(f"smddp: {error}")
