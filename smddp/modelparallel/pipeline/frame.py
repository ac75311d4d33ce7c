"""What a task knows about itself."""

from __future__ import annotations

from smddp.modelparallel.pipeline.collector import Collector

__all__ = ["Frame"]


class Frame:
    """What a task of a microbatch knows about itself.

    Attributes:
        microbatch: its number.
        forward: does it do forward or backward work at the moment?
        path: where its call stands in the program: per caller on the way from the body, the
            number of the call graph and of the segment. It does not depend on timing.
        order: breaks ties between tasks of one microbatch.
        name: for timelines.
        depth: how many segments come before it in the pipeline.
        grad: did it begin with gradients enabled?
        open: the calls whose values nobody has looked at yet.
        sent: numbers of the call graphs that it has sent.
    """

    __slots__ = ("depth", "forward", "grad", "microbatch", "name", "open", "order", "path", "sent")

    def __init__(
        self,
        microbatch: int,
        forward: bool,
        path: tuple[int, ...],
        name: str,
        depth: int,
        grad: bool,
    ) -> None:
        self.microbatch = microbatch
        self.forward = forward
        self.path = path
        # Backwards the other way round: later segments first.
        self.order = path if forward else tuple([-number for number in path])
        self.name = name
        self.depth = depth
        self.grad = grad
        self.open: Collector | None = None
        self.sent: list[int] = []
