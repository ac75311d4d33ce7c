"""Tests that need several hosts: lost packets, and hosts with two network interfaces."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import hosts
import psutil
import pytest
import ranks
import torch
import torch.distributed as dist
from test_failure import Failure, failure_of

import smddp

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(hosts.unavailable() is not None, reason=str(hosts.unavailable())),
]


@pytest.fixture
def network() -> Iterator[hosts.Network]:
    with hosts.Hosts(2) as network:
        yield network


def _meet() -> tuple[float, int, list[str]]:
    dist.init_process_group("smddp", timeout=timedelta(seconds=20))
    tensor = torch.full((100_000,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    sent = sum(use["fabric_bytes"] for use in smddp.statistics().values())
    connections = psutil.Process().net_connections("inet")
    listening = [str(c.laddr.ip) for c in connections if c.status == psutil.CONN_LISTEN]
    dist.barrier()
    dist.destroy_process_group()
    return float(tensor.unique()), sent, listening


def test_hosts_meet_on_their_network(network: hosts.Network) -> None:
    outcomes = ranks.check_ranks(_meet, "2x2", network=network)
    for rank, (result, sent, listening) in enumerate(outcomes):
        assert result == 1 + 2 + 3 + 4
        assert sent > 0
        # Rank 0 also has torch's store, which listens on all interfaces.
        if rank != 0:
            assert listening
            assert set(listening) == {network.address(rank // 2)}


def _be_cut_off(network: hosts.Network) -> Failure:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    tensor = torch.ones(10_000)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        threading.Timer(0.5, network.unplug, [1]).start()
    # The class of the error shows that no timeout ended the call. benchmarks/faults.py measures how
    # long it takes.
    return failure_of(lambda: [dist.all_reduce(tensor) for _ in range(10_000_000)])


def test_host_that_is_cut_off(network: hosts.Network) -> None:
    outcomes = ranks.check_ranks(_be_cut_off, "2x2", network, network=network)
    for rank, failure in enumerate(outcomes):
        assert failure.kind == "SMDDPPeerLostError", failure
        others = (2, 3) if rank < 2 else (0, 1)
        assert any(f"rank {other} (pid " in failure.text for other in others), failure
        assert "has not answered" in failure.text, failure


def _see_it_heal(network: hosts.Network, idle: bool) -> int:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    dist.barrier()

    def cut() -> None:
        network.unplug(1)
        time.sleep(4 if idle else 0.5)
        network.plug(1)
        ranks.arrive("healed")

    wrong = 0
    if rank == 0:
        cutter = threading.Timer(0 if idle else 0.3, cut)
        cutter.start()
    if idle:
        # No rank waits for another one, so a host that does not answer is not an error.
        ranks.await_ranks("healed", 1)
    end = torch.tensor([time.monotonic() + 2])
    dist.broadcast(end, 0)
    tensor = torch.empty(10_000)
    more = torch.ones(1)
    while more:
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor)
        wrong += int((tensor != 10).sum())
        more.fill_(time.monotonic() < end.item())
        dist.broadcast(more, 0)
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("idle", [False, True], ids=["busy", "idle"])
def test_link_that_heals(network: hosts.Network, idle: bool) -> None:
    assert ranks.check_ranks(_see_it_heal, "2x2", network, idle, network=network) == [0] * 4


def _stop() -> Failure | None:
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    tensor = torch.ones(10_000)
    pid = torch.tensor(os.getpid())
    dist.broadcast(pid, 1)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    ranks.limit(4)
    failure = failure_of(lambda: dist.all_reduce(tensor))
    ranks.arrive("failed")
    if dist.get_rank() == 0:
        ranks.await_ranks("failed", 3)
        os.kill(int(pid), signal.SIGCONT)
    return failure


@pytest.mark.slow
def test_process_that_is_stopped_on_another_host(network: hosts.Network) -> None:
    outcomes = ranks.run_ranks(_stop, "2x2", network=network)
    for rank in (0, 2, 3):
        outcome = outcomes[rank]
        assert outcome.returned, "\n".join(map(str, outcomes))
        assert outcome.value.kind == "SMDDPCollectiveTimeoutError", outcome.value
        assert f"rank 1 (pid {outcomes[1].pid} on " in outcome.value.text, outcome.value
        # Another host cannot distinguish a stopped process from one that is disconnected.
        assert "stopped" in outcome.value.text, outcome.value
        # The log has this long before the timeout.
        warning = f"rank 1 (pid {outcomes[1].pid} on "
        assert any(warning in line and "stopped" in line for line in outcome.stderr.splitlines())
