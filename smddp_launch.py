"""Ranks that mpirun or srun start: the variables that torch reads, and the command smddprun.

    mpirun -n 8 smddprun python train.py

`smddprun` sets the variables that `torch.distributed` reads from those that mpirun or srun set.
Then it replaces itself by the command that follows on its command line. `smddpmprun` is the same
program. Both accept and ignore -i and --allow-bypass, options of SageMaker's launcher about the
instance type.

This module is not part of the package smddp, whose import takes as long as that of torch: the
command runs on every rank, before the script imports torch.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Sequence
from typing import NoReturn

__all__ = [
    "UNKNOWN_HOST",
    "command_of",
    "complete_environment",
    "complete_from_launcher",
    "complete_rendezvous",
    "is_bare_rank",
    "main",
    "prepare_rendezvous",
]

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

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
UNKNOWN_HOST = (
    "the job has several hosts, and nothing says where rank 0 is: "
    "set MASTER_ADDR, for instance by mpirun -x MASTER_ADDR=host"
)

_WITH_VALUE = ("-i", "--instance-type")
_FLAGS = ("--allow-bypass",)


def is_bare_rank() -> bool:
    """Returns whether mpirun or srun started this process, and it lacks variables of torch."""
    return any(name in os.environ for name in _FROM_LAUNCHERS["RANK"]) and not all(
        name in os.environ for name in _RENDEZVOUS
    )


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


def prepare_rendezvous(rank: int = -1, size: int = -1) -> None:
    """Sets what `init_process_group` is about to read from the environment.

    Args:
        rank: what the script passes to `init_process_group`; -1 if it leaves that to the
            environment.
        size: the same for world_size.

    Raises:
        ValueError: the job has several hosts, and nothing tells that of rank 0.
    """
    complete_from_launcher()
    found = [int(os.environ.get(name, "-1")) for name in ("RANK", "WORLD_SIZE")]
    # Otherwise the script divides the launcher's ranks into jobs of its own: only it knows where
    # they meet.
    of_the_launcher = -1 not in found and rank in (-1, found[0]) and size in (-1, found[1])
    if of_the_launcher and not complete_rendezvous():
        raise ValueError(f"smddp: {UNKNOWN_HOST}")


def _host_of_rank_0() -> str | None:
    size = os.environ.get("WORLD_SIZE", "1")
    if size in ("1", os.environ.get("LOCAL_WORLD_SIZE")):
        return "127.0.0.1"
    if server := os.environ.get("SMDATAPARALLEL_SERVER_ADDR"):
        return server
    if os.environ.get("SM_HOSTS"):
        import json

        hosts = json.loads(os.environ["SM_HOSTS"])
        if hosts:
            return str(hosts[0])
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if "SLURM_PROCID" in os.environ and os.environ.get(name):
            return _first_node(os.environ[name])
    # Some launchers run `python -m mpi4py script.py`. Then MPI is loaded and can tell.
    if "mpi4py.MPI" in sys.modules:
        import socket

        world = sys.modules["mpi4py.MPI"].COMM_WORLD
        return str(world.bcast(socket.gethostname() if world.rank == 0 else None))
    return None


def _first_node(nodes: str) -> str:
    """Returns the first host of a list in Slurm's notation, such as "node[03-05,9],other"."""
    import re

    found = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,]*)", nodes)
    if found is None:
        return nodes
    prefix, numbers, suffix = found.groups()
    return prefix + (re.split("[-,]", numbers)[0] if numbers else "") + suffix


def _tasks_of_this_node() -> str | None:
    """Returns how many tasks of the job step this node has, from a list such as "4(x2),3"."""
    import re

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


def command_of(arguments: Sequence[str]) -> list[str]:
    """Returns the command line without the launcher's own options, which come first."""
    rest = list(arguments)
    while rest and (rest[0] in _WITH_VALUE or rest[0] in _FLAGS):
        del rest[: 2 if rest[0] in _WITH_VALUE else 1]
    return rest


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Sets the environment, then replaces this process by the command.

    Raises:
        SystemExit: there is no command, or it cannot be run, or the ranks cannot be known.
    """
    command = command_of(sys.argv[1:] if arguments is None else arguments)
    if not command:
        raise SystemExit("smddprun: name the command to run: mpirun -n 8 smddprun python train.py")
    complete_from_launcher()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise SystemExit(
            "smddprun: this process has no rank: start it by mpirun or srun, or use torchrun"
        )
    if not complete_rendezvous():
        raise SystemExit(f"smddprun: {UNKNOWN_HOST}")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise SystemExit(f"smddprun: {command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main()
