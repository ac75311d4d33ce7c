"""Starts ranks: the command smddprun, and the variables that torch reads under mpirun and srun.

    smddprun -n 4 --nodes 2 train.py             4 ranks here, which play 2 nodes
    mpirun -n 8 smddprun python train.py         one of 8 ranks, which mpirun starts

In the first form `smddprun` hands over to torchrun. In the second one it sets the variables that
`torch.distributed` reads from those that mpirun or srun set; then it replaces itself by the command
that follows on its command line. `smddpmprun` is the same program. Both accept and ignore -i and
--allow-bypass, options of SageMaker's launcher about the instance type.

This module is not part of the package smddp, whose import takes as long as that of torch: the
command runs on every rank, before the script imports torch.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import zlib
from collections.abc import Sequence

__all__ = [
    "UNKNOWN_HOST",
    "complete_environment",
    "complete_from_launcher",
    "complete_rendezvous",
    "instead_of",
    "is_bare_rank",
    "main",
    "prepare_rendezvous",
    "sizes_of_nodes",
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

_REPLACEABLE = ("gloo", "mpi")


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


def instead_of(text: str) -> frozenset[str]:
    """Returns the backends of a value of SMDDP_INSTEAD_OF, such as "gloo,mpi".

    Raises:
        ValueError: it names another one.
    """
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if wrong := [name for name in names if name not in _REPLACEABLE]:
        raise ValueError(
            f"SMDDP_INSTEAD_OF={text}: expects {' or '.join(_REPLACEABLE)}, or both joined by a "
            f"comma, not {wrong[0]}"
        )
    return frozenset(names)


def sizes_of_nodes(text: str) -> list[int]:
    """Returns the number of ranks of each node: "2x3" gives [3, 3], "3+1" gives [3, 1].

    An empty list if the text is not of this form, or has a node without ranks.
    """
    if found := re.fullmatch(r"(\d+)x(\d+)", text):
        sizes = [int(found[2])] * int(found[1])
    elif re.fullmatch(r"\d+(\+\d+)*", text):
        sizes = [int(size) for size in text.split("+")]
    else:
        sizes = []
    return [] if 0 in sizes else sizes


def ranks_of_nodes(ranks: int | None, nodes: str | None) -> list[int]:
    """Returns the number of ranks of each node that this machine plays.

    Args:
        ranks: of -n.
        nodes: of --nodes: a number of nodes with as many ranks each, or "2x3", or "3+1".

    Raises:
        ValueError: one of them is invalid, or they contradict each other.
    """
    layout = [ranks or 1]
    if nodes is not None and nodes.isdigit() and int(nodes) > 0 and ranks:
        each, rest = divmod(ranks, int(nodes))
        if rest:
            raise ValueError(
                f"{ranks} ranks cannot be divided evenly over {nodes} nodes: give the ranks of "
                "each, such as --nodes 3+1"
            )
        layout = [each] * int(nodes)
    elif nodes is not None:
        layout = [] if nodes.isdigit() or re.search(r"(?<!\d)0", nodes) else sizes_of_nodes(nodes)
        if not layout:
            raise ValueError(
                f"--nodes {nodes}: expects a number of nodes together with -n, or the ranks of "
                "each node, such as 2x2 or 3+1"
            )
    if ranks is not None and (ranks < 1 or sum(layout) != ranks):
        raise ValueError(f"-n {ranks}, but --nodes {nodes} has {sum(layout)} ranks")
    return layout


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="smddprun",
        usage="smddprun -n RANKS [options] script.py ...\n"
        "       mpirun -n RANKS smddprun [--instead-of BACKENDS] command ...",
        description="Starts ranks on this machine, by torchrun; or, under mpirun or srun, sets the "
        "variables that torch reads and runs the command.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", "--ranks", type=int, help="number of ranks to start")
    parser.add_argument(
        "--nodes",
        help="how many nodes this machine plays, or the ranks of each: 2x2, 3+1 (default 1)",
    )
    parser.add_argument(
        "--instead-of",
        metavar="BACKENDS",
        help="gloo, mpi, or both joined by a comma: a script that asks for one of them gets smddp "
        "on the CPU",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="how often all ranks are started again when one fails (default 0)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run")
    parser.add_argument("-i", "--instance-type", help=argparse.SUPPRESS)
    parser.add_argument("--allow-bypass", action="store_true", help=argparse.SUPPRESS)
    # A rank of those that this command starts: the ranks of the nodes.
    parser.add_argument("--node-of-rank", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what the ranks run")
    return parser.parse_args(list(arguments))


def _torchrun(options: argparse.Namespace) -> list[str]:
    """Returns the command line that starts the ranks."""
    layout = ranks_of_nodes(options.ranks, options.nodes)
    command = list(options.command)
    if command[0].endswith(".py"):
        command.insert(0, sys.executable)
    if len(layout) > 1:
        nodes = "+".join(map(str, layout))
        command = [sys.executable, "-m", "smddp_launch", "--node-of-rank", nodes, *command]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--tee", "3"]
    torchrun += ["--nproc-per-node", str(sum(layout)), "--max-restarts", str(options.max_restarts)]
    return [*torchrun, "--no-python", *command]


def _prepare_rank(options: argparse.Namespace) -> None:
    """Sets the variables of a rank that a launcher has started.

    Raises:
        ValueError: there is no launcher, or nothing tells the host of rank 0.
    """
    complete_from_launcher()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "this process has no rank: say how many ranks to start (smddprun -n 4 train.py), or "
            "start it by mpirun or srun"
        )
    if not complete_rendezvous():
        raise ValueError(UNKNOWN_HOST)
    if options.node_of_rank:
        layout = sizes_of_nodes(options.node_of_rank)
        nodes = [node for node, ranks in enumerate(layout) for _ in range(ranks)]
        os.environ["SMDDP_NODE_ID"] = f"node{nodes[int(os.environ['LOCAL_RANK'])]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Starts ranks, or sets the environment of one; replaces this process by what runs then.

    Raises:
        SystemExit: an argument is wrong, or what shall run cannot be run, or the ranks cannot be
            known.
    """
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if not options.command:
        raise SystemExit(
            "smddprun: name what to run: smddprun -n 4 train.py, or, under mpirun, "
            "mpirun -n 8 smddprun python train.py"
        )
    command = options.command
    try:
        if options.instead_of is not None:
            instead_of(options.instead_of)
            os.environ["SMDDP_INSTEAD_OF"] = options.instead_of
        if options.max_restarts < 0:
            raise ValueError("--max-restarts must be at least 0")
        if options.ranks is not None or options.nodes is not None:
            command = _torchrun(options)
        elif not options.dry_run:
            _prepare_rank(options)
        if options.dry_run:
            import shlex

            print(shlex.join(command))
            return
        os.execvp(command[0], command)
    except ValueError as error:
        raise SystemExit(f"smddprun: {error}") from None
    except OSError as error:
        raise SystemExit(f"smddprun: {command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main()
