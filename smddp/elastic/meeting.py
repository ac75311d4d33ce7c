"""Where the processes of a job find one another: a few keys of the launcher's store.

Only processes that begin or come use it. Members agree without it, so they go on when it is gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from smddp.elastic.errors import lost
from smddp.torch.errors import CollectiveTimeoutError, PeerLostError, TransportError

__all__ = ["Meeting", "connect"]

_log = logging.getLogger("smddp.elastic")
_LOOK = 0.1  # seconds between two looks for newcomers
_KNOCK = 1.0  # seconds until a newcomer says again that it waits
_PAUSE = 0.02
_ANSWER = 5.0  # seconds that the store has for an answer
_torch: Any = dist  # whose names mypy does not see


def connect(timeout: float) -> Any:
    """Returns the store at MASTER_ADDR and MASTER_PORT; without a launcher's, rank 0 has it.

    Raises:
        JobLostError: nobody serves it. A launcher may start this process again.
    """
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return _torch.TCPStore(
            *address,
            is_master=not has_store and os.environ.get("RANK") == "0",
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except (_torch.DistStoreError, _torch.DistNetworkError) as error:
        raise lost(
            f"no store at {address[0]}:{address[1]}, where the ranks meet: {error}"
        ) from error


class Meeting:
    """One process and its place (RANK) in the store.

    `card/PLACE` has the last process of each place, and the step of its checkpoint; `first` who the
    first members are to be, and `seen/N` how many of them know it; `members` who the members are;
    `newcomer/N` who waits.
    """

    def __init__(self, core: Any, store: Any, step: int) -> None:
        self._core = core
        self._store: Any = _torch.PrefixStore("smddp/elastic", store)
        self._place, self._places = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._step = step
        self._attempt = 0  # of the last `first` that this process has seen
        self._heard, self._next_look = -1, 0.0  # number of the last newcomer it has told of

    def meet(self, limit: float) -> Any:
        """Becomes a member: of the first generation, or of a job that runs.

        Args:
            limit: seconds.

        Returns:
            The members.

        Raises:
            JobLostError: not in this time.
            SystemExit: the job has ended meanwhile.
        """
        mine = self._core.card()
        self._put(f"card/{self._place}", [mine, self._step])
        deadline, why = time.monotonic() + limit, "the members did not let it in"
        while (left := deadline - time.monotonic()) > 0:
            cards = self._cards()
            known = {card for card, _ in cards}
            # A place has a new card as soon as its process has been started again.
            running = [card for card in (self._get("members") or []) if card in known]
            if not running or mine in running:
                if (first := self._first(cards)) is not None:
                    return self._begin(first, left)
            elif self._get("ended"):
                _log.warning("smddp.elastic: the job ended before this process could come")
                raise SystemExit(0)
            else:
                try:
                    with contextlib.suppress(CollectiveTimeoutError):
                        # They can answer only those who have met them.
                        return self._core.join(running, 0.001)
                    self._knock()
                    return self._core.join(running, min(_KNOCK, left))
                except (PeerLostError, CollectiveTimeoutError, TransportError) as error:
                    why = str(error)  # such as members that have died meanwhile
            time.sleep(_PAUSE)
        missing = [rank for rank in range(self._places) if not self._store.check([f"card/{rank}"])]
        if missing:
            why = f"ranks {missing} did not come"
        raise lost(f"this process is no member after {limit:.0f} s: {why}")

    def _cards(self) -> list[Any]:
        """Returns card and step of each place; nothing before all places have them."""
        keys = [f"card/{place}" for place in range(self._places)]
        if not self._store.check(keys):
            return []
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def _begin(self, first: Any, limit: float) -> Any:
        try:
            return self._core.begin(first["cards"], first["step"], limit)
        except (PeerLostError, CollectiveTimeoutError, TransportError) as error:
            raise lost(f"the job did not begin: {error}") from error

    def _first(self, cards: list[Any]) -> Any:
        """Returns the first generation when all who are in it have seen it; None before.

        So a process that was started again has no part in it with the card of the one before.
        """
        first, known = self._get("first"), [card for card, _ in cards]
        if self._place == 0 and cards and (first is None or first["cards"] != known):
            attempt = self._store.add("attempts", 1)
            first = {"attempt": attempt, "step": max(step for _, step in cards), "cards": known}
            self._put("first", first)
        if first is None or self._core.card() not in first["cards"]:
            return None
        has_seen, self._attempt = self._attempt == first["attempt"], first["attempt"]
        count = self._store.add(f"seen/{self._attempt}", 0 if has_seen else 1)
        return first if count == self._places else None

    def _knock(self) -> None:
        number = self._store.add("newcomers", 1)
        self._store.set(f"newcomer/{number}", self._core.card())

    def publish(self, cards: list[str]) -> None:
        """The first member tells newcomers who the members are."""
        if self._store is not None:  # its host may be gone, and a member must not wait long for it
            self._store.set_timeout(timedelta(seconds=_ANSWER))
        self._try(lambda: self._put("members", cards))

    def end(self, ended: bool) -> None:
        """Says whether a process that comes now is too late."""
        self._try(lambda: self._put("ended", ended))

    def newcomers(self) -> int:
        """Returns how many newcomers wait of which this process has heard; rank 0 looks for them.

        Each is told of once; one that nobody lets in says again that it waits. So one that has died
        is forgotten.
        """
        if dist.get_rank() != 0:
            self._heard = -1
        elif time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK
            self._try(self._look)
        return int(self._core.newcomers())

    def _look(self) -> None:
        count = self._store.add("newcomers", 0)
        if self._heard < 0:  # this rank was not the first one before
            self._heard = self._get("heard") or 0
        for number in range(self._heard + 1, count + 1):
            if self._store.check([f"newcomer/{number}"]):
                self._core.hear(self._store.get(f"newcomer/{number}").decode())
                self._store.delete_key(f"newcomer/{number}")
        if count > self._heard:
            self._heard = count
            self._put("heard", count)

    def _try(self, call: Any) -> None:
        """Calls something of the store, unless it is gone."""
        if self._store is None:
            return
        try:
            call()
        except (_torch.DistStoreError, _torch.DistNetworkError) as error:
            self._store = None
            _log.warning(
                "smddp.elastic: the store is gone: the job goes on, but nobody can come: %s", error
            )

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def sum_of(*numbers: int) -> list[int]:
    """Returns the sums over all members."""
    sums = torch.tensor(numbers)
    dist.all_reduce(sums)
    return sums.tolist()
