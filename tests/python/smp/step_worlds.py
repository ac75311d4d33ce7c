"""A job of two pipelines of two ranks in one step, as a state that moves in every possible order.

Rank `2 * replica + place`. Each rank has its machine, and what surrounds it in a job: the thread of
the caller, at most one task, collective calls, and streams whose messages come in order, at any
moment. One microbatch runs: the body, on place 0, calls the forward and then the backward pass of
place 1. A task that waits in a collective call keeps the baton, so its rank takes no messages of
its pipeline; those of the order group have a thread of their own.

A world is a tuple, so that worlds can be compared. `moves` returns all that may happen next.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from smddp.modelparallel.core.failure import Elsewhere, Failure
from smddp.modelparallel.core.step_machine import (
    SILENT,
    Action,
    Event,
    Phase,
    Place,
    Rules,
    State,
    Verdict,
)

RANKS = range(4)


class Layout(NamedTuple):
    """What replicas do together, besides gradients.

    Attributes:
        name: of the layout.
        ordered: do they run tasks in one order?
        exchanges: do tasks make collective calls, which a failed step completes?
        gathers: do tasks gather parameters, which the rest of a failed step gathers, too?
        divided: is it known where modules live?
        partitions: how many; with one, ranks 1 and 3 are missing.
    """

    name: str
    ordered: bool
    exchanges: bool = False
    gathers: bool = False
    divided: bool = True
    partitions: int = 2


LAYOUTS = [
    Layout("gradients", ordered=False),
    Layout("exchanges", ordered=True, exchanges=True),
    Layout("gathers", ordered=True, gathers=True),
    Layout("one partition", ordered=False, partitions=1),
    Layout("one partition, gathers", ordered=False, gathers=True, partitions=1),
    Layout("first step", ordered=False, divided=False),
    Layout("first step in order", ordered=True, exchanges=True, divided=False),
]


class Fault(NamedTuple):
    """Something that goes wrong once.

    Attributes:
        kind: what; of the body "early" and "late", it raises before its collective call or after
            it; "no call", it does not call the other place; "waits", only this replica waits for a
            call. Of tasks on place 1 "forward" and "backward", this one raises; "redo", an
            assumption was wrong; "other step", the rank is in another one than rank 0. Of any rank
            "report", what END should say cannot be made; "skip", a task leaves out a collective
            call; "begin", the step cannot begin here; "change", a gathered parameter was changed;
            "gather", the end of the gathers fails here alone; "plan", their plan was wrong; "hook",
            reducing the gradients fails here. On all ranks "order", calls were made in different
            orders. At any moment "lost", the process ends; "signal", the thread of the caller is
            interrupted; "silent", the wait for END lasts too long; "extra", a follower gets a task
            that its leader has not got, such as dropping a graph, and for which nobody waits.
        rank: where.
    """

    kind: str
    rank: int


BODY_FAULTS = "early", "late", "no call", "waits"
TASK_FAULTS = "forward", "backward", "redo", "other step"
ANY_TIME = "signal", "silent", "extra"  # a rank with such a fault is tried at each of its phases
ANY_FAULTS = (
    "report",
    "skip",
    "begin",
    "gather",
    "change",
    "plan",
    "hook",
    "lost",
    "signal",
    "silent",
)


def faults(layout: Layout) -> list[Fault]:
    """Returns all faults that may happen in a layout."""
    found = [Fault(kind, rank) for kind in BODY_FAULTS for rank in (0, 2)]
    found += [Fault(kind, rank) for kind in TASK_FAULTS for rank in (1, 3)]
    found += [Fault(kind, rank) for kind in ANY_FAULTS for rank in RANKS]
    found.append(Fault("extra", 3))
    if layout.partitions == 1:
        found = [fault for fault in found if fault.rank % 2 == 0]
    if layout.exchanges:
        found.append(Fault("order", -1))
    missing = set()
    if not layout.exchanges:
        missing.add("skip")
    if not layout.gathers:
        missing |= {"gather", "change", "plan"}
    if not layout.ordered or not layout.divided:
        missing |= {"waits", "extra"}
    if not layout.ordered and layout.divided:
        missing.add("no call")
    return [fault for fault in found if fault.kind not in missing]


class Rank(NamedTuple):
    """One rank, in what concerns the end of a step.

    Attributes:
        state: of its machine.
        here: "out" before it calls the step, then "in"; at the end "return", "again" or "raise"; or
            "gone".
        woken: may the thread of the caller go on?
        task: the one that runs or waits; "" for none.
        at: how far it is.
        blocked: does it wait in a collective call?
        ready: tasks that have not begun.
        ran: how many have begun.
        aborted: are tasks aborted?
        calls: how many collective calls or gathers it has begun.
        heard: has the stream from the other rank of its pipeline ended?
        ended: has it sent END to it? And
        succeeded: with a report?
        stopped: has it sent STOP?
        said: what the other member has said: () nothing, (number of calls,) in STOP or END.
        verdict: with END.
        in_order: has this rank sent END to the other member?
        quiet: has the stream from the other member ended?
        decided: how many tasks the leader has begun, as far as is known here.
        over: does the leader begin no more?
        noted: the other member waits for a call (1), and this rank has noticed that (2).
        placed: has rank 0 decided, or ended the step?
        met: what it has said about the division: "", "agree", "abstain" or "fail".
        flags: that it exchanges at the end: None, or (failed, redo).
    """

    state: Held
    here: str = "out"
    woken: bool = False
    task: str = ""
    at: int = 0
    blocked: bool = False
    ready: tuple[str, ...] = ()
    ran: int = 0
    aborted: bool = False
    calls: int = 0
    heard: bool = False
    ended: bool = False
    succeeded: bool = False
    stopped: bool = False
    said: tuple[int, ...] = ()
    verdict: Verdict | None = None
    in_order: bool = False
    quiet: bool = False
    decided: int = 0
    over: bool = False
    noted: int = 0
    placed: bool = False
    met: str = ""
    flags: tuple[bool, bool] | None = None


Streams = tuple[tuple[Any, ...], ...]


class World(NamedTuple):
    """The ranks; the messages under way, by sender, in its pipeline and in its order group."""

    ranks: tuple[Rank, ...]
    inside: Streams
    across: Streams
    faults: tuple[Fault, ...]


class Held:
    """A state of a machine; equal ones are one object, so that they are compared quickly."""

    def __init__(self, state: State) -> None:
        self.value = state
        self.phase, self.verdict, self.postponed = state.phase, state.verdict, state.postponed
        self.divided, self.completed, self.left = state.divided, state.completed, state.left
        self.silent = state.phase in SILENT
        self.after: dict[Any, tuple[Held, tuple[Action, ...]]] = {}


class WrongError(Exception):
    """A property does not hold."""


def mate(rank: int) -> int:
    """Returns the other rank of the pipeline."""
    return rank ^ 1


def twin(rank: int) -> int:
    """Returns the other member of the order group, with the same place in the other replica."""
    return rank ^ 2


class Explored:
    """Moves worlds of one layout, by the rules of a table.

    Attributes:
        taken: the rows that were taken.
        events: those that have happened.
    """

    def __init__(self, layout: Layout, rules: Rules, reduced: bool = True) -> None:
        """Begins.

        Args:
            layout: of the job.
            rules: of all machines.
            reduced: leave out orders of moves that do not depend on each other.
        """
        self.layout, self.rules, self.reduced = layout, rules, reduced
        self.places = [
            Place(rank % 2, layout.partitions, layout.ordered, layout.ordered and rank >= 2)
            for rank in RANKS
        ]
        self.taken: set[int] = set()
        self.events: set[Event] = set()
        self._held: dict[State, Held] = {}

    def hold(self, state: State) -> Held:
        """Returns the one object for a state."""
        found = self._held.get(state)
        if found is None:
            found = self._held[state] = Held(state)
        return found

    def first(self, wrong: Iterable[Fault] = ()) -> World:
        """Returns the world before the step."""
        nothing: Streams = ((),) * 4
        state = self.hold(State(divided=self.layout.divided))
        missing = "none" if self.layout.partitions == 1 else "out"
        ranks = tuple(Rank(state, missing if rank % 2 else "out") for rank in RANKS)
        return World(ranks, nothing, nothing, tuple(wrong))

    def advance(
        self, rank: int, held: Held, event: Event, value: Any
    ) -> tuple[Held, tuple[Action, ...]]:
        """Returns what the machine of a rank does."""
        key = rank, int(event), value
        found = held.after.get(key)
        if found is None:
            row = self.rules.row(self.places[rank], held.value, event)
            if row is None:
                raise WrongError(f"{event.name} has no row in {held.phase.name}")
            self.events.add(event)
            self.taken.add(id(row))
            state, actions = self.rules.advance(self.places[rank], held.value, event, value)
            if held.left and not state.left:
                raise WrongError("a rank that has left has come back")
            found = held.after[key] = self.hold(state), actions
        return found

    def moves(self, world: World) -> list[tuple[str, World]]:
        """Returns all that may happen next, with its name.

        Raises:
            WrongError: a property does not hold.
        """
        found: list[tuple[str, World]] = []
        for rank in RANKS if self.reduced else ():
            at_once = self._at_once(world, rank)
            if at_once is not None:
                next_world = Moving(self, world)
                at_once(next_world)
                return [(f"{rank}: at once", next_world.frozen())]
        for rank in RANKS:
            if world.ranks[rank].here in ("gone", "none"):
                continue
            for name, move in self._of_rank(world, rank):
                next_world = Moving(self, world)
                move(next_world)
                found.append((f"{rank}: {name}", next_world.frozen()))
        if not found:
            # Time passes only when nothing else happens.
            for rank in RANKS:
                for name, move in self._of_time(world, rank):
                    next_world = Moving(self, world)
                    move(next_world)
                    if next_world.frozen() != world:
                        found.append((f"{rank}: {name}", next_world.frozen()))
        if not found:
            self._check_end(world)
        return found

    def _at_once(self, world: World, i: int) -> Callable[[Moving], None] | None:
        """Returns a move that need not be tried later than now; None if there is none.

        Such a move stays possible whatever other ranks do, and what may happen meanwhile leads to
        the same world before and after it; or to one that others lead to, too.
        """
        me = world.ranks[i]
        if me.here in ("gone", "none"):
            return None
        if me.here == "out":
            return None if Fault("begin", i) in world.faults else lambda w: w.begin(i)
        if me.state.left and self._loses(world, i):
            return lambda w: w.lose_both(i)
        if me.here != "in":
            return None
        kind = world.inside[mate(i)][0][0] if world.inside[mate(i)] else ""
        hears = not (me.heard or me.blocked or Fault("other step", i) in world.faults)
        if kind == "BEGIN" and hears:
            return lambda w: w.hear(i)
        kind = world.across[twin(i)][0][0] if world.across[twin(i)] else ""
        if kind in ("DECISION", "OVER", "NOTED") and not me.quiet:
            return lambda w: w.hear_twin(i)
        if any(one.rank == i for one in world.faults if one.kind in ANY_TIME):
            return None  # it may happen in each phase
        phase, failed = me.state.phase, me.state.verdict.failures
        ordered, exchanges = self.layout.ordered, self.layout.exchanges
        idle = not me.task and not me.ready and me.woken
        if phase is Phase.SETTLING and idle and (me.state.divided or i % 2 == 0):
            if me.stopped or i >= 2 or not ordered:  # a leader's OVER may come before its STOP
                return lambda w: w.on(i, Event.DONE)
        elif phase is Phase.COMPLETING and not exchanges:
            return lambda w: w.complete(i, failed=False)
        elif phase is Phase.COMPLETING and failed and not me.state.left and me.said:
            return lambda w: w.complete(i, failed=True)
        elif phase is Phase.CLOSING and not self.layout.gathers:
            return lambda w: w.on(i, Event.DONE)
        elif phase is Phase.CLOSING:
            found = [move for name, move in self._of_gathers(world, i)]
            return found[0] if len(found) == 1 else None
        elif phase is Phase.DRAINING and me.heard:
            return lambda w: w.on(i, Event.DONE)
        elif phase is Phase.RELEASING and idle and (failed or not exchanges):
            return lambda w: w.on(i, Event.DONE, Verdict())
        elif phase is Phase.AGREEING and not me.in_order and (me.said or not exchanges):
            return lambda w: w.end_in_order(i)
        elif phase is Phase.AGREEING and me.in_order and me.verdict is not None:
            return lambda w: w.agree(i)
        elif phase is Phase.REDUCING and Fault("hook", i) not in world.faults:
            other = world.ranks[twin(i)]
            if me.state.left:
                return lambda w: w.on(i, Event.DONE)
            if me.flags is None:
                return lambda w: w.flag(i)
            if other.flags is not None:
                return lambda w: w.reduce(i)
        return None

    # --- what may happen on a rank ----------------------------------------------------------------

    def _of_rank(self, world: World, i: int) -> Iterator[tuple[str, Callable[[Moving], None]]]:
        me = world.ranks[i]
        for fault in world.faults:
            if fault.rank == i and fault.kind == "lost" and me.here in ("out", "in"):
                yield "is lost", lambda w: w.lose(i)
            in_step = me.here == "in" and me.state.phase is not Phase.OUTSIDE
            ran = me.ran == 2 and not me.task and not me.aborted
            if fault.rank == i and fault.kind == "extra" and ran and in_step:
                yield "gets a task alone", lambda w: w.get_task(i)
            if fault.rank == i and fault.kind == "signal" and in_step:
                yield "gets a signal", lambda w: w.signal(i, me.state.silent)
                yield "gets a signal between phases", lambda w: w.abandon(i)
                if me.state.phase is Phase.SETTLING:  # and has not woken yet
                    yield "gets a signal late", lambda w: w.signal(i, True)
        if me.here == "out":
            yield "begins", lambda w: w.begin(i)
            return
        if me.here == "in":
            yield from self._of_caller(world, i)
        yield from self._of_tasks(world, i)
        yield from self._of_streams(world, i)

    def _of_caller(self, world: World, i: int) -> Iterator[tuple[str, Callable[[Moving], None]]]:
        me, other = world.ranks[i], world.ranks[twin(i)]
        phase, on = me.state.phase, Moving.on
        alone = self.aborted(world, i, twin(i))
        if me.state.silent:
            if me.woken:
                yield "goes on", lambda w: w.collect(i)
        elif phase in (Phase.SETTLING, Phase.RELEASING):
            if not me.task and not me.ready and me.woken:
                yield "has no task", lambda w: on(w, i, Event.DONE, Verdict())
        elif phase is Phase.PLACING:
            if me.placed:
                yield "knows the places", lambda w: on(w, i, Event.DONE)
        elif phase is Phase.COMPLETING:
            waits = self.layout.exchanges and me.state.verdict.failures and not me.state.left
            if not waits or me.said or me.quiet:
                yield "completes calls", lambda w: w.complete(i, bool(waits))
        elif phase is Phase.CLOSING:
            yield from self._of_gathers(world, i)
        elif phase is Phase.DRAINING:
            if me.heard:
                yield "has heard all", lambda w: on(w, i, Event.DONE)
            elif Fault("silent", i) in world.faults:
                yield "waits no longer", lambda w: w.time_out(i)
        elif phase is Phase.MEETING:
            if not me.met:
                yield "abstains", lambda w: w.meet(i)
            elif other.met:
                yield "has met", lambda w: w.end_meeting(i)
            elif alone:
                yield "meets nobody", lambda w: on(w, i, Event.BROKEN, failure(i, "meet"))
        elif phase is Phase.AGREEING:
            if not me.in_order:
                yield "ends in order", lambda w: w.end_in_order(i)
            elif me.verdict is not None and me.calls <= max(me.calls, other.calls):
                yield "agrees", lambda w: w.agree(i)
            elif me.quiet:
                yield "agrees with nobody", lambda w: on(w, i, Event.BROKEN, failure(i, "agree"))
        elif phase is Phase.REDUCING:
            if Fault("hook", i) in world.faults:
                yield "fails to reduce", lambda w: w.fail_to_reduce(i)
            elif me.state.left:
                yield "reduces alone", lambda w: on(w, i, Event.DONE)
            elif me.flags is None:
                yield "has flags", lambda w: w.flag(i)
            elif other.flags is not None:
                yield "reduces", lambda w: w.reduce(i)
            elif alone:
                yield "reduces with nobody", lambda w: on(w, i, Event.BROKEN, failure(i, "reduce"))

    def _of_gathers(self, world: World, i: int) -> Iterator[tuple[str, Callable[[Moving], None]]]:
        me, other = world.ranks[i], world.ranks[twin(i)]
        if not self.layout.gathers or me.state.left:
            yield "closes", lambda w: w.on(i, Event.DONE)
        elif self.aborted(world, i, twin(i)):
            yield "cannot close", lambda w: w.close_alone(i)
        elif me.calls < me.decided:
            yield "gathers", lambda w: w.put(i, calls=me.calls + 1)
        elif self.layout.ordered and not me.over:
            pass  # more may be decided
        elif other.calls >= me.calls:
            if Fault("gather", i) in world.faults:
                yield "fails to close", lambda w: w.close_alone(i, Fault("gather", i))
            elif Fault("change", i) in world.faults:
                yield "finds a change", lambda w: w.find_change(i)
            elif Fault("plan", i) in world.faults:
                yield "finds a wrong plan", lambda w: w.find_plan(i)
            else:
                yield "closes", lambda w: w.on(i, Event.DONE)

    def _of_tasks(self, world: World, i: int) -> Iterator[tuple[str, Callable[[Moving], None]]]:
        me, other = world.ranks[i], world.ranks[twin(i)]
        if me.blocked:
            if me.task == "body" and me.at == 5:  # in `agree`
                if other.met:
                    yield "has met", lambda w: w.decide(i)
                elif self.aborted(world, i, twin(i)):
                    yield "meets nobody", lambda w: w.break_task(i)
            elif other.calls >= me.calls:
                yield "ends a call", lambda w: w.end_call(i)
            elif self.aborted(world, i, twin(i)):
                yield "call fails", lambda w: w.break_task(i)
        elif me.task:
            if me.at in (0, 1, 3, 4, 6):
                yield f"{me.task} {me.at}", lambda w: w.work(i)
            elif me.at == 7 and (me.noted == 3 or me.said or me.quiet):
                yield "goes on after the note", lambda w: w.work(i)
        elif me.ready:
            follows = self.places[i].follows and self.layout.divided and me.state.divided
            if me.ready[0] == "apply" or not follows or me.ran < me.decided or me.aborted:
                yield f"begins {me.ready[0]}", lambda w: w.begin_task(i)
            elif me.over:
                yield "finds a task left over", lambda w: w.find_left_over(i)
        follows = self.places[i].follows and not me.state.completed
        waits = follows and me.state.phase in (Phase.RUNNING, Phase.FOLLOWING)
        if waits and me.over and not (me.task or me.ready) and me.ran >= me.decided:
            yield "completes", lambda w: w.on(i, Event.COMPLETED)

    def _of_streams(self, world: World, i: int) -> Iterator[tuple[str, Callable[[Moving], None]]]:
        me = world.ranks[i]
        if self.layout.partitions > 1 and not me.heard and not me.blocked:
            if world.inside[mate(i)]:
                message = world.inside[mate(i)][0]
                yield f"hears {message[0]}", lambda w: w.hear(i)
            if self.aborted(world, i, mate(i)):
                yield "loses its mate", lambda w: w.lose_mate(i)
        if self.layout.ordered and not me.quiet:
            if world.across[twin(i)]:
                message = world.across[twin(i)][0]
                yield f"hears {message[0]} from its twin", lambda w: w.hear_twin(i)
            if self.aborted(world, i, twin(i)):
                yield "loses its twin", lambda w: w.lose_twin(i)

    def _of_time(self, world: World, i: int) -> Iterator[tuple[str, Callable[[Moving], None]]]:
        """A rank that waits for long tells its twin how far it is; see history.py and order.py."""
        me, other = world.ranks[i], world.ranks[twin(i)]
        if me.here != "in" or not me.state.silent or not self.layout.ordered:
            return
        if me.blocked and me.at != 5:
            if other.state.phase is Phase.AGREEING or other.here != "in":
                yield "compares", lambda w: w.on(i, Event.STOPPED, failure(i, "differs"))
            elif not other.blocked:
                there = twin(i)
                yield "is compared", lambda w: w.on(there, Event.STOPPED, failure(there, "differs"))
        elif me.ran < me.decided and not me.task and not me.ready:
            yield "is stuck", lambda w: w.on(i, Event.FAILED, failure(i, "stuck"))

    def _loses(self, world: World, i: int) -> bool:
        """Says whether a rank that has left still has to hear that its streams have ended."""
        me = world.ranks[i]
        inside = self.layout.partitions > 1 and not (me.heard or me.blocked)
        return inside or (self.layout.ordered and not me.quiet)

    @staticmethod
    def aborted(world: World, one: int, other: int) -> bool:
        """Says whether a process group of these two has ended: nobody waits in it."""
        both = world.ranks[one], world.ranks[other]
        return any(rank.state.left or rank.here == "gone" for rank in both)

    def explore(self, wrong: Iterable[Fault] = (), longest: int = 0) -> tuple[int, int]:
        """Moves a world in every order until nothing more can happen.

        Args:
            wrong: the faults that may happen.
            longest: give up after so many worlds; 0 for never.

        Returns:
            How many worlds there are, and how many orders of moves.

        Raises:
            WrongError: a property does not hold; says after which moves.
        """
        first = self.first(wrong)
        # By hash, which is enough: with a million worlds, two have one hash with probability 1e-7.
        orders: dict[int, int] = {}
        path = [[hash(first), "", iter(self.moves(first)), 0]]
        while path:
            place = path[-1]
            following = next(place[2], None)
            if following is None:
                path.pop()
                orders[place[0]] = place[3] or 1
                if path:
                    path[-1][3] += orders[place[0]]
                continue
            name, world = following
            known = hash(world)
            if known in orders:
                place[3] += orders[known]
                continue
            try:
                moves = self.moves(world)
            except WrongError as error:
                names = [*(one[1] for one in path[1:]), name]
                raise WrongError(f"{self.layout.name}, {wrong}: {error}; {names}") from None
            orders[known] = 0
            path.append([known, name, iter(moves), 0])
            if longest and len(orders) > longest:
                break
        return len(orders), orders.get(hash(first), 0)

    def walk(self, wrong: Iterable[Fault], source: random.Random, late: Sequence[str] = ()) -> None:
        """Moves a world in one order, by chance, until nothing more can happen.

        Args:
            wrong: the faults that may happen.
            source: of the choices.
            late: names of moves that happen when no other can, the first ones first.
        """
        world = self.first(wrong)
        while moves := self.moves(world):
            places = {name: late.index(name) if name in late else -1 for name, _ in moves}
            soonest = min(places.values())
            _, world = source.choice([one for one in moves if places[one[0]] == soonest])

    # --- properties -------------------------------------------------------------------------------

    def _check_end(self, world: World) -> None:
        """Checks a world in which nothing more can happen."""
        waiting = [i for i in RANKS if world.ranks[i].here in ("out", "in")]
        if waiting:
            phases = [world.ranks[i].state.phase.name for i in waiting]
            raise WrongError(f"ranks {waiting} wait for ever: {phases}")
        there = [i for i in RANKS if world.ranks[i].here not in ("gone", "none")]
        stay = [i for i in there if not world.ranks[i].state.left]
        for i in there:
            if world.ranks[i].state.left and world.ranks[i].here == "return":
                raise WrongError(f"rank {i} has left, and returns a result")
        if len({world.ranks[i].here for i in stay}) > 1:
            raise WrongError(f"outcomes differ: {[(i, world.ranks[i].here) for i in stay]}")
        for i in stay:
            verdict = world.ranks[i].state.verdict
            if world.ranks[i].here == "return" and (verdict.failures or verdict.redo):
                raise WrongError(f"rank {i} returns a result, and knows {verdict}")
            me, other = world.ranks[i], world.ranks[mate(i)]
            if mate(i) in stay and world.inside[i]:
                raise WrongError(f"messages of rank {i} are left: {world.inside[i]}")
            if twin(i) in stay and world.across[i]:
                raise WrongError(f"messages of rank {i} are left: {world.across[i]}")
            if twin(i) in stay and me.calls != world.ranks[twin(i)].calls:
                raise WrongError(f"ranks {i} and {twin(i)} have begun other calls")
            if mate(i) in stay and me.here == "raise":
                firsts = [said(rank.state.verdict) for rank in (me, other)]
                if firsts[0] != firsts[1]:
                    raise WrongError(f"ranks {i} and {mate(i)} raise {firsts}")


def said(verdict: Verdict) -> Any:
    """Returns what a rank raises, as far as it has to be the same on both places."""
    first = verdict.first
    assert first is not None
    # Each place may have heard it of its own twin.
    return "elsewhere" if first.elsewhere is not None else first


@functools.lru_cache(None)
def failure(rank: int, text: str, redo: bool = False) -> Failure:
    """Returns the failure of a rank; in a microbatch if it is of a task."""
    microbatch = 0 if text in ("early", "late", "forward", "backward", "redo") else -1
    return Failure(microbatch, rank % 2, f"{text} on {rank}", "", None, redo)


class Moving:
    """A world that changes."""

    def __init__(self, explored: Explored, world: World) -> None:
        self._explored, self._layout = explored, explored.layout
        self.ranks, self.faults = list(world.ranks), world.faults
        self.inside, self.across = list(world.inside), list(world.across)

    def frozen(self) -> World:
        """Returns what it has become, without what can have no effect any more."""
        for i in RANKS:
            me = self.ranks[i]
            if me.here in ("out", "in"):
                continue
            if me.here == "gone" or me.state.left:
                self.ranks[i] = Rank(
                    self._explored.hold(State(left=me.state.left)),
                    me.here,
                    calls=me.calls,
                    met=me.met,
                    flags=me.flags,
                    heard=me.heard,
                    quiet=me.quiet,
                )
            if me.here == "gone" or (me.state.left and me.heard):
                self.inside[mate(i)] = ()
            if me.here == "gone" or (me.state.left and me.quiet):
                self.across[twin(i)] = ()
        return World(tuple(self.ranks), tuple(self.inside), tuple(self.across), self.faults)

    def put(self, i: int, **changes: Any) -> None:
        """Changes a rank."""
        self.ranks[i] = self.ranks[i]._replace(**changes)

    def has(self, kind: str, i: int) -> bool:
        """Returns whether a fault happens now; it does once only."""
        fault = Fault(kind, i)
        if fault not in self.faults:
            return False
        self.faults = tuple(one for one in self.faults if one != fault)
        return True

    # --- the machine ------------------------------------------------------------------------------

    def on(self, i: int, event: Event, value: Any = None) -> None:
        """Lets an event happen on a rank, and does what its machine says."""
        before = self.ranks[i].state
        state, actions = self._explored.advance(i, before, event, value)
        self.put(i, state=state)
        for action in actions:
            if action is Action.REPLAY:
                for one in before.postponed:
                    self.on(i, Event.STOPPED, one)
            else:
                self._do(i, action, value)

    def _do(self, i: int, action: Action, value: Any) -> None:
        me = self.ranks[i]
        if action is Action.SUCCEED:
            if self.has("report", i):
                self.on(i, Event.FAILED, failure(i, "report", redo=True))
            else:
                self._end(i, ("END", True))
                self.put(i, succeeded=True)
                self.on(i, Event.SUCCEEDED)
        elif action is Action.SEND_FAILURE:
            self._end(i, ("END", value))
        elif action is Action.SEND_NOTHING:
            self._end(i, ("END", None))
        elif action is Action.ABORT_TASKS:
            self.put(i, aborted=True, ready=())
            place = self._explored.places[i]
            if place.follows and me.over and not (me.task or me.ready or me.state.completed):
                self.on(i, Event.COMPLETED)  # it was about to say so
            if me.task and not me.blocked:
                self._end_task(i)  # at the latest at its next wait
        elif action is Action.STOP_REPLICAS:
            if self._layout.ordered and not me.stopped and not me.in_order:
                why = me.state.verdict.elsewhere(_job_ranks(i)) or value.for_others(_job_ranks(i))
                self._tell_twin(i, ("STOP", why, me.calls))
                self.put(i, stopped=True)
        elif action is Action.COMPLETE_CALLS:
            self._complete(i)
            if self.ranks[twin(i)].here == "gone":
                self.on(i, Event.LEAVES, failure(i, "call"))
        elif action is Action.WAKE:
            self.put(i, woken=True)
            if not me.state.silent:
                self.on(i, Event.COLLECTED)
        elif action is Action.ANNOUNCE_END:
            if self._layout.ordered and i < 2:
                self._tell_twin(i, ("OVER",))
                self.put(i, over=True)
        elif action is Action.LEAVE:
            self.put(i, over=True)
        elif action in (Action.RETURN, Action.RUN_AGAIN, Action.RAISE):
            if action is Action.RETURN and not me.succeeded:
                raise WrongError(f"rank {i} returns a result that it has not")
            names = {Action.RETURN: "return", Action.RUN_AGAIN: "again", Action.RAISE: "raise"}
            self.put(i, here=names[action])

    def _end(self, i: int, message: Any) -> None:
        if self.ranks[i].ended:
            raise WrongError(f"rank {i} sends END twice")
        self.put(i, ended=True)
        if self._layout.partitions > 1:
            self.inside[i] = (*self.inside[i], message)

    def _send(self, i: int, message: Any) -> None:
        """Sends a message of a task, as `Mail.send` does."""
        if self.ranks[i].state.silent:
            if self.ranks[i].ended:
                raise WrongError(f"rank {i} sends {message} after END")
            self.inside[i] = (*self.inside[i], message)

    def _tell_twin(self, i: int, message: Any) -> None:
        if not self.ranks[i].in_order:
            self.across[i] = (*self.across[i], message)

    # --- the thread of the caller -----------------------------------------------------------------

    def begin(self, i: int) -> None:
        """Calls the step."""
        if self.has("begin", i):
            self.on(i, Event.BROKEN, failure(i, "begin"))
            self.put(i, here="raise", heard=True, quiet=True)
            return
        undecided = i % 2 == 0 and not self._layout.divided
        self.put(i, here="in")
        self.on(i, Event.ADOPTED, self._layout.divided)
        self.on(i, Event.BEGUN, undecided)
        if self._layout.gathers and not self._layout.ordered:
            self.put(i, decided=1)  # the plan of the step has one gather
        if i % 2 == 0:
            if self._layout.partitions > 1:
                self._send(i, ("BEGIN",))
            self.put(i, ready=("body",))

    def collect(self, i: int) -> None:
        """Goes on when it was woken."""
        self.put(i, woken=False)
        self.on(i, Event.COLLECTED)

    def complete(self, i: int, failed: bool) -> None:
        """Ends COMPLETING."""
        if failed:
            self._complete(i)
        self.on(i, Event.DONE)

    def _complete(self, i: int) -> None:
        me = self.ranks[i]
        if self._layout.exchanges and not me.state.left:
            self.put(i, calls=max(me.calls, *me.said, 0))

    def close_alone(self, i: int, fault: Fault | None = None) -> None:
        """Fails in CLOSING, as no other rank does."""
        if fault is not None:
            self.has(*fault)
        self.on(i, Event.LEAVES, failure(i, "gather"))
        self.on(i, Event.DONE)

    def find_plan(self, i: int) -> None:
        """Finds in CLOSING that a task has gathered other parameters than planned."""
        self.has("plan", i)
        self.on(i, Event.REDO, failure(i, "plan", redo=True))
        self.on(i, Event.DONE)

    def find_change(self, i: int) -> None:
        """Finds in CLOSING that code has changed a gathered parameter."""
        self.has("change", i)
        self.on(i, Event.FAILED, failure(i, "change"))
        self.on(i, Event.DONE)

    def time_out(self, i: int) -> None:
        """Waits no longer for END of its mate."""
        self.has("silent", i)
        self.put(i, heard=True)
        self.on(i, Event.TIMED_OUT, failure(i, "silence"))

    def signal(self, i: int, silent: bool) -> None:
        """Gets a signal on the thread of the caller."""
        self.has("signal", i)
        self.on(i, Event.SIGNALLED if silent else Event.BROKEN, failure(i, "signal"))

    def abandon(self, i: int) -> None:
        """Gets a signal on the thread of the caller between two phases."""
        self.has("signal", i)
        self.on(i, Event.ABANDONED, failure(i, "signal"))
        self.put(i, here="raise")

    def lose(self, i: int) -> None:
        """Ends a process. What it has sent may still arrive."""
        self.has("lost", i)
        self.put(i, here="gone", task="", ready=(), blocked=False)

    def meet(self, i: int) -> None:
        """Tells the other replica, in MEETING, that there was no decision."""
        self.put(i, met="fail" if self.ranks[i].state.verdict.failures else "abstain")

    def end_meeting(self, i: int) -> None:
        """Hears the other replica in MEETING."""
        mine, other = self.ranks[i].met, self.ranks[twin(i)].met
        if mine != "fail" and (other == "fail" or mine != other):
            self.on(i, Event.FAILED, _of_other(i, Elsewhere(twin(i), "meeting", False)))
        self.on(i, Event.DONE)

    def end_in_order(self, i: int) -> None:
        """Sends END to the other member."""
        self._complete(i)
        me = self.ranks[i]
        verdict = me.state.verdict
        why = verdict.elsewhere(_job_ranks(i))
        failures = frozenset() if why is None else frozenset([_of_other(i, why)])
        self._tell_twin(i, ("END", Verdict(failures, verdict.redo), me.calls))
        self.put(i, in_order=True)

    def agree(self, i: int) -> None:
        """Hears how the step has gone on the other member."""
        verdict, own = self.ranks[i].verdict, self.ranks[i].state.verdict
        assert verdict is not None
        fine = not any((verdict.failures, verdict.redo, own.failures, own.redo))
        if fine and Fault("order", -1) in self.faults:
            self.on(i, Event.FAILED, failure(0, "order"))
        self.on(i, Event.AGREED, verdict)

    def flag(self, i: int) -> None:
        """Sends flags to the other replica."""
        verdict = self.ranks[i].state.verdict
        failed = bool(verdict.failures)
        self.put(i, flags=(failed, verdict.redo and not failed))

    def reduce(self, i: int) -> None:
        """Hears the flags of the other replica."""
        mine, other = self.ranks[i].flags, self.ranks[twin(i)].flags
        assert mine is not None
        assert other is not None
        if mine[0]:
            self.on(i, Event.DONE)
        elif other[0]:
            self.on(i, Event.FAILED, _of_other(i, Elsewhere(twin(i), "flags", False)))
        elif mine[1] or other[1]:
            self.on(i, Event.REDO)
        else:
            self.on(i, Event.DONE)

    def fail_to_reduce(self, i: int) -> None:
        """Fails in REDUCING."""
        self.has("hook", i)
        self.on(i, Event.BROKEN, failure(i, "hook"))

    # --- tasks ------------------------------------------------------------------------------------

    def begin_task(self, i: int) -> None:
        """Begins a task that is ready."""
        me = self.ranks[i]
        name, *rest = me.ready
        self.put(i, task=name, ready=tuple(rest), at=0)
        if name == "apply":
            return
        self.put(i, ran=me.ran + 1)
        if self._layout.ordered and i < 2 and self._layout.divided:
            self.put(i, decided=me.decided + 1)
            self._tell_twin(i, ("DECISION",))

    def work(self, i: int) -> None:
        """Lets a task go on to its next wait."""
        me = self.ranks[i]
        if me.task == "body":
            return self._body(i, me.at)
        if me.task == "apply":
            self.put(i, placed=True)
            self._end_task(i)
            return self.on(i, Event.DIVIDED)
        if me.task == "drop":
            return self._end_task(i)
        if me.at == 0:
            for kind in ("forward", "redo") if me.task == "forward" else ("backward",):
                if self.has(kind, i):
                    self._end_task(i)
                    return self.on(i, Event.FAILED, failure(i, kind, kind == "redo"))
            if me.task == "forward" and self._call(i):
                return None
        self._send(i, (f"{me.task} back",))
        return self._end_task(i)

    def _body(self, i: int, at: int) -> None:
        if at == 0:
            if self.has("early", i):
                self._end_task(i)
                return self.on(i, Event.FAILED, failure(i, "early"))
            if not self.ranks[i].state.divided and self.has("no call", i):
                self._end_task(i)
                return self.on(i, Event.BODIES_ENDED)
            if not self.ranks[i].state.divided:
                self.on(i, Event.DECIDES)
                return self.put(i, at=5, blocked=True, met="agree")
            if self._call(i):
                return None
        if at in (0, 1, 6):
            if self.has("late", i):
                self._end_task(i)
                return self.on(i, Event.FAILED, failure(i, "late"))
            if self.has("no call", i):
                self._end_task(i)
                return self.on(i, Event.BODIES_ENDED)
            if self.has("waits", i):
                self._tell_twin(i, ("WAIT",))
                return self.put(i, at=7, noted=2)
        if at in (0, 1, 6, 7):
            if self.ranks[i].noted == 1 and at != 7:
                self.put(i, noted=2)
                self.on(i, Event.CALLS_DIFFER, failure(i, "waits", redo=True))
            if self._layout.partitions == 1:
                self._end_task(i)
                return self.on(i, Event.BODIES_ENDED)
            self._send(i, ("forward",))
            return self.put(i, at=2)
        if at == 3:
            self._send(i, ("backward",))
            return self.put(i, at=8)
        self._end_task(i)
        return self.on(i, Event.BODIES_ENDED)

    def _call(self, i: int) -> bool:
        """Begins a collective call, or a gather; returns whether the task waits in it."""
        if not (self._layout.exchanges or self._layout.gathers):
            return False
        if self.has("skip", i):
            return False
        self.put(i, calls=self.ranks[i].calls + 1, blocked=True, at=1)
        return True

    def _end_task(self, i: int) -> None:
        self.put(i, task="", at=0, blocked=False)

    def end_call(self, i: int) -> None:
        """A collective call has ended."""
        self.put(i, blocked=False)
        if self.ranks[i].aborted:
            self._end_task(i)

    def break_task(self, i: int) -> None:
        """A task raises because a process group has ended."""
        deciding = self.ranks[i].at == 5
        self._end_task(i)
        if deciding:
            self.on(i, Event.DECIDED)
        self.on(i, Event.LEAVES, failure(i, "call"))

    def decide(self, i: int) -> None:
        """The replicas have met in `agree`."""
        other = self.ranks[twin(i)].met
        self.put(i, blocked=False)
        if other != "agree":
            self._end_task(i)
            self.on(i, Event.DECIDED)
            self.on(i, Event.FAILED, failure(i, "meeting"))
            return
        self._send(i, ("PARTITION",))
        self.put(i, at=6)
        self.on(i, Event.DECIDED)
        self.on(i, Event.DIVIDED)
        if self.ranks[i].aborted:
            self._end_task(i)  # at its next wait

    def get_task(self, i: int) -> None:
        """Gets a task that the leader has not got."""
        self.has("extra", i)
        self.put(i, ready=(*self.ranks[i].ready, "drop"))

    def find_left_over(self, i: int) -> None:
        """A follower has a task that its leader has not run; see `Member.diverged`."""
        self.on(i, Event.LEFT_OVER, failure(i, "left over", redo=True))

    # --- messages ---------------------------------------------------------------------------------

    def hear(self, i: int) -> None:
        """Takes the next message of the pipeline."""
        message, *rest = self.inside[mate(i)]
        self.inside[mate(i)] = tuple(rest)
        me, kind = self.ranks[i], message[0]
        if kind == "END":
            self.put(i, heard=True, placed=True)
            what = message[1]
            if isinstance(what, Failure):
                self.on(i, Event.HEARD_FAILURE, what)
            elif what is True and i % 2 == 1:
                self.on(i, Event.BODIES_ENDED)
        elif kind == "BEGIN":
            if self.has("other step", i):
                self.on(i, Event.FAILED, failure(i, "other step"))
        elif kind == "PARTITION":
            self.put(i, placed=True)
            if not me.aborted:
                self.put(i, ready=(*me.ready, "apply"))
            else:
                self.on(i, Event.DIVIDED)  # as a late decision
        elif kind.endswith("back"):
            if me.task == "body" and not me.aborted:
                self.put(i, at={2: 3, 8: 4}[me.at])
        elif not me.aborted:
            self.put(i, ready=(*me.ready, kind))

    def lose_mate(self, i: int) -> None:
        """The stream from the other rank of the pipeline has ended."""
        self.put(i, heard=True, placed=True)
        self.inside[mate(i)] = ()
        gone = self.ranks[mate(i)].here == "gone"
        event = Event.STREAM_LOST if gone else Event.STREAM_ENDED
        self.on(i, event, failure(i, "no mate"))

    def lose_both(self, i: int) -> None:
        """The streams of a rank that has left have ended."""
        alone = self._layout.partitions == 1
        if not (alone or self.ranks[i].heard or self.ranks[i].blocked):
            self.lose_mate(i)
        if self._layout.ordered and not self.ranks[i].quiet:
            self.lose_twin(i)

    def hear_twin(self, i: int) -> None:
        """Takes the next message of the order group."""
        message, *rest = self.across[twin(i)]
        self.across[twin(i)] = tuple(rest)
        me, kind = self.ranks[i], message[0]
        if kind == "DECISION":
            self.put(i, decided=me.decided + 1)
        elif kind == "OVER":
            self.put(i, over=True)
        elif kind == "WAIT":
            self._tell_twin(i, ("NOTED",))
            if me.task == "body" and me.at < 2:
                self.put(i, noted=1)
            elif me.task == "body" or me.state.phase is not Phase.RUNNING or me.ran:
                self.on_wait(i)
            else:
                self.put(i, noted=1)
        elif kind == "NOTED":
            self.put(i, noted=3)
        elif kind == "STOP":
            self.put(i, said=(message[2],))
            self.on(i, Event.STOPPED, _of_other(i, message[1]))
        elif kind == "END":
            verdict = message[1]
            self.put(i, said=(message[2],), verdict=verdict, quiet=True)
            if verdict.failures or verdict.redo:
                if i >= 2:
                    self.put(i, over=True)
                first = verdict.first
                why = first.elsewhere if first is not None else Elsewhere(twin(i), "", True)
                self.on(i, Event.STOPPED, _of_other(i, why))

    def on_wait(self, i: int) -> None:
        """Another replica waits for a call for which this one has not waited."""
        if self.ranks[i].state.phase is not Phase.OUTSIDE:
            self.on(i, Event.CALLS_DIFFER, failure(i, "waits", redo=True))

    def lose_twin(self, i: int) -> None:
        """The stream from the other member of the order group has ended."""
        self.put(i, quiet=True)
        self.across[twin(i)] = ()
        self.on(i, Event.REPLICA_LOST, _of_other(i, Elsewhere(twin(i), "lost", False)))


@functools.lru_cache(None)
def _of_other(i: int, why: Elsewhere) -> Failure:
    return Failure(-1, i % 2, why.text, "", None, why.redo, elsewhere=why)


def _job_ranks(i: int) -> tuple[int, int]:
    return i & 2, i | 1
