"""Where the ranks of mpirun and srun meet: MASTER_ADDR and MASTER_PORT, which neither sets."""

from __future__ import annotations

import contextlib
import os
import sys
import zlib

from smddp.launch.environment import complete_from_launcher, first_of
from smddp.launch.slurm import first_node, tasks_without_step

__all__ = [
    "UNKNOWN_HOST",
    "complete_rendezvous",
    "prepare_rendezvous",
]

# Each of these has the same value on all ranks of a job, and another value in other jobs of the
# host. MPICH's mpiexec may run in a job of Slurm, so the names of what has started the ranks come
# first.
_STEP_NAMES = ("PMIX_NAMESPACE", "PMI_JOBID")
_JOB_NAMES = ("SLURM_JOB_ID", "TRAINING_JOB_NAME")
_PORTS = range(20000, 28192)  # below the kernel's range of ephemeral ports
UNKNOWN_HOST = (
    "the job has several hosts, and nothing says where rank 0 is: "
    "set MASTER_ADDR, for instance by mpirun -x MASTER_ADDR=host (MPICH: -genv MASTER_ADDR host)"
)


def complete_rendezvous(port: int | None = None) -> bool:
    """Sets MASTER_ADDR and MASTER_PORT where they are absent; mpirun and srun set neither.

    Args:
        port: the port to use if MASTER_PORT is absent; None means a port computed from the job's
            name.

    Returns:
        False if nothing tells the host of rank 0; then nothing is set.

    Raises:
        ValueError: a variable of the launcher is wrong.
    """
    if "MASTER_ADDR" not in os.environ:
        host = _host_of_rank_0()
        if host is None:
            return False
        os.environ["MASTER_ADDR"] = host
    if "MASTER_PORT" not in os.environ:
        if port is None:
            # A job of one process may take any port; several processes need the same one.
            port = _port_of_job() if _number("WORLD_SIZE", 1) > 1 else 0
        os.environ["MASTER_PORT"] = str(port)
    return True


def prepare_rendezvous(rank: int = -1, size: int = -1) -> None:
    """Sets what `init_process_group` is about to read from the environment.

    Args:
        rank: what the script passes to `init_process_group`; -1 if it leaves that to the
            environment.
        size: the same for world_size.

    Raises:
        ValueError: the job has several hosts, and nothing tells that of rank 0, or wrongly; or
            this process is no rank.
    """
    complete_from_launcher()
    tasks = tasks_without_step()
    if tasks > 1 and rank == -1 and "RANK" not in os.environ:
        raise ValueError(
            f"smddp: this process is the script of a job of Slurm with {tasks} tasks, and none of "
            "these: let srun start them, as in srun python train.py"
        )
    found = [_number(name, -1) for name in ("RANK", "WORLD_SIZE")]
    # Otherwise the script divides the launcher's ranks into jobs of its own: only it knows where
    # they meet.
    of_the_launcher = -1 not in found and rank in (-1, found[0]) and size in (-1, found[1])
    if of_the_launcher and not complete_rendezvous():
        raise ValueError(f"smddp: {UNKNOWN_HOST}")


def _number(name: str, default: int) -> int:
    """Returns the number in a variable.

    Raises:
        ValueError: it is none.
    """
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text}: expects a number") from None


def _host_of_rank_0() -> str | None:
    size = os.environ.get("WORLD_SIZE", "1")
    if size in ("1", os.environ.get("LOCAL_WORLD_SIZE")):
        return "127.0.0.1"
    if server := os.environ.get("SMDATAPARALLEL_SERVER_ADDR"):
        return server
    if os.environ.get("SM_HOSTS"):
        import json

        try:
            hosts = json.loads(os.environ["SM_HOSTS"])
        except ValueError:
            hosts = None
        if not isinstance(hosts, list):
            raise ValueError(
                f"SM_HOSTS={os.environ['SM_HOSTS']}: expects a list of hosts as JSON, such as "
                '["algo-1", "algo-2"]'
            )
        if hosts:
            return str(hosts[0])
    names = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    for name in names if is_of_openmpi() else ("SLURM_STEP_NODELIST", *names):
        if "SLURM_PROCID" in os.environ and os.environ.get(name):
            return first_node(os.environ[name])
    # Some launchers run `python -m mpi4py script.py`. Then MPI can tell. It is not loaded if the
    # script does not use it itself.
    if "mpi4py.MPI" in sys.modules or "mpi4py.run" in sys.modules:
        return _ask_mpi()
    return None


def _ask_mpi() -> str | None:
    """Returns the name of the host of rank 0, if MPI can be loaded. All ranks must call it."""
    import importlib
    import socket

    try:
        world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    except (ImportError, RuntimeError):  # there is no libmpi
        return None
    return str(world.bcast(socket.gethostname() if world.rank == 0 else None))


def is_of_openmpi() -> bool:
    """Returns whether Open MPI's mpirun started this rank.

    In a job of Slurm it starts its daemons by srun, but only on the other nodes: ranks of the first
    node have no step, or another one.
    """
    return "OMPI_COMM_WORLD_RANK" in os.environ


def _port_of_job() -> int:
    """Returns the port where the ranks meet: the same for all, and hardly that of another job."""
    name = first_of(_STEP_NAMES) or _job_of_hydra() or first_of(_JOB_NAMES)
    if name == os.environ.get("SLURM_JOB_ID") and not is_of_openmpi():
        # Steps of one job may run at the same time.
        name += "." + os.environ.get("SLURM_STEP_ID", "")
    return _PORTS[zlib.crc32(name.encode()) % len(_PORTS)]


def _job_of_hydra() -> str:
    """Returns what MPICH's mpiexec calls this job; "" if it has not started this rank.

    No variable tells. On each host a rank is below a proxy, whose arguments have the place where
    this mpiexec listens, and the number of the group of ranks.
    """
    if "PMI_RANK" not in os.environ:
        return ""
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):  # /proc may be hidden
        while pid > 1:
            with open(f"/proc/{pid}/cmdline", errors="replace") as file:
                words = file.read().split("\0")
            if "--control-port" in words:
                return " ".join(
                    words[words.index(name) + 1] for name in ("--control-port", "--pgid")
                )
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                # The name of the program, which comes before, may contain anything.
                pid = int(file.read().rpartition(")")[2].split()[1])
    return ""
