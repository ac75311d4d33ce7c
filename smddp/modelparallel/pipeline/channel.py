"""Streams of messages between the ranks of a pipeline.

There is one stream per ordered pair of ranks. Messages of one stream arrive in order; between
streams there is no order. A step begins and ends on every stream: END is the last message of a rank
to each other rank in a step, whether the step went well or not. So between steps nobody has a
receive posted, and a failed step leaves no message behind.

One thread per peer receives. It waits for nothing but the network, and hands every message to
`deliver` at once; hence a sender is never held up for long, whatever the receiver computes.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.pipeline.protocol import Kind
from smddp.modelparallel.pipeline.wire import ENVELOPE, Message, decode, encode

__all__ = ["Channel"]


class Channel:
    """This rank's ends of all streams of its pipeline.

    Owns the receiving threads, which end with the process. After `failed` was called for a peer the
    channel is broken for good: a step that needs it raises.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        size: int,
        deliver: Callable[[int, Message], None],
        failed: Callable[[int, Exception], None],
    ) -> None:
        self._group = group
        self._deliver = deliver
        self._failed = failed
        self.peers = [peer for peer in range(size) if peer != rank]
        self.broken: dict[int, Exception] = {}
        # Sends under way, with the memory they read.
        self._sending: deque[tuple[Any, list[torch.Tensor]]] = deque()
        self._lock = threading.Lock()
        # A receiver runs while its gate is open, which is from open() to the peer's END.
        self._gates = {peer: threading.Semaphore(0) for peer in self.peers}
        self._ended = threading.Semaphore(0)
        self._ended_peers: set[int] = set()
        for peer in self.peers:
            name = f"smp-from-{peer}"
            threading.Thread(target=self._receive, args=(peer,), name=name, daemon=True).start()

    def open(self) -> None:
        """Begins a step on all streams."""
        self._ended_peers.clear()
        for gate in self._gates.values():
            gate.release()

    def send(self, peer: int, message: Message) -> None:
        """Sends a message; returns at once. Its tensors must not change any more."""
        parts = encode(message)
        with self._lock:
            while self._sending and all(w.is_completed() for w in self._sending[0][0]):
                self._sending.popleft()
            works = [self._group.send([part], peer, 0) for part in parts]
            self._sending.append((works, parts))

    def drain(self, patience: float) -> list[int]:
        """Waits until every peer has sent END and every send of ours is complete.

        Returns:
            The peers whose END has not come within `patience` seconds.
        """
        for _ in self.peers:
            if not self._ended.acquire(timeout=patience):
                return [peer for peer in self.peers if peer not in self._ended_peers]
        with self._lock:
            for works, _ in self._sending:
                for work in works:
                    # A send to a peer that is gone; the peer's loss has been reported.
                    with contextlib.suppress(RuntimeError):
                        work.wait()
            self._sending.clear()
        return []

    def _receive(self, peer: int) -> None:
        gate = self._gates[peer]
        while True:
            gate.acquire()
            try:
                self._receive_step(peer)
            except Exception as error:
                self.broken[peer] = error
                self._failed(peer, error)
            self._ended_peers.add(peer)
            self._ended.release()
            if peer in self.broken:
                return

    def _receive_step(self, peer: int) -> None:
        def receive(size: int) -> torch.Tensor:
            data = torch.empty(size, dtype=torch.uint8)
            self._group.recv([data], peer, 0).wait()
            return data

        while True:
            message = decode(receive(ENVELOPE), receive)
            self._deliver(peer, message)
            if message.kind == Kind.END:
                return
