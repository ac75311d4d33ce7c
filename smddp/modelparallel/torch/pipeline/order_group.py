"""What the ranks of an order group tell each other; see order.py.

Their streams are a `Channel` of their own. A thread takes what comes, also while a task blocks: so
a rank hears of a failure on another replica, even if one of its tasks waits in a collective.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from smddp.modelparallel.core.errors import SMPPeerError
from smddp.modelparallel.core.failure import Elsewhere
from smddp.modelparallel.core.order import Announcement
from smddp.modelparallel.core.step_machine import Verdict
from smddp.modelparallel.torch.common import device
from smddp.modelparallel.torch.pipeline.channel import Channel, Ended
from smddp.modelparallel.torch.pipeline.history import Point
from smddp.modelparallel.torch.pipeline.protocol import Kind

__all__ = ["OrderEvents", "OrderGroup"]

# Seconds between the looks whether a rank has gone on.
_STILL = 0.5


class OrderEvents(Protocol):
    """What `OrderGroup` calls when something has come, on its own thread. The executor has it."""

    def on_decisions(self, decisions: Sequence[Announcement]) -> None:
        """The leader has decided what runs next."""

    def on_wait(self, task: int, call: int) -> None:
        """A task of another replica waits for a call; see `Waits.told`."""

    def on_leader_ended(self) -> None:
        """The leader has no task left in this step, and has announced everything."""

    def on_point(self, rank: int, point: Point) -> None:
        """A rank of the job, a member, has come so far in the step."""

    def on_stop(self, failure: Elsewhere) -> None:
        """The step has failed on another replica, or has to be run again there."""

    def on_lost(self, rank: int, error: Exception) -> None:
        """A rank of the job is gone, which is a member of the group."""


class OrderGroup:
    """This rank's streams to and from the other members of its order group.

    Any thread may call the methods.

    Attributes:
        ranks: the members, as ranks of the job.
        leads: does this rank decide the order?
        timeout: seconds to wait for another replica; the timeout of the process group.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        """Begins no step yet.

        Args:
            group: the members, the leader first; nothing else sends messages in it.
            timeout: see the class.
        """
        self.ranks = dist.get_process_group_ranks(group)
        self._rank = group.rank()
        self.leads = self._rank == 0
        self.timeout = timeout.total_seconds()
        self._channel = Channel(group, self._rank, group.size())
        # Held for a check of `_ended` and the send: no message may follow END.
        self._send_lock = threading.Lock()
        self._open = self._stopped = False
        self._ended = True
        # What has ended on other members, and how far they were.
        self._said: dict[int, tuple[Verdict, Point]] = {}
        # What other members have said in STOP, and has that of all come that will come?
        self._stops: dict[int, list[Any]] = {}
        self._quiet: set[int] = set()
        self._noted: set[int] = set()  # members that have noted the last WAIT
        self._point: Point | None = None  # how far this rank was when it last looked
        self._news = threading.Condition()
        self._events: OrderEvents | None = None
        self._gate = threading.Semaphore(0)
        run = functools.partial(self._run, device.current())
        threading.Thread(target=run, name="smp-order", daemon=True).start()

    def begin(self, events: OrderEvents) -> None:
        """Begins a step.

        Args:
            events: is told what comes.
        """
        self._events = events
        self._said, self._stops, self._quiet = {}, {}, set()
        self._stopped = self._ended = False
        self._last_sign, self._point = time.monotonic(), None
        self._channel.open()
        self._open = True
        self._gate.release()

    def announce(self, decisions: list[Announcement]) -> None:
        """Sends decisions of the leader to the followers."""
        self._send(Kind.DECISIONS, decisions)

    def announce_end(self) -> None:
        """Tells the followers that the leader has no task left in this step."""
        self._send(Kind.DECISIONS, None)

    def tell_of_wait(self, task: int, call: int) -> None:
        """Tells the other members that a task waits for a call; see `Waits.told`.

        It returns when they have noted that, have stopped or ended the step, or are lost. Only the
        task that has the baton may call it.
        """
        peers = set(self._channel.peers)
        self._noted = set()
        self._send(Kind.WAIT, (task, call))
        with self._news:
            self._news.wait_for(lambda: peers <= self._quiet | self._noted, self.timeout)

    def keep_alive(self, point: Point, often: bool) -> float:
        """Tells the other members how far this rank is, if it was silent for long.

        A leader hears of its followers only at the end of the step, which may be longer than the
        time after which a receive fails.

        Args:
            point: how far it is.
            often: tell them soon if the rank stays there.

        Returns:
            Seconds until the next call is due.
        """
        now, longest = time.monotonic(), self.timeout / 4
        soon = min(_STILL, longest) if often else longest
        still, self._point = point == self._point, point
        if now - self._last_sign >= (soon if still else longest):
            self._last_sign = now
            self._send(Kind.ALIVE, tuple(point))
        return min(soon, self._last_sign + longest - now)

    def stop(self, failure: Elsewhere, calls: list[Any]) -> None:
        """Tells the other members, once, that the step has failed or has to be run again here.

        Args:
            failure: why.
            calls: the collective calls that tasks have begun here, as `StepCollectives` notes them.
        """
        self._send(Kind.STOP, (tuple(failure), calls))

    def await_stops(self) -> dict[int, list[Any]]:
        """Waits until the other members have stopped or ended the step, or are lost.

        Returns:
            `stops`.
        """
        peers = set(self._channel.peers)
        with self._news:
            self._news.wait_for(lambda: peers <= self._quiet, self.timeout)
        return self.stops

    @property
    def stops(self) -> dict[int, list[Any]]:
        """By rank of the job, the calls that those have begun which have stopped so far."""
        with self._news:
            return {self.ranks[peer]: calls for peer, calls in self._stops.items()}

    @property
    def ended(self) -> list[tuple[int, Point]]:
        """The members whose step has succeeded, as ranks of the job, and how far they were then."""
        said = list(self._said.items())  # the other thread may add some
        return [
            (self.ranks[peer], point)
            for peer, (verdict, point) in said
            if not (verdict.failures or verdict.redo)
        ]

    def end(self, own: Verdict, point: Point) -> list[Verdict]:
        """Ends the step: tells the others how it went here, and waits for what they say.

        Args:
            own: how it went here.
            point: how far this rank has come.

        Returns:
            How it went on all replicas of the group; only `own` if the step was not begun.

        Raises:
            SMPPeerError: a member is gone, or has not answered in time.
        """
        if not self._open:
            return [own]
        self._open = False
        self._send(Kind.END, (own, point))
        for peer in self._channel.drain(self.timeout):
            late = f"it has not ended its step within {self.timeout:g} s"
            self._channel.end(peer, Ended(RuntimeError(late)))
            self._channel.interrupt()
        self._events = None
        for peer, error in self._channel.broken.items():
            raise SMPPeerError(f"rank {self.ranks[peer]} of the job was lost: {error}") from error
        return [own, *(verdict for verdict, _ in self._said.values())]

    def _send(self, kind: Kind, header: Any, peers: Sequence[int] | None = None) -> None:
        with self._send_lock:
            if self._ended or (kind == Kind.STOP and self._stopped):
                return
            self._stopped |= kind == Kind.STOP
            self._ended |= kind == Kind.END
            for peer in self._channel.peers if peers is None else peers:
                if peer in self._channel.broken:
                    continue
                try:
                    self._channel.send(peer, kind, header)
                except RuntimeError as error:
                    self._channel.broken[peer] = error

    # --- the thread that takes --------------------------------------------------------------------

    def _run(self, place: torch.device) -> None:
        device.use(place)
        while True:
            self._gate.acquire()
            left = set(self._channel.peers)
            while left:
                arrived = self._channel.take(True)
                if not arrived and not self._channel.expects:
                    break  # `end` waits no longer
                for peer, item in arrived:
                    if isinstance(item, Ended):
                        self._note_quiet(peer)
                        if item.error is not None:
                            self._tell(lambda e, p=peer, i=item: e.on_lost(self.ranks[p], i.error))
                        left.discard(peer)
                        # Last, because the next step may begin then.
                        self._channel.end(peer, item)
                    else:
                        self._handle(peer, item.kind, item.header)
                arrived = []

    def _handle(self, peer: int, kind: int, header: Any) -> None:
        if kind == Kind.DECISIONS and header is None:
            self._tell(lambda events: events.on_leader_ended())
        elif kind == Kind.DECISIONS:
            self._tell(lambda events: events.on_decisions(header))
        elif kind == Kind.WAIT:
            self._tell(lambda events: events.on_wait(*header))
            self._send(Kind.NOTED, None, [peer])
        elif kind == Kind.NOTED:
            with self._news:
                self._noted.add(peer)
                self._news.notify_all()
        elif kind == Kind.STOP:
            failure, calls = header
            self._note_quiet(peer, calls)
            self._tell(lambda events: events.on_stop(Elsewhere(*failure)))
        elif kind == Kind.ALIVE:
            self._tell(lambda events: events.on_point(self.ranks[peer], Point(*header)))
        elif kind == Kind.END:
            self._note_quiet(peer)
            verdict, point = self._said[peer] = header
            if verdict.failures or verdict.redo:
                first = verdict.first
                why = first.elsewhere if first is not None else None
                other = why or Elsewhere(self.ranks[peer], "", True)
                self._tell(lambda events: events.on_stop(other))
                if peer == 0:  # it may have failed before it could announce anything
                    self._tell(lambda events: events.on_leader_ended())
            else:
                self._tell(lambda events: events.on_point(self.ranks[peer], point))

    def _note_quiet(self, peer: int, calls: list[Any] | None = None) -> None:
        with self._news:
            self._quiet.add(peer)
            if calls is not None:
                self._stops[peer] = calls
            self._news.notify_all()

    def _tell(self, what: Any) -> None:
        events = self._events
        if events is not None:
            what(events)
