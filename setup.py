"""Builds the wheel: setuptools runs CMake, which builds smddp._C for the installed torch.

pyproject.toml has everything that is static. This file has what depends on the installed torch: the
version tag, the torch requirement and the extension module. It also adds the metadata of a second
distribution name.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "cmake"))
from torch_facts import UnusableTorchError, installed_release  # noqa: E402


class CMakeBuild(build_ext):
    """Builds the CMake target _C and puts its module where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        """Configures once, builds, and installs the module below the package's folder."""
        for tool in ("cmake", "ninja"):
            if shutil.which(tool) is None:
                sys.exit(f"smddp: {tool} is missing; install it and build again.")
        # A development install uses the build folder of `make`, so nothing is compiled twice.
        folder = ROOT / "build" if self.editable_mode else Path(self.build_temp).resolve()
        build = folder / f"torch-{installed_release()}"
        if not (build / "CMakeCache.txt").exists():
            self.configure(build)
        subprocess.run(["cmake", "--build", str(build), "--target", "_C"], check=True)
        package = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        install = ["cmake", "--install", str(build), "--component", "module", "--strip"]
        subprocess.run([*install, "--prefix", str(package.parent)], check=True)

    def configure(self, build: Path) -> None:
        """Configures the build folder; arguments in SMDDP_CMAKE_ARGS override the defaults."""
        options = [
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPYTHON_EXECUTABLE={sys.executable}",
            "-DSMDDP_BUILD_TESTS=OFF",
            "-DSMDDP_WARNINGS_AS_ERRORS=OFF",
        ]
        if shutil.which("ccache"):
            options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
        options += shlex.split(os.environ.get("SMDDP_CMAKE_ARGS", ""))
        source = ["-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
        subprocess.run(["cmake", *source, *options], check=True)


class WithOldName(build_py):
    """Adds the metadata of a distribution `smdistributed`, for programs that ask for that name."""

    def run(self) -> None:
        """Copies the packages, and writes the metadata beside them."""
        super().run()
        if self.editable_mode:
            return
        # An .egg-info folder, because installers allow only one .dist-info in a wheel.
        folder = Path(self.build_lib) / "smdistributed.egg-info"
        folder.mkdir(parents=True, exist_ok=True)
        version = self.distribution.get_version()
        (folder / "PKG-INFO").write_text(
            f"Metadata-Version: 2.1\nName: smdistributed\nVersion: {version}\n"
            "Summary: The import names smdistributed.*, which smddp provides\n"
        )


def describe() -> tuple[str, list[str]]:
    """Returns the version of the package and what it requires."""
    text = (ROOT / "smddp/_version.py").read_text()
    found = re.search(r'^__version__ = "([0-9.]+)"$', text, re.MULTILINE)
    assert found is not None, "smddp/_version.py names no version"
    # A source distribution fits any torch; a wheel fits exactly one release.
    if "sdist" in sys.argv:
        return found[1], ["torch"]
    try:
        release = installed_release()
    except UnusableTorchError as error:
        sys.exit(f"smddp: {error}")
    return f"{found[1]}+torch{release}", [f"torch=={release}.*"]


version, requirements = describe()
setup(
    version=version,
    install_requires=requirements,
    ext_modules=[Extension("smddp._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": WithOldName},
)
