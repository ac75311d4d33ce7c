"""Prints what the build needs to know about Python and about releases of torch, one fact per line.

    python torch_facts.py [FOLDER ...]

Each folder contains `torch`, as a wheel has it; without one it is the torch that Python imports.
torch is not imported, so a wheel that was unpacked without what it requires will do. setup.py
imports this file, so that both report the same errors.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import sysconfig
from pathlib import Path

SUPPORTED_MINORS = range(11, 16)


class UnusableTorchError(RuntimeError):
    """The text is one sentence for the user: what is wrong and what to do."""


def installed_folder() -> Path:
    """Returns the folder that contains the torch that Python would import.

    Raises:
        UnusableTorchError: there is none.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise UnusableTorchError(
            f"{sys.executable} has no torch. smddp is built for the torch it finds: install torch "
            "first, then run `pip install --no-build-isolation .`"
        )
    return Path(found.origin).parent.parent


class Torch:
    """A release of torch in a folder.

    Raises:
        UnusableTorchError: smddp does not support this release, or it is without collectives.
    """

    def __init__(self, folder: Path) -> None:
        self.home = folder / "torch"
        facts = runpy.run_path(str(self.home / "version.py"))
        self.version: str = facts["__version__"]
        self.cuda: str = facts["cuda"] or "none"
        major, minor = (int(part) for part in self.version.split(".")[:2])
        if major != 2 or minor not in SUPPORTED_MINORS:
            first, last = SUPPORTED_MINORS[0], SUPPORTED_MINORS[-1]
            raise UnusableTorchError(
                f"torch {self.version} is not supported: smddp builds against torch 2.{first} to "
                f"2.{last}. Install one of those and build again."
            )
        self.release = f"{major}.{minor}"
        if not (self.home / "include/torch/csrc/distributed/c10d/Backend.hpp").exists():
            raise UnusableTorchError(
                f"torch {self.version} in {folder} has no headers of torch.distributed; install "
                "one that has them."
            )


def print_facts(folders: list[Path]) -> None:
    """Prints the suffix and headers of Python modules; then version, home, CUDA of each torch."""
    print(sysconfig.get_config_var("EXT_SUFFIX"))
    print(sysconfig.get_paths()["include"])
    for folder in folders or [installed_folder()]:
        torch = Torch(folder)
        print(f"{torch.version}|{torch.home}|{torch.cuda}")


if __name__ == "__main__":
    try:
        print_facts([Path(folder) for folder in sys.argv[1:]])
    except (UnusableTorchError, OSError) as error:
        sys.exit(f"smddp: {error}")
