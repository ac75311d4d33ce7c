"""Streams of messages between the ranks of a pipeline.

There is one stream per ordered pair of ranks, for the whole job. `Channel.open` begins a step on
all streams. END is the last message of a step on each stream, whether the step failed or not;
`send` tells the codec so. Messages of one stream arrive in order; between streams there is no
order. Between steps no receive is posted, and a failed step leaves no message behind.

Over smddp a sender never waits. Over other backends at most 8 messages are pending: before one
more, the sender waits until the oldest has been received, which does not depend on what the peer
computes, because the peer has threads that only receive. `Channel.take` returns the messages that
have come. Over smddp, the thread that calls it waits for all streams at once. torch.distributed has
no such wait, so over other backends each stream that comes in has a thread, which fills a queue. In
both cases the bytes are those of csrc/process_group/message_codec.h.

Tensors travel in host memory. One that is on a device when it is sent arrives on the device of the
rank that receives it; one that is on the CPU stays there.
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

from smddp.modelparallel.core.failure import summary
from smddp.modelparallel.torch.pipeline.pickling import dumps
from smddp.modelparallel.torch.pipeline.protocol import Kind, Message
from smddp.torch import _C
from smddp.torch.backend import backend_of

__all__ = ["Arrival", "Channel", "Ended"]


class Ended(NamedTuple):
    """The end of a step on one stream.

    Attributes:
        error: why the stream is broken; None if END has come.
    """

    error: Exception | None


# What has come, and the rank of its sender in the pipeline.
Arrival = tuple[int, Message | Ended]

_NESTED = (
    "smp cannot send nested tensors between ranks. In eval mode nn.TransformerEncoder makes them "
    "of a padding mask, unless it was created with enable_nested_tensor=False"
)

# Types of devices whose tensors are sent as they are.
_HOST = "cpu", "meta"

# How many bytes of a message `_ThreadStreams` receives before it knows the length.
_FIRST_BYTES = 8192


class Channel:
    """This rank's ends of all streams of its pipeline.

    One thread at a time may call `take`; any thread may call `send` and `interrupt`. A stream that
    has failed stays broken, and the rank leaves the job; see `Departure`.

    Attributes:
        peers: the other ranks of the pipeline.
        broken: the error of each stream that is broken, by peer.
        expects: may messages still come in this step?
        take: returns what has come; with True it waits until something has come, or somebody calls
            `interrupt`. Whoever calls `take` passes each `Ended` to `end`, after the messages
            before it.
        interrupt: ends the `take` that waits, or else the next one.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Begins no step yet.

        Args:
            group: the ranks of the pipeline; nothing else sends messages in it.
            rank: of this process in the group.
            size: of the group.
        """
        self.peers = [peer for peer in range(size) if peer != rank]
        self.broken: dict[int, Exception] = {}
        self._all_ended = threading.Event()
        self._ended_peers = set(self.peers)
        self.expects = False
        backend = backend_of(group, "cpu")
        self._streams: _Streams
        if isinstance(backend, _C.ProcessGroup):
            self._streams = _MailboxStreams(backend)
        else:
            self._streams = _ThreadStreams(group, self.peers)
        self.take = self._streams.take
        self.interrupt = self._streams.interrupt

    def send(
        self, peer: int, kind: int, header: Any, tensors: Sequence[torch.Tensor | None] = ()
    ) -> None:
        """Sends a message; see the top of this file.

        Args:
            peer: a rank of the pipeline.
            kind: a `Kind`.
            header: is pickled.
            tensors: on any devices. Those in host memory must not change until they have left,
                because large ones are not copied.
        """
        devices = None
        for tensor in tensors:
            if tensor is not None and tensor.device.type not in _HOST:
                devices = [None if one is None else one.device.type for one in tensors]
                tensors = [None if one is None else _moved(one, "cpu") for one in tensors]
                break
        pickled = dumps((int(kind), header, devices))
        try:
            self._streams.send(peer, pickled, tensors, kind == Kind.END)
        except RuntimeError as error:
            if any(tensor is not None and tensor.is_nested for tensor in tensors):
                raise TypeError(_NESTED) from error
            raise

    def open(self) -> None:
        """Begins a step on all streams."""
        self._streams.open()
        self._all_ended.clear()
        self._ended_peers.clear()
        self.expects = bool(self.peers)

    def end(self, peer: int, ended: Ended) -> None:
        """Notes the end of the step on a stream."""
        if ended.error is not None:
            self.broken[peer] = ended.error
        self._ended_peers.add(peer)
        if len(self._ended_peers) == len(self.peers):
            self.expects = False
            self._all_ended.set()

    def drain(self, timeout: float) -> list[int]:
        """Waits until every peer has sent END and every send of this rank is complete.

        Another thread has to call `take` meanwhile.

        Args:
            timeout: seconds to wait for END.

        Returns:
            The peers whose END has not come within `timeout` seconds.
        """
        if not self._all_ended.wait(timeout):
            return [peer for peer in self.peers if peer not in self._ended_peers]
        self._streams.flush()
        return []


class _Streams(Protocol):
    """How messages are sent and received: one class for smddp, one for other backends.

    `Channel` says what the methods do; `flush` waits until every send is complete.
    """

    def open(self) -> None: ...

    def take(self, block: bool) -> list[Arrival]: ...

    def interrupt(self) -> None: ...

    def send(self, peer: int, header: bytes, tensors: Sequence[Any], last: bool) -> None: ...

    def flush(self) -> None: ...


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Returns the tensor on a device. It has the same `requires_grad`, which the codec sends."""
    if tensor.device.type in (device, "meta"):
        return tensor
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def _message(pickled: bytes, tensors: list[Any]) -> Message:
    """Returns what `Channel.send` was given; tensors of a device are on this thread's device."""
    try:
        kind, header, devices = pickle.loads(pickled)
    except BaseException as error:  # of an object of the script; signals raise elsewhere
        return Message(Kind.UNREADABLE, summary(error), [])
    if devices is not None:
        tensors = [
            None if tensor is None else _moved(tensor, device)
            for tensor, device in zip(tensors, devices, strict=True)
        ]
    return Message(kind, header, tensors)


class _MailboxStreams:
    """Over smddp: the thread that takes waits for all streams at once."""

    def __init__(self, backend: _C.ProcessGroup) -> None:
        self._mailbox = _C.Mailbox(backend)
        self.open = self._mailbox.open
        self.send = self._mailbox.send
        self.interrupt = self._mailbox.interrupt
        self.flush = self._mailbox.flush

    def take(self, block: bool) -> list[Arrival]:
        arrived: list[Arrival] = []
        for peer, pickled, tensors, last, error in self._mailbox.take(block):
            if error is not None:
                arrived.append((peer, Ended(error)))
                continue
            arrived.append((peer, _message(pickled, tensors)))
            if last:
                arrived.append((peer, Ended(None)))
        return arrived


class _ThreadStreams:
    """Over any other backend: one thread for each stream receives its messages.

    The threads end with the process. Between steps each waits for `open`.
    """

    # At most so many messages are pending: before one more, `send` waits for the oldest. Some
    # backends report that a send is complete only to a thread that waits for it. The peers' threads
    # receive all the time, so that takes no longer than the network.
    _PENDING = 8

    def __init__(self, group: dist.ProcessGroup, peers: list[int]) -> None:
        self._group = group
        # None stands for an interrupt.
        self._arrived: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        # Sends that are pending, with the memory that they read.
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
        while True:
            message = self._receive(peer)
            self._arrived.put((peer, message))
            if message.kind == Kind.END:
                return
            # The message must not live on until the next one comes.
            del message

    def _receive(self, peer: int) -> Message:
        front = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        self._receive_into(peer, front)
        length = _C.front_length(front)
        if length > _FIRST_BYTES:
            front = torch.cat([front, torch.empty(length - _FIRST_BYTES, dtype=torch.uint8)])
            self._receive_into(peer, front[_FIRST_BYTES:])
        pickled, tensors, large = _C.decode_front(front)
        for part in large:
            self._receive_into(peer, part)
        return _message(pickled, tensors)

    def _receive_into(self, peer: int, data: torch.Tensor) -> None:
        self._group.recv([data], peer, 0).wait()

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

    def send(self, peer: int, header: bytes, tensors: Sequence[Any], last: bool) -> None:
        front, large = _C.encode_message(header, tensors, last, _FIRST_BYTES)
        parts = [front[:_FIRST_BYTES]]
        if front.numel() > _FIRST_BYTES:
            parts.append(front[_FIRST_BYTES:])
        parts += large
        with self._lock:
            while len(self._sending) >= self._PENDING:
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
            # A send fails if the peer is gone. The stream from that peer reports the loss.
            with contextlib.suppress(RuntimeError):
                work.wait()
