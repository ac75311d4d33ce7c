"""A rank dies or is interrupted at any moment of a step: no other rank waits long, then or later.

The survivors catch what their step raises and call more steps, which a script should not do; even
then no step may wait for a rank that takes part in no more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import arrive, await_ranks, rotating_or_all, run_ranks
from smp.common import BY_HAND
from torch import nn

import smddp  # noqa: F401  registers the backend
import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core import errors
from smddp.modelparallel.core.errors import SMPError, SMPPeerError

pytestmark = pytest.mark.multiprocess

RANKS = 4
# Far more than any step takes on a busy machine, far less than the timeout of the groups.
LONGEST = 25
TIMEOUT = 120
STEPS = 3  # after the one in which the rank is lost

# By name: partitions, and what else is configured.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp4": (4, {}),
    "pp2 x dp2": (2, {}),
    "pp2 x dp2, one order": (2, {"deterministic_server": True}),
    "pp2 x sdp2": (2, {"sharded_data_parallel_degree": 2}),
    "pp2 x tp2": (2, {"tensor_parallel_degree": 2}),
    "tp2 x sdp2": (1, {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2}),
    "sdp4": (1, {"sharded_data_parallel_degree": 4}),
    "dp4": (1, {}),
}
# torch.distributed's functions before which a rank may be lost, too.
CALLS = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_gather_object"


class Fate:
    """Counts moments, and lets this rank be lost at one of them.

    Attributes:
        count: moments so far.
        at: the moment at which it happens; None for never.
        in_step: does this rank call the step function now?
        end: what happens then.
    """

    count = 0
    at: int | None = None
    in_step = False
    end: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    def moment(cls, *_: Any) -> None:
        """Is called at any moment at which a rank may be lost."""
        cls.count += 1
        if cls.count == cls.at:
            cls.end()

    @classmethod
    def interrupt(cls, *_: Any) -> None:
        """Handles SIGINT. Outside a step it does not raise: this rank would miss a step."""
        if cls.in_step:
            raise KeyboardInterrupt


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Fate.moment()
        y = torch.tanh(self.linear(x))
        if y.requires_grad:
            y.register_hook(Fate.moment)
        return y


class Net(nn.Module):
    def __init__(self, divided: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for index in range(4):
            with smp.partition(index * smp.pp_size() // 4):
                self.parts.append(Layer())
        with smp.tensor_parallelism(divided), smp.partition(smp.pp_size() - 1):
            self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        y: torch.Tensor = self.last(x)
        return y


@smp.step
def train(model: Any, x: torch.Tensor) -> Any:
    Fate.moment()
    loss = model(x).square().mean()
    model.backward(loss)
    Fate.moment()
    return loss


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """In this context the calls of torch.distributed are moments."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            original = getattr(dist, name)

            def call(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                Fate.moment()
                return original(*args, **kwargs)

            patch.setattr(dist, name, call)
        yield


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Seen(NamedTuple):
    """What a rank has seen of one step: the class and text of its error, and seconds."""

    error: str
    text: str
    seconds: float


def losing(layout: str, lost: int, dies: bool, where: float, delay: float) -> list[Seen]:
    """Trains; one rank is lost in the second or third step.

    Args:
        layout: in `LAYOUTS`.
        lost: the rank.
        dies: its process ends at once; otherwise it gets SIGINT, and goes on as the others do.
        where: at which moment, as a part of two steps.
        delay: it happens so many seconds after that moment, between any two instructions.
    """
    partitions, more = LAYOUTS[layout]
    # So that smp.init, which waits for ranks that start, has the same limit as the steps.
    dist.init_process_group("smddp", timeout=timedelta(seconds=TIMEOUT))
    config = {"ddp": True, "microbatches": 2, "pipeline": "interleaved"}
    smp.init({**BY_HAND, "partitions": partitions, **more, **config})
    signal.signal(signal.SIGINT, Fate.interrupt)
    torch.manual_seed(0)
    model = smp.DistributedModel(Net("tensor_parallel_degree" in more))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 8)

    def step() -> None:
        Fate.moment()
        try:
            Fate.in_step = True
            train(model, x)
        finally:
            Fate.in_step = False
        Fate.moment()
        optimizer.step()
        model.zero_grad()

    seen = []
    with counted():
        step()
        if dist.get_rank() == lost:
            now = (lambda: os._exit(7)) if dies else _interrupt
            Fate.end = threading.Timer(delay, now).start if delay else now
            Fate.at = Fate.count + 1 + int(where * 2 * Fate.count)
        for _ in range(2 + STEPS):
            begin, error = time.monotonic(), None
            try:
                step()
            except (SMPError, dist.DistError, KeyboardInterrupt) as raised:
                error = raised
            name = "" if error is None else type(error).__name__
            seen.append(Seen(name, str(error), time.monotonic() - begin))
    if not dies:  # a script may save what it has
        begin = time.monotonic()
        dist.barrier()
        seen.append(Seen("", "", time.monotonic() - begin))
    # Nobody ends while others are in a step: that, too, would end their waits.
    arrive("out")
    await_ranks("out", RANKS - dies)
    return seen


def check(layout: str, lost: int, dies: bool, where: float, delay: float) -> None:
    case = f"{layout}, rank {lost} {'dies' if dies else 'is interrupted'} at {where} + {delay} s"
    outcomes = run_ranks(losing, str(RANKS), layout, lost, dies, where, delay, timeout=TIMEOUT)
    for outcome in outcomes:
        if dies and outcome.rank == lost:
            assert outcome.status == 7, f"{case}: {outcome}"
            continue
        assert outcome.returned, f"{case}: {outcome}"
        seen: list[Seen] = outcome.value
        assert max(one.seconds for one in seen) < LONGEST, f"{case}: rank {outcome.rank}: {seen}"
        for one in seen:
            assert one.error in ("", "KeyboardInterrupt") or issubclass(
                getattr(errors, one.error, Exception), SMPError
            ), (case, outcome.rank, seen)
        if dies:
            assert seen[-1].error == SMPPeerError.__name__, f"{case}: rank {outcome.rank}: {seen}"


def case_of(seed: int) -> tuple[str, int, bool, float, float]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(5, generator=generator).tolist()
    layout = list(LAYOUTS)[seed % len(LAYOUTS)]
    delay = max(0.0, numbers[4] - 0.5) * 0.02  # none in half of the cases
    return layout, int(numbers[1] * RANKS), numbers[2] < 0.6, numbers[3], delay


@pytest.mark.parametrize("seed", rotating_or_all(list(range(160)), 4))
def test_no_rank_waits_for_one_that_is_lost(seed: int) -> None:
    check(*case_of(seed))
