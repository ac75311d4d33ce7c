"""Prints what smddp sees of a machine and of a job: `smddp topo`.

On its own it describes this host. Under a launcher (torchrun, mpirun, srun) it describes each host
of the job: processor, NUMA nodes, network interfaces and which of them smddp uses, cards, GPUs.
`smddp doctor` says what is wrong with them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import ipaddress
import json
import os
import platform
import re
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from smddp.tools import _files, topology_drawing
from smddp.tools._command import run
from smddp.tools._spans import plural, spans
from smddp.tools.doctor import CARDS, Finding, identity, is_job, join_job, make_group
from smddp.tools.libfabric_providers import providers
from smddp.torch import _load

__all__ = ["Card", "Gpu", "Host", "Interface", "NumaNode", "look", "main"]

_SYS = Path("/sys")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR, netdevice(7)
# Reserved for documentation: no network has them, so the kernel takes the default route.
_NOWHERE = ("192.0.2.1", "2001:db8::1")


@dataclasses.dataclass
class NumaNode:
    """Cores with memory of their own."""

    number: int
    socket: int
    cores: list[list[int]]  # the hardware threads of each
    memory_bytes: int  # 0: unknown


@dataclasses.dataclass
class Interface:
    """A network interface of the kernel."""

    name: str
    state: str  # such as "up"
    megabits: int | None  # per second; None where the driver does not tell
    addresses: list[str]
    numa_node: int | None
    is_used: bool = False


@dataclasses.dataclass
class Card:
    """A card that bypasses the kernel's network."""

    name: str
    driver: str
    provider: str  # of libfabric; "" if smddp knows none
    rate: str  # as the driver words it
    numa_node: int | None


@dataclasses.dataclass
class Gpu:
    """A GPU that torch sees."""

    name: str
    memory_bytes: int


@dataclasses.dataclass
class Host:
    """What smddp sees of a host."""

    name: str
    ranks: list[int]
    processor: str
    simd: str  # what smddp's sums use
    usable_threads: int  # hardware threads on which this process may run
    numa_nodes: list[NumaNode]
    interfaces: list[Interface]
    network: str  # what smddp uses between nodes, and why
    cards: list[Card]
    libfabric: list[str]  # its providers
    no_libfabric: str  # why libfabric cannot be used, or ""
    gpus: list[Gpu]


def _read(path: Path) -> str:
    """Returns the content of a file; "" if it cannot be read, as in some containers."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """Returns the number in a file; None if there is none, or a negative one: unknown."""
    text = _read(path)
    return int(text) if text.isdigit() else None


def _list(text: str) -> list[int]:
    """Returns the numbers of a list in the kernel's notation, such as "0-3,8"."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _by_number(folder: Path, name: str) -> list[Path]:
    found = [path for path in folder.glob(f"{name}[0-9]*") if path.name[len(name) :].isdigit()]
    return sorted(found, key=lambda path: int(path.name[len(name) :]))


def numa_nodes(system: Path) -> list[NumaNode]:
    """Returns the NUMA nodes below a folder such as /sys; one node where the kernel tells none."""
    processors = system / "devices/system/cpu"
    lists = {
        int(folder.name[4:]): _list(_read(folder / "cpulist"))
        for folder in _by_number(system / "devices/system/node", "node")
    }
    if not lists:
        lists = {0: [int(path.name[3:]) for path in _by_number(processors, "cpu")]}
    found = []
    for number, threads in lists.items():
        cores: dict[str, list[int]] = {}
        sockets = set()
        for thread in threads:
            place = processors / f"cpu{thread}/topology"
            # Numbers of cores begin anew in each socket; the list of siblings does not.
            core = _read(place / "thread_siblings_list") or str(thread)
            cores.setdefault(core, []).append(thread)
            sockets.add(_number(place / "physical_package_id") or 0)
        text = _read(system / f"devices/system/node/node{number}/meminfo")
        memory = re.search(r"MemTotal:\s*(\d+) kB", text)
        size = int(memory[1]) << 10 if memory else 0
        found.append(NumaNode(number, min(sockets, default=0), list(cores.values()), size))
    return found


def _addresses(name: str) -> list[str]:
    """Returns the addresses of an interface of this host, as far as the kernel tells."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, request)
        found.append(socket.inet_ntoa(answer[20:24]))
    for line in _read(Path("/proc/net/if_inet6")).splitlines():
        address, *_, interface = line.split()
        if interface == name:
            found.append(str(ipaddress.IPv6Address(int(address, 16))))
    return found


def interfaces(system: Path) -> list[Interface]:
    """Returns the network interfaces below a folder such as /sys; those that are up first."""
    found = []
    for folder in sorted((system / "class/net").glob("*")):
        if not (folder / "operstate").exists():  # a file, such as that of bonding
            continue
        found.append(
            Interface(
                folder.name,
                _read(folder / "operstate") or "unknown",
                _number(folder / "speed") or None,
                _addresses(folder.name),
                _number(folder / "device/numa_node"),
            )
        )
    order = {"up": 0, "unknown": 1}
    return sorted(found, key=lambda one: order.get(one.state, 2))


def cards(system: Path) -> list[Card]:
    """Returns the cards below a folder such as /sys that bypass the kernel's network."""
    found = []
    for kind in ("infiniband", "cxi"):
        for folder in sorted((system / "class" / kind).glob("*")):
            driver = (folder / "device/driver").resolve().name
            if driver == "driver":  # there is no such link
                driver = "unknown"
            provider = CARDS.get(driver, "cxi" if kind == "cxi" else "")
            rate = _read(folder / "ports/1/rate")
            numa = _number(folder / "device/numa_node")
            found.append(Card(folder.name, driver, provider, rate, numa))
    return found


def _source_towards(target: str) -> str:
    """Returns the address from which this host reaches another one; "" if it does not.

    To connect a datagram socket sends nothing.
    """
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def chosen_address(environ: dict[str, str]) -> tuple[str, str]:
    """Returns the address at which other nodes reach this one, and why it is that one.

    csrc/bootstrap/local_address.h has the rule. The first is the name of an interface if that was
    asked for.
    """
    if asked := environ.get("SMDDP_INTERFACE"):
        return asked, f"SMDDP_INTERFACE={asked}"
    rank_0 = environ.get("MASTER_ADDR", "")
    by_default = next(filter(None, map(_source_towards, _NOWHERE)), "")
    if not rank_0:
        return by_default, "the default route; under a launcher, the one that reaches rank 0"
    if rank_0 == "localhost":
        return "127.0.0.1", "MASTER_ADDR is localhost, so all ranks are on this host"
    source = _source_towards(rank_0)
    # A name that means loopback here, as in Debian's /etc/hosts: others cannot use that address.
    is_name = re.fullmatch(r"[0-9.]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]*", rank_0) is None
    if source and ipaddress.ip_address(source).is_loopback and is_name:
        return by_default or source, "the default route; MASTER_ADDR is this host"
    return source or by_default, f"it reaches rank 0 at {rank_0}"


def network(
    found: Iterable[Interface], those: Iterable[Card], no_libfabric: str, environ: dict[str, str]
) -> str:
    """Returns what carries data between nodes, and why; marks the interface that smddp uses.

    csrc/transport/network/network.h has the rule.
    """
    address, why = chosen_address(environ)
    used = next((one for one in found if address in (one.name, *one.addresses)), None)
    if used is not None:
        used.is_used = True
    place = f"{used.name if used else address or 'no interface'} ({why})"
    asked = environ.get("SMDDP_PROVIDER", "")
    usable = ", ".join(dict.fromkeys(card.provider or card.driver for card in those))
    if asked == "sockets":
        return f"TCP sockets (SMDDP_PROVIDER) over {place}"
    if asked:
        return f"libfabric's provider {asked} (SMDDP_PROVIDER); rendezvous over {place}"
    if usable and not no_libfabric:
        return f"libfabric on a card ({usable}); rendezvous over {place}"
    reason = f"a card ({usable}), but {no_libfabric}" if usable else "no card bypasses the kernel"
    return f"TCP sockets ({reason}) over {place}"


def _gpus() -> list[Gpu]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(Gpu(facts.name, facts.total_memory))
    return found


def _processor() -> str:
    text = _read(Path("/proc/cpuinfo"))
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def look(system: Path | None = None) -> Host:
    """Returns what smddp sees of this host.

    Args:
        system: the kernel's folder about devices; None means /sys.
    """
    system = _SYS if system is None else system
    facts = _load.load().build_info()
    found, those = interfaces(system), cards(system)
    environ = dict(os.environ)
    return Host(
        name=environ.get("SMDDP_NODE_ID") or socket.gethostname(),
        ranks=[],
        processor=_processor(),
        simd=facts["simd"],
        usable_threads=len(os.sched_getaffinity(0)),
        numa_nodes=numa_nodes(system),
        interfaces=found,
        network=network(found, those, facts["no_libfabric"], environ),
        cards=those,
        libfabric=[] if facts["no_libfabric"] else providers(),
        no_libfabric=facts["no_libfabric"],
        gpus=_gpus(),
    )


def _ranges(numbers: Iterable[int]) -> str:
    """Returns the kernel's notation of numbers: "0-3,8"."""
    return ",".join(spans(numbers))


def _speed(interface: Interface) -> str:
    if interface.megabits is None:
        return "speed unknown"
    if interface.megabits < 1000:
        return f"{interface.megabits} Mbit/s"
    return f"{interface.megabits / 1000:g} Gbit/s"


def _near(numa_node: int | None) -> str:
    return "" if numa_node is None else f", at NUMA node {numa_node}"


def as_text(host: Host) -> str:
    """Returns the lines about a host."""
    ranks = f": ranks {_ranges(host.ranks)}" if host.ranks else ""
    threads = plural(host.usable_threads, "hardware thread")
    lines = [
        f"{host.name}{ranks}",
        f"  processor: {host.processor}; sums use {host.simd}; {threads} to run on",
    ]
    for number in sorted({node.socket for node in host.numa_nodes}):
        lines.append(f"  socket {number}")
        for node in (one for one in host.numa_nodes if one.socket == number):
            memory = f", {node.memory_bytes / 2**30:.1f} GiB" if node.memory_bytes else ""
            numbers = _ranges(thread for core in node.cores for thread in core)
            lines.append(
                f"    NUMA node {node.number}: {plural(len(node.cores), 'core')}, hardware "
                f"threads {numbers or 'none'}{memory}"
            )
    lines.append(f"  between nodes: {host.network}")
    for one in host.interfaces:
        addresses = ", ".join(one.addresses) or "no address"
        used = "  <- used" if one.is_used else ""
        lines.append(
            f"    {one.name}: {one.state}, {_speed(one)}, {addresses}{_near(one.numa_node)}{used}"
        )
    for card in host.cards:
        provider = f"libfabric's {card.provider}" if card.provider else "no known provider"
        rate = f", {card.rate}" if card.rate else ""
        lines.append(
            f"    card {card.name}: {card.driver}, {provider}{rate}{_near(card.numa_node)}"
        )
    usable = ", ".join(host.libfabric) or "no providers"
    lines.append(f"  libfabric: {host.no_libfabric or usable}")
    for index, gpu in enumerate(host.gpus):
        lines.append(f"  GPU {index}: {gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB")
    if not host.gpus:
        lines.append("  GPUs: torch sees none")
    return "\n".join(lines)


def _host(row: dict[str, Any]) -> Host:
    """Returns the host that dataclasses.asdict() has made a row of."""
    kinds = {"numa_nodes": NumaNode, "interfaces": Interface, "cards": Card, "gpus": Gpu}
    parts = {name: [kind(**part) for part in row[name]] for name, kind in kinds.items()}
    return Host(**(row | parts))


def _hosts_of_job() -> tuple[list[Host], str]:
    """Returns the hosts on rank 0, none elsewhere, and what smddp says of the group of all ranks.

    Raises:
        RuntimeError: the ranks do not meet, or cannot exchange what they see.
    """
    import torch.distributed as dist

    import smddp

    meeting = join_job()
    if isinstance(meeting, Finding):
        raise RuntimeError(f"{meeting.text}; {meeting.remedy}")
    make_group(meeting)
    # Not by all_gather_object(), which needs numpy.
    everyone = meeting.gather("host", [identity()[1], dataclasses.asdict(look())])
    description = smddp.describe()
    dist.barrier()  # rank 0, which may serve the store, stays until all have read
    dist.destroy_process_group()
    hosts: dict[str, Host] = {}
    for rank, (which, row) in enumerate(everyone):
        hosts.setdefault(which, _host(row)).ranks.append(rank)
    if len(hosts) == 1:
        (alone,) = hosts.values()
        alone.network = "no network: all ranks are on this host"
        for one in alone.interfaces:
            one.is_used = False
    return (list(hosts.values()) if meeting.rank == 0 else []), description


def main(arguments: list[str] | None = None) -> int:
    """Prints or draws what smddp sees; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="smddp topo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw it into FILE")
    options = parser.parse_args(arguments)
    try:
        if is_job():
            hosts, description = _hosts_of_job()
            if not hosts:
                return 0  # rank 0 prints for all
        else:
            hosts, description = [look()], ""
        if options.svg is not None:
            _files.write(options.svg, topology_drawing.draw(list(map(dataclasses.asdict, hosts))))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"smddp topo: {error}", file=sys.stderr)
        return 1
    if options.json:
        rows = [dataclasses.asdict(host) for host in hosts]
        print(json.dumps({"hosts": rows, "group": description}, indent=1, ensure_ascii=False))
    else:
        print("\n".join([*map(as_text, hosts), *filter(None, [description])]))
    if options.svg is not None:
        print(f"wrote {options.svg}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run(main)
