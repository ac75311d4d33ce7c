"""What the caller of a remote module knows of its owners."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from smddp.modelparallel.torch.common.structure import flatten
from smddp.modelparallel.torch.pipeline.calls import CallerSide
from smddp.modelparallel.torch.pipeline.collector import KnownCall
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.method import CALL
from smddp.modelparallel.torch.pipeline.protocol import Ambient, Kind, ambient


class Services:
    """The services of a caller; it records what it sends, unless its step is over."""

    rank = 0
    baton: Any = None
    timeline: Any = None
    modules: Any = None
    member: Any = None
    model: Any = types.SimpleNamespace(
        parameters=types.SimpleNamespace(reach=lambda calls: frozenset())
    )

    def __init__(self) -> None:
        self.over = False
        self.mail: Any = self
        self.sent: list[tuple[Kind, Any]] = []

    def send(self, peer: int, kind: Kind, header: Any, tensors: Any = ()) -> bool:
        if not self.over:
            self.sent.append((kind, header))
        return not self.over

    def wait(self, ticket: Any, frame: Frame, forward: bool) -> None:
        raise AssertionError("nothing is to wait for")


def test_a_graph_that_did_not_leave_is_sent_in_the_next_step() -> None:
    services = Services()
    caller = CallerSide(services)
    tensor = torch.ones(1)
    known = KnownCall(1, CALL, flatten(((tensor,), {}), [], []), ("t", 0), ())
    other = KnownCall(2, CALL, flatten(((tensor,), {}), [], []), ("t", 0), ())

    def call(made: KnownCall) -> list[tuple[Kind, int]]:
        """Makes a call, in a step; returns what was sent, and which graph it was."""
        services.sent.clear()
        frame = Frame(microbatch=0, forward=True, path=(), name="", depth=0, grad=True)
        value = caller.collector(frame).add(1, made, [tensor], [], None)
        caller.send(frame)
        del value
        caller.clear()
        graph_ids = {
            Kind.GRAPH: lambda header: header[1],
            Kind.FORWARD: lambda header: header[0][2],
        }
        return [(kind, graph_ids[kind](header)) for kind, header in services.sent]

    # A task may still compute after its step has failed. It calls, and nothing leaves.
    services.over = True
    assert call(known) == []
    services.over = False
    # The number of the graph that did not leave stays unused.
    assert call(other) == [(Kind.GRAPH, 1), (Kind.FORWARD, 1)]
    assert call(known) == [(Kind.GRAPH, 2), (Kind.FORWARD, 2)]
    assert call(known) == [(Kind.FORWARD, 2)]


STATES = [
    Ambient(grad, inference, autocast, cache)
    for grad, inference in ((True, False), (False, False), (False, True))
    for autocast in ((), (("cpu", torch.bfloat16),), (("cpu", torch.float16),))
    for cache in (True, False)
]


@pytest.mark.parametrize("wanted", STATES)
def test_a_thread_gets_the_state_of_a_call(wanted: Ambient) -> None:
    # Code may have left the thread in any state.
    for before in STATES:
        with before.entered():
            assert ambient() == before
            with wanted.entered():
                assert ambient() == wanted, before
            assert ambient() == before
