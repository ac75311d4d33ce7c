"""Starts the ranks of a job on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["leaving_at_signals", "python_command", "reserved_port", "start_ranks"]


# The signals that have come while a rank is being started; None while none is.
_held: list[int] | None = None


@contextlib.contextmanager
def leaving_at_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP raise SystemExit meanwhile, as Ctrl-C raises KeyboardInterrupt.

    Otherwise they would end this process before it ends the ranks that it has started.
    """

    def leave(number: int, _: Any) -> None:
        if _held is None:
            raise SystemExit(128 + number)
        _held.append(number)  # nobody would know the rank that has just been started

    # Signals that are ignored stay so, as under nohup. Only the main thread may change any.
    is_main = threading.current_thread() is threading.main_thread()
    both = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    changed = [each for each in both if signal.getsignal(each) == signal.SIG_DFL]
    for each in changed:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in changed:
            signal.signal(each, signal.SIG_DFL)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a port on this host that the kernel does not assign until the with statement ends.

    A port that was only found free may become the source port of another connection before the
    server binds it. Then the server cannot bind, or a client that retries connects to itself.
    """
    with socket.socket() as holder:
        # This socket does not listen. A server with SO_REUSEADDR, such as torch's, can bind the
        # port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def python_command(module: str) -> list[str]:
    """Returns what runs a module in a new interpreter, which imports what this one imports.

    `python -m` would look in the current folder first. That may be a clone, whose sources are not
    built, where this interpreter has an installed smddp.
    """
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"import runpy, sys; sys.path[:] = {sys.path!r}; {run}"]


def start_ranks(
    layout: Sequence[int], command: Sequence[str], port: int, output: int | None = None
) -> list[subprocess.Popen[bytes]]:
    """Starts a command once per rank.

    Args:
        layout: the number of ranks of each node; with several nodes SMDDP_NODE_ID is set.
        command: what each rank runs.
        port: where rank 0 makes torch's store.
        output: where output and errors go, such as subprocess.PIPE; None: where this process's go.

    Raises:
        OSError: one cannot be started; then none runs.
    """
    # If a torchrun has started this process, its store is not that of these ranks.
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("TORCHELASTIC_")}
    common = {
        "OMP_NUM_THREADS": "1",
        **inherited,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(sum(layout)),
    }
    global _held
    ranks: list[subprocess.Popen[bytes]] = []
    for node, size in enumerate(layout):
        for local in range(size):
            own = {
                "RANK": str(len(ranks)),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(size),
            }
            if len(layout) > 1:
                own["SMDDP_NODE_ID"] = f"node{node}"
            environ = {**common, **own}
            came = _held = []
            try:
                ranks.append(subprocess.Popen(command, env=environ, stdout=output, stderr=output))
                _held = None
                if came:
                    raise SystemExit(128 + came[0])
            except BaseException:
                _held = None
                for rank in ranks:
                    rank.kill()
                    rank.wait()
                raise
    return ranks
