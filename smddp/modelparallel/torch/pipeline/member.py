"""This rank as a member of its order group: acts upon what the other members say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from smddp.modelparallel.core.baton import Baton
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.failure import CallsDifferError, Elsewhere
from smddp.modelparallel.core.order import Announcement, Follower, Leader, TaskName, TaskOrder
from smddp.modelparallel.core.step_machine import Event
from smddp.modelparallel.torch.pipeline import step
from smddp.modelparallel.torch.pipeline.ending import Ending
from smddp.modelparallel.torch.pipeline.history import History, Point
from smddp.modelparallel.torch.pipeline.method import Method
from smddp.modelparallel.torch.pipeline.model import PipelineModel
from smddp.modelparallel.torch.pipeline.order_group import OrderGroup
from smddp.modelparallel.torch.pipeline.step import StepCollectives
from smddp.modelparallel.torch.pipeline.waits import Waits

__all__ = ["Member", "MemberRank"]

_ONLY_SOME_WAIT = "only some replicas wait for the result of a call"


class MemberRank(Protocol):
    """The rank; `Executor` implements it. Its parts exist when a step begins.

    Attributes:
        baton: runs the tasks.
        ending: ends the steps.
        model: of the step.
    """

    baton: Baton
    ending: Ending
    model: PipelineModel


class Member:
    """Notes what this rank does in a step, and compares that with the other members.

    Tasks call `called` and `entered`; the thread of the group calls the methods of `OrderEvents`;
    the thread of the caller calls the others.

    Attributes:
        group: the streams to and from the other members.
        order: of the tasks; None if they need none.
        waits: for the results of which calls this rank and others wait; None without an order.
        history: what this rank has done in the step.
    """

    def __init__(
        self,
        rank: MemberRank,
        of_job: int,
        group: OrderGroup,
        collectives: StepCollectives | None,
        ordered: bool,
    ) -> None:
        """Begins without a step.

        Args:
            rank: this one.
            of_job: its number in the job.
            group: the streams to and from the other members.
            collectives: those of tasks, over members of the group; None if there are none.
            ordered: do the members run their tasks in one order? Not with one partition, where
                microbatches run one after the other in any case.
        """
        self._rank, self._of_job = rank, of_job
        self.group, self._collectives = group, collectives
        self.history = History(collectives)
        self.order: TaskOrder | None = None
        self.waits: Waits | None = None
        if ordered:
            self.waits = Waits(self)
            self.order = Leader(group.announce) if group.leads else Follower(self)
            self.order.note = self.history.slice_ended

    def begin_step(self, divided: bool) -> None:
        """Begins a step.

        Args:
            divided: is it known where modules live?
        """
        if self.order is not None:
            self.order.alone = not divided
            self.order.observer = self._rank.model.local.observer
        if self.waits is not None:
            self.waits.begin_step()
        self.history.begin_step(self._rank.model.modules.names)

    def open(self) -> None:
        """Begins to hear of the other members."""
        self.group.begin(self)

    def note_division(self) -> None:
        """Lets tasks run in one order from now on."""
        if self.order is not None:
            self.order.alone = False

    # --- what tasks do ----------------------------------------------------------------------------

    def called(self, module: int, method: Method) -> None:
        """See `CallLog`."""
        self.history.called(module, method)

    def entered(self, module: str) -> None:
        """See `CallLog`."""
        if self._collectives is not None:
            self._collectives.enter(module)

    # --- what other members say; see `OrderEvents` ------------------------------------------------

    def on_decisions(self, decisions: Sequence[Announcement]) -> None:
        """Lets the tasks run that the leader has announced."""
        with self._rank.baton.changing_order() as order:
            order.announce(decisions)

    def on_wait(self, task: int, call: int) -> None:
        """Compares what replicas wait for."""
        assert self.waits is not None
        self.waits.told(task, call)

    def on_leader_ended(self) -> None:
        """Notes that there are no more announcements."""
        self._rank.ending.end_order()

    def on_point(self, rank: int, point: Point) -> None:
        """Ends the step if another replica does not make the calls of this one."""
        # Without exchanges and gathers the members may make different calls in the same tasks.
        model = self._rank.model
        exchanges = self._collectives is not None and rank in self._collectives.ranks
        together = exchanges or model.local.observer is not None
        if not (together and self.history.differs(rank, point)):
            return
        called = [
            f"rank {one} of the job has called {', '.join(map(repr, how.trail)) or 'none'}"
            for one, how in ((rank, point), (self._of_job, self.history.point()))
        ]
        self._end(
            Event.STOPPED,
            SMPUsageError(
                "replicas that run their tasks in one order, such as the ranks of a "
                "tensor-parallel group, have to call the same modules in the same order, and "
                "model.backward for the same losses, whatever their data are, and they do not. Up "
                f"to here, {'; '.join(called)}"
            ),
        )

    def on_stop(self, failure: Elsewhere) -> None:
        """Ends the step because another replica has ended it."""
        self._rank.ending.on(Event.STOPPED, self._rank.ending.of_other(failure))

    def on_lost(self, rank: int, error: Exception) -> None:
        """Ends the step because a rank of another replica is gone."""
        self._rank.ending.lose_replica(rank, error)

    # --- what is missing --------------------------------------------------------------------------

    def check(self) -> float:
        """Ends the step if it has waited too long for the leader; see `StallWatch.wait`."""
        timeout = self.group.timeout
        compares = self._collectives is not None or self._rank.model.local.observer is not None
        left = self.group.keep_alive(self.history.point(), compares)
        # This rank may have gone on since it heard of them.
        for rank, point in self.group.ended:
            self.on_point(rank, point)
        if isinstance(self.order, Follower):
            with self._rank.baton.changing_order() as order:
                # The leader may wait for this rank in a collective, or other ranks may wait for
                # this one in the pipeline, which ends after the same timeout. So this rank says
                # earlier what the reason is.
                stuck = timeout / 2
                wait = order.check(stuck, timeout * 3 / 4, over=min(stuck, step.END_TIMEOUT))
            order.settle()
            left = min(left, wait)
        return left

    # --- what is found here; see `WaitEvents` and `FollowerEvents` --------------------------------

    def tell_of_wait(self, task: int, call: int) -> None:
        """Tells the other members of a call for whose result this rank waits."""
        self.group.tell_of_wait(task, call)

    def calls_differ(self) -> None:
        """Ends the step, which is run again: this time every replica waits for every call."""
        self._rank.ending.tell(Event.CALLS_DIFFER, CallsDifferError(_ONLY_SOME_WAIT))

    def completed(self) -> None:
        """Notes that this follower has run all that its leader has run."""
        self._rank.ending.on(Event.COMPLETED)

    def diverged(
        self, reason: str, announced: tuple[Any, ...] | None, ready: list[TaskName]
    ) -> None:
        """Ends the step because this replica does not make the calls of the leader's."""
        names = self._rank.model.modules.names
        leader, here = f"rank {self.group.ranks[0]} of the job", f"rank {self._of_job}"
        there = TaskName(*announced).text(names) if announced is not None else ""
        mine = "; ".join(sorted({name.text(names) for name in ready})) or "nothing"
        what = {
            "over": f"{leader} has ended the step without it",
            "silent": f"{leader}, which decides the order, has begun nothing for "
            f"{self.group.timeout * 3 / 4:g} s",
            "stuck": f"{leader} has run {there}, which cannot run on {here}",
        }[reason]
        error = SMPUsageError(
            f"replicas that run their tasks in one order have to make the same calls in each step: "
            f"{what}. On {here} could run: {mine}"
        )
        if reason == "over":
            self._end(Event.LEFT_OVER, error)
        else:
            self._rank.ending.fail(-1, error)

    def _end(self, event: Event, error: SMPUsageError) -> None:
        """Ends the step because members make other calls.

        Perhaps only because some have waited for a result, for which others have not: so the first
        attempt of a step is run again, and then all wait.
        """
        waited = self.order is not None and self._rank.model.learned.predicts_structures
        self._rank.ending.tell(event, CallsDifferError(_ONLY_SOME_WAIT) if waited else error)
