"""`smddprun --elastic`: one process per host that starts ranks again, each by itself.

A rank that was killed by a signal, or ended with status 75, is started again in its place, or a
spare takes that place. The others go on. Any other status but 0 ends the job.

The supervisor imports no torch, so it starts at once; the store at MASTER_PORT, where the ranks
meet, is in a process beside it (`store.py`). What the ranks are told is in `_variables`.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from smddp.launch.processes import Child, Children, how_it_ended
from smddp.launch.spare import JOB_LOST, SPARE, key_of_spare

__all__ = ["Host", "supervise"]

# What a rank has that runs this command, but its ranks do not, or no spare.
_OF_A_RANK = (SPARE, "SMDDP_ELASTIC", "SMDDPRUN_RANK", "TORCHELASTIC_ERROR_FILE", "RANK",
              "LOCAL_RANK", "ROLE_RANK")  # fmt: skip
_MINUTE = 60.0
_MOMENT = 5.0  # seconds within which others may fail because a rank was killed


@dataclass(frozen=True)
class Host:
    """What a supervisor starts.

    Args:
        command: of each rank.
        index: which of the job's hosts this one is.
        hosts: their number.
        first: rank of its first place.
        world: number of places of the job.
        places: number of ranks here.
        nodes: for each place here, the name of the node that it plays; empty if it plays none.
        spares: how many wait here.
        restarts: most starts of one place in a minute, besides the first.
        address, port: where the ranks meet; port 0 means any.
    """

    command: Sequence[str]
    index: int
    hosts: int
    first: int
    world: int
    places: int
    nodes: Sequence[str]
    spares: int
    restarts: int
    address: str
    port: int


@dataclass
class _Place:
    """A rank, or a spare (rank None), whose process may change."""

    rank: int | None
    due: float | None = 0.0  # when its next process is to start; None: it has one, or gets none
    child: Child | None = None
    starts: int = 0
    number: int = 0  # of a spare: that of its process
    times: list[float] = field(default_factory=list)  # of its losses within a minute

    def __str__(self) -> str:
        name = f"spare {self.number}" if self.rank is None else f"rank {self.rank}"
        return f"{name} (pid {self.child.pid})" if self.child else name


def supervise(host: Host, dry_run: bool = False) -> None:
    """Starts ranks, and starts again what is lost, until all have ended with 0.

    Args:
        host: says what to start.
        dry_run: only print what would run.

    Raises:
        SystemExit: with the status of the first rank that failed; with 128 and the number of a
            signal that has ended this process, or the last rank; with 1 if something cannot start.
    """
    if dry_run:
        for place in range(host.places):
            variables = _variables(host, host.port) | _variables_of_place(host, place, 0)
            words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
            print(" ".join([*words, shlex.join(host.command)]))
        return
    try:
        _Supervisor(host).run()
    except OSError as error:
        raise SystemExit(f"smddprun: {host.command[0]}: {error.strerror}") from None


def _say(text: str) -> None:
    sys.stderr.write(f"smddprun: {text}\n")
    sys.stderr.flush()


def _variables(host: Host, port: int) -> dict[str, str]:
    """Returns what all processes are told: torchrun's variables, but those of a place."""
    variables = {
        "GROUP_RANK": host.index,
        "GROUP_WORLD_SIZE": host.hosts,
        "LOCAL_WORLD_SIZE": host.places,
        "WORLD_SIZE": host.world,
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": host.world,
        "MASTER_ADDR": host.address,
        "MASTER_PORT": port,
        # The same in all processes, whose stores would else have different prefixes.
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": host.restarts,
        # Hosts that were started apart know no common name.
        "TORCHELASTIC_RUN_ID": uuid.uuid4() if host.hosts == 1 else "none",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "SMDDPRUN": 1,  # see `register_backend` in smddp/_registration.py
    }
    texts = {name: str(value) for name, value in variables.items()}
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS"):  # as torchrun does
        texts[name] = os.environ.get(name, "1")
    return texts


def _variables_of_place(host: Host, place: int, starts: int) -> dict[str, str]:
    rank = str(host.first + place)
    variables = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": str(place)}
    variables["SMDDP_ELASTIC"] = str(starts)
    if host.nodes:
        variables["SMDDP_NODE_ID"] = host.nodes[place]
    return variables


class _Supervisor:
    """Runs the processes of a host. If it is killed, they are killed."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._children = Children()
        self._places = [_Place(host.first + place) for place in range(host.places)]
        self._spares = [_Place(None) for _ in range(host.spares)]
        self._spares_started = 0
        self._is_done = False  # a rank has ended with 0
        self._killed: tuple[float, str] | None = None  # the last loss: when, and a sentence
        self._code = 0  # of the last rank that was given up
        self._store: Child | None = None

    def run(self) -> None:
        port = self._start_store()
        self._common = {**os.environ, **_variables(self._host, port)}
        for name in _OF_A_RANK:
            self._common.pop(name, None)
        self._start_due()
        _say("starts " + ", ".join(str(each) for each in (*self._places, *self._spares)))
        while any(place.child or place.due is not None for place in self._places):
            due = [each.due for each in (*self._places, *self._spares) if each.due is not None]
            ended = self._children.wait(min(due, default=None))
            if self._children.signals:
                self._stop_by_signal(self._children.signals[0])
            for child in ended:
                self._take_end_of(child)
            self._start_due()
        self._end_all(signal.SIGTERM)
        if not self._is_done:
            raise SystemExit(128 - self._code if self._code < 0 else self._code)

    def _start_store(self) -> int:
        """Starts the process with the store, or the one that writes to it for this host's spares.

        Returns:
            The port of the store.

        Raises:
            SystemExit: the port is in use.
        """
        host, port = self._host, self._host.port
        arguments: list[str] = []
        if host.index == 0:
            # Opened here, so that a port in use is known at once, and ranks may connect before
            # the store has begun.
            everywhere = host.hosts > 1
            is_dual = everywhere and socket.has_dualstack_ipv6()
            try:
                listener = socket.create_server(
                    ("" if everywhere else host.address, port),
                    family=socket.AF_INET6 if is_dual or ":" in host.address else socket.AF_INET,
                    backlog=1024,
                    dualstack_ipv6=is_dual,
                )
            except OSError as error:
                raise SystemExit(
                    f"smddprun: cannot listen at port {port} of {host.address}, where the ranks "
                    f"would meet: {os.strerror(error.errno or 0)}: set another MASTER_PORT"
                ) from None
            port = listener.getsockname()[1]
            arguments = [str(listener.fileno())]
        elif not host.spares:
            return port
        dropped = ("SMDDPRUN", "SMDDP_INSTEAD_OF", "RANK", "WORLD_SIZE")
        variables = {name: value for name, value in os.environ.items() if name not in dropped}
        self._store = self._children.start(
            [sys.executable, "-m", "smddp.launch.store", host.address, str(port), *arguments],
            variables, "[store]: ", subprocess.PIPE, [int(word) for word in arguments],
        )  # fmt: skip
        if arguments:
            listener.close()  # then connecting fails as soon as the store has ended
        return port

    def _start_due(self) -> None:
        """Fills the places whose time has come: by a spare, or a new process."""
        now = time.monotonic()
        for place in (*self._places, *self._spares):
            if place.due is None or place.due > now:
                continue
            place.due = None
            if place.starts and self._take_spare(place):
                continue
            variables = dict(self._common)
            if place.rank is None:
                self._spares_started += 1
                place.number = self._spares_started
                variables[SPARE] = str(place.number)
                label = f"[spare {place.number}]: "
            else:
                variables |= self._variables_of(place)
                label = f"[rank {place.rank}]: "
            place.child = self._children.start(self._host.command, variables, label)
            place.starts += 1
            if place.starts > 1:
                _say(f"{place} came")

    def _variables_of(self, place: _Place) -> dict[str, str]:
        assert place.rank is not None
        return _variables_of_place(self._host, place.rank - self._host.first, place.starts)

    def _take_spare(self, place: _Place) -> bool:
        """Lets the spare that has waited longest take a place, if there is one."""
        waiting = [each for each in self._spares if each.child]
        if place.rank is None or not waiting or self._store is None:
            return False
        spare = min(waiting, key=lambda each: each.number)
        key = key_of_spare(self._host.index, spare.number)
        assert self._store.process.stdin is not None
        line = f"{key}\t{json.dumps(self._variables_of(place))}\n"
        try:
            self._store.process.stdin.write(line.encode())
        except OSError:  # it has just ended
            return False
        place.child, spare.child, spare.due = spare.child, None, time.monotonic()
        assert place.child is not None
        place.child.label = f"[rank {place.rank}]: "
        place.starts += 1
        _say(f"{place} came: it was spare {spare.number}")
        return True

    def _take_end_of(self, child: Child) -> None:
        code = child.process.returncode
        if child is self._store:
            _say(f"the store {how_it_ended(code)}: who is in the job goes on, nobody can come")
            self._store = None
            return
        place = next(each for each in (*self._places, *self._spares) if each.child is child)
        if code < 0 or code == JOB_LOST:
            self._take_loss_of(place, code)
        elif code and place.rank is not None:
            self._fail(place, code)
        elif place.rank is not None:
            self._is_done = True
            for each in self._places:
                each.due = None  # it would wait for members that have ended
        else:
            _say(f"{place} {how_it_ended(code)} before it was needed")
        place.child = None

    def _take_loss_of(self, place: _Place, code: int) -> None:
        """Decides when a process that was killed, or has lost the job, gets a successor."""
        now = time.monotonic()
        self._tell_of_death(place, code)
        self._killed = (now, f"{place} {how_it_ended(code)}")
        place.times = [when for when in place.times if when > now - _MINUTE]
        if self._is_done:
            why = "others have ended with 0"
        elif self._store is None and self._host.index == 0:
            why = "the store has ended"
        elif len(place.times) >= self._host.restarts:
            why = f"--max-restarts {self._host.restarts} in a minute"
        else:
            # At once after the first loss; then 1, 2, 4, ... seconds.
            place.due = now + (2 ** (len(place.times) - 1) if place.times else 0)
            place.times.append(now)
            return
        _say(f"{place} is not started again: {why}")
        self._code = code if place.rank is not None else self._code

    def _tell_of_death(self, place: _Place, code: int) -> None:
        """Tells that a process of this host has died; it has been reaped.

        Here other members of the job could be told, too. The kernel reports the end of a process
        only after it has freed its memory (60 ms for a GiB): a robust mutex is quicker.
        """
        _say(f"{place} left: it {how_it_ended(code)}")

    def _fail(self, place: _Place, code: int) -> NoReturn:
        """Ends the job because of a rank's status."""
        child = place.child
        assert child is not None
        said = f": {child.last_words}" if child.last_words else ""
        cause = f"{place} {how_it_ended(code)}{said}"
        if self._killed and self._killed[0] > time.monotonic() - _MOMENT:
            cause = f"{self._killed[1]}; then {cause}"
        _say(f"the job ends. Root cause: {cause}")
        self._end_all(signal.SIGTERM)
        raise SystemExit(code)

    def _stop_by_signal(self, number: int) -> NoReturn:
        self._end_all(signal.SIGTERM if number == signal.SIGPIPE else number)
        _say(f"ended by {signal.Signals(number).name}")
        raise SystemExit(128 + number)

    def _end_all(self, number: int) -> None:
        """Ends all ranks and spares, and then the store."""
        self._children.end([each for each in self._children.running if each != self._store], number)
        self._children.end(self._children.running, signal.SIGKILL)
