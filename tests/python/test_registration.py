"""Imports in new interpreters: with and without torch's autoload, and with another torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from ranks import ROOT


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    # The tests must not depend on an installed package with entry points.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT)}
    for name in ("LOCAL_RANK", "SMDATAPARALLEL_LOCAL_RANK", "DDP_DISABLE_COMM_MEM"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env={**environment, **env},
        cwd="/",  # the current folder, which Python searches before PYTHONPATH
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def succeed(script: str, **env: str) -> None:
    ended = run(script, **env)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


def test_import_by_the_original_name_registers_the_backend() -> None:
    succeed(
        """
        import os
        import torch.distributed as dist

        import smdistributed.dataparallel.torch.torch_smddp
        import smdistributed.dataparallel.torch.torch_smddp as again
        import smddp
        from smddp_autoload import autoload, register

        autoload()
        register()  # any number of times
        assert dist.Backend.SMDDP == "smddp"
        assert dist.is_backend_available("smddp")
        assert os.environ["SMDATAPARALLEL_LOCAL_RANK"] == "3"
        assert os.environ["DDP_DISABLE_COMM_MEM"] == "0"

        from smdistributed.dataparallel import exceptions

        for name in exceptions.__all__:
            assert name.startswith("SMDDP"), name
            error = getattr(exceptions, name)
            assert issubclass(error, dist.DistBackendError), name
            assert error is getattr(smddp, name.removeprefix("SMDDP")), name
        """,
        LOCAL_RANK="3",
    )


def test_import_smddp_is_enough_for_a_job_of_one() -> None:
    succeed(
        """
        import os
        import tempfile

        import torch
        import torch.distributed as dist

        import smddp

        # Importing starts no thread and loads nothing compiled: fork is still safe.
        assert len(os.listdir("/proc/self/task")) == 1
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(
                "smddp", init_method=f"file://{folder}/store", rank=0, world_size=1
            )
            assert dist.get_backend() == "smddp"
            assert os.environ["SMDATAPARALLEL_LOCAL_RANK"] == "0"
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.sum() == 3
            dist.destroy_process_group()
        """,
        OMP_NUM_THREADS="1",
    )


def test_settings_of_the_user_stay() -> None:
    succeed(
        """
        import os

        import smddp

        assert os.environ["DDP_DISABLE_COMM_MEM"] == "1"
        assert os.environ["SMDATAPARALLEL_LOCAL_RANK"] == "5"
        """,
        DDP_DISABLE_COMM_MEM="1",
        SMDATAPARALLEL_LOCAL_RANK="5",
        LOCAL_RANK="3",
    )


def test_another_torch_is_refused_in_one_sentence() -> None:
    ended = run(
        """
        import torch

        torch.__version__ = "9.8.7+cpu"
        import smddp
        """
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: smddp was built for torch ")
    assert "cannot be used with torch 9.8: install the wheel for torch 9.8, or build it" in last


def test_autoload_never_breaks_import_torch() -> None:
    ended = run(
        """
        import warnings

        import torch
        import smddp.backend
        import smddp_autoload

        def broken():
            raise RuntimeError("no such thing")

        smddp.backend.register_backend = broken
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            smddp_autoload.autoload()
        assert "could not be registered: no such thing" in str(caught[0].message)
        """
    )
    assert ended.returncode == 0, ended.stderr


def _installed(folder: Path, built_for: str | None) -> str:
    """Makes a folder look as if smddp were installed there; returns a value for PYTHONPATH."""
    package = folder / "smddp"
    package.mkdir()
    for file in (ROOT / "smddp").iterdir():
        if file.name != "_build.py":
            (package / file.name).symlink_to(file)
    if built_for is not None:
        (package / "_build.py").write_text(f'TORCH_VERSION = "{built_for}"\n')
    (folder / "smddp_autoload.py").symlink_to(ROOT / "smddp_autoload.py")
    # Python uses the first folder of its search path that has a distribution of this name.
    metadata = folder / "smddp-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: smddp\nVersion: 0.1\n")
    lines = []
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if group := re.fullmatch(r'\[project\.entry-points\."(.+)"\]', line):
            lines.append(f"[{group[1]}]")
        elif line.startswith("smddp = ") and lines:
            lines.append(line.replace('"', ""))
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return str(folder)


@pytest.mark.parametrize(
    ("built_for", "text"),
    [("1.0.0", "smddp was built for torch 1.0 and"), (None, "has no compiled part, as in sources")],
)
def test_import_torch_survives_an_smddp_that_does_not_fit(
    built_for: str | None, text: str, tmp_path: Path
) -> None:
    script = f"""
        import sys, warnings

        # A development install would complete what is missing.
        sys.meta_path[:] = [each for each in sys.meta_path if "Editable" not in repr(each)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import torch
        (said,) = [str(each.message) for each in caught if "smddp" in str(each.message)]
        assert said.startswith("smddp: the backend could not be registered: ")
        assert {text!r} in said, said
        try:
            import smddp
        except ImportError as error:
            assert {text!r} in str(error)
        else:
            raise AssertionError("the import succeeded")
    """
    succeed(script, TORCH_DEVICE_BACKEND_AUTOLOAD="1", PYTHONPATH=_installed(tmp_path, built_for))


def test_import_torch_makes_the_backend_known(tmp_path: Path) -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    path = _installed(tmp_path, release)
    script = """
        import torch.distributed as dist

        assert dist.Backend.SMDDP == "smddp"
    """
    succeed(script, TORCH_DEVICE_BACKEND_AUTOLOAD="1", PYTHONPATH=path)


def test_a_single_node_never_loads_libfabric() -> None:
    succeed(
        """
        import smddp, torch
        import torch.distributed as dist

        dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        with open("/proc/self/maps") as maps:
            text = maps.read()
        assert "_C." in text  # the compiled module is there, what it may need later is not
        assert "libfabric" not in text
        dist.destroy_process_group()
        """
    )


def test_a_libfabric_that_cannot_be_loaded_is_named(tmp_path) -> None:
    (tmp_path / "libfabric.so.1").write_text("no library")
    succeed(
        """
        import smddp
        from smddp import _load

        info = _load.load().build_info()
        if "built without libfabric" not in info["fabric_reason"]:
            assert not info["fabric"]
            assert "libfabric cannot be loaded, and ranks on several nodes need it: " in (
                info["fabric_reason"]
            )
            assert "libfabric.so.1" in info["fabric_reason"]
        """,
        LD_LIBRARY_PATH=str(tmp_path),
    )
