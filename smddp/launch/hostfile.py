"""Host files: the hosts of a job, and which of them this one is."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = [
    "hosts_of_file",
    "hosts_of_words",
    "node_of_this_host",
]


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


def hosts_of_words(text: str) -> list[tuple[str, int | None]]:
    """Returns hosts from "[host]:4,[host]:0", each with its number of ranks; 0 stands for None."""
    pairs = [_host_and_slots(word) for word in text.split(",")]
    return [(host, int(slots) or None) for host, slots in pairs]


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
