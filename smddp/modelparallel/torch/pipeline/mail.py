"""The messages of a rank of a pipeline: sends them, and gives what comes to whom it concerns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.pipeline.channel import Arrival, Channel, Ended
from smddp.modelparallel.torch.pipeline.protocol import Kind, Message
from smddp.modelparallel.torch.pipeline.step import StepBegin

__all__ = ["Mail", "Recipient"]


class Recipient(Protocol):
    """Acts upon the messages of a step that are not work."""

    def on_begin(self, begin: StepBegin) -> None:
        """Rank 0 has begun the step."""

    def on_decision(self, decision: Any) -> None:
        """Rank 0 has decided where modules live."""

    def on_end(self, peer: int, message: Message) -> None:
        """A rank has ended the step."""

    def on_lost(self, peer: int, error: Exception) -> None:
        """The stream from a rank is broken."""

    def on_error(self, error: Exception) -> None:
        """A message cannot be acted upon."""


class Mail:
    """Sends and delivers messages; the `Inbox` of the baton.

    Any thread may call `send`, `send_end` and `interrupt`; the thread that has the baton takes and
    delivers.

    Attributes:
        rank: of this process in the pipeline.
        job_ranks: the ranks of the pipeline, as ranks of the job.
        channel: the streams to and from the other ranks; None if there are none.
        peers: the other ranks of the pipeline.
        ended: has this rank sent END in this step?
        work: what acts upon messages that begin or end work, by kind.
        take: returns what has come; with True, waits until something has.
        interrupt: ends the `take` that waits, or else the next one.
    """

    take: Callable[[bool], list[Arrival]]  # with a channel; without one, nothing is expected
    interrupt: Callable[[], None]

    def __init__(
        self,
        rank: int,
        job_ranks: Sequence[int],
        channel: Channel | None,
        lock: threading.RLock,
    ) -> None:
        """Begins without a step.

        Args:
            rank: of this process in the pipeline.
            job_ranks: the ranks of the pipeline, as ranks of the job.
            channel: see the class.
            lock: held while a message is acted upon, because that may end the step.
        """
        self.rank, self.job_ranks = rank, job_ranks
        self.channel = channel
        self.peers = [peer for peer in range(len(job_ranks)) if peer != rank]
        self.work: dict[int, Callable[[Message], None]] = {}
        self.ended = False
        if channel is not None:
            self.take, self.interrupt = channel.take, channel.interrupt
        self._lock = lock
        # Held for a check of `ended` and the send: no message may follow END, because the receiver
        # would take it for one of the next step.
        self._send_lock = threading.Lock()
        self._recipient: Recipient | None = None
        self._lets_work_in = False
        # (peer, message): what has come before this rank can use it.
        self._held: list[tuple[int, Message]] = []

    def who(self, peer: int) -> str:
        """Returns how errors name a rank of the pipeline; there is none with one partition."""
        of_job = self.job_ranks[peer]
        if len(self.job_ranks) == 1:
            return f"rank {of_job} of the job"
        return f"rank {peer} of the pipeline" + (f" (rank {of_job} of the job)" * (of_job != peer))

    # --- the life of a step -----------------------------------------------------------------------

    def open(self, recipient: Recipient) -> None:
        """Begins to take messages of a step; keeps those that begin or end work.

        Args:
            recipient: acts upon the others.
        """
        self._recipient, self.ended = recipient, False
        if self.channel is not None:
            self.channel.open()

    def let_work_in(self) -> None:
        """Acts also upon messages that begin or end work, and upon those that were kept."""
        self._lets_work_in = True
        held, self._held = self._held, []
        for peer, message in held:
            self._handle(peer, message)

    def end_step(self) -> None:
        """Keeps such messages again; those that were kept are forgotten."""
        self._lets_work_in = False
        self._held.clear()

    # --- what is sent -----------------------------------------------------------------------------

    def send(self, peer: int, kind: Kind, header: Any, tensors: Sequence[Any] = ()) -> bool:
        """Sends a message to a rank of the pipeline, which may be this one.

        Two segments of one graph may have the same owner, and an edge between them.

        Args:
            peer: rank of the pipeline.
            kind: of the message.
            header: anything that pickles and holds no tensors.
            tensors: see `Message`.

        Returns:
            Whether it was sent: not if this rank has sent END in this step.
        """
        if peer == self.rank:
            if self.ended:
                return False
            detached = [None if tensor is None else _leaf(tensor) for tensor in tensors]
            self._handle(peer, Message(kind, header, detached))
            return True
        assert self.channel is not None
        with self._send_lock:
            if self.ended:
                return False
            self.channel.send(peer, kind, header, tensors)
            return True

    def send_end(self, header: Any, tensors: list[Any]) -> None:
        """Sends END to all other ranks. Raises, and sends nothing, if it cannot be pickled."""
        with self._send_lock:
            channel = self.channel
            for peer in self.peers:
                assert channel is not None
                if peer in channel.broken:
                    continue
                try:
                    channel.send(peer, Kind.END, header, tensors)
                except RuntimeError as error:
                    channel.broken[peer] = error
            self.ended = True

    # --- what comes; see `Inbox` ------------------------------------------------------------------

    @property
    def expects(self) -> bool:
        """Says whether messages may still come in this step."""
        return self.channel is not None and self.channel.expects

    def deliver(self, arrived: list[Arrival]) -> None:
        """Acts upon what has come; the thread that has the baton calls this."""
        for peer, item in arrived:
            if type(item) is Message:
                self._handle(peer, item)
                continue
            assert isinstance(item, Ended)
            assert self.channel is not None
            if item.error is not None:
                assert self._recipient is not None
                self.channel.broken[peer] = item.error
                self._recipient.on_lost(peer, item.error)
            self.channel.end(peer, item)

    def _handle(self, peer: int, message: Message) -> None:
        """Acts upon a message; an error in that ends the step."""
        recipient = self._recipient
        assert recipient is not None
        try:
            with self._lock:
                kind = message.kind
                work = self.work.get(kind)
                # GRAPH is always taken: the caller sends it once only, so it must not be lost if
                # the step fails before BEGIN has come.
                if work is not None and (self._lets_work_in or kind == Kind.GRAPH):
                    work(message)
                elif kind == Kind.END:
                    recipient.on_end(peer, message)
                elif kind == Kind.UNREADABLE:
                    raise SMPUsageError(
                        f"an object that {self.who(peer)} has sent cannot be unpickled: "
                        f"{message.header}"
                    )
                elif kind == Kind.BEGIN:
                    recipient.on_begin(message.header)
                elif kind == Kind.PARTITION:
                    recipient.on_decision(message.header)
                else:
                    # There is no order between streams: this message has come before BEGIN or
                    # PARTITION of rank 0.
                    self._held.append((peer, message))
        except Exception as error:
            recipient.on_error(error)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
