"""Members that agree themselves on who goes on: csrc/process_group/elastic_members.h."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not hasattr(dist, "_reconfigure"), reason="this release of torch cannot change members"
    ),
]

LAYOUTS = ["3", "1+1+1", "2+1", "2+2"]


class _Member:
    """This process: a member, or one that may become one."""

    def __init__(self) -> None:
        from smddp.torch import _C

        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("smddp", timeout=timedelta(seconds=30), enable_reconfigure=True)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        self.members = _C.ElasticMembers(backend, grace=2.0)
        self.store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
        self.store.set(f"card/{self.rank}", self.members.card())
        self.pids = {}
        self.store.set(f"pid/{self.rank}", str(os.getpid()))

    def cards(self, ranks_: list[int]) -> list[str]:
        return [self.store.get(f"card/{rank}").decode() for rank in ranks_]

    def begin(self, count: int) -> Any:
        return self.members.begin(self.cards(list(range(count))))

    def sum(self) -> None:
        size = dist.get_world_size()
        tensor = torch.full((1000,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor)
        torch.testing.assert_close(tensor, torch.full((1000,), size * (size + 1) / 2))

    def sum_until_it_fails(self, at_most: float = 20) -> None:
        began = time.monotonic()
        while time.monotonic() - began < at_most:
            try:
                self.sum()
            except RuntimeError:
                return
        raise AssertionError("no error")


def _goes_on(victim: int) -> tuple[Any, ...] | None:
    me = _Member()
    first = me.begin(me.count)
    assert (first.generation, first.rank, first.step) == (1, me.rank, 0)
    me.sum()
    if me.rank == victim:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    me.sum_until_it_fails()
    began = time.monotonic()
    next_ = me.members.agree(7, 8 if me.rank == 2 else 9, 20)
    took = time.monotonic() - began
    assert not next_.out
    assert dist.get_world_size() == me.count - 1
    me.sum()
    return next_.generation, next_.rank, next_.step, next_.left, next_.came, took


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_others_go_on(layout: str, victim: int) -> None:
    outcomes = ranks.run_ranks(_goes_on, layout, victim)
    others = [one for one in outcomes if one.rank != victim]
    for rank, one in enumerate(others):
        assert one.returned, one
        generation, new, step, left, came, _ = one.value
        assert (generation, new, came) == (2, rank, [])
        # Step 8 counts: all who are left have voted for it. Rank 2 has not voted for step 9.
        assert step == 8
        assert len(left) == 1
        assert left[0].startswith(f"rank {victim} (")
        assert f"pid {outcomes[victim].pid})" in left[0]


def _joins() -> Any:
    me = _Member()
    if me.rank < 2:
        me.begin(2)
        me.sum()
        # One of them hears of it.
        if me.rank == 1:
            me.members.hear(me.cards([2])[0])
        assert me.members.newcomers() == me.rank
        dist.barrier()
        now = me.members.agree(5, 5, 20)
    else:
        now = me.members.join(me.cards([0, 1]), 20)
    assert (now.generation, now.step, now.rank) == (2, 5, me.rank)
    assert len(now.came) == (1 if me.rank < 2 else 3)
    me.sum()
    return now.cards


@pytest.mark.parametrize("layout", ["3", "1+1+1", "2+1"])
def test_a_newcomer_is_let_in(layout: str) -> None:
    cards = ranks.check_ranks(_joins, layout)
    assert cards[0] == cards[1] == cards[2]


def _at_random(seed: int) -> tuple[int, int]:
    me = _Member()
    me.begin(me.count)
    rng = random.Random(f"{seed} {me.rank}")
    victims = random.Random(seed).sample(range(me.count), me.count - 2)
    dies_at = rng.uniform(0, 0.3) + time.monotonic() if me.rank in victims else None
    if dies_at is not None:
        pid = os.fork()
        if pid == 0:  # from outside, at any moment
            time.sleep(max(0.0, dies_at - time.monotonic()))
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
    size = me.count
    generation = 1
    while size > 2:
        me.sum_until_it_fails()
        now = me.members.agree(0, 0, 20)
        assert not now.out
        assert now.generation > generation
        generation, size = now.generation, len(now.cards)
        assert size == dist.get_world_size()
    me.sum()
    return generation, size


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", ["4", "2+2", "1+1+1+1"])
def test_deaths_at_random_moments(layout: str, seed: int) -> None:
    outcomes = ranks.run_ranks(_at_random, layout, seed)
    victims = random.Random(seed).sample(range(4), 2)
    values = set()
    for one in outcomes:
        if one.rank in victims:
            assert one.status == -signal.SIGKILL, one
        else:
            assert one.returned, one
            values.add(one.value)
    assert len(values) == 1
