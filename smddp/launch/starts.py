"""What smddprun starts by itself, without torchrun: supervisors of ranks, and all hosts of a file.

Also what its options say about hosts and ranks, whoever starts them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from smddp.launch.hostfile import hosts_of_file, hosts_of_words, node_of_this_host
from smddp.launch.layout import ranks_of_nodes

__all__ = [
    "RESTARTS",
    "command_of_rank",
    "hosts_of_job",
    "index_among",
    "ranks_of_host",
    "start_all_hosts",
    "start_supervisor",
]

RESTARTS = 5  # of one place in a minute, unless --max-restarts says otherwise


def command_of_rank(options: argparse.Namespace) -> list[str]:
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


def hosts_of_job(options: argparse.Namespace) -> list[tuple[str, int | None]]:
    """Returns the hosts of the job with their numbers of ranks, [] if no host file names any.

    Raises:
        ValueError: options contradict each other, or the file is wrong.
        OSError: the file cannot be read.
    """
    if options.hosts is not None:
        return hosts_of_words(options.hosts)
    if options.hostfile is not None and options.nodes is not None:
        raise ValueError("--nodes and --hostfile exclude each other: both say what the nodes are")
    if options.hostfile is None and options.node_rank is not None:
        raise ValueError("--node-rank needs --hostfile")
    return [] if options.hostfile is None else hosts_of_file(options.hostfile)


def index_among(hosts: Sequence[tuple[str, int | None]], options: argparse.Namespace) -> int:
    """Returns which of the hosts this one is.

    Raises:
        ValueError: it is none of them.
    """
    node: int | None = options.node_rank
    if node is None:
        return node_of_this_host([host for host, _ in hosts])
    if not 0 <= node < len(hosts):
        raise ValueError(
            f"--node-rank {node}: {options.hostfile} has {len(hosts)} hosts, with numbers from 0"
        )
    return node


def ranks_of_host(
    hosts: Sequence[tuple[str, int | None]], node: int, options: argparse.Namespace
) -> int | None:
    """Returns the number of ranks of a host of a host file; None if a distribution says it.

    Raises:
        ValueError: it is said twice, or nowhere.
    """
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
    return ranks


def start_supervisor(options: argparse.Namespace, variables: dict[str, str]) -> None:
    """Starts the ranks of this host by a supervisor, and waits for them.

    Raises:
        ValueError: options contradict each other, or a file is wrong.
        OSError: a file cannot be read.
    """
    from smddp.launch.supervisor import Host, supervise

    if options.distribution is not None:
        raise ValueError("--elastic and --distribution exclude each other: use -n or --hostfile")
    if options.ranks is None and options.nodes is None and options.hostfile is options.hosts:
        raise ValueError("--elastic needs -n, --nodes or --hostfile, for the number of ranks")
    if (options.spares or 0) < 0:
        raise ValueError(f"--spares {options.spares}: expects a number of at least 0")
    hosts = hosts_of_job(options)
    index, nodes = 0, []
    if hosts:
        index = index_among(hosts, options)
        counts = [ranks_of_host(hosts, node, options) or 0 for node in range(len(hosts))]
    else:
        layout = ranks_of_nodes(options.ranks, options.nodes)
        counts = [sum(layout)]
        if len(layout) > 1:
            nodes = [f"node{node}" for node, ranks in enumerate(layout) for _ in range(ranks)]
    is_alone = len(counts) == 1
    host = Host(
        command=command_of_rank(options),
        index=index,
        hosts=len(counts),
        first=sum(counts[:index]),
        world=sum(counts),
        places=counts[index],
        nodes=nodes,
        spares=options.spares or 0,
        restarts=RESTARTS if options.max_restarts is None else options.max_restarts,
        address=os.environ.get("MASTER_ADDR") or ("127.0.0.1" if is_alone else hosts[0][0]),
        port=_port(0 if is_alone else 29500),
    )
    os.environ.update(variables)
    supervise(host, options.dry_run)


def start_all_hosts(options: argparse.Namespace, variables: dict[str, str]) -> None:
    """Starts the ranks of all hosts from here, and waits for them.

    Raises:
        ValueError: options contradict each other, or a file is wrong.
        OSError: a file cannot be read.
    """
    import shlex
    import shutil

    from smddp.launch.remote import start_on_hosts, variables_to_pass

    if options.hostfile is None:
        raise ValueError("--ssh needs --hostfile, for the hosts")
    if options.node_rank is not None:
        raise ValueError("--ssh and --node-rank exclude each other: --ssh starts all hosts")
    hosts, command = hosts_of_job(options), shlex.split(options.ssh)
    if not options.dry_run and (not command or shutil.which(command[0]) is None):
        raise ValueError(f"--ssh={options.ssh}: there is no such program")
    for node in range(len(hosts)):
        ranks_of_host(hosts, node, options)  # what is wrong is said here, once
    words = [f"--hosts={','.join(f'[{host}]:{slots or 0}' for host, slots in hosts)}"]
    for name in ("ranks", "spares", "max-restarts", "distribution", "instance-type"):
        value = getattr(options, name.replace("-", "_"))
        words += [] if value is None else [f"--{name}={value}"]
    words += ["--elastic"] if options.elastic else []
    start_on_hosts(
        command,
        [host for host, _ in hosts],
        [[*words, f"--node-rank={node}", *options.command] for node in range(len(hosts))],
        variables_to_pass(options.export) | variables,
        options.elastic,
        options.dry_run,
    )


def _port(default: int) -> int:
    text = os.environ.get("MASTER_PORT") or str(default)
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise ValueError(f"MASTER_PORT={text}: expects a port")
    return int(text)
