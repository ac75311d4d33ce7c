"""The end of a step in every order of events, for two pipelines of two ranks: see step_worlds.py.

Whatever the order is and whatever goes wrong, no rank waits for ever; ranks that stay agree on the
outcome; a rank says nothing after END; one that has left is left for ever; and ranks that stay have
begun the same collective calls and gathers, and leave no message behind.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from smp.step_worlds import ANY_TIME, LAYOUTS, Explored, Fault, Layout, WrongError, failure, faults

from smddp.modelparallel.core import step_machine
from smddp.modelparallel.core.failure import Elsewhere, Failure
from smddp.modelparallel.core.step_machine import TABLE, Action, Event, Phase, Row, Rules, Verdict

BY_NAME = {layout.name: layout for layout in LAYOUTS}
# With an order, these multiply the orders of events; `make test-all` has all of them.
MANY = {"lost", *ANY_TIME, "waits", "no call"}


def quick(layout: Layout) -> list[tuple[Fault, ...]]:
    """Returns the faults with which `make test` tries a layout."""
    every = faults(layout)
    if not layout.ordered:
        pairs = itertools.combinations(every, 2)
        few = [pair for pair in pairs if not any(one.kind in MANY for one in pair)]
        return [(), *((fault,) for fault in every), *few]
    few = [fault for fault in every if fault.kind not in MANY]
    return [(), *((fault,) for fault in few if fault.rank in (0, 3, -1))]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.timeout(300)
def test_a_step_ends_in_every_order_of_events(name: str) -> None:
    explored = Explored(BY_NAME[name], Rules())
    for wrong in quick(BY_NAME[name]):
        worlds, orders = explored.explore(wrong)
        assert orders >= 1
        assert worlds > 1


@pytest.mark.parametrize(
    ("name", "first"),
    [(layout.name, first) for layout in LAYOUTS for first in faults(layout)],
    ids=lambda one: one if isinstance(one, str) else f"{one.kind} {one.rank}",
)
@pytest.mark.timeout(3600)
@pytest.mark.exhaustive
def test_a_step_ends_in_many_orders_with_two_faults(name: str, first: Fault) -> None:
    layout = BY_NAME[name]
    explored, every = Explored(layout, Rules()), faults(layout)
    explored.explore([first], longest=2_000_000)
    walked, source = Explored(layout, Rules(), reduced=False), random.Random(1)
    for second in every[every.index(first) + 1 :]:
        # Some have millions of worlds. The first ones differ in how the step ends only, so there
        # are also orders by chance.
        explored.explore([first, second], longest=20_000)
        for _ in range(30):
            walked.walk([first, second], source)


# Layouts and faults that together take every row.
FOR_ALL_ROWS: list[tuple[str, list[tuple[str, int]]]] = [
    *(("gradients", [fault]) for fault in [("early", 0), ("redo", 1), ("report", 1), ("begin", 0)]),
    *(("gradients", [fault]) for fault in [("lost", 0), ("lost", 1), ("silent", 0), ("signal", 1)]),
    ("gradients", [("signal", 1), ("lost", 0)]),
    ("gradients", [("signal", 1), ("other step", 1)]),
    *(("exchanges", [fault]) for fault in [("early", 0), ("no call", 0), ("begin", 0)]),
    *(("exchanges", [fault]) for fault in [("begin", 1), ("waits", 0), ("order", -1)]),
    ("exchanges", [("waits", 0), ("late", 2)]),
    ("gathers", [("extra", 3)]),
    ("exchanges", [("forward", 1), ("lost", 3)]),
    *(("gathers", [fault]) for fault in [("change", 0), ("plan", 0)]),
    ("gathers", [("plan", 0), ("late", 0)]),
    ("one partition", [("signal", 0)]),
    *(("one partition, gathers", [fault]) for fault in [("change", 0), ("plan", 0)]),
    ("first step", []),
    ("first step", [("no call", 0), ("signal", 0)]),
    ("first step in order", [("early", 0)]),
]

# A rank that leaves may hear late that the others have succeeded: these moves happen last.
LATE = [
    *("1: gets a signal", "1: gets a signal between phases"),
    *("1: hears END", "1: loses its mate"),
]


@pytest.mark.timeout(300)
def test_the_exploration_takes_every_row_and_every_event() -> None:
    taken: set[int] = set()
    events: set[Event] = set()
    source = random.Random(1)
    for name, pairs in FOR_ALL_ROWS:
        wrong = [Fault(*fault) for fault in pairs]
        # Some orders are left out because they lead to the same world, by other rows.
        every = Explored(BY_NAME[name], Rules(), reduced=False)
        for _ in range(40):
            every.walk(wrong, source)
        every.walk(wrong, source, LATE)
        some = Explored(BY_NAME[name], Rules())
        some.explore(wrong, 15_000)
        taken |= some.taken | every.taken
        events |= some.events | every.events
    left = [row for row in TABLE if id(row) not in taken]
    assert not left, "\n".join(map(str, left))
    assert events == set(Event)


# --- planted mistakes -----------------------------------------------------------------------------


def without(event: Event, phase: Phase, at: int = 0) -> tuple[Row, ...]:
    """Returns the table without a row: the one at this place among those for the event."""
    row = [row for row in TABLE if row.event is event and phase in row.phases][at]
    return tuple(one for one in TABLE if one is not row)


def changed(
    event: Event, phase: Phase, change: Callable[[Row], Row], at: int = 0
) -> tuple[Row, ...]:
    """Returns the table with another row."""
    row = [row for row in TABLE if row.event is event and phase in row.phases][at]
    return tuple(change(one) if one is row else one for one in TABLE)


def less(action: Action) -> Callable[[Row], Row]:
    """Returns what takes an action away from a row."""
    return lambda row: row._replace(actions=tuple(one for one in row.actions if one is not action))


E, P, A = Event, Phase, Action
MISTAKES: dict[str, tuple[tuple[Row, ...], str, list[tuple[str, int]]]] = {
    "a failure that was heard is not answered": (
        changed(E.HEARD_FAILURE, P.RUNNING, less(A.SEND_NOTHING)),
        *("gradients", [("late", 0)]),
    ),
    "a failure is not sent": (
        changed(E.FAILED, P.RUNNING, less(A.SEND_FAILURE)),
        *("gradients", [("forward", 1)]),
    ),
    "a failure after the own END is not joined": (
        changed(E.HEARD_FAILURE, P.SETTLING, lambda row: row._replace(note=None)),
        *("gradients", [("report", 1)]),
    ),
    "tasks are not aborted": (
        changed(E.HEARD_FAILURE, P.RUNNING, less(A.ABORT_TASKS)),
        *("gradients", [("forward", 1)]),
    ),
    "replicas do not hear of a failure": (
        changed(E.FAILED, P.RUNNING, less(A.STOP_REPLICAS)),
        *("exchanges", [("early", 0)]),
    ),
    "the caller is not woken when a rank is lost": (
        changed(E.STREAM_LOST, P.RUNNING, less(A.WAKE)),
        *("gradients", [("lost", 1)]),
    ),
    "a rank stays when its mate is lost": (
        changed(E.STREAM_LOST, P.RUNNING, lambda row: row._replace(note=None)),
        *("gradients", [("lost", 1)]),
    ),
    "a rank stays that waits for END no longer": (
        changed(E.TIMED_OUT, P.DRAINING, lambda row: row._replace(note=None)),
        *("gradients", [("silent", 0)]),
    ),
    "a rank alone with a failure stays": (
        without(E.FAILED, P.CLOSING, 1),
        *("gathers", [("change", 0)]),
    ),
    "a wrong plan is known here only": (
        without(E.REDO, P.CLOSING, 1),
        *("gathers", [("plan", 0)]),
    ),
    "END of the others is awaited before gathers": (
        changed(E.DONE, P.COMPLETING, lambda row: row._replace(to=P.DRAINING)),
        *("gathers", [("early", 0)]),
    ),
    "the leader does not say that it has ended": (
        changed(E.DONE, P.SETTLING, less(A.ANNOUNCE_END), 1),
        *("gathers", []),
    ),
    "calls that others wait for are not made in time": (
        changed(E.STOPPED, P.AGREEING, less(A.COMPLETE_CALLS)),
        *("exchanges", [("skip", 1)]),
    ),
    "a rank that decides says nothing": (
        changed(E.STOPPED, P.RUNNING, less(A.STOP_REPLICAS)),
        *("first step in order", [("early", 0)]),
    ),
    "rank 0 does not meet the other replicas": (
        without(E.DONE, P.RELEASING),
        *("first step", [("early", 0)]),
    ),
    "a rank stays whose caller does not": (
        changed(E.ABANDONED, P.RUNNING, lambda row: row._replace(note=None)),
        *("gradients", [("signal", 1)]),
    ),
    "replicas run a step again alone": (
        changed(E.REDO, P.REDUCING, lambda row: row._replace(actions=(A.RETURN,))),
        *("gradients", [("redo", 1)]),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.timeout(120)
def test_the_exploration_finds_a_planted_mistake(mistake: str) -> None:
    table, name, wrong = MISTAKES[mistake]
    assert table != TABLE
    with pytest.raises(WrongError):
        Explored(BY_NAME[name], Rules(table)).explore([Fault(*fault) for fault in wrong], 200_000)


# --- verdicts -------------------------------------------------------------------------------------


class Found(frozenset[int]):
    """Stands for `Findings`."""

    def join(self, other: Found) -> Found:
        return Found(self | other)


def test_verdicts_join_in_any_order_and_any_number_of_times() -> None:
    elsewhere = Failure(-1, 0, "x", "", None, elsewhere=Elsewhere(2, "x", False))
    verdicts = [
        Verdict(frozenset(failures), redo, matters, found, orders, gradients)
        for failures, (redo, gradients), matters, (found, orders) in itertools.product(
            [(), (failure(0, "early"),), (failure(1, "redo", True), elsewhere)],
            [(False, True), (True, False)],
            [None, False, True],
            [(None, frozenset()), (Found({1}), frozenset([(0, 5)])), (Found({2}), frozenset())],
        )
    ]
    for a, b in itertools.product(verdicts, verdicts):
        assert a.join(b) == b.join(a)
        assert a.join(a) == a
        assert a.join(b).join(b) == a.join(b)
    for a, b, c in itertools.product(verdicts[::3], verdicts[1::3], verdicts[2::3]):
        assert a.join(b).join(c) == a.join(b.join(c))


def test_a_redo_counts_before_failures_of_its_replica_and_after_those_of_others() -> None:
    redo, other = failure(1, "redo", True), failure(0, "early")
    own = Verdict(frozenset([redo, other])).of_replica()
    assert own.redo
    assert not own.failures
    together = own.join(Verdict(frozenset([other])).of_replica())
    assert together.first == other


def test_the_machine_needs_neither_torch_nor_threads() -> None:
    assert not {"torch", "threading", "time"} & set(vars(step_machine))
