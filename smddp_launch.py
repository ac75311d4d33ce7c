"""Starts ranks: the command smddprun, and the variables that torch reads under mpirun and srun.

    smddprun -n 4 --nodes 2 train.py             4 ranks here, which play 2 nodes
    smddprun --hostfile hosts train.py           on each host: the ranks that the file gives it
    smddprun --distribution dist.json train.py   the ranks that a SageMaker estimator asks for
    mpirun -n 8 smddprun python train.py         one of 8 ranks, which mpirun starts

In the first three forms `smddprun` runs torchrun. In the last one it sets the variables
that `torch.distributed` reads from those that mpirun or srun set; then it replaces itself by the
command that follows on its command line. `smddpmprun` is the same program. Both accept -i and
--allow-bypass, options of SageMaker's launcher: -i tells the ranks the instance type of a
distribution, and --allow-bypass has no effect.

This module is not part of the package smddp, whose import takes as long as that of torch: the
command runs on every rank, before the script imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import zlib
from collections.abc import Sequence
from typing import NoReturn

__all__ = [
    "UNKNOWN_HOST",
    "complete_environment",
    "complete_from_launcher",
    "complete_rendezvous",
    "hosts_of_file",
    "instead_of",
    "is_bare_rank",
    "is_shell_of_slurm",
    "main",
    "node_of_this_host",
    "prepare_rendezvous",
    "print_lines_at_once",
    "ranks_of_nodes",
    "sizes_of_nodes",
]

# init_process_group() reads torchrun's names. mpirun and srun set the variables on the right; the
# first one that is set counts. SLURM_NTASKS may be that of the job, as in the shell that salloc
# starts, which is a step of one task.
_FROM_LAUNCHERS = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
# Each of these has the same value on all ranks of a job, and another value in other jobs of the
# host. MPICH's mpiexec may run in a job of Slurm, so the names of what has started the ranks come
# first.
_STEP_NAMES = ("PMIX_NAMESPACE", "PMI_JOBID")
_INTERACTIVE_STEP = "4294967290"  # of the shell of salloc, SLURM_INTERACTIVE_STEP in slurm.h
_JOB_NAMES = ("SLURM_JOB_ID", "TRAINING_JOB_NAME")
_PORTS = range(20000, 28192)  # below the kernel's range of ephemeral ports

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
UNKNOWN_HOST = (
    "the job has several hosts, and nothing says where rank 0 is: "
    "set MASTER_ADDR, for instance by mpirun -x MASTER_ADDR=host (MPICH: -genv MASTER_ADDR host)"
)

_REPLACEABLE = ("gloo", "mpi")
_MOST_RANKS = 1 << 20


def is_bare_rank() -> bool:
    """Returns whether mpirun or srun started this process, and it lacks variables of torch."""
    return any(name in os.environ for name in _FROM_LAUNCHERS["RANK"]) and not all(
        name in os.environ for name in _RENDEZVOUS
    )


def _step_of_slurm() -> str:
    """Returns the number of the step of Slurm that this process belongs to; "" if to none."""
    return _first_of(("SLURM_STEP_ID", "SLURM_STEPID"))


def _tasks_without_step() -> int:
    """Returns how many tasks a job of Slurm has, if srun has not started this process; else 0.

    So it is in a batch script, and in the shell of salloc. There SLURM_NTASKS is that of the job,
    and SLURM_PROCID may be 0; but no srun starts the other tasks beside this process.
    """
    tasks = os.environ.get("SLURM_NTASKS", "")
    return int(tasks) if tasks.isdecimal() and not _step_of_slurm() else 0


def _sources(name: str) -> list[str]:
    """Returns the variables of launchers that stand for one of torch here."""
    # A script of one task may be a job of one rank.
    of_slurm = _tasks_without_step() < 2
    return [each for each in _FROM_LAUNCHERS[name] if of_slurm or not each.startswith("SLURM_")]


def is_shell_of_slurm() -> bool:
    """Returns whether this process is in a batch script or the shell of salloc, and no rank."""
    launchers = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "TORCHELASTIC_RUN_ID")
    if "SLURM_JOB_ID" not in os.environ or any(name in os.environ for name in launchers):
        return False
    return _step_of_slurm() in ("", _INTERACTIVE_STEP)


def complete_from_launcher() -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where they are absent."""
    counts = os.environ.get("SLURM_LOCALID") and _tasks_without_step() < 2
    for name in _FROM_LAUNCHERS:
        value = _first_of(_sources(name)) or None
        if value is None and name == "LOCAL_WORLD_SIZE" and counts:
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
    tasks = _tasks_without_step()
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
    for name in names if _is_of_openmpi() else ("SLURM_STEP_NODELIST", *names):
        if "SLURM_PROCID" in os.environ and os.environ.get(name):
            return _first_node(os.environ[name])
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


def _first_node(nodes: str) -> str:
    """Returns the first host of a list in Slurm's notation, such as "node[03-05,9],other"."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)  # a name may have several brackets
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", found[0] if found else nodes)


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


def _is_of_openmpi() -> bool:
    """Returns whether Open MPI's mpirun started this rank.

    In a job of Slurm it starts its daemons by srun, but only on the other nodes: ranks of the first
    node have no step, or another one.
    """
    return "OMPI_COMM_WORLD_RANK" in os.environ


def _port_of_job() -> int:
    """Returns the port where the ranks meet: the same for all, and hardly that of another job."""
    name = _first_of(_STEP_NAMES) or _job_of_hydra() or _first_of(_JOB_NAMES)
    if name == os.environ.get("SLURM_JOB_ID") and not _is_of_openmpi():
        # Steps of one job may run at the same time.
        name += "." + os.environ.get("SLURM_STEP_ID", "")
    return _PORTS[zlib.crc32(name.encode()) % len(_PORTS)]


def _first_of(names: Sequence[str]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


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

    An empty list if the text is not of this form, or has a node without ranks, or more ranks than
    any job has.
    """
    if found := re.fullmatch(r"(\d{1,7})x(\d{1,7})", text):
        if int(found[1]) * int(found[2]) > _MOST_RANKS:
            return []
        sizes = [int(found[2])] * int(found[1])
    elif re.fullmatch(r"\d{1,7}(\+\d{1,7})*", text):
        sizes = [int(size) for size in text.split("+")]
    else:
        sizes = []
    return [] if 0 in sizes or sum(sizes) > _MOST_RANKS else sizes


def ranks_of_nodes(ranks: int | None, nodes: str | None) -> list[int]:
    """Returns the number of ranks of each node that this machine plays.

    Args:
        ranks: of -n.
        nodes: of --nodes: a number of nodes with as many ranks each, or "2x3", or "3+1".

    Raises:
        ValueError: one of them is invalid, or they contradict each other.
    """
    if ranks is not None and ranks < 1:
        raise ValueError(f"-n {ranks}: expects a number of ranks of at least 1")
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
    if ranks is not None and sum(layout) != ranks:
        raise ValueError(f"-n {ranks}, but --nodes {nodes} has {sum(layout)} ranks")
    return layout


def hosts_of_file(path: str) -> list[tuple[str, int | None]]:
    """Returns the hosts of a host file, each with its number of ranks, None where it has none.

    A line is `host slots=N`, as Open MPI reads it, or `host:N`, as MPICH does. What follows a # is
    a comment. An IPv6 address may be in brackets, and is if `:N` follows. A host that several lines
    without a number name has a rank for each, as both read the files of PBS and LSF.

    Raises:
        ValueError: a line is of another form, or there is no host.
        OSError: the file cannot be read.
    """
    try:
        # Editors of Windows put a mark before the first line.
        with open(path, encoding="utf-8-sig") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text: expects lines such as node1 slots=4") from None
    hosts: list[tuple[str, int | None]] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        place, *options = re.sub(r"\s*=\s*", "=", line).split()
        host, count = _host_and_slots(place)
        options += [f"slots={count}"] if count else []
        values = dict(option.partition("=")[::2] for option in options)
        slots = values.pop("slots", None)
        unknown = values.keys() - {"max_slots", "max-slots"}
        twice = len(options) > len(values) + (slots is not None)
        if not host or unknown or twice or not (slots is None or slots.isdecimal()):
            raise ValueError(f"{path}:{number}: expects a line such as node1 slots=4, not {line}")
        if slots and int(slots) == 0:
            raise ValueError(f"{path}:{number}: {host} has no slots: take the line out")
        hosts.append((host, int(slots) if slots else None))
    if not hosts:
        raise ValueError(f"{path} names no host")
    return _without_repetitions(hosts)


def _without_repetitions(lines: Sequence[tuple[str, int | None]]) -> list[tuple[str, int | None]]:
    """Returns hosts with their numbers of ranks; of lines without a number each stands for one."""
    hosts: list[tuple[str, int | None]] = []
    for place, line in enumerate(lines):
        count = lines.count(line)
        if line[1] is not None or count == 1:
            hosts.append(line)
        elif line not in lines[:place]:
            hosts.append((line[0], count))
    return hosts


def _host_and_slots(text: str) -> tuple[str, str]:
    """Returns the two parts of "host:4"; of "host" and of "fe80::1" the second is empty.

    The first is empty if the text is of another form.
    """
    if found := re.fullmatch(r"(?:\[([^\]=]+)\]|([^:\[\]=]+))(?::(\d+))?", text):
        return found[1] or found[2], found[3] or ""
    import socket

    try:
        socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    except (OSError, ValueError):
        return "", ""
    return text, ""


def node_of_this_host(hosts: Sequence[str]) -> int:
    """Returns which of the hosts this one is, by its name, or else by its addresses.

    Raises:
        ValueError: none of them is this host, or several are.
    """
    import socket

    me = socket.gethostname().lower()
    found = [node for node, host in enumerate(hosts) if _same_name(host.lower(), me)]
    # Names come first, because looking up the others takes time.
    found = found or [node for node, host in enumerate(hosts) if _is_here(host)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"the host file does not name this host, {me}: say which of its {len(hosts)} hosts "
            "this one is, by --node-rank, from 0"
        )
    which = ", ".join(f"{node} ({hosts[node]})" for node in found)
    raise ValueError(
        f"the host file names this host, {me}, several times: say by --node-rank which one of "
        f"these it is: {which}"
    )


def _same_name(host: str, me: str) -> bool:
    """Returns whether two names are equal; if one has no domain, then without that of the other."""
    if "." in host and "." in me:
        return host == me
    return host.partition(".")[0] == me.partition(".")[0]


def _is_here(host: str) -> bool:
    import socket

    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as tried:
                tried.bind(address)  # succeeds for addresses of this host only
        except OSError:
            continue
        return True
    return False


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="smddprun",
        usage="smddprun -n RANKS [options] script.py ...\n"
        "       smddprun --hostfile FILE [options] script.py ...        (on each of the hosts)\n"
        "       smddprun --distribution JSON|FILE [options] script.py ...\n"
        "       mpirun -n RANKS smddprun [--instead-of BACKENDS] command ...",
        description="Starts ranks on this machine, by torchrun; or, under mpirun or srun, sets the "
        "variables that torch reads and runs the command.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", "--ranks", type=int, help="number of ranks to start on this machine")
    parser.add_argument(
        "--nodes",
        help="how many nodes this machine plays, or the ranks of each: 2x2, 3+1 (default 1)",
    )
    parser.add_argument(
        "--hostfile",
        metavar="FILE",
        help="the hosts of the job, one in a line: node1 slots=4. Give each host the same command "
        "and the same file: each starts its own ranks, which meet at the first host, at port "
        "MASTER_PORT (default 29500)",
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        metavar="I",
        help="with --hostfile: which host this one is, from 0 (default: the one with its name or "
        "one of its addresses)",
    )
    parser.add_argument(
        "--distribution",
        metavar="JSON|FILE",
        help="the distribution of a SageMaker estimator, or a file that holds it: starts the ranks "
        "and sets the variables that it asks for. Where neither it nor -n nor the host file says "
        "how many: one for each GPU of this machine, or else for each CPU; with mpi, one",
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
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would run, with the variables that would be set",
    )
    parser.add_argument("-i", "--instance-type", help=argparse.SUPPRESS)
    parser.add_argument("--allow-bypass", action="store_true", help=argparse.SUPPRESS)
    # A rank of those that this command starts: the ranks of the nodes.
    parser.add_argument("--node-of-rank", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what the ranks run")
    return parser.parse_args(list(arguments))


def _torchrun(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments of torchrun that start the ranks, and variables for it.

    Raises:
        ValueError: options contradict each other, or a file is wrong.
        OSError: a file cannot be read.
    """
    if options.hostfile is not None and options.nodes is not None:
        raise ValueError("--nodes and --hostfile exclude each other: both say what the nodes are")
    if options.hostfile is None and options.node_rank is not None:
        raise ValueError("--node-rank needs --hostfile")
    hosts = [] if options.hostfile is None else hosts_of_file(options.hostfile)
    ranks: int | None = options.ranks
    where = ["--standalone"]
    if hosts:
        ranks, where = _place_among(hosts, options)
    variables: dict[str, str] = {}
    if options.distribution is not None:
        ranks, variables = _with_distribution(options, ranks, len(hosts) or 1)
    if ranks is None and options.nodes is None:
        layout, count = [1], "auto"  # torchrun counts GPUs, or else CPUs
    else:
        layout = ranks_of_nodes(ranks, options.nodes)
        count = str(sum(layout))
    command = _command(options)
    if len(layout) > 1:
        nodes = "+".join(map(str, layout))
        command = [sys.executable, "-m", "smddp_launch", "--node-of-rank", nodes, *command]
    arguments = [*where, "--tee", "3", "--nproc-per-node", count]
    arguments += ["--max-restarts", str(options.max_restarts)]
    return [*arguments, "--no-python", *command], variables


def _command(options: argparse.Namespace) -> list[str]:
    """Returns what a rank runs.

    Raises:
        ValueError: it is a script or a program that does not exist.
    """
    import shutil

    command = list(options.command)
    if command[0] == "--" and len(command) > 1:
        del command[0]
    if command[0].endswith(".py"):
        if not options.dry_run and not os.path.exists(command[0]):
            raise ValueError(f"there is no file {command[0]}")
        command.insert(0, sys.executable)
    elif not options.dry_run and shutil.which(command[0]) is None:
        raise ValueError(f"there is no program {command[0]} that can be run")
    return command


def _with_distribution(
    options: argparse.Namespace, ranks: int | None, hosts: int
) -> tuple[int | None, dict[str, str]]:
    """Returns the ranks per host and the variables of --distribution; says what it leaves out."""
    from smddp_distribution import plan_of_distribution, read_distribution

    ranks, variables, ignored = plan_of_distribution(
        read_distribution(options.distribution), ranks, hosts, options.instance_type
    )
    if ignored:
        sys.stderr.write(
            f"smddprun: ignores the options {' '.join(ignored)} of mpirun: torchrun starts the "
            "ranks\n"
        )
    return ranks, variables


def _place_among(
    hosts: Sequence[tuple[str, int | None]], options: argparse.Namespace
) -> tuple[int | None, list[str]]:
    """Returns the number of ranks of this host of a host file, and where torchrun is told to meet.

    Raises:
        ValueError: this host is not one of them, or its number of ranks is said twice.
    """
    node = options.node_rank
    if node is None:
        node = node_of_this_host([host for host, _ in hosts])
    elif not 0 <= node < len(hosts):
        raise ValueError(
            f"--node-rank {node}: {options.hostfile} has {len(hosts)} hosts, with numbers from 0"
        )
    host, slots = hosts[node]
    ranks: int | None = slots or options.ranks
    if options.ranks not in (None, ranks):
        raise ValueError(
            f"{options.hostfile} gives {host} {slots} slots, but -n asks for {options.ranks} ranks"
        )
    if ranks is None and options.distribution is None:
        raise ValueError(
            f"{options.hostfile} does not say how many ranks {host} has: write slots=N there, or "
            "give -n"
        )
    if len(hosts) == 1:
        return ranks, ["--standalone"]
    # The static rendezvous of torchrun keeps the order of the hosts, which that of c10d does not.
    where = ["--nnodes", str(len(hosts)), "--node-rank", str(node)]
    where += ["--master-addr", os.environ.get("MASTER_ADDR") or hosts[0][0]]
    return ranks, [*where, "--master-port", os.environ.get("MASTER_PORT") or "29500"]


def _note_about_disk(folder: str) -> str:
    """Returns what to add to a report if the disk is full that the output of the ranks goes to.

    Then a rank may have failed because of that, and what it wrote about it is lost.
    """
    import shutil

    try:
        if shutil.disk_usage(folder).free >= 1 << 16:
            return ""
    except OSError:
        return ""
    return (
        f"\nsmddprun: the disk of {os.path.dirname(folder)} is full, to which the output of the "
        "ranks goes: set TMPDIR to another folder"
    )


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
    """Starts ranks; or sets the environment of one, and replaces this process by what it runs.

    Raises:
        SystemExit: with status 2 if an argument is wrong or the ranks cannot be known; with 1 if
            the command cannot be run.
    """
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    torchrun: list[str] = []
    variables: dict[str, str] = {}
    try:
        if not options.command:
            raise ValueError(
                "name what to run: smddprun -n 4 train.py, or, under mpirun, "
                "mpirun -n 8 smddprun python train.py"
            )
        if options.instead_of is not None:
            instead_of(options.instead_of)
            variables["SMDDP_INSTEAD_OF"] = options.instead_of
        if options.max_restarts < 0:
            raise ValueError("--max-restarts must be at least 0")
        asked = (options.ranks, options.nodes, options.hostfile, options.distribution)
        if any(value is not None for value in (*asked, options.node_rank)):
            torchrun, more = _torchrun(options)
            variables |= more
            _warn_of_several_jobs(options)
        elif options.max_restarts:
            raise ValueError(
                "--max-restarts needs -n, --hostfile or --distribution: mpirun and srun do not "
                "start ranks again"
            )
        else:
            command = _command(options)
            if not options.dry_run:
                _prepare_rank(options)
    except ValueError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(_sentence(error))
    if options.dry_run:
        import io
        import shlex

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape")  # names of files may be any bytes
        if torchrun:
            command = [sys.executable, "-m", "torch.distributed.run", *torchrun]
        assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        print(" ".join([*assignments, shlex.join(command)]))
        return
    os.environ.update(variables)
    if torchrun:
        _start_ranks(torchrun)
        return
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise SystemExit(f"smddprun: {command[0]}: {error.strerror}") from None


def _sentence(error: Exception) -> str:
    """Returns what an error says; of one of the system without its number."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _warn_of_several_jobs(options: argparse.Namespace) -> None:
    """Says so if a launcher has started several processes, each of which starts ranks of its own.

    With a host file they are the agents of one job.
    """
    started, rank = _first_of(_sources("WORLD_SIZE")), _first_of(_sources("RANK"))
    if options.hostfile is None and rank == "0" and started.isdecimal() and int(started) > 1:
        sys.stderr.write(
            f"smddprun: mpirun or srun has started {started} processes, and each of them starts a "
            "job of its own: leave out the number of ranks, or give a host file\n"
        )


def print_lines_at_once() -> None:
    """Lets a rank of smddprun write each line when it is printed, and not 8 KiB later.

    Python would wait, because the output of a rank goes to a file, which torchrun copies to that of
    smddprun; and what a rank has not written is lost if it is killed. PYTHONUNBUFFERED is no help:
    it writes parts of lines, and torchrun puts the rank's number before each.
    """
    import io

    if "SMDDPRUN" in os.environ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _start_ranks(arguments: Sequence[str]) -> None:
    """Runs torchrun until all ranks have ended, and deletes its copies of their output.

    Raises:
        SystemExit: a rank has failed, a signal has ended all, or torchrun cannot do its work.
    """
    import signal

    try:
        _run_torchrun(arguments)
    except KeyboardInterrupt:  # before torchrun has begun to listen, or after it has ended
        sys.stderr.write("smddprun: ended by SIGINT\n")
        raise SystemExit(128 + signal.SIGINT) from None


def _run_torchrun(arguments: Sequence[str]) -> None:
    import signal
    import tempfile

    try:
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import RendezvousError
        from torch.distributed.run import main as torchrun
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _refuse(
            "starting ranks needs torchrun, and torch is not installed: `pip install torch`, or "
            "start them by mpirun or srun: mpirun -n 4 python train.py"
        )

    # What begins each line. torchrun's own has the rank on this host, which several hosts have.
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}]: ")
    os.environ["SMDDPRUN"] = "1"  # see `register_backend` in smddp_registration.py
    os.environ.pop("SMDDPRUN_RANK", None)  # of a rank that runs this command
    print_lines_at_once()
    # Stack traces of torchrun would hide what its errors say.
    try:
        with tempfile.TemporaryDirectory(prefix="smddprun_") as logs:
            try:
                torchrun(["--log-dir", logs, *arguments])
            except ChildFailedError as error:
                raise SystemExit(f"smddprun: {error}{_note_about_disk(logs)}") from None
    except SignalException as error:
        sys.stderr.write(f"smddprun: ended by {signal.Signals(error.sigval).name}\n")
        raise SystemExit(128 + error.sigval) from None  # as a shell tells it
    except (DistError, RendezvousError, OSError) as error:
        # Hosts that do not come, a port in use, a full disk.
        raise SystemExit(f"smddprun: {_sentence(error)}") from None


def _refuse(text: str) -> NoReturn:
    sys.stderr.write(f"smddprun: {text}\n")
    raise SystemExit(2)


if __name__ == "__main__":
    main()
