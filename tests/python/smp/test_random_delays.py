"""Steps of real ranks in random schedules: each ends, and computes the same bits.

All steps begin with the same weights, batch and seed. In each of them threads sleep for a random
time, up to 2 ms, where the order of work may depend on time: before messages are sent and acted
upon, where tasks begin and go on, before gathers and reductions, and when the scratch file is used.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import check_ranks
from smp.common import BY_HAND, shards
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.activations import offload
from smddp.modelparallel.torch.pipeline.channel import _MailboxStreams
from smddp.modelparallel.torch.pipeline.executor import Executor
from smddp.modelparallel.torch.pipeline.mail import Mail
from smddp.modelparallel.torch.pipeline.order_group import OrderGroup

pytestmark = pytest.mark.multiprocess

WIDTH, BLOCKS, MICROBATCHES = 6, 3, 3
# Seconds in which each step has to end. A step takes about 0.05 s; one that stalls and is freed by
# another time-out takes longer than this.
DEADLINE = 60.0
CONFIGS: dict[str, dict[str, Any]] = {
    "pp2 x sdp2": {"partitions": 2},
    "sdp2 x dp2": {"partitions": 1, "offload_activations": True, "activation_loading_horizon": 1},
}


class Delays:
    """Lets threads of this rank sleep. The same seed gives the same sequence of times."""

    def __init__(self) -> None:
        self.count = 0
        self.begin("")

    def begin(self, seed: str) -> None:
        self._source = random.Random(seed)
        # Some steps have few delays, others many.
        self._often: float = self._source.choice([0.0, 0.05, 0.2, 0.5])

    def pause(self) -> None:
        if self._source.random() < self._often:
            self.count += 1
            time.sleep(self._source.choice([0.0, 1e-5, 1e-4, self._source.uniform(0, 2e-3)]))

    def before(self, owner: Any, name: str) -> None:
        """Lets threads sleep before each call of a function."""
        function = getattr(owner, name)

        def delayed(*args: Any, **kwargs: Any) -> Any:
            self.pause()
            return function(*args, **kwargs)

        setattr(owner, name, delayed)

    def hold_messages_back(self) -> None:
        """Lets a rank that looks for messages find none, although some have come."""
        take = _MailboxStreams.take

        def taken(streams: _MailboxStreams, block: bool) -> Any:
            self.pause()
            if not block and self._source.random() < self._often:
                return []
            return take(streams, block)

        _MailboxStreams.take = taken  # type: ignore[method-assign]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.outer, self.dropout = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(torch.tanh(self.inner(self.norm(x)))))


class Model(nn.Module):
    """Each block is on another rank than the one before it; the last ones get all results."""

    def __init__(self, partitions: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for number in range(BLOCKS):
            with smp.partition((number + 1) % partitions):
                self.blocks.append(Block())
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        results = [x]
        for block in self.blocks:
            results.append(block(results[-1] + results[len(results) // 2]))
        return self.last(results[-1])


@smp.step
def train_step(model: Any, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def delayed_steps(name: str, schedules: range) -> tuple[list[int], float, int, int]:
    """Makes one step for each schedule.

    Returns:
        The schedules with other losses, gradients or parameters than the first one; the seconds of
        the longest step; in how many orders tasks have run; how often a thread has slept.
    """
    config = CONFIGS[name]
    offload.SMALL = 0  # the arguments of these modules are small
    delays = Delays()
    for owner, function in (
        (Mail, "send"),
        (Executor, "enter"),
        (Mail, "deliver"),
        (OrderGroup, "_handle"),
        (offload._ScratchFile, "read"),
        (offload._ScratchFile, "write"),
        (dist, "all_gather_into_tensor"),
        (dist, "reduce_scatter_tensor"),
        (dist, "all_reduce"),
    ):
        delays.before(owner, function)
    delays.hold_messages_back()
    sharding = {**shards(2, 20), "sdp_reduce_bucket_size": 100}
    smp.init({**BY_HAND, "ddp": True, "microbatches": MICROBATCHES, **sharding, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(Model(config["partitions"]))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if "offload_activations" in config:
        for block in model.get_module().blocks:
            smp.set_activation_checkpointing(block)
    source = torch.Generator().manual_seed(smp.dp_rank())
    x = torch.randn(2 * MICROBATCHES, WIDTH, generator=source)
    y = torch.randint(3, (2 * MICROBATCHES,), generator=source)
    longest = 0.0

    def step(seed: str) -> list[Any]:
        nonlocal longest
        optimizer.zero_grad()
        delays.begin(seed)
        torch.manual_seed(1)
        begun = time.monotonic()
        losses = train_step(model, x, y).stack()
        gradients = [None if p.grad is None else p.grad.clone() for p in optimised()]
        optimizer.step()
        longest = max(longest, time.monotonic() - begun)
        return [losses, *gradients, *(p.detach().clone() for p in optimised())]

    def optimised() -> list[Any]:
        """Returns the parameters of this rank, or their shards."""
        return [p for group in optimizer.param_groups for p in group["params"] if not p.is_meta]

    step("divides the model")
    kept = [parameter.detach().clone() for parameter in optimised()]
    first: list[Any] = []
    wrong, orders = [], set()
    for schedule in schedules:
        for parameter, value in zip(optimised(), kept, strict=True):
            parameter.data.copy_(value)
        found = step(f"schedule {schedule} of rank {smp.rank()}")
        orders.add(tuple(span[2:] for span in model.runtime.executor.timeline.spans))
        first = first or found
        if not all(map(same, found, first)):
            wrong.append(schedule)
    assert not any(map(same, first[-len(kept) :], kept)), "nothing was trained"
    return wrong, longest, len(orders), delays.count


def same(one: Any, other: Any) -> bool:
    return one is other is None or torch.equal(one, other)


def turn(count: int) -> range:
    """Returns the numbers of some schedules, others with each TEST_TURN."""
    first = count * int(os.environ.get("TEST_TURN", "0"))
    return range(first, first + count)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "schedules",
    [
        pytest.param(turn(40), id="turn"),
        *(
            pytest.param(range(first, first + 500), marks=pytest.mark.exhaustive, id=str(first))
            for first in range(0, 5000, 500)  # of each configuration
        ),
    ],
)
@pytest.mark.timeout(600)
def test_each_schedule_ends_with_the_same_bits(name: str, schedules: range) -> None:
    ranks = check_ranks(delayed_steps, "4", name, schedules, timeout=60 + len(schedules))
    for rank, (wrong, longest, orders, sleeps) in enumerate(ranks):
        assert wrong == [], f"rank {rank}: other bits than in schedule {schedules[0]}"
        assert longest < DEADLINE, f"rank {rank}"
        assert sleeps > len(schedules), f"rank {rank}"
        if CONFIGS[name]["partitions"] > 1:
            assert orders > 1, f"rank {rank}: tasks always run in one order"
