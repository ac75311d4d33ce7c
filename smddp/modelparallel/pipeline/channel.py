"""Streams of messages between the ranks of a pipeline.

There is one stream per ordered pair of ranks. Messages of one stream arrive in order; between
streams there is no order. A step begins and ends on every stream: END is the last message of a rank
to each other rank in a step, whether the step went well or not. So between steps nobody has a
receive posted, and a failed step leaves no message behind.

A receive is posted on every stream all the time, and sends are not waited for: so no sender is held
up by what the receiver computes. What has come is taken by `Channel.take`. Over smddp, the thread
that calls it waits for all streams at once. torch.distributed knows no such wait, so over other
backends each stream has a thread, which fills a queue.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from smddp import _C
from smddp.modelparallel.pipeline.protocol import Kind
from smddp.modelparallel.pipeline.wire import ENVELOPE, Message, decode, encode

__all__ = ["Arrival", "Channel", "Ended"]


class Ended(NamedTuple):
    """A stream has ended in this step."""

    error: Exception | None


Arrival = tuple[int, Message | Ended]


class Channel:
    """This rank's ends of all streams of its pipeline.

    One thread takes; any thread sends and interrupts. Once a stream has ended with an error the
    channel is broken for good: a step that needs it raises.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.peers = [peer for peer in range(size) if peer != rank]
        self.broken: dict[int, Exception] = {}
        self._all_ended = threading.Event()
        self._ended_peers = set(self.peers)
        backend: Any = group._get_backend(torch.device("cpu"))
        self._streams: _Streams
        if isinstance(backend, _C.ProcessGroup):
            self._streams = _Together(backend)
        else:
            self._streams = _Threads(group, self.peers)
        # Returns what has come; with True, it waits until something has, or somebody interrupts.
        # `end` has to be called for an `Ended`, after all before it.
        self.take = self._streams.take
        # Ends the `take` that waits, or else the next one.
        self.interrupt = self._streams.interrupt
        # Sends a message; returns at once. Its tensors must not change any more.
        self.send = self._streams.send

    def open(self) -> None:
        """Begins a step on all streams."""
        self._streams.open()
        self._all_ended.clear()
        self._ended_peers.clear()

    @property
    def expects(self) -> bool:
        """May messages still come in this step?"""
        return len(self._ended_peers) < len(self.peers)

    def end(self, peer: int, ended: Ended) -> None:
        """Notes the end of a stream in this step."""
        if ended.error is not None:
            self.broken[peer] = ended.error
        self._ended_peers.add(peer)
        if not self.expects:
            self._all_ended.set()

    def drain(self, patience: float) -> list[int]:
        """Waits until every peer has sent END and every send of ours is complete.

        Somebody has to `take` meanwhile.

        Returns:
            The peers whose END has not come within `patience` seconds.
        """
        if not self._all_ended.wait(patience):
            return [peer for peer in self.peers if peer not in self._ended_peers]
        self._streams.flush()
        return []


class _Streams(Protocol):
    """How messages go and come; see Channel."""

    def open(self) -> None: ...

    def take(self, block: bool) -> list[Arrival]: ...

    def interrupt(self) -> None: ...

    def send(self, peer: int, kind: int, header: Any, tensors: Sequence[Any]) -> None: ...

    def flush(self) -> None: ...


class _Together:
    """Over smddp: the thread that takes waits for all streams at once."""

    def __init__(self, backend: _C.ProcessGroup) -> None:
        self._mailbox = _C.Mailbox(backend)
        self.open = self._mailbox.open
        self.interrupt = self._mailbox.interrupt
        self.flush = self._mailbox.flush

    def send(self, peer: int, kind: int, header: Any, tensors: Sequence[Any]) -> None:
        head = pickle.dumps((int(kind), header), pickle.HIGHEST_PROTOCOL)
        self._mailbox.send(peer, head, tensors, kind == Kind.END)

    def take(self, block: bool) -> list[Arrival]:
        arrived: list[Arrival] = []
        for peer, head, tensors, error in self._mailbox.take(block):
            if error:
                arrived.append((peer, Ended(RuntimeError(error))))
                continue
            kind, header = pickle.loads(head)
            arrived.append((peer, Message(kind, header, tensors)))
            if kind == Kind.END:
                arrived.append((peer, Ended(None)))
        return arrived


class _Threads:
    """Over any backend: a thread per stream.

    The threads end with the process. Each waits at its gate between steps.
    """

    # A backend may not say that a send is complete unless it is waited for. As somebody receives
    # all the time, that takes no longer than the network.
    _PENDING = 8

    def __init__(self, group: dist.ProcessGroup, peers: list[int]) -> None:
        self._group = group
        # None wakes who takes.
        self._arrived: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        # Sends under way, with the memory they read.
        self._sending: deque[tuple[list[Any], list[torch.Tensor]]] = deque()
        self._lock = threading.Lock()
        self._gates = {peer: threading.Semaphore(0) for peer in peers}
        for peer in peers:
            name = f"smp-from-{peer}"
            threading.Thread(target=self._run, args=(peer,), name=name, daemon=True).start()

    def open(self) -> None:
        for gate in self._gates.values():
            gate.release()

    def _run(self, peer: int) -> None:
        while True:
            self._gates[peer].acquire()
            try:
                self._receive_step(peer)
            except Exception as error:
                self._arrived.put((peer, Ended(error)))
                return
            self._arrived.put((peer, Ended(None)))

    def _receive_step(self, peer: int) -> None:
        def receive(size: int) -> torch.Tensor:
            data = torch.empty(size, dtype=torch.uint8)
            self._group.recv([data], peer, 0).wait()
            return data

        while True:
            message = decode(receive(ENVELOPE), receive)
            self._arrived.put((peer, message))
            if message.kind == Kind.END:
                return
            # Not held until the next one comes.
            del message

    def take(self, block: bool) -> list[Arrival]:
        arrived: list[Arrival | None] = []
        if block:
            arrived.append(self._arrived.get())
        with contextlib.suppress(queue.Empty):
            while True:
                arrived.append(self._arrived.get_nowait())
        return [one for one in arrived if one is not None]

    def interrupt(self) -> None:
        self._arrived.put(None)

    def send(self, peer: int, kind: int, header: Any, tensors: Sequence[Any]) -> None:
        parts = encode(Message(kind, header, list(tensors)))
        with self._lock:
            while len(self._sending) > self._PENDING:
                self._finish_one()
            works = [self._group.send([part], peer, 0) for part in parts]
            self._sending.append((works, parts))

    def flush(self) -> None:
        with self._lock:
            while self._sending:
                self._finish_one()

    def _finish_one(self) -> None:
        works, _ = self._sending.popleft()
        for work in works:
            # A send to a peer that is gone; the peer's loss is reported by its stream.
            with contextlib.suppress(RuntimeError):
                work.wait()
