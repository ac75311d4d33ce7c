"""Where the processes of a job find one another: a few keys of the launcher's store.

Only processes that begin or come use it. Members agree without it, so they go on when it is gone.
"""

from __future__ import annotations

import json
import logging
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from smddp.elastic.errors import JobLostError
from smddp.torch.errors import CollectiveTimeoutError, PeerLostError

__all__ = ["Meeting", "connect"]

_log = logging.getLogger("smddp.elastic")
_LOOK = 0.1  # seconds between two looks for newcomers
_KNOCK = 0.5  # seconds until a newcomer says again that it waits
_PAUSE = 0.02
_ANSWER = 5.0  # seconds that the store has for an answer
_torch: Any = dist  # whose names mypy does not see


def connect(timeout: float) -> Any:
    """Returns the store at MASTER_ADDR and MASTER_PORT; without a launcher's, rank 0 has it.

    Raises:
        JobLostError: nobody serves it. The launcher may start this process again.
    """
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = _torch.TCPStore(
            *address,
            is_master=not has_agent and os.environ["RANK"] == "0",
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except (_torch.DistStoreError, _torch.DistNetworkError) as error:
        text = f"no store at {address[0]}:{address[1]}, where the ranks meet: {error}"
        _log.error("%s", text)
        raise JobLostError(text) from error
    # A member must not wait long for a host that may be gone.
    store.set_timeout(timedelta(seconds=_ANSWER))
    return store


class Meeting:
    """One process and its place (RANK) in the store.

    `card/PLACE` has the last process of each place, and the step of its checkpoint; `first` what
    the first generation is; `members` who the members are; `newcomer/N` who waits.
    """

    def __init__(self, core: Any, store: Any, step: int) -> None:
        self._core = core
        self._store: Any = _torch.PrefixStore("smddp/elastic", store)
        self._place, self._places = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._step = step
        self._attempt = 0  # the last `first` that this process has tried
        self._seen, self._next_look = -1, 0.0

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
        self._put(f"card/{self._place}", [self._core.card(), self._step])
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            left = deadline - time.monotonic()
            cards = [self._get(f"card/{place}") for place in range(self._places)]
            known = {card[0] for card in cards if card}
            # A place has a new card as soon as its process has been started again.
            running = [card for card in (self._get("members") or []) if card in known]
            try:
                if running and self._core.card() not in running:
                    if self._get("ended"):
                        _log.warning("the job has ended before this process could come")
                        raise SystemExit(0)
                    self._knock()
                    return self._core.join(running, min(_KNOCK, left))
                first = self._first(cards) if None not in cards else None
                if first is not None:
                    return self._core.begin(first["cards"], first["step"], min(10.0, left))
            except (PeerLostError, CollectiveTimeoutError) as error:
                _log.info("not a member yet: %s", error)
            time.sleep(_PAUSE)
        missing = [place for place, card in enumerate(cards) if card is None]
        raise JobLostError(
            f"this process is no member after {limit:.0f} s: "
            + (f"ranks {missing} did not come" if missing else "the members did not let it in")
        )

    def _first(self, cards: list[Any]) -> Any:
        """Returns the first generation to try: that which place 0 has written."""
        first = self._get("first") or {"attempt": 0}
        if self._place == 0:
            step = max(card[1] for card in cards)
            first = {"attempt": first["attempt"] + 1, "step": step, "cards": [c[0] for c in cards]}
            self._put("first", first)
        elif first["attempt"] <= self._attempt or self._core.card() not in first["cards"]:
            return None
        self._attempt = first["attempt"]
        return first

    def _knock(self) -> None:
        number = self._store.add("newcomers", 1)
        self._store.set(f"newcomer/{number}", self._core.card())

    def publish(self, cards: list[str]) -> None:
        """The first member tells newcomers who the members are."""
        self._seen, self._next_look = -1, 0.0
        self._try(lambda: self._put("members", cards))

    def end(self, ended: bool) -> None:
        """Says whether a process that comes now is too late."""
        self._try(lambda: self._put("ended", ended))

    def newcomers(self) -> int:
        """Returns how many newcomers wait of which this process has heard; rank 0 looks for them.

        One that nobody lets in says again that it waits, so who has died is forgotten.
        """
        if dist.get_rank() == 0 and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK
            self._try(self._look)
        return int(self._core.newcomers())

    def _look(self) -> None:
        count = self._store.add("newcomers", 0)
        for number in range(self._seen + 1, count + 1) if self._seen >= 0 else ():
            if self._store.check([f"newcomer/{number}"]):
                self._core.hear(self._store.get(f"newcomer/{number}").decode())
                self._store.delete_key(f"newcomer/{number}")
        self._seen = count

    def _try(self, call: Any) -> None:
        """Calls something of the store, unless it is gone."""
        if self._store is None:
            return
        try:
            call()
        except (_torch.DistStoreError, _torch.DistNetworkError) as error:
            self._store = None
            _log.warning("the store is gone: the job goes on, but nobody can come: %s", error)

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def sum_of(*numbers: int) -> list[int]:
    """Returns the sums over all members."""
    sums = torch.tensor(numbers)
    dist.all_reduce(sums)
    return sums.tolist()
