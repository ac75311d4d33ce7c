"""The wheels for all Pythons, which `cibuildwheel` builds in containers that tests do not have."""

from __future__ import annotations

import fnmatch
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_each_wheel_has_the_releases_of_torch_that_its_python_has() -> None:
    import tomllib

    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    releases = runpy.run_path(str(ROOT / "tools/unpack_torch.py"))["releases"]
    assert config["build"][0] == "cp310-*"
    for pattern in config["build"]:
        minor = int(pattern.removeprefix("cp3").removesuffix("-*"))
        identifier = f"cp3{minor}-manylinux_x86_64"
        environment = dict(config["environment"])
        for override in config.get("overrides", []):
            if fnmatch.fnmatch(identifier, override["select"]):
                environment |= override["environment"]
        folders = [f"/project/build/wheel-torch/{each}" for each in releases((3, minor))]
        assert environment["SMDDP_TORCH_FOLDERS"].split(":") == folders
        assert f"={folders[0]}/torch/include" in environment["SMDDP_CMAKE_ARGS"]
