"""Messages between the ranks of a pipeline: a kind, an object and tensors."""

from __future__ import annotations

import contextlib
import enum
import pickle
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf

import smddp.numpy
from smddp.modelparallel.tensorflow.values import from_bytes, to_bytes

__all__ = ["Channel", "Kind", "Message"]

_FRONT = 1 << 14  # bytes of the first part of a message, which has a fixed length
_HEAD = 16  # bytes: the length of the message, and of what is pickled in it
_FIRST, _REST = 1, 2  # tags
_SLICE = 0.1  # seconds between looks at interruptions and deadlines
_FOREVER = 1e8  # seconds
_PATIENCE = 5.0  # seconds that `close` waits for other ranks


class Kind(enum.IntEnum):
    """What a message says."""

    BEGIN = 0  # rank 0 begins a step
    CALL = 1  # run a layer
    RESULT = 2  # of a call
    BACKWARD = 3  # the gradients of a call's results
    GRADIENTS = 4  # those of its arguments
    FAILED = 5  # the step has failed
    END = 6  # of rank 0: what the step returns; of others: they have it


class Message(NamedTuple):
    """What another rank has sent.

    Attributes:
        sender: a rank of the pipeline.
        kind: what it says.
        step: in which step it was sent.
        header: an object.
        tensors: see `Kind`.
    """

    sender: int
    kind: Kind
    step: int
    header: Any
    tensors: list[Any]


class Channel:
    """This rank's messages. Any thread may send; one at a time takes.

    A receive that no message has ended in its step stays, and takes the first message of the next.
    """

    def __init__(self, group: smddp.numpy.Group, timeout: float) -> None:
        """Begins to receive nothing yet.

        Args:
            group: the ranks of the pipeline; nothing else sends messages in it.
            timeout: seconds that `take` waits.
        """
        self._group, self._timeout = group, timeout
        self.peers = [peer for peer in range(group.size) if peer != group.rank]
        self._front = np.empty(_FRONT, np.uint8)
        self._posted: smddp.numpy.Work | None = None
        # Sender and bytes of a message whose first part has come; `_posted` receives the rest.
        self._sender, self._data = -1, self._front
        self._sending: list[smddp.numpy.Work] = []
        self._lock = threading.Lock()
        self._interrupted = threading.Event()

    def send(
        self, peer: int, kind: Kind, step: int, header: Any, tensors: Sequence[Any] = ()
    ) -> None:
        """Sends a message; returns before it has arrived."""
        outline = [(tensor.dtype.name, tuple(tensor.shape)) for tensor in tensors]
        pickled = pickle.dumps((int(kind), step, header, outline), pickle.HIGHEST_PROTOCOL)
        parts = [np.frombuffer(pickled, np.uint8), *map(to_bytes, tensors)]
        sizes = [_aligned(part.size) for part in parts]
        length = _HEAD + sum(sizes)
        data = np.empty(max(length, _FRONT), np.uint8)
        data[:_HEAD].view(np.int64)[:] = length, len(pickled)
        place = _HEAD
        for part, room in zip(parts, sizes, strict=True):
            data[place : place + part.size] = part
            place += room
        with self._lock:
            self._sending = [work for work in self._sending if not work.is_completed()]
            # The rank that waits for an answer sees to the deadline, and knows what it waits for.
            how: dict[str, Any] = {"wait": False, "timeout": _FOREVER}
            self._sending.append(self._group.send(data[:_FRONT], peer, tag=_FIRST, **how))
            if length > _FRONT:
                self._sending.append(self._group.send(data[_FRONT:], peer, tag=_REST, **how))

    def flush(self) -> None:
        """Waits until everything has left this rank.

        Raises:
            TimeoutError: a rank has not received it in time.
            smddp.numpy.Error: a rank is gone.
        """
        deadline = time.monotonic() + self._timeout
        with self._lock:
            works, self._sending = self._sending, []
        for work in works:
            while not work.is_completed(_SLICE):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a message was not received for {self._timeout:g} s")
            work.wait()

    def take(self, block: bool) -> list[Message]:
        """Returns the messages that have come; with `block`, waits until there is one.

        It may return none if another thread has called `interrupt`.

        Raises:
            TimeoutError: no message has come in time.
            smddp.numpy.Error: a rank is gone.
        """
        arrived: list[Message] = []
        deadline = time.monotonic() + self._timeout
        while True:
            wait = block and not arrived
            if self._posted is None:
                self._sender, self._data = -1, self._front
                self._posted = self._receive(self._front, -1, _FIRST)
            if self._posted.is_completed(_SLICE if wait else 0.0):
                work, self._posted = self._posted, None
                work.wait()
                if self._sender < 0:
                    self._sender = work.source()
                    length = int(self._front[:_HEAD].view(np.int64)[0])
                    if length > _FRONT:
                        self._data = np.empty(length, np.uint8)
                        self._data[:_FRONT] = self._front
                        self._posted = self._receive(self._data[_FRONT:], self._sender, _REST)
                        deadline = time.monotonic() + self._timeout
                        continue
                arrived.append(self._message())
            elif not wait:
                return arrived
            elif self._interrupted.is_set():
                self._interrupted.clear()
                return []
            elif time.monotonic() > deadline:
                raise TimeoutError(f"no message has come for {self._timeout:g} s")

    def _receive(self, out: np.ndarray[Any, Any], peer: int, tag: int) -> smddp.numpy.Work:
        work = self._group.receive(out, peer, tag=tag, wait=False, timeout=_FOREVER)
        return cast("smddp.numpy.Work", work)

    def _message(self) -> Message:
        """Returns the message that has come."""
        data = self._data
        pickled = int(data[:_HEAD].view(np.int64)[1])
        kind, step, header, outline = pickle.loads(data[_HEAD : _HEAD + pickled].tobytes())
        place, tensors = _HEAD + _aligned(pickled), []
        for name, shape in outline:
            count = int(np.prod(shape)) * tf.dtypes.as_dtype(name).size
            tensors.append(from_bytes(data[place : place + count], name, shape))
            place += _aligned(count)
        return Message(self._sender, Kind(kind), step, header, tensors)

    def close(self) -> None:
        """Ends the receive that may be left of a step; nothing can be sent any more."""
        # If another rank fails elsewhere, it does not come. A group that this process has left with
        # the whole job, before smp, raises ValueError; nothing is left to end then.
        may_be_gone = contextlib.suppress(smddp.numpy.Error, ValueError)
        if self.peers:
            with may_be_gone:  # another rank may not have taken the last message of a step yet
                self._group.barrier(timeout=_PATIENCE)
        if self._posted is not None:
            with may_be_gone:
                self._group.abort("smp.shutdown() was called")

    def interrupt(self) -> None:
        """Ends the `take` that waits, or else the next one."""
        self._interrupted.set()


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
