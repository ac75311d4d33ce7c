"""Ranks that are lost while a stand-in for NCCL has enqueued work."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import device_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from device_cases import error_of
from device_jobs import RAILS

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(device_cases.find_fake() is None, reason="the C++ tests are not built"),
]


@contextlib.contextmanager
def _hanging_job() -> Iterator[tuple[Any, list[Any]]]:
    """Yields the device and the peers of the default group, which has served a call.

    On rails there is one peer for the first stage and one for the last. The timeout of the group is
    longer than the test.
    """
    from smddp.torch import backend

    made = []

    def make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(device_cases.Fake.module.HangingNccl(rank, size))
        return made[-1]

    backend._gpu_support = lambda: ("fake", lambda index: f"GPU {os.environ['RANK']}", make_nccl)
    with device_cases.job("fake", timeout=600) as device:
        dist.all_reduce(torch.ones(1000, device=device.device))
        dist.barrier()
        yield device, made
        device.synchronize()
    assert all(peer.aborts() <= 1 for peer in made)


def _until_it_fails(call: Callable[[], Any]) -> str:
    while (said := error_of(call)) == "no error":
        time.sleep(0.01)
    return said


def _loses_a_rank(stage: int, how: str) -> tuple[list[str], int]:
    """The last rank dies or fails while enqueued work of its node waits for it in a stage."""
    with _hanging_job() as (device, peers):
        me, last = dist.get_rank(), dist.get_world_size() - 1
        tensor = torch.ones(1000, device=device.device)
        locals_ = int(os.environ["LOCAL_WORLD_SIZE"])
        if me == last and how == "breaks":
            peers[stage].break_down()
        elif me != last and me // locals_ == last // locals_:
            peers[stage].hang()
        if stage == 0 and me == last:
            ranks.await_ranks("enqueued", locals_ - 1)
        if me == last and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if me == last and how == "aborts":
            dist.group.WORLD.abort()
        said = []
        try:
            work = dist.all_reduce(tensor, async_op=True)
            ranks.arrive("enqueued")
            said.append(error_of(work.wait))
        except dist.DistBackendError as error:
            said.append(f"{type(error).__name__}: {error}")
        device.synchronize()
        said.append(_until_it_fails(lambda: dist.all_reduce(tensor)))
        said.append(error_of(dist.barrier))
        # The rank that notices the failure first has its error before its engine aborts the peers.
        while not all(peer.aborts() for peer in peers):
            time.sleep(0.01)
        return said, sum(peer.aborts() for peer in peers)


LOST = {
    # The connection may break before the lifeline does.
    "dies": "SMDDPPeerLostError: smddp.*rank {} .*(its process (died|ended)|its connection broke)",
    "breaks": "SMDDPTransportError: smddp.*rank {} could not do its part.*unhandled error",
    "aborts": "SMDDPAbortedError: smddp.*rank {} called abort",
}


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("stage", [0, 1])
def test_nccl_ends_when_a_rank_is_lost_on_rails(stage: int, how: str) -> None:
    outcomes = ranks.run_ranks(_loses_a_rank, "2x2", stage, how, env=RAILS, timeout=60)
    _check_lost(outcomes, how, peers=2)


@pytest.mark.parametrize("how", LOST)
def test_nccl_ends_when_a_rank_is_lost(how: str) -> None:
    outcomes = ranks.run_ranks(_loses_a_rank, "3", 0, how, timeout=60)
    _check_lost(outcomes, how, peers=1)


def _check_lost(outcomes: list[ranks.Outcome], how: str, peers: int) -> None:
    """Checks that NCCL was aborted once on all ranks, and that their last errors name the rank."""
    last = len(outcomes) - 1
    for outcome in outcomes[: last if how == "dies" else None]:
        assert outcome.returned, str(outcome)
        said, aborts = outcome.value
        assert aborts == peers, str(outcome)
        for text in said[:-2]:
            # Only the enqueued work may have been missing; then its call has succeeded.
            assert text == "no error" or re.search(LOST[how].format(last), text, re.S), said
        for text in said[-2:]:
            assert re.search(LOST[how].format(last), text, re.S), said


def _ends_in_order(how: str) -> list[str]:
    """A rank leaves while NCCL of another rank waits."""
    with _hanging_job() as (device, peers):
        tensor = torch.ones(1000, device=device.device)
        peers[0].hang()
        dist.all_reduce(tensor, async_op=True)
        ranks.arrive("enqueued")
        ranks.await_ranks("enqueued", 2)
        if how == "abort":
            dist.group.WORLD.abort()
        else:
            threading.Timer(0.2, peers[0].abort).start()
            dist.group.WORLD._get_backend(device.device).shutdown()
        said = error_of(lambda: dist.all_reduce(tensor)) if how == "abort" else ""
        device.synchronize()
        return [said, str(peers[0].aborts())]


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_script_ends_nccl_itself(how: str) -> None:
    """NCCL is aborted only once, and not again after a shutdown that ended by itself."""
    for said, aborts in ranks.check_ranks(_ends_in_order, "2", how):
        if how == "abort":
            assert re.match("SMDDPAbortedError: smddp.*rank . called abort", said), said
        assert aborts == "1"


def _forgets_a_group() -> list[int]:
    """The last reference to a group is dropped while NCCL waits for a rank."""
    from smddp.torch import _load

    made = []

    def make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(device_cases.Fake.module.HangingNccl(rank, size))
        return made[-1]

    with device_cases.job("fake", timeout=600) as device:
        me, size = dist.get_rank(), dist.get_world_size()
        group = _load.load().GpuProcessGroup(
            dist.distributed_c10d._get_default_store(),
            me,
            size,
            timedelta(seconds=600),
            "forgotten",
            "",
            "",
            [],
            "fake",
            lambda index: f"GPU {me}",
            make_nccl,
            "",
        )
        tensor = torch.ones(1000, device=device.device)
        group.allreduce([tensor]).wait()
        for peer in made:
            peer.hang()
        group.allreduce([tensor])
        dist.barrier()
        del group
        gc.collect()
        return [peer.aborts() for peer in made]


@pytest.mark.parametrize(("layout", "env"), [("2", {}), ("2x2", RAILS)])
def test_a_group_that_nobody_has_left_waits_for_nobody(layout: str, env: dict[str, str]) -> None:
    for aborts in ranks.check_ranks(_forgets_a_group, layout, env=env, timeout=40):
        assert aborts == [1] * len(aborts)
        assert aborts
