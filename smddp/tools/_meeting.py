"""What the ranks of a job tell one another without a group: for `smddp doctor` and `smddp topo`.

All goes through the store of the launcher, which every rank reaches, even where the hosts cannot
connect to one another.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

__all__ = ["Dial", "Meeting", "dial_all"]

_DIALLING = 3.0  # seconds until an address counts as one that does not answer


class Meeting:
    """All ranks of a job, at the store of rank 0.

    Attributes:
        rank, size: of the job.
        store: for a process group of these ranks.
    """

    def __init__(self, timeout: timedelta) -> None:
        """Waits until all ranks are here; their variables are set.

        Args:
            timeout: also of every later wait.

        Raises:
            RuntimeError: not all ranks have come.
        """
        from torch.distributed import distributed_c10d
        from torch.distributed.rendezvous import rendezvous

        store, self.rank, self.size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        self.store = distributed_c10d.PrefixStore("group", store)
        self._store = distributed_c10d.PrefixStore("doctor", store)
        self.gather("here", True)

    def tell(self, what: str, value: Any) -> None:
        """Tells the others something of this rank; JSON has to know the value."""
        self._store.set(f"{what}/{self.rank}", json.dumps(value))

    def told(self, what: str) -> list[Any]:
        """Returns what all ranks tell, by rank.

        Raises:
            RuntimeError: a rank has not told it in time.
        """
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        self._store.wait(keys)
        return [json.loads(value) for value in self._store.multi_get(keys)]

    def gather(self, what: str, value: Any) -> list[Any]:
        """Tells the value of this rank, and returns those of all ranks; see `told`."""
        self.tell(what, value)
        return self.told(what)


class Dial(NamedTuple):
    """A host that could not connect to another one.

    Attributes:
        source: a rank of the host that tried.
        target: a rank of the other host; the same rank if it could not wait for connections.
        address: that it tried.
        error: of the system.
        silent: nothing has answered: a firewall drops packets, or there is no route.
    """

    source: int
    target: int
    address: str
    error: str
    silent: bool


def dial_all(meeting: Meeting, ranks: Sequence[int], address: str) -> list[Dial]:
    """Lets each of these ranks connect to each other one; returns what failed, on all ranks.

    All ranks of the job call it. It takes at most `_DIALLING` seconds for each 64 hosts.

    Args:
        meeting: of the job.
        ranks: one of each host; they are the same on all ranks.
        address: at which others are to reach this rank.

    Raises:
        RuntimeError: a rank does not answer.
    """
    me = meeting.rank
    takes_part = me in ranks
    failed: list[Dial] = []
    with contextlib.ExitStack() as stack:
        port = None
        if takes_part:
            try:
                port = stack.enter_context(_listener(address))
            except (OSError, RuntimeError) as error:  # RuntimeError: there is no thread
                failed = [Dial(me, me, address, _reason(error), False)]
        # Also a rank without a port tells the others, who would wait for it.
        places = meeting.gather("address", [address, port])
        if takes_part:
            peers = [peer for peer in ranks if peer != me and places[peer][1] is not None]
            with ThreadPoolExecutor(max_workers=64) as pool:
                dials = pool.map(lambda peer: _dial(me, peer, *places[peer]), peers)
                failed += [dial for dial in dials if dial is not None]
        return [Dial(*one) for some in meeting.gather("dials", failed) for one in some]


@contextlib.contextmanager
def _listener(address: str) -> Iterator[int]:
    """Accepts connections at an address; yields the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=128) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends `accept`
            thread.join()


def _reason(error: OSError | RuntimeError) -> str:
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number in errno.errorcode:
        return os.strerror(number)  # Python adds to the text
    return getattr(error, "strerror", None) or str(error)


def _dial(source: int, target: int, address: str, port: int) -> Dial | None:
    try:
        socket.create_connection((address, port), _DIALLING).close()
    except OSError as error:
        silent = isinstance(error, TimeoutError)
        text = f"no answer within {_DIALLING:g} s" if silent else _reason(error)
        return Dial(source, target, f"{address}:{port}", text, silent)
    return None
