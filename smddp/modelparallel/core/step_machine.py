"""How a step goes on and ends, on one rank: a state machine, which sends and waits for nothing.

Whoever drives it tells it what has happened (an `Event`), and does what it says (an `Action`).
`TABLE` has all its rules. docs/model-parallel-design.md says what ranks, replicas and order groups
are. tests/python/smp/test_step_machine.py runs the machines of four ranks in every order of events.

The phases are what the thread does that has called the step function. It goes through them in their
order; what other threads hear may end the first three early.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from smddp.modelparallel.core.failure import Elsewhere, Failure, choose

__all__ = [
    "ENDED",
    "SILENT",
    "TABLE",
    "Action",
    "Event",
    "Phase",
    "Place",
    "Row",
    "Rules",
    "State",
    "Verdict",
]


class Phase(enum.IntEnum):
    """What the thread does that has called the step function."""

    OUTSIDE = 0  # there is no step
    RUNNING = 1  # waits until the bodies of all microbatches have ended
    FOLLOWING = 2  # waits until this rank has run all that its leader has run
    COLLECTING = 3  # on rank 0, makes the result; END is sent then
    SETTLING = 4  # END was sent; waits until no task is left
    PLACING = 5  # waits until rank 0 has said where modules live, or has ended the step
    COMPLETING = 6  # begins the collective calls of tasks that others have begun
    CLOSING = 7  # ends the gathers of sharded parameters
    DRAINING = 8  # waits for END of the other ranks of the pipeline
    RELEASING = 9  # frees what belongs to the step
    MEETING = 10  # tells the other replicas that there was no decision about the division
    AGREEING = 11  # has ended the step in the order group; waits for the other members
    REDUCING = 12  # reduces what is left of the gradients, and exchanges flags with replicas


class Event(enum.IntEnum):
    """What has happened. Most come with a `Failure`, AGREED with a `Verdict`."""

    BEGUN = 0  # the step function was called; does rank 0 owe a word about the division?
    BODIES_ENDED = 1  # all have ended on rank 0; the others hear that in its END
    COMPLETED = 2  # a follower has run all that its leader has run
    COLLECTED = 3  # the thread of the caller has nothing more to do before END
    SUCCEEDED = 4  # END was sent, with a report
    DONE = 5  # what the phase does has ended; RELEASING with a `Verdict`, which has no failures
    FAILED = 6  # a task has failed here, or the thread of the caller
    CALLS_DIFFER = 7  # only some replicas wait for the result of a call
    HEARD_FAILURE = 8  # END of another rank of the pipeline says that it has failed
    STOPPED = 9  # another replica has ended the step, or makes other calls
    STREAM_LOST = 10  # a rank of the pipeline is gone
    STREAM_ENDED = 11  # a rank of the pipeline has left, because it has heard of a loss or a signal
    REPLICA_LOST = 12  # a member of the order group is gone, or has left
    DECIDES = 13  # rank 0 agrees with other replicas about the division
    DECIDED = 14  # it has told its pipeline
    DIVIDED = 15  # this rank has applied the decision
    SIGNALLED = 16  # a signal has raised on the thread of the caller, before END
    LEAVES = 17  # this rank can take part in no more steps: a process group has failed here
    BROKEN = 18  # what the phase does has raised what other ranks do not know; or a signal has
    TIMED_OUT = 19  # END of a rank of the pipeline has not come
    AGREED = 20  # all members of the order group have ended the step
    REDO = 21  # gathers or replicas find at the end that the step has to be run again
    ABANDONED = 22  # a signal has raised on the thread of the caller, between two phases
    ADOPTED = 23  # the next steps are those of another model: is it known where modules live?
    LEFT_OVER = 24  # the leader has ended the step without a task that is runnable here


class Action(enum.IntEnum):
    """What to do, in their order, before the next event."""

    SUCCEED = 0  # make the report, and send END with it: then SUCCEEDED, or else FAILED
    SEND_FAILURE = 1  # send END with the failure that has come
    SEND_NOTHING = 2  # send END, which says only that this rank has heard of a failure
    ABORT_TASKS = 3  # tasks that wait raise, none begins, nor a collective call of a task
    STOP_REPLICAS = 4  # tell the order group why, and which collective calls have begun
    COMPLETE_CALLS = 5  # begin the collective calls that a member had begun before it stopped
    WAKE = 6  # let the thread of the caller go on
    ROUSE = 7  # let tasks run for which nobody waits
    ANNOUNCE_END = 8  # a leader tells its followers that it decides nothing more
    REPLAY = 9  # let STOPPED happen again that has come while rank 0 was deciding
    LEAVE = 10  # end the process groups, so that nobody waits for this rank in a step any more
    RETURN = 11  # the caller gets the result
    RUN_AGAIN = 12  # the step is run again
    RAISE = 13  # the caller gets an error


class Verdict(NamedTuple):
    """What is known about a step. It does not matter in which order, and how often, it is joined.

    Attributes:
        failures: why it has failed. One may also say that the step has to be run again.
        redo: it has to be run again, and no failure says why.
        order_matters: see `StepModel.accept_reports`; None if that is not known.
        findings: what was found out about calls; anything that has a `join`, or None.
        orders: the order of the collective calls of tasks: (first rank of a group, what each rank
            of a pipeline has reported).
        gradients: are gradients on?
    """

    failures: frozenset[Failure] = frozenset()
    redo: bool = False
    order_matters: bool | None = False
    findings: Any = None
    orders: frozenset[Any] = frozenset()
    gradients: bool = False

    def join(self, other: Verdict) -> Verdict:
        """Returns what both say."""
        matters = self.order_matters, other.order_matters
        found = self.findings
        if found is None or other.findings is None:
            found = other.findings if found is None else found
        else:
            found = found.join(other.findings)
        return Verdict(
            self.failures | other.failures,
            self.redo or other.redo,
            True if True in matters else None if None in matters else False,
            found,
            self.orders | other.orders,
            self.gradients or other.gradients,
        )

    @property
    def orders_differ(self) -> int | None:
        """The first rank of a group whose ranks have made their calls in different orders."""
        known: dict[int, Any] = {}
        differ = [first for first, found in self.orders if known.setdefault(first, found) != found]
        return min(differ, default=None)

    @property
    def first(self) -> Failure | None:
        """The failure that all ranks raise."""
        return choose(self.failures) if self.failures else None

    def of_replica(self) -> Verdict:
        """Returns what this replica has made of the step, when all its ranks have ended it.

        If what smp had assumed was wrong, that may be why other tasks have failed. So the step is
        run again, whatever else has failed. But a replica that has failed otherwise does not run it
        again; so among replicas, a failure counts first.
        """
        if not any(failure.redo for failure in self.failures):
            return self
        return self._replace(failures=frozenset(), redo=True)

    def elsewhere(self, job_ranks: Sequence[int]) -> Elsewhere | None:
        """Returns why this replica ends the step, for the others; None if it has not failed.

        Args:
            job_ranks: the ranks of the pipeline, as ranks of the job.
        """
        first = self.first
        if first is None or first.elsewhere is not None:
            return first and first.elsewhere
        redo = any(failure.redo for failure in self.failures)
        return first.for_others(job_ranks)._replace(redo=redo)


class Place(NamedTuple):
    """Where a rank stands in the job; the same in all its steps.

    Attributes:
        rank, size: in the pipeline.
        replicas: is there an order group?
        follows: does another member of it decide the order of tasks?
    """

    rank: int
    size: int
    replicas: bool = False
    follows: bool = False


class State(NamedTuple):
    """All that a rank's machine knows.

    Attributes:
        phase: see there.
        verdict: what is known about the step: of the pipeline, and after AGREEING of all replicas.
        divided: is it known here where modules live?
        undecided: does rank 0 owe the other replicas a word about the division?
        deciding: is rank 0 about to decide it?
        postponed: failures of other replicas that have come meanwhile.
        completed: has a follower run all that its leader has run?
        left: takes this rank part in no more steps?
    """

    phase: Phase = Phase.OUTSIDE
    verdict: Verdict = Verdict()
    divided: bool = True
    undecided: bool = False
    deciding: bool = False
    postponed: tuple[Failure, ...] = ()
    completed: bool = False
    left: bool = False


# Before END was sent, and after it as long as the pipeline has not ended the step.
SILENT = Phase.RUNNING, Phase.FOLLOWING, Phase.COLLECTING
ENDED = (
    *(Phase.SETTLING, Phase.PLACING, Phase.COMPLETING, Phase.CLOSING, Phase.DRAINING),
    Phase.RELEASING,
)


class Row(NamedTuple):
    """A rule: at an event, in one of these phases, if the condition holds.

    Attributes:
        phases, event, condition: see above; without a condition the row always holds.
        to: the phase that follows; None for the same one.
        actions: what to do then.
        note: what else the state keeps of it.
    """

    phases: tuple[Phase, ...]
    event: Event
    condition: Callable[[Place, State], bool] | None
    to: Phase | None
    actions: tuple[Action, ...] = ()
    note: Callable[[State, Any], State] | None = None


# --- conditions -----------------------------------------------------------------------------------


def _failed(place: Place, state: State) -> bool:
    return bool(state.verdict.failures)


def _cannot_return(place: Place, state: State) -> bool:
    return bool(state.verdict.failures) or state.left


def _deciding(place: Place, state: State) -> bool:
    return state.deciding


def _undecided(place: Place, state: State) -> bool:
    return state.undecided


def _awaits_leader(place: Place, state: State) -> bool:
    # Without a division the leader may wait in its body until this replica has ended the step.
    return place.follows and state.divided and not state.completed


def _collects(place: Place, state: State) -> bool:
    return place.rank == 0 or place.follows


def _awaits_place(place: Place, state: State) -> bool:
    return place.replicas and place.rank > 0 and not state.divided and not state.left


def _has_partitions(place: Place, state: State) -> bool:
    return place.size > 1


def _awaits_partitions(place: Place, state: State) -> bool:
    return place.size > 1 and not state.left


def _awaits_replicas(place: Place, state: State) -> bool:
    return place.replicas and not state.left


def _is_needed(place: Place, state: State) -> bool:
    return place.size > 1 or place.replicas


# --- what a state keeps ---------------------------------------------------------------------------


def _begin(state: State, undecided: bool) -> State:
    return State(Phase.RUNNING, divided=state.divided, undecided=undecided, left=state.left)


def _adopt(state: State, divided: bool) -> State:
    return state._replace(divided=divided)


def _join(state: State, failure: Failure) -> State:
    known = state.verdict
    return state._replace(verdict=known._replace(failures=known.failures | {failure}))


def _join_first(state: State, failure: Failure) -> State:
    # Later errors of this rank follow from what it knows.
    return state if state.verdict.failures else _join(state, failure)


def _leave(state: State, failure: Failure) -> State:
    return _join_first(state, failure)._replace(left=True)


def _leave_for_loss(state: State, failure: Failure) -> State:
    return _join(state, failure)._replace(left=True)


def _leave_only(state: State, _: Any) -> State:
    return state._replace(left=True)


def _complete(state: State, _: Any) -> State:
    return state._replace(completed=True)


def _decide(state: State, _: Any) -> State:
    return state._replace(deciding=True, undecided=False)


def _postpone(state: State, failure: Failure) -> State:
    return state._replace(postponed=(*state.postponed, failure))


def _decided(state: State, _: Any) -> State:
    return state._replace(deciding=False, postponed=())


def _want_redo(state: State, _: Any) -> State:
    return state._replace(verdict=state.verdict._replace(redo=True))


def _divided(state: State, _: Any) -> State:
    return state._replace(divided=True)


def _tell(state: State, _: Any) -> State:
    return state._replace(undecided=False)


def _conclude(state: State, verdict: Verdict) -> State:
    return state._replace(verdict=state.verdict.join(verdict).of_replica())


def _agree(state: State, verdict: Verdict) -> State:
    return state._replace(verdict=state.verdict.join(verdict))


# --- the table ------------------------------------------------------------------------------------

_P, _E, _A = Phase, Event, Action
_HALT = _A.ABORT_TASKS, _A.STOP_REPLICAS
_END = _A.SEND_FAILURE, *_HALT, _A.WAKE
_BEFORE_RELEASE = ENDED[:-1]
_AFTER = _P.MEETING, _P.AGREEING, _P.REDUCING, _P.OUTSIDE

# At an event, the first row that fits says what happens. An event without a row changes nothing;
# that does not occur, as far as the exploration goes.
TABLE: tuple[Row, ...] = (
    Row((_P.OUTSIDE,), _E.ADOPTED, None, None, (), _adopt),
    Row((_P.OUTSIDE,), _E.BEGUN, None, _P.RUNNING, (), _begin),
    # --- success
    # What nobody has waited for may still be left; the leader has run it, too.
    Row((_P.RUNNING,), _E.BODIES_ENDED, _awaits_leader, _P.FOLLOWING, (_A.ROUSE,)),
    Row((_P.RUNNING,), _E.BODIES_ENDED, _collects, _P.COLLECTING, (_A.WAKE,)),
    # Rank 0 waits for this END, so it is not left to the caller's thread, which has to wake first.
    Row((_P.RUNNING,), _E.BODIES_ENDED, None, _P.COLLECTING, (_A.SUCCEED,)),
    # The word of the leader may come before that of rank 0.
    Row((_P.RUNNING,), _E.COMPLETED, None, None, (), _complete),
    Row((_P.FOLLOWING,), _E.COMPLETED, None, _P.COLLECTING, (_A.WAKE,)),
    # All bodies have ended: nobody has waited for the results of what is left over, and the replica
    # of the leader has not run it any more.
    Row((_P.FOLLOWING,), _E.LEFT_OVER, None, _P.COLLECTING, (_A.ABORT_TASKS, _A.WAKE)),
    Row((_P.COLLECTING, *ENDED, *_AFTER), _E.LEFT_OVER, None, None, (_A.ABORT_TASKS,)),
    Row((_P.COLLECTING,), _E.COLLECTED, None, None, (_A.SUCCEED,)),
    Row((_P.COLLECTING,), _E.SUCCEEDED, None, _P.SETTLING, (_A.WAKE,)),
    # END was sent on another thread: with a report, or because of a failure.
    Row(ENDED, _E.COLLECTED, None, None),
    Row(ENDED, _E.BODIES_ENDED, None, None),
    Row((_P.COLLECTING, *ENDED, *_AFTER), _E.COMPLETED, None, None),
    # --- failure before END. The first to know it tells it to all ranks of the pipeline; those that
    # hear it send END, too, because the step ends so on every stream.
    Row(SILENT, _E.FAILED, None, _P.SETTLING, _END, _join_first),
    Row(SILENT, _E.CALLS_DIFFER, None, _P.SETTLING, _END, _join_first),
    Row((_P.RUNNING,), _E.LEFT_OVER, None, _P.SETTLING, _END, _join_first),
    Row(SILENT, _E.HEARD_FAILURE, None, _P.SETTLING, (_A.SEND_NOTHING, *_END[1:]), _join),
    # This rank would have the decision, and could not tell it its pipeline any more. Others must
    # not wait for its calls meanwhile: it may wait for them to say whether they decide.
    Row(SILENT, _E.STOPPED, _deciding, None, (_A.STOP_REPLICAS,), _postpone),
    Row(SILENT, _E.STOPPED, None, _P.SETTLING, _END, _join_first),
    Row(SILENT, _E.STREAM_LOST, None, _P.SETTLING, (*_END, _A.LEAVE), _leave_for_loss),
    Row(SILENT, _E.STREAM_ENDED, None, _P.SETTLING, (*_END, _A.LEAVE), _leave),
    Row(SILENT, _E.REPLICA_LOST, None, _P.SETTLING, (*_END, _A.LEAVE), _leave),
    Row(SILENT, _E.LEAVES, None, _P.SETTLING, (*_END, _A.LEAVE), _leave),
    # The caller gets the signal, and may never come back. Alone in its pipeline, and without
    # replicas that wait for its tasks, a rank can end this step with the others.
    Row(SILENT, _E.SIGNALLED, _is_needed, _P.SETTLING, (*_END, _A.LEAVE), _leave),
    Row(SILENT, _E.SIGNALLED, None, _P.SETTLING, _END, _join_first),
    # --- failure after END
    Row(ENDED, _E.FAILED, _failed, None),  # a task that was aborted
    # The others have this rank's report, and may have ended the step. It is alone.
    Row(ENDED, _E.FAILED, _has_partitions, None, (*_HALT, _A.LEAVE), _leave),
    Row(ENDED, _E.FAILED, None, None, _HALT, _join_first),
    # All of the pipeline know that it has succeeded here.
    Row((*ENDED, *_AFTER), _E.CALLS_DIFFER, None, None),
    Row(ENDED, _E.HEARD_FAILURE, None, None, _HALT, _join),
    Row(ENDED, _E.STOPPED, _failed, None),
    # This pipeline may have succeeded. Its ranks hear of the failure when replicas agree.
    Row((*ENDED, _P.MEETING), _E.STOPPED, None, None, _HALT),
    Row(ENDED, _E.STREAM_LOST, None, None, (*_HALT, _A.LEAVE), _leave_for_loss),
    Row(ENDED, _E.STREAM_ENDED, None, None, (*_HALT, _A.LEAVE), _leave),
    Row(ENDED, _E.REPLICA_LOST, None, None, (*_HALT, _A.LEAVE), _leave),
    Row(ENDED, _E.LEAVES, None, None, (*_HALT, _A.LEAVE), _leave),
    Row(ENDED, _E.SIGNALLED, _is_needed, None, (*_HALT, _A.LEAVE), _leave),
    Row(ENDED, _E.SIGNALLED, None, None, _HALT, _join_first),
    # --- what the caller's thread does after END. Tasks end before gathers, and gathers before it
    # waits for END of the others. Else ranks could wait in a circle: for a peer's END, which waits
    # for a gather with another replica, which waits for its own pipeline. So a leader says first
    # that it has no more decisions.
    # Others of the order group may have a decision that comes yet, and wait in collective calls.
    Row((_P.SETTLING,), _E.DONE, _awaits_place, _P.PLACING, (_A.ANNOUNCE_END,)),
    Row((_P.SETTLING,), _E.DONE, None, _P.COMPLETING, (_A.ANNOUNCE_END,)),
    Row((_P.PLACING,), _E.DONE, None, _P.COMPLETING),
    Row((_P.COMPLETING,), _E.DONE, None, _P.CLOSING),
    Row((_P.CLOSING,), _E.DONE, _awaits_partitions, _P.DRAINING),
    Row((_P.CLOSING,), _E.DONE, None, _P.RELEASING),
    # The plan of the gathers was wrong, and no task has said so before END.
    Row((_P.CLOSING,), _E.REDO, _failed, None),
    Row((_P.CLOSING,), _E.REDO, _has_partitions, None, (*_HALT, _A.LEAVE), _leave),
    Row((_P.CLOSING,), _E.REDO, None, None, (), _want_redo),  # replicas hear of it
    Row((_P.DRAINING,), _E.DONE, None, _P.RELEASING),
    Row((_P.DRAINING,), _E.TIMED_OUT, None, _P.RELEASING, (*_HALT, _A.LEAVE), _leave),
    Row(_BEFORE_RELEASE, _E.BROKEN, None, _P.RELEASING, (*_HALT, _A.LEAVE), _leave),
    # --- all of the pipeline have ended the step, or this rank waits for nobody
    # Rank 0 of each replica owes the others one word in each step before the division.
    Row((_P.RELEASING,), _E.DONE, _undecided, _P.MEETING, (), _conclude),
    Row((_P.RELEASING,), _E.DONE, _awaits_replicas, _P.AGREEING, (), _conclude),
    Row((_P.RELEASING,), _E.DONE, None, _P.REDUCING, (), _conclude),
    Row((_P.RELEASING,), _E.BROKEN, _undecided, _P.MEETING, (*_HALT, _A.LEAVE), _leave),
    Row((_P.RELEASING,), _E.BROKEN, None, _P.REDUCING, (*_HALT, _A.LEAVE), _leave),
    Row((_P.MEETING,), _E.FAILED, None, None, (), _join_first),  # all replicas hear of it there
    Row((_P.MEETING,), _E.DONE, _awaits_replicas, _P.AGREEING, (), _tell),
    Row((_P.MEETING,), _E.DONE, None, _P.REDUCING, (), _tell),
    # A task of another replica may wait in a call that this rank's tasks do not make.
    Row((_P.AGREEING,), _E.STOPPED, None, None, (_A.ABORT_TASKS, _A.COMPLETE_CALLS)),
    # The members have made their calls in different orders; all find it in what they have said.
    Row((_P.AGREEING,), _E.FAILED, None, None, (), _join_first),
    Row((_P.AGREEING,), _E.AGREED, None, _P.REDUCING, (), _agree),
    # This rank has left, and waits for nobody.
    Row((_P.REDUCING, _P.OUTSIDE), _E.STOPPED, None, None),
    Row(_AFTER, _E.REPLICA_LOST, None, None, (_A.LEAVE,), _leave_only),
    Row(_AFTER, _E.LEAVES, None, None, (_A.LEAVE,), _leave_only),
    # A rank that has left does not wait for END of the others, but may still hear it.
    Row(_AFTER, _E.STREAM_LOST, None, None, (_A.LEAVE,), _leave_only),
    Row(_AFTER, _E.STREAM_ENDED, None, None, (_A.LEAVE,), _leave_only),
    Row(_AFTER, _E.HEARD_FAILURE, None, None),
    Row(_AFTER, _E.BODIES_ENDED, None, None),
    Row((_P.MEETING, _P.AGREEING), _E.BROKEN, None, _P.REDUCING, (_A.LEAVE,), _leave),
    Row((_P.REDUCING,), _E.DONE, _cannot_return, _P.OUTSIDE, (_A.RAISE,)),
    Row((_P.REDUCING,), _E.DONE, None, _P.OUTSIDE, (_A.RETURN,)),
    Row((_P.REDUCING,), _E.FAILED, None, _P.OUTSIDE, (_A.RAISE,), _join_first),
    Row((_P.REDUCING,), _E.REDO, None, _P.OUTSIDE, (_A.RUN_AGAIN,), _want_redo),
    Row((_P.REDUCING,), _E.BROKEN, None, _P.OUTSIDE, (_A.LEAVE, _A.RAISE), _leave),
    # The step could not begin here, and the others may be in it already.
    Row((_P.OUTSIDE,), _E.BROKEN, None, None, (_A.SEND_FAILURE, _A.LEAVE), _leave_only),
    # The caller gets the signal at once; it does not wait, so there is nobody to wake.
    Row(SILENT, _E.ABANDONED, None, _P.OUTSIDE, (_A.SEND_FAILURE, *_HALT, _A.LEAVE), _leave),
    Row(ENDED, _E.ABANDONED, None, _P.OUTSIDE, (*_HALT, _A.LEAVE), _leave),
    Row(_AFTER[:-1], _E.ABANDONED, None, _P.OUTSIDE, (_A.LEAVE,), _leave_only),
    # What has come before that may still be acted upon.
    Row((_P.OUTSIDE,), _E.FAILED, None, None),
    # --- the division
    Row(tuple(_P), _E.DECIDES, None, None, (), _decide),
    Row(tuple(_P), _E.DIVIDED, None, None, (), _divided),
    Row(tuple(_P), _E.DECIDED, None, None, (_A.REPLAY,), _decided),
)


def _by_event(table: tuple[Row, ...]) -> dict[tuple[Event, Phase], tuple[Row, ...]]:
    found: dict[tuple[Event, Phase], tuple[Row, ...]] = {}
    for row in table:
        for phase in row.phases:
            key = row.event, phase
            found[key] = (*found.get(key, ()), row)
    return found


class Rules:
    """Finds rows of a table quickly."""

    def __init__(self, table: tuple[Row, ...] = TABLE) -> None:
        """Takes a table; tests have others."""
        self._rows = _by_event(table)

    def row(self, place: Place, state: State, event: Event) -> Row | None:
        """Returns the row that fits; None if there is none."""
        for row in self._rows.get((event, state.phase), ()):
            if row.condition is None or row.condition(place, state):
                return row
        return None

    def advance(
        self, place: Place, state: State, event: Event, value: Any = None
    ) -> tuple[State, tuple[Action, ...]]:
        """Returns the state after an event, and what to do.

        Args:
            place: of the rank.
            state: before the event.
            event: what has happened.
            value: what comes with it.
        """
        row = self.row(place, state, event)
        if row is None:
            return state, ()
        if row.note is not None:
            state = row.note(state, value)
        if row.to is not None:
            state = state._replace(phase=row.to)
        return state, row.actions
