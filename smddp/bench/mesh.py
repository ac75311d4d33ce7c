"""Connects the ranks by TCP, each with each other one, for the bound between nodes."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from smddp.torch import _load

__all__ = ["connect"]

_TIMEOUT = 60.0
_TOKEN_BYTES = 16
_RANK_BYTES = 4


def connect(timeout: float = _TIMEOUT) -> list[socket.socket | None]:
    """Connects this rank with all others. All ranks call it.

    Args:
        timeout: seconds after which it fails.

    Returns:
        The connection to each rank, None for this one. The caller closes them.

    Raises:
        OSError: a rank could not be reached; raised on all ranks, with the same text.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    streams: list[socket.socket | None] = [None] * size
    token = secrets.token_bytes(_TOKEN_BYTES)
    places: list[Any] = [None] * size
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as servers, contextlib.ExitStack() as opened:
        with _on_all_ranks():
            server, address = _listen()
            servers.enter_context(server)
        dist.all_gather_object(places, (address, server.getsockname()[1], token))
        with _on_all_ranks():
            # The kernel accepts connections for the server, so no rank waits for another one here.
            for other, (host, port, their_token) in enumerate(places[:rank]):
                stream = _dial(host, port, deadline)
                streams[other] = opened.enter_context(stream)
                stream.sendall(their_token + rank.to_bytes(_RANK_BYTES, "big"))
            while None in streams[rank + 1 :]:
                other, stream = _accept(server, token, deadline)
                streams[other] = opened.enter_context(stream)
            for each in filter(None, streams):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _load.load().set_congestion_control(each.fileno())
        opened.pop_all()
    return streams


@contextlib.contextmanager
def _on_all_ranks() -> Iterator[None]:
    """Raises an OSError on all ranks if the with statement raises one on any of them."""
    problem = ""
    try:
        yield
    except OSError as error:
        problem = f"rank {dist.get_rank()} on {socket.gethostname()}: {error}"
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for each in filter(None, problems):
        raise OSError(each)


def _listen() -> tuple[socket.socket, str]:
    """Returns a server, and the name or address by which other hosts reach it."""
    master = os.environ["MASTER_ADDR"]
    found = socket.getaddrinfo(master, os.environ["MASTER_PORT"], type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: the kernel only chooses the interface
        own = str(probe.getsockname()[0])
    # On the host of MASTER_ADDR that may be an address which no other host can use, such as
    # 127.0.1.1. All ranks have connected to MASTER_ADDR when the job began, so this name works.
    if own == target[0] or ipaddress.ip_address(own).is_loopback:
        own = master
    server = socket.create_server(("", 0), family=family, backlog=dist.get_world_size())
    # The streams that it accepts inherit it.
    _load.load().set_congestion_control(server.fileno())
    return server, own


def _dial(host: str, port: int, deadline: float) -> socket.socket:
    """Returns a connection that has the congestion control of smddp's from its first byte on."""
    problem: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        with contextlib.ExitStack() as opened:
            try:
                stream = opened.enter_context(socket.socket(family, kind, protocol))
                _load.load().set_congestion_control(stream.fileno())
                stream.settimeout(_left(deadline))
                stream.connect(address)
            except OSError as error:
                problem = error
                continue
            opened.pop_all()
            return stream
    raise problem or OSError(f"{host} has no address")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _accept(server: socket.socket, token: bytes, deadline: float) -> tuple[int, socket.socket]:
    """Returns the next connection that a rank has made, and which rank."""
    while True:
        server.settimeout(_left(deadline))
        stream = server.accept()[0]
        with contextlib.ExitStack() as opened:
            opened.enter_context(stream)
            hello = b""
            with contextlib.suppress(OSError):
                stream.settimeout(_left(deadline))
                while more := stream.recv(_TOKEN_BYTES + _RANK_BYTES - len(hello)):
                    hello += more
            # Anybody can connect. Only ranks know the token.
            if len(hello) == _TOKEN_BYTES + _RANK_BYTES and hello.startswith(token):
                opened.pop_all()
                return int.from_bytes(hello[_TOKEN_BYTES:], "big"), stream
