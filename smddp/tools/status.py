"""Shows what the ranks on this host are doing, without stopping them: `smddp status`.

    smddp status --all         all ranks of this host that use smddp
    smddp status 4711 4712     those of some processes, or of a launcher's children

Each process that uses smddp has a status board in memory that others may read
(csrc/engine/observe/status_board.h has the format). Ranks on other hosts are not seen: run the
command there, too. Only processes of the same user can be read, and with root's rights all, also
those in containers; the texts about their groups have the numbers that processes have in there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from smddp.tools._command import run
from smddp.tools._spans import plural, spans

__all__ = ["Member", "Wait", "look", "main", "text_of"]

_NAME = "/memfd:smddp-status"
_MAGIC = b"smddpst1"
_FRONT = 4096  # of a segment (csrc/transport/shm/segment.h)
_SLOT = 1024
_MOST_SLOTS = 1024
_HEAD = struct.Struct("<8siIQ")
_CONTENT = struct.Struct("<QQQqQ")
_FRESH = 1.0  # seconds
_PROC = Path("/proc")


@dataclasses.dataclass(frozen=True)
class Wait:
    """A call that waits.

    Attributes:
        call: its number in the group; 0 for a message.
        seconds: for how long it has waited; None if that is not known.
        what: "allreduce of 10 float32 (40 B) with SUM", or "message".
        where: "at the arrival for rank 1".
        culprit: "rank 1 (…) has not made this call yet"; empty if nobody is known to be at fault.
    """

    call: int
    seconds: float | None
    what: str
    where: str
    culprit: str


@dataclasses.dataclass(frozen=True)
class Member:
    """A rank of a group.

    Attributes:
        group: the group's name.
        id: its number, which no other group has.
        rank, size: of the group.
        job_rank: its number in the job; errors and logs have this one.
        pid: of the rank's process.
        state: "waits", "computes" (it waits for nobody: it computes, or moves data), or "stopped"
            (by a signal, a debugger, or a freezer of cgroups).
        calls: the number of its last collective call; 0 before the first.
        waits: the calls that wait, if the state is "waits".
    """

    group: str
    id: str
    rank: int
    job_rank: int
    size: int
    pid: int
    state: str
    calls: int
    waits: list[Wait]


class _Board:
    """The status board of a process, which may change, shrink or be damaged at any moment."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, struct: struct.Struct, offset: int) -> tuple[Any, ...]:
        """Returns the fields at an offset; zeros if the board ends before."""
        data = os.pread(self._descriptor, struct.size, offset)
        return struct.unpack(data.ljust(struct.size, b"\0"))

    def text(self, size: int, offset: int) -> str:
        """Returns a text; other users' processes must not control the terminal with it."""
        text = os.pread(self._descriptor, size, offset).decode(errors="replace")
        return "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" for c in text)


def _boards(pid: int) -> Iterator[_Board]:
    """Opens the status boards of a process.

    Raises:
        PermissionError: the process belongs to another user.
    """
    folder = _PROC / str(pid) / "fd"
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            if not os.readlink(folder / name).startswith(_NAME):
                continue
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield _Board(descriptor)
            finally:
                os.close(descriptor)


def _own_number(pid: int) -> int:
    """Returns the number by which a process knows itself, which is another one in a container."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = (_PROC / str(pid) / "status").read_text(errors="replace")
        # The name of the program, which comes before, may contain anything but the end of a line.
        return int(text.partition("\nNSpid:")[2].splitlines()[0].split()[-1])
    return pid


def _is_own(number: int, board: _Board) -> bool:
    """Returns whether a process has made this board: a child has the descriptors of its parent.

    Args:
        number: from _own_number().
        board: one that the process has open.
    """
    return board.read(_HEAD, _FRONT)[:2] == (_MAGIC, number)


def _contents(number: int, board: _Board) -> Iterator[tuple[int, int, int, str]]:
    """Reads the slots of a board: (group, calls, when it was written in nanoseconds, text)."""
    if not _is_own(number, board):
        return
    for slot in range(1, 1 + min(board.read(_HEAD, _FRONT)[2], _MOST_SLOTS)):
        begin = _FRONT + _SLOT * slot
        for _ in range(100):
            version, group, calls, written, length = board.read(_CONTENT, begin)
            if version == 0:
                break
            text = board.text(min(length, _SLOT - _CONTENT.size), begin + _CONTENT.size)
            if version % 2 == 0 and board.read(_CONTENT, begin)[0] == version:
                if text:
                    yield group, calls, written, text
                break


def _state_and_parent(pid: int) -> tuple[str, int]:
    """Returns two fields of proc_pid_stat(5); ("", 0) if there is no such process."""
    with contextlib.suppress(OSError, ValueError):
        # The name of the program, which comes before, may contain anything, also half a character.
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
        state, parent = text.rpartition(")")[2].split()[:2]
        return state, int(parent)
    return "", 0


def _is_stopped(pid: int) -> bool:
    return _state_and_parent(pid)[0] in ("T", "t") or _is_frozen(pid)


def _is_frozen(pid: int) -> bool:
    """Returns whether a freezer of cgroups holds a process still, as `docker pause` does."""
    files = []
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "freezer":
                files.append((f"/freezer{path}/freezer.state", "FROZEN"))
            elif not controllers:  # version 2, which may be mounted beside version 1
                files += [(f"{at}{path}/cgroup.events", "frozen 1") for at in ("", "/unified")]
    for file, text in files:
        with contextlib.suppress(OSError):
            if text in Path(f"/sys/fs/cgroup{file}").read_text():
                return True
    return False


def _wait_of(fields: list[str], now: int) -> Wait:
    call, since, what, where, culprit = fields
    seconds = (now - int(since)) / 1e9 if int(since) else None
    return Wait(int(call), seconds, what, where, culprit)


def _members(pid: int) -> Iterator[Member]:
    stopped, own = _is_stopped(pid), _own_number(pid)
    for board in _boards(pid):
        for group, calls, written, text in _contents(own, board):
            with contextlib.suppress(ValueError):  # a damaged board
                if (member := _member(pid, group, calls, written, text, stopped)) is not None:
                    yield member


def _member(
    pid: int, group: int, calls: int, written: int, text: str, stopped: bool
) -> Member | None:
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    lines = [line.split("\t") for line in text.splitlines()]
    head = next((line for line in lines if line[0] == "group" and len(line) == 5), None)
    if head is None:
        return None
    waits = [_wait_of(line[1:], now) for line in lines if line[0] == "wait" and len(line) == 6]
    if (now - written) / 1e9 > _FRESH:
        waits = []
    state = "waits" if waits else "computes"
    if stopped:
        state, waits = "stopped", []
    rank, size, job_rank = (int(field) for field in head[2:])
    return Member(head[1], f"{group:016x}", rank, job_rank, size, pid, state, calls, waits)


def look(pids: Iterable[int] | None = None) -> list[Member]:
    """Returns the ranks of processes, ordered by group and rank.

    Args:
        pids: the processes; None for all of this host that can be read.

    Raises:
        FileNotFoundError: there is no such process.
        PermissionError: a process belongs to another user.
    """
    found = []
    for pid in pids if pids is not None else _all_pids():
        try:
            found += list(_members(pid))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            if pids is not None:
                raise
    return _sorted(found)


def _sorted(members: list[Member]) -> list[Member]:
    return sorted(members, key=lambda member: (member.id, member.rank))


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _descendants(pid: int) -> list[int]:
    """Returns the children of a process, and theirs: the ranks, if it is a launcher."""
    children: dict[int, list[int]] = defaultdict(list)
    for other in _all_pids():
        children[_state_and_parent(other)[1]].append(other)
    found, left = [], [pid]
    while left:
        more = children[left.pop()]
        found += more
        left += more
    return found


def _has_board(pid: int) -> bool:
    """Returns whether a process has a status board of its own."""
    own = _own_number(pid)
    return any(_is_own(own, board) for board in _boards(pid))


def _state(member: Member) -> str:
    if member.state == "stopped":
        return f"stopped by a signal, a debugger or a freezer, after call #{member.calls}"
    if not member.waits:
        return f"waits for nobody, after call #{member.calls}"
    texts = []
    for wait in member.waits:
        seconds = "" if wait.seconds is None else f" for {wait.seconds:.1f} s"
        call = f"in #{wait.call}, {wait.what}: " if wait.call else ""
        culprit = f"; {wait.culprit}" if wait.culprit else ""
        texts.append(f"waits{seconds} {call}{wait.where}{culprit}")
    return "\n           ".join(texts)


def _verdicts(members: list[Member]) -> Iterator[str]:
    """Says which ranks others wait for in a collective call that they have not made."""
    waiting = [wait.call for member in members for wait in member.waits if wait.call]
    for call in sorted(set(waiting)):
        late = [member for member in members if member.calls < call]
        if late:
            ranks = ", ".join(f"{member.job_rank} (pid {member.pid})" for member in late)
            verb = "rank has" if len(late) == 1 else "ranks have"
            yield f"  → {len(late)} {verb} not made call #{call} yet: {ranks}"


def _place(member: Member) -> str:
    return "" if member.rank == member.job_rank else f"{member.rank} of the group: "


def text_of(members: list[Member]) -> str:
    """Returns the members as a text for the terminal; see `main`."""
    groups: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        groups[member.id].append(member)
    lines = []
    for those in groups.values():
        lines.append(f'group "{those[0].group}" of {plural(those[0].size, "rank")}')
        lines += [f"  rank {m.job_rank:<3} pid {m.pid:<8} {_place(m)}{_state(m)}" for m in those]
        absent = sorted(set(range(those[0].size)) - {member.rank for member in those})
        if absent:
            of = " of the group" if any(_place(member) for member in those) else ""
            ranks = ", ".join(spans(absent))
            lines.append(f"  not among the processes looked at: rank {ranks}{of}")
        lines += _verdicts(those)
    return "\n".join(lines)


def _pid(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a process")
    return int(text)


@dataclasses.dataclass
class _Found:
    """What a command has found: ranks, processes that have no group, and what went wrong."""

    members: list[Member] = dataclasses.field(default_factory=list)
    without_group: list[int] = dataclasses.field(default_factory=list)
    unreadable: int = 0
    errors: list[str] = dataclasses.field(default_factory=list)
    users: set[int] = dataclasses.field(default_factory=set)  # processes that use smddp

    def add(self, pid: int) -> bool:
        """Looks at a process; returns whether it uses smddp."""
        if pid in self.users:  # named twice, or once beside its launcher
            return True
        members = list(_members(pid))
        self.members += members
        if not members and _has_board(pid):
            self.without_group.append(pid)
        elif not members:
            return False
        self.users.add(pid)
        return True

    def add_named(self, pid: int) -> None:
        """Looks at a process that the user has named, or else at its children."""
        try:
            if self.add(pid):
                return
            if sum(self._tried(child) for child in _descendants(pid)) > 0:
                return
            self.errors.append(f"process {pid} does not use smddp, and has no child that does")
        except (FileNotFoundError, ProcessLookupError):
            self.errors.append(f"there is no process {pid}")
        except PermissionError:
            self.errors.append(
                f"may not read process {pid}: run this as its user; a container may forbid it to "
                "root, too"
            )
        except OSError as error:  # such as no free descriptor
            self.errors.append(f"cannot read process {pid}: {error}")

    def add_all(self) -> None:
        """Looks at all processes of this host."""
        try:
            for pid in _all_pids():
                self._tried(pid)
        except OSError as error:
            self.errors.append(f"cannot read the processes of this host: {error}")
            return
        if not self.members and not self.without_group:
            others = f"; {self.unreadable} could not be read" if self.unreadable else ""
            self.errors.append(f"no process of this host uses smddp{others}")

    def _tried(self, pid: int) -> bool:
        try:
            return self.add(pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        except PermissionError:
            self.unreadable += 1
            return False


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 if a process cannot be read or does not use smddp."""
    parser = argparse.ArgumentParser(
        prog="smddp status",
        description="Shows what ranks on this host are doing, without stopping them.",
    )
    parser.add_argument("pid", nargs="*", type=_pid, help="a rank's process, or its launcher")
    parser.add_argument("--all", action="store_true", help="all processes of this host")
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")
    options = parser.parse_args(arguments)
    if options.all and options.pid:
        parser.error("pids and --all exclude each other")
    if not options.all and not options.pid:
        parser.error("name processes by their pids, or say --all")
    found = _Found()
    if options.all:
        found.add_all()
    for pid in options.pid:
        found.add_named(pid)
    members = _sorted(found.members)
    if options.json:
        print(json.dumps([dataclasses.asdict(member) for member in members], indent=2))
    elif members:
        print(text_of(members))
    for pid in found.without_group:
        print(
            f"process {pid} has no group: it may wait in init_process_group() for ranks that have "
            "not called it, or its groups have ended",
            file=sys.stderr if options.json else sys.stdout,
        )
    for error in found.errors:
        print(f"smddp status: {error}", file=sys.stderr)
    return 1 if found.errors else 0


if __name__ == "__main__":
    run(main)
