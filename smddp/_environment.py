"""Sets the variables that torch and scripts read, such as RANK, if the launcher did not."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import zlib

# init_process_group() reads torchrun's names. mpirun and srun set the variables on the right; the
# first one that is set counts.
_FROM_LAUNCHERS = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
# Each of these has the same value on all ranks of a job, and another value in other jobs of the
# host.
_JOB_NAMES = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "TRAINING_JOB_NAME")
_PORTS = range(20000, 28192)  # below the kernel's range of ephemeral ports


def complete_from_launcher() -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where they are absent."""
    for name, sources in _FROM_LAUNCHERS.items():
        value = next((os.environ[s] for s in sources if os.environ.get(s)), None)
        if value is None and name == "LOCAL_WORLD_SIZE" and "SLURM_LOCALID" in os.environ:
            value = _tasks_of_this_node()
        if value is not None:
            os.environ.setdefault(name, value)
    if local := os.environ.get("LOCAL_RANK"):
        os.environ.setdefault("SMDATAPARALLEL_LOCAL_RANK", local)


def complete_environment(rank: int, size: int) -> None:
    """Does the same when a group is created.

    A script that was started by hand has no local rank; its rank in the group is used instead.

    Args:
        rank: this rank in the group.
        size: number of ranks of the group.
    """
    complete_from_launcher()
    if size > 0:
        os.environ.setdefault("SMDATAPARALLEL_LOCAL_RANK", str(rank))


def complete_rendezvous(port: int | None = None) -> bool:
    """Sets MASTER_ADDR and MASTER_PORT where they are absent; mpirun and srun set neither.

    Args:
        port: the port to use if MASTER_PORT is absent; None means a port computed from the job's
            name.

    Returns:
        False if nothing tells the host of rank 0; then nothing is set.
    """
    if "MASTER_ADDR" not in os.environ:
        host = _host_of_rank_0()
        if host is None:
            return False
        os.environ["MASTER_ADDR"] = host
    if "MASTER_PORT" not in os.environ:
        if port is None:
            # A job of one process may take any port; several processes need the same one.
            port = _port_of_job() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0
        os.environ["MASTER_PORT"] = str(port)
    return True


def _host_of_rank_0() -> str | None:
    size = os.environ.get("WORLD_SIZE", "1")
    if size in ("1", os.environ.get("LOCAL_WORLD_SIZE")):
        return "127.0.0.1"
    if server := os.environ.get("SMDATAPARALLEL_SERVER_ADDR"):
        return server
    if os.environ.get("SM_HOSTS"):
        hosts = json.loads(os.environ["SM_HOSTS"])
        if hosts:
            return str(hosts[0])
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if "SLURM_PROCID" in os.environ and os.environ.get(name):
            return _first_node(os.environ[name])
    # Some launchers run `python -m mpi4py script.py`. Then MPI is loaded and can tell.
    if "mpi4py.MPI" in sys.modules:
        world = sys.modules["mpi4py.MPI"].COMM_WORLD
        return str(world.bcast(socket.gethostname() if world.rank == 0 else None))
    return None


def _first_node(nodes: str) -> str:
    """Returns the first host of a list in Slurm's notation, such as "node[03-05,9],other"."""
    found = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,]*)", nodes)
    if found is None:
        return nodes
    prefix, numbers, suffix = found.groups()
    return prefix + (re.split("[-,]", numbers)[0] if numbers else "") + suffix


def _tasks_of_this_node() -> str | None:
    """Returns how many tasks of the job step this node has, from a list such as "4(x2),3"."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE")
    if not text:
        return os.environ.get("SLURM_NTASKS_PER_NODE")
    counts: list[str] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [tasks] * int(times or 1)
    node = int(os.environ.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else None


def _port_of_job() -> int:
    name = next((os.environ[n] for n in _JOB_NAMES if os.environ.get(n)), "")
    return _PORTS[zlib.crc32(name.encode()) % len(_PORTS)]
