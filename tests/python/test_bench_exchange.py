"""The bare loop, and the exchange between nodes of one rank: connections, and rows."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hosts
import pytest
import ranks
import torch
import torch.distributed as dist
from bench_runs import bench, rows_of

from smddp.bench import bare, mesh
from smddp.bench.bounds import BoundContender
from smddp.bench.contender import Unable
from smddp.bench.operations import Task

TIMEOUT = 60.0


@contextlib.contextmanager
def _meshes(size: int) -> Iterator[list[list[socket.socket | None]]]:
    """Yields the sockets of each rank, by the rank at the other end."""
    meshes: list[list[socket.socket | None]] = [[None] * size for _ in range(size)]
    with contextlib.ExitStack() as opened:
        for one in range(size):
            for other in range(one):
                pair = socket.socketpair()
                meshes[one][other], meshes[other][one] = map(opened.enter_context, pair)
        yield meshes


def _floats(tensor: torch.Tensor) -> memoryview[Any]:
    return memoryview(tensor.numpy())


@pytest.mark.parametrize("size", [2, 3, 5])
def test_exchange_sums_in_place(size: int) -> None:
    with _meshes(size) as meshes, ThreadPoolExecutor(size) as threads:
        exchanges = [bare.BareExchange(sockets, rank) for rank, sockets in enumerate(meshes)]
        # The last one fills the ring of 256 KiB several times.
        for count in (0, 1, 2, 5, 16, 1023, 20_001, 1_000_003):
            tensors = [(torch.arange(count) * (rank + 1) % 1009).float() for rank in range(size)]
            right = torch.stack(tensors).sum(0)

            def run(rank: int, tensors: list[torch.Tensor] = tensors) -> None:
                exchanges[rank].sum_in_place(_floats(tensors[rank]), TIMEOUT)

            list(threads.map(run, range(size)))
            assert all(torch.equal(tensor, right) for tensor in tensors), count


def test_exchange_without_a_peer_fails() -> None:
    vector = _floats(torch.zeros(1000))
    with _meshes(3) as meshes:
        exchange = bare.BareExchange(meshes[0], 0)
        for stream in filter(None, meshes[1]):
            stream.close()
        with pytest.raises(RuntimeError, match="lost rank 1 in an exchange"):
            exchange.sum_in_place(vector, TIMEOUT)
        with pytest.raises(RuntimeError, match="failed before"):
            exchange.sum_in_place(vector, TIMEOUT)


def test_exchange_in_which_nothing_moves_ends() -> None:
    with _meshes(3) as meshes:
        exchange = bare.BareExchange(meshes[2], 2)
        with pytest.raises(RuntimeError, match=r"nothing has moved for 0\.01 s .* rank 0, rank 1"):
            exchange.sum_in_place(_floats(torch.zeros(1000)), 0.01)


def test_a_signal_ends_an_exchange() -> None:
    def interrupt(*_: object) -> None:
        raise InterruptedError("by the test")

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        with _meshes(2) as meshes:
            exchange = bare.BareExchange(meshes[0], 0)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
            with pytest.raises(InterruptedError, match="by the test"):
                exchange.sum_in_place(_floats(torch.zeros(1000)), TIMEOUT)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_bare_loop_sums_in_place() -> None:
    for count in (0, 1, 5, 1023, 5000):
        for number in (2, 3, 5):
            tensors = [torch.arange(count, dtype=torch.float32) + i for i in range(number)]
            right = torch.stack(tensors).sum(0)
            bare.summing([_floats(tensor) for tensor in tensors])()
            assert all(torch.equal(tensor, right) for tensor in tensors)


# --- connections, and the contender ---------------------------------------------------------------


def test_strangers_are_not_ranks() -> None:
    token = b"t" * 16
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n\r\n", token + b"\0\0\0\7"):
            stream = opened.enter_context(socket.create_connection(server.getsockname()))
            stream.sendall(said)
            stream.shutdown(socket.SHUT_WR)
        rank, accepted = mesh._accept(server, token, time.monotonic() + TIMEOUT)
        with accepted:
            assert rank == 7
            assert accepted.getpeername() == stream.getsockname()


def _measure_bound(count: int) -> tuple[list[str], int, int | None]:
    dist.init_process_group("gloo")
    bound = BoundContender(list(range(dist.get_world_size())), count * 4, None)
    places = bound.prepare(Task("allreduce", count))
    wrong = bound.wrong("in_place", shift=0)
    times = bound.time("in_place", 5)
    assert all(time > 0 for time in times)
    # As many bytes of another type; then something that it cannot do.
    bound.prepare(Task("allreduce", count // 2, "int64", "max"))
    wrong = max(wrong or 0, bound.wrong("in_place", shift=1) or 0)
    with pytest.raises(Unable, match="for allreduce only"):
        bound.prepare(Task("broadcast", 1))
    bound.close()
    dist.destroy_process_group()
    return places, len(times), wrong


@pytest.mark.multiprocess
def test_contender_between_nodes() -> None:
    assert ranks.check_ranks(_measure_bound, "3x1", 1001) == [(["in_place"], 5, 0)] * 3


@pytest.mark.multiprocess
@pytest.mark.skipif(hosts.unavailable() is not None, reason=str(hosts.unavailable()))
def test_contender_between_hosts() -> None:
    with hosts.Hosts(3) as network:
        found = ranks.check_ranks(_measure_bound, "3x1", 1001, network=network)
    assert found == [(["in_place"], 5, 0)] * 3


def _without_programs(several_nodes: bool) -> list[str]:
    dist.init_process_group("gloo")
    bare._path = lambda: Path("/nowhere")
    ranks_of_world = range(dist.get_world_size())
    bound = BoundContender([rank * several_nodes for rank in ranks_of_world], 4, 1.0)
    with pytest.raises(Unable, match="`make setup` builds them"):
        bound.prepare(Task("allreduce", 1))
    places = [] if several_nodes else bound.prepare(Task("broadcast", 1))
    dist.destroy_process_group()
    return places


@pytest.mark.multiprocess
@pytest.mark.parametrize("several_nodes", [False, True])
def test_an_installed_benchmark_leaves_out_what_is_compiled(several_nodes: bool) -> None:
    expected = [] if several_nodes else ["in_place"]
    assert ranks.check_ranks(_without_programs, "2", several_nodes) == [expected] * 2


def _fail_to_connect(where: str) -> str:
    dist.init_process_group("gloo")

    def fail(*_: Any) -> Any:
        raise OSError("no luck")

    if dist.get_rank() == 1:
        setattr(mesh, where, fail)
    bound = BoundContender(list(range(dist.get_world_size())), 4, 1.0)
    with pytest.raises(Unable) as caught:
        bound.prepare(Task("allreduce", 1))
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.multiprocess
@pytest.mark.parametrize("where", ["_listen", "_accept"])
def test_all_hear_that_ranks_cannot_connect(where: str) -> None:
    said = ranks.check_ranks(_fail_to_connect, "3x1", where)
    right = f"the ranks cannot be connected: rank 1 on {socket.gethostname()}: no luck"
    assert said == [right] * 3


@pytest.mark.multiprocess
@pytest.mark.costly
def test_bound_between_nodes() -> None:
    done = bench("allreduce", "--nodes=3x1", "--backends=bound", "--counts=1,1001,100000",
                 "--iterations=5")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    assert [int(row[1]) for row in rows] == [1, 1001, 100_000]
    for row in rows:
        assert row[5:9] == ["-"] * 4  # nothing out of place
        assert float(row[9]) > 0
        assert row[12:] == ["0", "bound", "-", "-", "100.0", "%", "-"]
    assert "left out" not in done.stdout
