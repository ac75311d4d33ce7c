"""Where a task stands in the program."""

from __future__ import annotations

from smddp.modelparallel.torch.activations.object_values import Change
from smddp.modelparallel.torch.pipeline.collector import Collector
from smddp.modelparallel.torch.pipeline.hooks import Recorder

__all__ = ["Frame"]


class Frame:
    """Where a task stands in the program: its microbatch, its path, and its open call graph.

    Attributes:
        microbatch: its number.
        forward: does it do forward work at the moment, not backward work?
        path: where its call stands in the program: for each caller on the way from the body, how
            many graphs the caller had sent before this one, and the number of the segment. It does
            not depend on timing.
        order: among tasks of one microbatch, the one with the smaller tuple runs first.
        name: of the module that runs, for timelines; empty for the body.
        depth: 0 for the body. For a segment, its caller's depth plus its position, counted from 1,
            in the longest chain of segments of its graph that leads to it. Backward tasks have 0.
        grad: were gradients enabled when it began?
        open: the call graph that has not been sent yet; None if there is none.
        sent: the numbers (`Origin.sending`) of the call graphs that it has sent.
        recorder: records calls of modules for hooks of the rank whose call is served; None if that
            has none.
        replays: does a hook run here now for a module that has run on another rank?
        moment: an object that is replaced by a new one with each call of a module on another rank.
            Code that has kept it can tell whether there was such a call since.
        set_by_calls: what its calls on other ranks have set as attributes of modules, by the
            module's number. Another microbatch may set others while this one waits.
    """

    __slots__ = (
        "depth",
        "forward",
        "grad",
        "microbatch",
        "moment",
        "name",
        "open",
        "order",
        "path",
        "recorder",
        "replays",
        "sent",
        "set_by_calls",
    )

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
        # In the backward pass, later segments come first.
        self.order = path if forward else tuple([-number for number in path])
        self.name = name
        self.depth = depth
        self.grad = grad
        self.open: Collector | None = None
        self.sent: list[int] = []
        self.recorder: Recorder | None = None
        self.replays = False
        self.moment = object()
        self.set_by_calls: dict[int, Change] = {}
