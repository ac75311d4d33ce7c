"""Starts ranks: the command smddprun, and the variables that torch reads under mpirun and srun.

    smddprun -n 4 --nodes 2 train.py             4 ranks here, which play 2 nodes
    smddprun --hostfile hosts train.py           on each host: the ranks that the file gives it
    smddprun --hostfile hosts --ssh train.py     on one host: the ranks of all hosts
    smddprun --distribution dist.json train.py   the ranks that a SageMaker estimator asks for
    smddprun --elastic -n 4 train.py             4 ranks, each of which is started again by itself
    mpirun -n 8 smddprun python train.py         one of 8 ranks, which mpirun starts

Here `smddprun` runs torchrun; with --elastic it starts the ranks itself (`supervisor.py`). In the
last form it sets the variables that `torch.distributed` reads from those that mpirun or srun set;
then it replaces itself by the command that follows on its command line.
`smddpmprun` is the same program. Both accept -i and --allow-bypass, options of SageMaker's
launcher: -i tells the ranks the instance type of a distribution, and --allow-bypass has no effect.

A rank that mpirun starts runs this before its script imports torch, so it imports no torch itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from smddp.launch.environment import (
    complete_from_launcher,
    first_of,
    instead_of,
    print_lines_at_once,
    sources,
)
from smddp.launch.layout import ranks_of_nodes, sizes_of_nodes
from smddp.launch.rendezvous import UNKNOWN_HOST, complete_rendezvous
from smddp.launch.starts import (
    RESTARTS,
    command_of_rank,
    hosts_of_job,
    index_among,
    ranks_of_host,
    start_all_hosts,
    start_supervisor,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["main"]

# Seconds within which the others of a killed rank fail, too, as torchrun counts them.
_MOMENT = 2


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="smddprun",
        usage="smddprun -n RANKS [options] script.py ...\n"
        "       smddprun --hostfile FILE [options] script.py ...        (on each of the hosts)\n"
        "       smddprun --hostfile FILE --ssh[=COMMAND] [options] script.py ...  (on one host)\n"
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
        "--elastic",
        action="store_true",
        help="start a rank again by itself when a signal has killed it, or it has ended with "
        "status 75; the others go on, by smddp.elastic",
    )
    parser.add_argument(
        "--spares",
        type=int,
        metavar="K",
        help="with --elastic: so many processes wait on this host to take the place of one that is "
        "lost",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        help="how often all ranks are started again when one fails (default 0); with --elastic: "
        f"how often in a minute the same rank is (default {RESTARTS})",
    )
    parser.add_argument(
        "--ssh",
        metavar="COMMAND",
        help="with --hostfile: start the ranks of all hosts from this one, by a command that takes "
        "a host and a command line and passes on its standard input. --ssh without = means ssh",
    )
    parser.add_argument(
        "-x",
        dest="export",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help="with --ssh: a variable that all hosts get, besides those that begin with SMDDP_, "
        "NCCL_ or FI_",
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
    # For a host that --ssh starts: what is in the host file.
    parser.add_argument("--hosts", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what the ranks run")
    # An optional value would take the script for it.
    words = list(arguments)
    options = parser.parse_args(["--ssh=ssh" if word == "--ssh" else word for word in words])
    options.command = words[len(words) - len(options.command) :]
    return options


def _torchrun(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments of torchrun that start the ranks, and variables for it.

    Raises:
        ValueError: options contradict each other, or a file is wrong.
        OSError: a file cannot be read.
    """
    hosts = hosts_of_job(options)
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
    command = command_of_rank(options)
    if len(layout) > 1:
        nodes = "+".join(map(str, layout))
        command = [sys.executable, "-m", "smddp.launch", "--node-of-rank", nodes, *command]
    arguments = [*where, "--tee", "3", "--nproc-per-node", count]
    arguments += ["--max-restarts", str(options.max_restarts or 0)]
    return [*arguments, "--no-python", *command], variables


def _with_distribution(
    options: argparse.Namespace, ranks: int | None, hosts: int
) -> tuple[int | None, dict[str, str]]:
    """Returns the ranks per host and the variables of --distribution; says what it leaves out."""
    from smddp.launch.distribution import plan_of_distribution, read_distribution

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
    node = index_among(hosts, options)
    ranks = ranks_of_host(hosts, node, options)
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
        if (options.max_restarts or 0) < 0:
            raise ValueError("--max-restarts must be at least 0")
        if options.spares is not None and not options.elastic:
            raise ValueError("--spares needs --elastic")
        if options.export and options.ssh is None:
            raise ValueError("-x needs --ssh: ranks of this host get all variables")
        asked = (options.ranks, options.nodes, options.hostfile, options.distribution)
        if options.ssh is not None or options.elastic:
            _warn_of_several_jobs(options)
            start = start_supervisor if options.ssh is None else start_all_hosts
            start(options, variables)
            return
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
            command = command_of_rank(options)
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
    if not (options.hostfile is options.hosts is None):
        return
    started, rank = first_of(sources("WORLD_SIZE")), first_of(sources("RANK"))
    if rank == "0" and started.isdecimal() and int(started) > 1:
        sys.stderr.write(
            f"smddprun: mpirun or srun has started {started} processes, and each of them starts a "
            "job of its own: leave out the number of ranks, or give a host file\n"
        )


def _start_ranks(arguments: Sequence[str]) -> None:
    """Runs torchrun until all ranks have ended, and deletes its copies of their output.

    Raises:
        SystemExit: a rank has failed, a signal has ended all, or torchrun cannot do its work.
    """
    try:
        _run_torchrun(arguments)
    except KeyboardInterrupt:  # before torchrun has begun to listen, or after it has ended
        sys.stderr.write("smddprun: ended by SIGINT\n")
        raise SystemExit(128 + signal.SIGINT) from None


def _run_torchrun(arguments: Sequence[str]) -> None:
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

    # The beginning of each line. torchrun's own has the rank on the host, which is not unique.
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}]: ")
    os.environ["SMDDPRUN"] = "1"  # see `register_backend` in smddp/_registration.py
    os.environ.pop("SMDDPRUN_RANK", None)  # of a rank that runs this command
    print_lines_at_once()
    # Stack traces of torchrun would hide what its errors say.
    try:
        with tempfile.TemporaryDirectory(prefix="smddprun_") as logs:
            try:
                torchrun(["--log-dir", logs, *arguments])
            except ChildFailedError as error:
                text = _report_of(error)
                raise SystemExit(f"smddprun: {text}{_note_about_disk(logs)}") from None
    except SignalException as error:
        sys.stderr.write(f"smddprun: ended by {signal.Signals(error.sigval).name}\n")
        raise SystemExit(128 + error.sigval) from None  # as a shell tells it
    except (DistError, RendezvousError, OSError) as error:
        # Hosts that do not come, a port in use, a full disk.
        raise SystemExit(f"smddprun: {_sentence(error)}") from None


def _report_of(error: ChildFailedError) -> str:
    """Returns torchrun's report, which names the rank that failed first.

    torchrun has whole seconds, and takes for a rank without an error file the second in which it
    makes the report. So ranks that failed because of another one, or that it has ended itself, may
    seem to be first. A signal comes before errors of the same moment, and SIGTERM after all.
    """
    failures = error.failures.values()
    times = [failure.timestamp for failure in failures]
    first, last = min(times), max(times)
    for failure in failures:
        if failure.exitcode == -signal.SIGTERM:
            failure.timestamp = last + 1
        elif failure.exitcode < 0 and failure.timestamp <= first + _MOMENT:
            failure.timestamp = first - 1
    text: str = error.format_msg()  # type: ignore[no-untyped-call]
    return text


def _refuse(text: str) -> NoReturn:
    sys.stderr.write(f"smddprun: {text}\n")
    raise SystemExit(2)
