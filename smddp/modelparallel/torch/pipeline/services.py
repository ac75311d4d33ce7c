"""What `CallerSide`, `Server` and `Modules` need of the executor of their rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from smddp.modelparallel.core.baton import Baton, Ticket
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.protocol import Kind
from smddp.modelparallel.torch.pipeline.timeline import Timeline

__all__ = ["RankServices"]


class RankServices(Protocol):
    """The rank on which calls are made and served; `Executor` implements it.

    Attributes:
        rank: in the pipeline.
        baton: runs the tasks.
        timeline: records when they run.
        modules: those of the model, a `Modules`.
    """

    rank: int
    baton: Baton
    timeline: Timeline

    @property
    def modules(self) -> Any:
        """The modules of the model."""

    def send(self, peer: int, kind: Kind, header: Any, tensors: Sequence[Any] = ()) -> bool:
        """Sends a message to a rank of the pipeline, which may be this one; see `Executor.send`."""

    def enter(self, frame: Frame, forward: bool) -> None:
        """Notes that a task begins to work, or goes on; see `Executor.enter`."""

    def wait(self, ticket: Ticket, frame: Frame, forward: bool) -> None:
        """Lets other tasks run until a ticket is done; see `Executor.wait`."""
