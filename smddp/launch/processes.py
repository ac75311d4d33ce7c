"""Processes that one thread starts, watches and ends: their output by lines, and how they ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import IO

__all__ = ["GRACE", "Child", "Children", "die_with_parent", "how_it_ended"]

GRACE = 30.0  # seconds that a process has to end after SIGTERM, as torchrun gives it
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent(parent: int) -> None:
    """Lets the kernel kill this process, a new child, as soon as its parent has died."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def how_it_ended(code: int) -> str:
    """Returns a return code of a process in words."""
    if code >= 0:
        return f"ended with status {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


class Child:
    """A process that Children has started.

    Args:
        label: begins each line of its output; may be changed.
        process: the process itself.
    """

    def __init__(self, label: str, process: subprocess.Popen[bytes]) -> None:
        self.label = label
        self.process = process
        self.pid = process.pid
        self.last_words = ""  # the last line that it wrote to its standard error
        self.is_smddprun = False  # it has said so there


class Children:
    """All processes that this one has started, each in a process group of its own.

    One thread uses it, the main one. While it exists, SIGINT, SIGTERM and SIGHUP are only noted, in
    `signals`. If this process is killed, the kernel kills its children.
    """

    def __init__(self) -> None:
        self.running: list[Child] = []
        self.signals: list[int] = []
        self._is_output_lost = False
        self._selector = selectors.DefaultSelector()
        self._unfinished: dict[IO[bytes], bytes] = {}  # the beginnings of lines
        self._wakes, wakeup = socket.socketpair()
        for end in (self._wakes, wakeup):
            end.setblocking(False)
        self._wakeup = wakeup
        self._selector.register(self._wakes, selectors.EVENT_READ)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # ignored ones wake nobody
        for each in _FORWARDED:
            if signal.getsignal(each) != signal.SIG_IGN:  # as under nohup
                signal.signal(each, self._note)

    def start(
        self,
        command: Sequence[str],
        variables: dict[str, str],
        label: str = "",
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Starts a process.

        Raises:
            OSError: it cannot be started.
        """
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        child = Child(label, process)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._unfinished[stream] = b""
            self._selector.register(stream, selectors.EVENT_READ, child)
        self.running.append(child)
        return child

    def wait(self, until: float | None = None) -> list[Child]:
        """Copies output until a process ends, a signal comes, or until a time.monotonic().

        Returns:
            The processes that have ended, those that a signal has killed first. What else is in
            their process groups has been killed, too.
        """
        while True:
            if ended := [child for child in self.running if self._reap(child)]:
                return sorted(ended, key=lambda child: child.process.returncode >= 0)
            rest = None if until is None else until - time.monotonic()
            if self.signals or (rest is not None and rest <= 0):
                return []
            for key, _ in self._selector.select(rest):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._wakes.recv(4096)
                else:
                    self._copy(key.data, key.fileobj)  # type: ignore[arg-type]

    def end(self, which: Sequence[Child], number: int = 0, grace: float = GRACE) -> None:
        """Sends a signal to processes, and kills those that it does not end; returns at their end.

        Signal 0 is none: they have been told otherwise.

        Another signal that arrives here meanwhile shortens the time that they have.
        """
        which = list(which)
        for each in (number, signal.SIGKILL):
            self.signals.clear()
            for child in self._those_that_run(which):
                os.kill(child.pid, each)
            until = time.monotonic() + grace
            while self._those_that_run(which) and not self.signals and time.monotonic() < until:
                self.wait(until)

    def _those_that_run(self, which: Sequence[Child]) -> list[Child]:
        return [child for child in which if child in self.running]

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signals.append(number)

    def _reap(self, child: Child) -> bool:
        """Returns whether a process has ended; then it is no longer one of those that run."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, child.pid, how) is None:
            return False
        # Before its number may be given to another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.process.wait()
        self.running.remove(child)
        for stream in (child.process.stdout, child.process.stderr):
            assert stream is not None
            while stream in self._unfinished and self._copy(child, stream):
                pass
        return True

    def _copy(self, child: Child, stream: IO[bytes]) -> bool:
        """Copies what a process has written, by whole lines; returns whether there may be more."""
        data = stream.read(1 << 16)
        if data is None:  # nothing now
            return False
        is_error = stream is child.process.stderr
        # Progress bars end their lines by \r.
        text = (self._unfinished[stream] + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        if rest and (not data or len(rest) > 1 << 16):
            lines.append(rest)
            rest = b""
        for line in lines:
            if is_error and line.strip():
                child.last_words = line.decode(errors="replace").strip()
                child.is_smddprun |= line.startswith(b"smddprun: ")
        begin = child.label.encode()
        self._write(2 if is_error else 1, b"".join(begin + line + b"\n" for line in lines))
        self._unfinished[stream] = rest
        if not data:
            self._selector.unregister(stream)
            del self._unfinished[stream]
            stream.close()
        return bool(data)

    def _write(self, descriptor: int, data: bytes) -> None:
        """Writes lines; if nobody reads them any more, that counts as the signal SIGPIPE."""
        while data and not self._is_output_lost:
            try:
                data = data[os.write(descriptor, data) :]
            except OSError:
                self._is_output_lost = True
                self.signals.append(signal.SIGPIPE)
