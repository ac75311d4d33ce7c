"""Builds the wheel: setuptools runs CMake, which builds a module for each release of torch.

These are the releases in the folders that the variable SMDDP_TORCH_FOLDERS lists (separated by
colons; each contains `torch`), or the one installed torch. pyproject.toml has everything that is
static. This file has what depends on the releases: the version tag, the torch requirement and the
extension modules. It also adds the metadata of a second distribution name.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "cmake"))
from torch_facts import Torch, UnusableTorchError, installed_folder  # noqa: E402

FOLDERS = [Path(each) for each in os.environ.get("SMDDP_TORCH_FOLDERS", "").split(":") if each]


class CMakeBuild(build_ext):
    """Builds the libraries of smddp/lib with CMake."""

    def build_extensions(self) -> None:
        """Configures once, builds, and installs the libraries below the package's folder."""
        for tool in ("cmake", "ninja"):
            if shutil.which(tool) is None:
                sys.exit(f"smddp: {tool} is missing; install it and build again.")
        # A development install uses the build folder of `make`, so nothing is compiled twice.
        folder = ROOT / "build" if self.editable_mode else Path(self.build_temp).resolve()
        build = folder / ("wheel" if FOLDERS else f"torch-{TORCHES[0].release}")
        # That of `make` has options of its own.
        if FOLDERS or not (build / "CMakeCache.txt").exists():
            self.configure(build)
        subprocess.run(["cmake", "--build", str(build), "--target", "modules"], check=True)
        install = ["cmake", "--install", str(build), "--component", "module", "--strip"]
        prefix = str(Path(self.build_lib).resolve())
        subprocess.run([*install, "--prefix", prefix], check=True)

    def configure(self, build: Path) -> None:
        """Configures the build folder; arguments in SMDDP_CMAKE_ARGS override the defaults."""
        options = [
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPYTHON_EXECUTABLE={sys.executable}",
            f"-DSMDDP_TORCH_FOLDERS={';'.join(map(str, FOLDERS))}",
            "-DSMDDP_BUILD_TESTS=OFF",
            # A wheel is built file by file, which shows whether each includes what it uses.
            f"-DSMDDP_QUICK_BUILD={'OFF' if FOLDERS else 'ON'}",
            "-DSMDDP_WARNINGS_AS_ERRORS=OFF",
        ]
        if shutil.which("ccache"):
            options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
        options += shlex.split(os.environ.get("SMDDP_CMAKE_ARGS", ""))
        source = ["-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
        subprocess.run(["cmake", *source, *options], check=True)

    def copy_extensions_to_source(self) -> None:
        """Makes the libraries part of the sources, for a development install."""
        target = ROOT / "smddp/lib"
        if target.is_symlink():
            target.unlink()
        shutil.copytree(Path(self.build_lib) / "smddp/lib", target, dirs_exist_ok=True)


# An .egg-info folder, because installers allow only one .dist-info in a wheel.
OLD_NAME_FILE = "smdistributed.egg-info/PKG-INFO"


def metadata_of_old_name(version: str) -> str:
    """Returns the metadata of a distribution `smdistributed`, for programs that ask for it."""
    return (
        f"Metadata-Version: 2.1\nName: smdistributed\nVersion: {version}\n"
        "Summary: The import names smdistributed.*, which smddp provides\n"
    )


class WithOldName(build_py):
    """Adds the metadata of the old name to a wheel."""

    def run(self) -> None:
        """Copies the packages, and writes the metadata beside them."""
        super().run()
        if self.editable_mode:
            return
        file = Path(self.build_lib) / OLD_NAME_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(metadata_of_old_name(self.distribution.get_version()))


class EditableWithOldName(editable_wheel):
    """Adds the same to the wheel of a development install, which copies no packages.

    It also adds the folder of the sources to sys.path. What setuptools installs is asked after all
    of sys.path. There a clone beside a script, which has the same name, counts as a package.
    """

    def run(self) -> None:
        """Makes the wheel, and adds these files to it and to its list of files."""
        super().run()
        # Others may lie there, of earlier builds.
        wheel = max(Path(self.dist_dir).glob("*.whl"), key=lambda path: path.stat().st_mtime)
        added = {
            OLD_NAME_FILE: metadata_of_old_name(self.distribution.get_version()).encode(),
            "smddp_sources.pth": f"{ROOT}\n".encode(),
        }
        lines = ""
        for name, content in added.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            lines += f"{name},sha256={digest.decode()},{len(content)}\n"
        with zipfile.ZipFile(wheel) as made:
            files = {info: made.read(info) for info in made.infolist()}
        # Written anew: a zip file cannot replace its list of files.
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as made:
            for name, content in added.items():
                made.writestr(name, content)
            for info, text in files.items():
                is_list = info.filename.endswith(".dist-info/RECORD")
                made.writestr(info, text + lines.encode() if is_list else text)


# torch needs it for calls on objects, and does not require it. smp and the benchmark need it, too.
NUMPY = "numpy>=1.26"


def describe(torches: list[Torch]) -> tuple[str, list[str]]:
    """Returns the version of the package and what it requires."""
    text = (ROOT / "smddp/_version.py").read_text()
    found = re.search(r'^__version__ = "([0-9.]+)"$', text, re.MULTILINE)
    assert found is not None, "smddp/_version.py names no version"
    if not torches:
        return found[1], [NUMPY, "torch"]
    minors = sorted(int(torch.release.split(".")[1]) for torch in torches)
    if not FOLDERS:
        return f"{found[1]}+torch2.{minors[0]}", [NUMPY, f"torch==2.{minors[0]}.*"]
    span = range(minors[0], minors[-1] + 1)
    gaps = "".join(f",!=2.{minor}.*" for minor in span if minor not in minors)
    return found[1], [NUMPY, f"torch>=2.{span[0]},<2.{span[-1] + 1}{gaps}"]


def find_torches() -> list[Torch]:
    """Returns the releases to build for. A source distribution fits any, so then there are none."""
    if "sdist" in sys.argv:
        return []
    try:
        return [Torch(folder) for folder in FOLDERS or [installed_folder()]]
    except (UnusableTorchError, OSError) as error:
        # What a source distribution needs is asked for by this command.
        if "egg_info" in sys.argv and len(sys.argv) == 2:
            return []
        sys.exit(f"smddp: {error}")


TORCHES = find_torches()
version, requirements = describe(TORCHES)
setup(
    version=version,
    install_requires=requirements,
    ext_modules=[
        Extension(f"smddp.lib._C_torch{torch.release.replace('.', '_')}", sources=[])
        for torch in TORCHES
    ],
    cmdclass={
        "build_ext": CMakeBuild,
        "build_py": WithOldName,
        "editable_wheel": EditableWithOldName,
    },
)
