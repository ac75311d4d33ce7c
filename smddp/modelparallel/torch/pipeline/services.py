"""What `CallerSide`, `Server` and `Routing` need of the executor of their rank."""

from __future__ import annotations

from typing import Any, Protocol

from smddp.modelparallel.core.baton import Baton, Ticket
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.mail import Mail
from smddp.modelparallel.torch.pipeline.method import Method
from smddp.modelparallel.torch.pipeline.modules import Modules
from smddp.modelparallel.torch.pipeline.timeline import Timeline
from smddp.modelparallel.torch.pipeline.waits import Waits

__all__ = ["CallLog", "RankServices"]


class CallLog(Protocol):
    """What the members of an order group compare of the calls that they make; see member.py.

    Attributes:
        waits: for the results of which calls they wait; None if their tasks have no order.
    """

    waits: Waits | None

    def called(self, module: int, method: Method) -> None:
        """Notes that a task calls a module of another partition.

        Args:
            module: its number.
            method: what the call does.
        """

    def entered(self, module: str) -> None:
        """Notes that a call from another partition begins here.

        Args:
            module: its name.
        """


class RankServices(Protocol):
    """The rank on which calls are made and served; `Executor` implements it.

    Attributes:
        rank: in the pipeline.
        baton: runs the tasks.
        mail: sends messages to ranks of the pipeline.
        timeline: records when they run.
        member: notes calls, if there is an order group; else None.
        modules: those of the model.
        model: a `PipelineModel`.
    """

    rank: int
    baton: Baton
    mail: Mail
    timeline: Timeline
    modules: Modules
    model: Any

    @property
    def member(self) -> CallLog | None:
        """See above."""

    def enter(self, frame: Frame, forward: bool) -> None:
        """Notes that a task begins to work, or goes on; see `Executor.enter`."""

    def wait(self, ticket: Ticket, frame: Frame, forward: bool) -> None:
        """Lets other tasks run until a ticket is done; see `Executor.wait`."""
