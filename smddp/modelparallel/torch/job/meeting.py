"""Calls that all ranks of a group have to make: warns which ranks are missing.

If a rank makes such a call alone, the process group raises only after its timeout, which may be
half an hour. Until then the other ranks may just be late; so `together` first warns.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from smddp._torch_internals import store_of_group
from smddp.modelparallel.core.errors import SMPPeerError
from smddp.modelparallel.core.failure import summary
from smddp.tools._spans import spans

__all__ = [
    "Difference",
    "decided",
    "done_on_all",
    "first_difference",
    "gathered",
    "gathered_over",
    "together",
]

log = logging.getLogger("smddp.modelparallel")

# The warning comes after this time. The call itself waits until the timeout of its group.
_LOG_AFTER = timedelta(seconds=10)
# Numbers the calls of this process. They are the same on all ranks as long as all make all calls.
_numbers = itertools.count()
# Likewise, of `decided`.
_decisions = itertools.count()


@contextlib.contextmanager
def together(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Surrounds the collectives of a call that all ranks of a group have to make.

    Args:
        what: the call; for messages.
        group: the ranks that have to make it.

    Raises:
        SMPPeerError: a rank has not made it within the timeout of the process group, or has failed
            in it.
    """
    store = store_of_group(group)
    ranks = dist.get_process_group_ranks(group)
    with _met(what, store, f"smp/meeting{next(_numbers)}", "", ranks[group.rank()], ranks):
        yield


def decided(
    what: str,
    mine: str,
    decide: Callable[[list[str]], str],
    store: distributed_c10d.Store,
    rank: int,
    size: int,
) -> str:
    """Returns what rank 0 decides from what each rank of the job tells; needs no process group.

    If it decides anything but "", no rank leaves before the others know it, or `_LOG_AFTER` has
    passed: rank 0 may serve the store, and its script may end then.

    Args:
        what: the call; for messages.
        mine: what this rank tells.
        decide: what rank 0 does with what all have told, by rank.
        store: which all ranks reach.
        rank: of this process.
        size: of the job.

    Raises:
        SMPPeerError: a rank has not made the call within the timeout of the store.
    """
    name, ranks = f"smp/decision{next(_decisions)}", range(size)
    with _met(what, store, name, mine, rank, ranks):
        if rank == 0:
            told = [store.get(f"{name}/{one}").decode() for one in ranks]
            store.set(name, decide(told))
        decision: str = store.get(name).decode()
    if decision:
        with contextlib.suppress(RuntimeError):
            store.set(f"{name}/known/{rank}", "")
            store.wait([f"{name}/known/{one}" for one in ranks], _LOG_AFTER)
    return decision


@contextlib.contextmanager
def _met(
    what: str, store: distributed_c10d.Store, name: str, text: str, me: int, ranks: Sequence[int]
) -> Iterator[None]:
    """Surrounds a call: warns if ranks do not come, and lets its errors name them.

    Args:
        what: the call; for messages.
        store: of the ranks.
        name: of the call in the store.
        text: that this rank puts there, at its number.
        me: this rank, of the job.
        ranks: that have to make the call.
    """
    missing = _meet(what, store, name, text, me, ranks)
    try:
        yield
    except RuntimeError as error:
        if late := missing():
            raise SMPPeerError(
                f"{what}: rank {_listed(late)} of the job did not answer; ranks {_listed(ranks)} "
                f"have to call it, at the same point of the script ({error})"
            ) from error
        if isinstance(error, dist.DistError):
            raise SMPPeerError(
                f"{what} failed, though ranks {_listed(ranks)} of the job have called it: {error}"
            ) from error
        # An error of other code, such as the model's: gloo has no class of its own.
        raise


def gathered(what: str, mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns what each rank of a group gives, in the order of its ranks; any objects that pickle.

    Arguments and errors are those of `together`.
    """
    parts: list[Any] = [None] * group.size()
    with together(what, group):
        dist.all_gather_object(parts, mine, group=group)
    return parts


def gathered_over(what: str, mine: Any, groups: Sequence[dist.ProcessGroup]) -> list[Any]:
    """Returns what all ranks give that groups connect, gathered in one group after the other.

    For example the shards of a sharding group, and then those of all ranks of the model. Without
    groups the result is `[mine]`.

    Args:
        what: the call; for messages.
        mine: what this rank gives; any object that pickles.
        groups: all their ranks have to make the call.

    Raises:
        SMPPeerError: as for `together`.
    """
    found = [mine]
    for group in groups:
        found = [one for some in gathered(what, found, group) for one in some]
    return found


def done_on_all(what: str, work: Callable[[], Any], group: dist.ProcessGroup) -> list[Any]:
    """Does the work of this rank; returns what that of each rank of a group returns.

    If it raises on one rank, it raises on all, so no rank waits for that one later.

    Args:
        what: the call; for messages.
        work: returns any object that pickles.
        group: all its ranks have to make the call.

    Raises:
        SMPPeerError: the work of another rank has raised.
        Exception: that of this rank has raised.
    """
    result = cause = None
    try:
        result = work()
    except Exception as error:
        cause = error
    everybody: list[Any] = [None] * group.size()
    mine = "" if cause is None else summary(cause), result
    dist.all_gather_object(everybody, mine, group=group)
    if cause is not None:
        raise cause
    for rank, (why, _) in enumerate(everybody):
        if why:
            of_job = dist.get_global_rank(group, rank)
            raise SMPPeerError(f"{what} has failed on rank {of_job} of the job: {why}")
    return [found for _, found in everybody]


class Difference(NamedTuple):
    """An entry that is not the same on two ranks.

    Attributes:
        name: of the entry.
        first, other: its values on the first rank, and on another one.
        ranks: these two, as ranks of the job.
    """

    name: str
    first: str
    other: str
    ranks: tuple[int, int]

    def __str__(self) -> str:
        """Describes it."""
        first, other = self.ranks
        return (
            f"{self.name!r} is {self.first} on rank {first} of the job, and {self.other} on rank "
            f"{other}"
        )


def first_difference(
    of_ranks: Sequence[Mapping[str, str]],
    ranks: Sequence[int],
    missing: str = "missing",
    key: Callable[[str], Any] = lambda _: 0,
) -> Difference | None:
    """Returns where a rank differs from the first one; None if none does.

    Args:
        of_ranks: what each rank has.
        ranks: their numbers in the job.
        missing: the value of an entry that a rank does not have.
        key: sorts the names of entries.
    """
    first, *others = of_ranks
    for rank, other in zip(ranks[1:], others, strict=True):
        for name in sorted({**first, **other}, key=key):
            values = first.get(name, missing), other.get(name, missing)
            if values[0] != values[1]:
                return Difference(name, *values, (ranks[0], rank))
    return None


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(spans(ranks))


def _meet(
    what: str, store: distributed_c10d.Store, name: str, text: str, me: int, ranks: Sequence[int]
) -> Callable[[], list[int]]:
    """Waits for the other ranks for `_LOG_AFTER`, and warns if some have not come.

    Returns:
        A function that returns the ranks, of the job, that have not come until then; none if the
        store is gone.
    """
    keys = {rank: f"{name}/{rank}" for rank in ranks}
    store.set(keys[me], text)

    def missing() -> list[int]:
        try:
            return [rank for rank, key in keys.items() if not store.check([key])]
        except RuntimeError:
            return []

    try:
        store.wait([*keys.values()], _LOG_AFTER)
    except RuntimeError:
        late = missing()
        if late:
            log.warning(
                "smp: %s on rank %d waits for rank %s of the job. Ranks %s have to call it, at the "
                "same point of the script",
                *(what, me, _listed(late), _listed(ranks)),
            )
    return missing
