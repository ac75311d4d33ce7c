"""The commands of docs/launching.md for Slurm, on two nodes that are both this machine.

Each node is a slurmd of its own. Their names lead to 127.0.0.1 by an /etc/hosts of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hosts as namespaces
import pytest
from ranks import ROOT

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PAGE = ROOT / "docs/launching.md"
# Slurm kills each child of slurmd that it does not know, and does not need munge on one machine.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=slurm0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=32 State=UNKNOWN
NodeName=slurm1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=32 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SCRIPT = """
import os, sys, torch, torch.distributed as dist
early = os.environ.get("MASTER_ADDR")
dist.init_process_group("smddp")
if sys.argv[1:] == ["fail"] and dist.get_rank() == 2:
    os._exit(3)
ones = torch.ones(1000)
dist.all_reduce(ones)
names = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_NODEID")]
said = f"{dist.get_rank()} of {dist.get_world_size()} {names} {ones.sum().item():g} {early}"
sys.stdout.write(said + "\\n")
dist.destroy_process_group()
"""


def missing() -> str | None:
    """Returns why no cluster can be started here; None if one can."""
    for program in ("slurmctld", "slurmd", "srun", "sbatch"):
        if shutil.which(program) is None:
            return f"there is no {program} (Debian: slurmctld, slurmd, slurm-client)"
    return namespaces.unavailable()


class Cluster:
    """Slurm on two nodes; jobs run in `folder`, which has train.py."""

    def __init__(self, folder: Path, keeper: int) -> None:
        self.folder = folder
        self._keeper = keeper
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "MASTER_ADDR"},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def command(self, *arguments: str) -> list[str]:
        """Returns a command line that runs another one where the names of the nodes are known."""
        inside = ["nsenter", "-t", str(self._keeper), "-m", "--", "env", "-C", str(self.folder)]
        return [*inside, *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in `folder`, and returns what it has written."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path
    (folder / "state").mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "hosts").write_text("127.0.0.1 localhost slurm0 slurm1\n")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(3)]
        ports = [each.getsockname()[1] for each in sockets]
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, ports=ports, folder=folder)
    (folder / "slurm.conf").write_text(text)
    mount = f"mount --bind {folder}/hosts /etc/hosts && echo ready && exec sleep 600"
    keeper = subprocess.Popen(["unshare", "-m", "sh", "-c", mount], stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    keeper.stdout.readline()
    found = Cluster(folder, keeper.pid)
    daemons = []
    try:
        for line in ("slurmctld -D", "slurmd -D -N slurm0", "slurmd -D -N slurm1"):
            with (folder / "daemons.log").open("ab") as log:
                command = found.command(*line.split())
                daemons.append(
                    subprocess.Popen(
                        command, env=found.environment, stdout=log, stderr=log, process_group=0
                    )
                )
        deadline = time.monotonic() + 60
        while "idle 2" not in found.run("sinfo", "-h", "-t", "idle", "-o", "%T %D").stdout:
            assert time.monotonic() < deadline, (folder / "daemons.log").read_text()
            time.sleep(0.2)
        yield found
    finally:
        for daemon in reversed(daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()
        keeper.kill()
        keeper.communicate()


def scripts_of_page() -> list[str]:
    """Returns the batch scripts of the page."""
    return re.findall(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", PAGE.read_text(), re.DOTALL)


def check(text: str, nodes: list[int], early: bool) -> None:
    """Checks what the script has written on each rank.

    Args:
        text: what all of them have written.
        nodes: how many ranks each node has.
        early: had MASTER_ADDR a value before the script began?
    """
    found = sorted(line for line in text.splitlines() if " of " in line)
    size = sum(nodes)
    expected = [
        f"{sum(nodes[:node]) + local} of {size} {[str(local), str(count), str(node)]} "
        f"{1000 * size} {'slurm0' if early else None}"
        for node, count in enumerate(nodes)
        for local in range(count)
    ]
    assert found == expected, text


def test_smddprun_under_srun(cluster: Cluster) -> None:
    """One node has more ranks than the other."""
    done = cluster.run("srun", "-N2", "-n3", "smddprun", "python", "train.py")
    assert done.returncode == 0, done.stderr
    check(done.stdout, [2, 1], early=True)


@pytest.mark.parametrize("number", range(2))
def test_batch_scripts_of_the_page(cluster: Cluster, number: int) -> None:
    """srun starts every rank, or one torchrun for each host."""
    script = cluster.folder / "job.sh"
    script.write_text(scripts_of_page()[number])
    done = cluster.run("sbatch", "--wait", "-o", f"{number}.out", "job.sh")
    text = (cluster.folder / f"{number}.out").read_text()
    assert done.returncode == 0, done.stderr + text
    check(text, [4, 4], early=number == 1)


def test_a_rank_that_fails(cluster: Cluster) -> None:
    """The others name it, and so does srun."""
    done = cluster.run("srun", "-N2", "-n4", "python", "train.py", "fail")
    assert done.returncode != 0, done.stderr
    assert "task 2: Exited with exit code 3" in done.stderr, done.stderr
    assert re.search(r"rank 2 .* (is gone|has ended|died)", done.stderr), done.stderr
