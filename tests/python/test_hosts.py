"""Tests that need several hosts: lost packets, and hosts with two network interfaces."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import hosts
import programs
import psutil
import pytest
import ranks
import torch
import torch.distributed as dist
from test_failure import Failure, failure_of

import smddp
from smddp.torch import _load

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


def _names_of_congestion_control(paced: bool) -> tuple[str, str, str]:
    if paced:
        # As on many cloud images. Each network namespace has a default of its own.
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("bbr")
    dist.init_process_group("smddp", timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1_000_000))
    dist.barrier()
    text = smddp.describe()
    found = _load.load().congestion_control()
    dist.destroy_process_group()
    return found["system"], found["on_short_paths"], text


@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_congestion_control_of_the_path(delay: float) -> None:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    paced = "bbr" in allowed
    with hosts.Hosts(2, delay=delay) as network:
        outcomes = ranks.check_ranks(_names_of_congestion_control, "1+1", paced, network=network)
    for system, short, text in outcomes:
        assert (short == system) == (not paced)
        name = system if delay else short
        assert re.search(rf"; \d connections? with {name}$", text), text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rate=quick"], "hosts.py: the hosts cannot be made: "),
        (["--hosts=255"], "--hosts 255: expects from 1 to 254"),
        (["--ranks=0"], "--ranks 0: expects at least 1"),
    ],
)
def test_wrong_arguments_of_the_command(arguments: list[str], text: str) -> None:
    done = programs.run(str(ranks.ROOT / "tools/hosts.py"), *arguments, "--", "-c", "pass")
    assert done.returncode == 2
    assert text in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def _be_cut_off(network: hosts.Network, how: str) -> tuple[Failure, float]:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    tensor = torch.ones(10_000)
    dist.all_reduce(tensor)
    started = time.monotonic()
    if dist.get_rank() == 1:
        threading.Timer(0.5, network.cut, [1, how]).start()
    # The class of the error shows that no timeout ended the call. benchmarks/faults.py measures how
    # long it takes.
    failure = failure_of(lambda: [dist.all_reduce(tensor) for _ in range(10_000_000)])
    return failure, time.monotonic() - started


@pytest.mark.parametrize("how", ["both", "to", "from"])
def test_host_that_is_cut_off(network: hosts.Network, how: str) -> None:
    outcomes = ranks.run_ranks(
        _be_cut_off, "2x2", network, how, network=network, env={"SMDDP_HOST_TIMEOUT": "2"}
    )
    for rank, outcome in enumerate(outcomes):
        assert outcome.returned, "\n".join(map(str, outcomes))
        failure, _ = outcome.value
        assert failure.kind == "SMDDPPeerLostError", failure
        others = (2, 3) if rank < 2 else (0, 1)
        # A rank that the verdict of the other side reaches does not read that itself is gone.
        verdict = failure.text.partition(" failed on ")[2]
        assert any(f"rank {other} (pid " in verdict for other in others), failure
        assert "answer" in failure.text, failure
        assert f"rank {rank} (pid" not in verdict, failure
        assert f"rank {rank ^ 1} (pid" not in verdict or "which is alive" in verdict, failure
    # Before, whoever waits for a rank of the other host has said it in the log.
    for host, others in ((outcomes[:2], (2, 3)), (outcomes[2:], (0, 1))):
        said = [line for one in host for line in one.stderr.splitlines() if "be reached" in line]
        assert any(f"rank {other} (pid " in line for line in said for other in others), "".join(
            f"{one.rank}: {one.value} {one.stderr}" for one in outcomes
        )


def _see_it_heal(network: hosts.Network, how: str, seconds: float, count: int) -> tuple[int, int]:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    dist.barrier()
    healed = 0

    def interrupt() -> None:
        nonlocal healed
        for _ in range(count):
            time.sleep(0.3)
            network.interrupt(1, how, seconds)
            time.sleep(0.5 + seconds)
            healed += 1

    interrupter = threading.Thread(target=interrupt)
    if rank == 0:
        interrupter.start()
    wrong = 0
    tensor = torch.empty(10_000)
    more = torch.ones(1)
    while more:
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor)
        wrong += int((tensor != 10).sum())
        more.fill_(healed < count)
        dist.broadcast(more, 0)
    dist.destroy_process_group()
    return wrong, healed


def _check_healing(network: hosts.Network, how: str, seconds: float, count: int) -> None:
    limit = 30 + count * (10 + 5 * seconds)
    outcomes = ranks.check_ranks(
        _see_it_heal, "2x2", network, how, seconds, count, network=network, timeout=limit
    )
    assert outcomes == [(0, count)] + [(0, 0)] * 3


@pytest.mark.parametrize(("how", "seconds"), [("both", 2), ("to", 1), ("from", 1)])
def test_link_that_heals(network: hosts.Network, how: str, seconds: float) -> None:
    _check_healing(network, how, seconds, 1)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["both", "to", "from"])
@pytest.mark.parametrize("seconds", [0.5, 1, 2])
def test_link_that_heals_again_and_again(network: hosts.Network, how: str, seconds: float) -> None:
    _check_healing(network, how, seconds, 20)


def _be_idle_meanwhile(network: hosts.Network) -> float:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    tensor = torch.ones(10_000)
    dist.all_reduce(tensor)
    if dist.get_rank() == 0:
        # No rank waits for another one, so a host that does not answer is not an error.
        network.interrupt(1, "both", 5)
        ranks.arrive("healed")
    ranks.await_ranks("healed", 1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return float(tensor.unique())


def test_link_that_heals_while_nobody_waits(network: hosts.Network) -> None:
    outcomes = ranks.check_ranks(_be_idle_meanwhile, "2x2", network, network=network)
    assert outcomes == [16.0] * 4


def _meet_on_a_bad_link(network: hosts.Network) -> float:
    if os.environ["RANK"] == "1":
        # Before the ranks connect to each other, and while they do.
        threading.Thread(target=network.interrupt, args=[1, "both", 2]).start()
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    tensor = torch.ones(10_000)
    dist.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return float(tensor.unique())


def test_link_that_heals_while_ranks_meet(network: hosts.Network) -> None:
    assert ranks.check_ranks(_meet_on_a_bad_link, "2x2", network, network=network) == [4.0] * 4


def _connect_in_an_outage(network: hosts.Network, how: str, seconds: float) -> float:
    # Connects the lifelines only.
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    if dist.get_rank() == 0:
        host = network.hosts[0]
        if how == "no route":
            host.run("ip link set eth0 down")
            restore = (host.run, ["ip link set eth0 up"])
        else:
            network.unplug(1)
            host.run("ip neigh flush dev eth0")
            restore = (network.plug, [1])
        threading.Timer(seconds, *restore).start()
        ranks.arrive("interrupted")
    # Rank 0 has to connect, so rank 1 does nothing before.
    ranks.await_ranks("interrupted", 1)
    tensor = torch.ones(10_000)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor.zero_(), 0)
    dist.destroy_process_group()
    return float(tensor.unique())


# To find out that there is no answer to ARP takes the kernel three seconds.
@pytest.mark.parametrize(("how", "seconds"), [("no route", 1), ("no answer", 4)])
def test_first_connection_in_an_outage(network: hosts.Network, how: str, seconds: float) -> None:
    outcomes = ranks.check_ranks(
        _connect_in_an_outage,
        "1+1",
        network,
        how,
        seconds,
        network=network,
        env={"SMDDP_HOST_TIMEOUT": "10"},
    )
    assert outcomes == [1.0] * 2


def _leave_before_all_has_arrived(call: str) -> float:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    tensor = torch.full((1 << 18,), float(dist.get_rank() == 0))
    # Nothing goes the other way that rank 0 could wait for.
    if call == "broadcast":
        dist.broadcast(tensor, 0)
    elif dist.get_rank() == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    dist.destroy_process_group()
    return float(tensor.unique())


@pytest.mark.parametrize("call", ["send", "broadcast"])
def test_rank_that_leaves_before_all_has_arrived(call: str) -> None:
    with hosts.Hosts(2, "10mbit") as network:
        outcomes = ranks.check_ranks(_leave_before_all_has_arrived, "1+1", call, network=network)
    assert outcomes == [1.0] * 2


def _reduce_slowly(mebibytes: int, limit: float) -> Failure | float:
    dist.init_process_group("smddp", timeout=timedelta(seconds=limit))
    tensor = torch.ones(mebibytes << 18)
    dist.barrier()
    try:
        dist.all_reduce(tensor)
    except dist.DistBackendError as error:
        return Failure(type(error).__name__, str(error), 0, 0)
    dist.barrier()
    dist.destroy_process_group()
    return float(tensor.unique())


# How the queue of a link is filled depends on the rate.
_SLOW = [
    pytest.param("10mbit", 16, 300),
    pytest.param("1mbit", 2, 300),
    pytest.param("10mbit", 64, 600, marks=pytest.mark.exhaustive),
    pytest.param("1mbit", 16, 900, marks=pytest.mark.exhaustive),
]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("rate", "mebibytes", "limit"), _SLOW)
def test_slow_link_is_not_a_dead_peer(rate: str, mebibytes: int, limit: float) -> None:
    with hosts.Hosts(2, rate) as network:
        outcomes = ranks.run_ranks(
            _reduce_slowly, "2x2", mebibytes, limit, network=network, timeout=limit + 60
        )
    for outcome in outcomes:
        assert outcome.value == 4.0, "\n".join(map(str, outcomes))
        assert "answer" not in outcome.stderr, outcome.stderr


def test_time_out_of_a_call_that_makes_progress() -> None:
    with hosts.Hosts(2, "20mbit") as network:
        outcomes = ranks.check_ranks(_reduce_slowly, "2x2", 64, 6, network=network)
    for failure in outcomes:
        assert failure.kind == "SMDDPCollectiveTimeoutError", failure
        assert "answer" not in failure.text, failure
        assert "it has exchanged" in failure.text, failure


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
