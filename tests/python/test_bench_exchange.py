"""The bound between nodes of one rank: the exchange."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from smddp import _load

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


def _exchange(sockets: list[socket.socket | None], rank: int) -> Any:
    descriptors = [-1 if each is None else each.fileno() for each in sockets]
    return _load.load().BareExchange(descriptors, rank)


def _floats(tensor: torch.Tensor) -> memoryview[Any]:
    return memoryview(tensor.numpy())


@pytest.mark.parametrize("size", [2, 3, 5])
def test_exchange_sums_in_place(size: int) -> None:
    with _meshes(size) as meshes, ThreadPoolExecutor(size) as threads:
        exchanges = [_exchange(sockets, rank) for rank, sockets in enumerate(meshes)]
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
        exchange = _exchange(meshes[0], 0)
        for stream in filter(None, meshes[1]):
            stream.close()
        with pytest.raises(RuntimeError, match="lost rank 1 in an exchange"):
            exchange.sum_in_place(vector, TIMEOUT)
        with pytest.raises(RuntimeError, match="failed before"):
            exchange.sum_in_place(vector, TIMEOUT)


def test_exchange_in_which_nothing_moves_ends() -> None:
    with _meshes(3) as meshes:
        exchange = _exchange(meshes[2], 2)
        with pytest.raises(RuntimeError, match=r"nothing has moved for 0\.01 s .* rank 0, rank 1"):
            exchange.sum_in_place(_floats(torch.zeros(1000)), 0.01)


def test_a_signal_ends_an_exchange() -> None:
    def interrupt(*_: object) -> None:
        raise InterruptedError("by the test")

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        with _meshes(2) as meshes:
            exchange = _exchange(meshes[0], 0)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
            with pytest.raises(InterruptedError, match="by the test"):
                exchange.sum_in_place(_floats(torch.zeros(1000)), TIMEOUT)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_wrong_arguments_of_an_exchange() -> None:
    make = _load.load().BareExchange
    floats = memoryview(bytearray(16)).cast("f")
    with _meshes(2) as meshes, socket.socket() as lonely:
        exchange = _exchange(meshes[0], 0)
        for wrong in (floats[::2], floats.cast("B").cast("i"), memoryview(b"1234").cast("f")):
            with pytest.raises((ValueError, BufferError), match=r"expects|not writable|read-only"):
                exchange.sum_in_place(wrong, TIMEOUT)
        for timeout in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="expects a timeout"):
                exchange.sum_in_place(floats, timeout)
        with pytest.raises(ValueError, match="at least two ranks"):
            make([-1], 0)
        with pytest.raises(ValueError, match="a rank below 2, not 2"):
            make([-1, -1], 2)
        for descriptor in (-1, lonely.fileno()):
            with pytest.raises(ValueError, match="that of rank 1 is none"):
                make([-1, descriptor], 0)
