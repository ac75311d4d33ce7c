"""Programs that import torch where smddp is installed, and do not use it, notice nothing.

Each one runs twice: with an installed smddp, and without.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import environment, install, run, run_together, succeed
from ranks import ROOT

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
LAUNCHERS = {
    "by hand": {},
    "torchrun": {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    },
    "mpirun of Open MPI": MPIRUN,
    "mpirun of MPICH": {
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
    },
    "srun": {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "n1",
    },
}

_LOOK = """
import json, os, sys
environ = dict(os.environ)
import torch
import torch.distributed as dist

with open("/proc/self/maps") as maps:
    libraries = {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}
files = []
for number in os.listdir("/proc/self/fd"):
    try:
        files.append(os.readlink(f"/proc/self/fd/{number}"))
    except FileNotFoundError:
        pass  # that of the folder itself
print(json.dumps({
    "environment": [dict(os.environ) == environ, os.environb == {
        os.fsencode(name): os.fsencode(value) for name, value in environ.items()
    }],
    "threads": len(os.listdir("/proc/self/task")),
    # Pipes have numbers of their own in each process.
    "files": sorted(file.split(":")[0] for file in files),
    "libraries": sorted(libraries),
    "modules": sorted(sys.modules),
    "finders": [repr(type(each)) for each in sys.meta_path],
    "defaults": dist.Backend.default_device_backend_map,
}))
"""


def _seen(folder: str, variables: dict[str, str]) -> dict[str, object]:
    variables = {**variables, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "PYTHONPATH": folder}
    seen: dict[str, object] = json.loads(succeed(_LOOK, **variables))
    return seen


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return install(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return _seen(install(tmp_path_factory.mktemp("absent"), entry_points=False), {})


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.costly
def test_import_torch_changes_nothing(
    launcher: str, installed: str, without: dict[str, object]
) -> None:
    seen = _seen(installed, LAUNCHERS[launcher])
    assert seen["environment"] == [True, True]
    new = set(seen.pop("modules")) - set(without["modules"])  # type: ignore[call-overload]
    assert new == {
        *("smddp", "smddp._autoload", "smddp._registration"),
        *("smddp.launch", "smddp.launch.environment", "smddp.launch.slurm"),
    }
    assert seen == {name: value for name, value in without.items() if name != "modules"}


@pytest.mark.costly
def test_other_backends_under_mpirun_get_the_error_of_torch(installed: str) -> None:
    """Programs try it, and go on as one process if it fails."""
    succeed(
        """
        import inspect, os, pickle
        import torch.distributed as dist

        before = dict(os.environ)
        for arguments, options, error, text in (
            (["gloo"], {}, ValueError, "environment variable RANK expected, but not set"),
            (["cpu:gloo"], {}, ValueError, "environment variable RANK expected, but not set"),
            ([], {}, ValueError, "environment variable RANK expected, but not set"),
            ([], {"backend": "smddp", "colour": "red"}, TypeError, "colour"),
        ):
            try:
                dist.init_process_group(*arguments, **options)
            except error as caught:
                assert text in str(caught)
            else:
                raise AssertionError(f"{arguments} {options}")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        assert os.environ == before

        function = dist.init_process_group
        assert function is dist.distributed_c10d.init_process_group
        assert pickle.loads(pickle.dumps(function)) is function
        assert next(iter(inspect.signature(function).parameters)) == "backend"
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
        PYTHONPATH=installed,
        **MPIRUN,
    )


@pytest.mark.costly
def test_jobs_inside_a_job_meet_where_their_script_says(installed: str) -> None:
    """A script may start processes itself in each rank of mpirun, and number them anew."""
    ended = run(
        """
        import os
        import torch.distributed as dist

        try:
            dist.init_process_group("smddp", rank=0, world_size=5)
        except ValueError as error:
            assert "environment variable MASTER_ADDR expected, but not set" in str(error)
        else:
            raise AssertionError("it succeeded")
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
        PYTHONPATH=installed,
        **MPIRUN,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.costly
def test_several_hosts_that_nobody_names(installed: str) -> None:
    succeed(
        """
        import torch.distributed as dist

        try:
            dist.init_process_group("cpu:smddp,cuda:gloo")
        except ValueError as error:
            assert "set MASTER_ADDR, for instance by mpirun -x" in str(error)
        else:
            raise AssertionError("it succeeded")
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
        PYTHONPATH=installed,
        **{**MPIRUN, "OMPI_COMM_WORLD_SIZE": "4"},
    )


_TRAIN = """
import os
import torch
import torch.distributed as dist

assert "RANK" not in os.environ
{begin}
ones = torch.ones(3)
dist.all_reduce(ones)
print(os.environ["LOCAL_RANK"], os.environ["SMDATAPARALLEL_LOCAL_RANK"], ones.tolist())
dist.destroy_process_group()
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("begin", "instead_of"),
    [
        ("dist.init_process_group('smddp')", ""),
        ("dist.init_process_group('cpu:smddp,cuda:gloo')", ""),
        ("dist.init_device_mesh('cpu', (2,))", "gloo"),
    ],
)
@pytest.mark.costly
def test_a_bare_mpirun(begin: str, instead_of: str, installed: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_TRAIN.format(begin=begin))
    environments = [
        environment(
            **{
                **MPIRUN,
                "OMPI_COMM_WORLD_RANK": rank,
                "OMPI_COMM_WORLD_LOCAL_RANK": rank,
                "PMIX_NAMESPACE": str(tmp_path),
                "SMDDP_INSTEAD_OF": instead_of,
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
                "PYTHONPATH": installed,
                "OMP_NUM_THREADS": "1",
            }
        )
        for rank in "01"
    ]
    done = run_together([str(script)], environments)
    assert [job.returncode for job in done] == [0, 0], done
    assert [job.stdout for job in done] == ["0 0 [2.0, 2.0, 2.0]\n", "1 1 [2.0, 2.0, 2.0]\n"]


def test_smddprun_does_not_import_torch(tmp_path: Path) -> None:
    """It runs on every rank before the script does, and torch takes more than a second."""
    scripts = re.findall(r'^(smddp\w*run) = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert scripts == [
        ("smddprun", "smddp.launch.cli:main"),
        ("smddpmprun", "smddp.launch.cli:main"),
    ]
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "smddp.launch", "env"],
        env=environment(**MPIRUN, TORCH_DEVICE_BACKEND_AUTOLOAD="1"),
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    imported = {line.split("|")[-1].strip() for line in ended.stderr.splitlines()}
    assert "zlib" in imported
    assert not {name for name in imported if re.match(r"torch\b|numpy\b|smddp\.torch\b", name)}
    found = dict(line.split("=", 1) for line in ended.stdout.splitlines() if "=" in line)
    assert found["RANK"] == found["LOCAL_RANK"] == "1"
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert os.environ.get("RANK") is None
