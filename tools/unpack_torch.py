"""Unpacks of releases of torch what smddp is built with: headers, and the libraries it links to.

    python tools/unpack_torch.py FOLDER

These are all releases that smddp supports and that this Python has. One such as 2.15 goes to
FOLDER/2.15/torch, unless it is there. `pip download` gets the wheel for the Python that runs this.
Prints the folders, separated by colons, as SMDDP_TORCH_FOLDERS takes them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cmake"))
from torch_facts import SUPPORTED_MINORS

_NEEDED = re.compile(
    r"torch/(version\.py|include/.*|lib/lib(c10|torch|torch_cpu|torch_python)\.so)"
)


def releases(python: tuple[int, int]) -> list[str]:
    """Returns the releases that smddp supports and that a Python has."""
    # torch 2.15 needs Python 3.11.
    return [f"2.{minor}" for minor in SUPPORTED_MINORS if minor < 15 or python >= (3, 11)]


def unpack(folder: Path, release: str) -> Path:
    """Makes sure that `folder` has the release; returns the folder that contains its `torch`."""
    target = folder / release
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        # Only the folders are for standard output.
        subprocess.run(
            [*pip, "--dest", temporary, f"torch=={release}.*"], check=True, stdout=sys.stderr
        )
        (wheel,) = Path(temporary).glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in filter(_NEEDED.fullmatch, archive.namelist()):
                archive.extract(name, Path(temporary) / "unpacked")
        shutil.move(Path(temporary) / "unpacked", target)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    where = Path(sys.argv[1]).resolve()
    print(":".join(str(unpack(where, release)) for release in releases(sys.version_info[:2])))
