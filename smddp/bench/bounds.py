"""The rows `bound` of the table: what the hardware allows, without a library.

| layout | collective | bound |
|---|---|---|
| one node | allreduce | the bare loop that sums the vectors of all ranks in shared memory |
| one node | others, unless they reduce | a copy of the bytes that a rank receives |
| several nodes, one rank each | allreduce | the bare exchange: what it sends and sums over TCP |
| several nodes, others | allreduce | computed: 2 (N - 1) / N of the vector at the link's rate |

The first three are programs, which are measured beside the others. Those that sum are compiled in a
clone of smddp only.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smddp.bench import bare, mesh
from smddp.bench.contender import Unable
from smddp.bench.operations import Task, contribution, result
from smddp.bench.torch_calls import DTYPES, differing, tiled

__all__ = ["BoundContender", "copy_rate", "link_rate"]

_COPIED = 16 << 20  # larger than most caches, as gradients are
_STREAMED = 64 << 20
_TIMEOUT = 60.0


def _median_of_slowest(action: Callable[[], Any], times: int = 5) -> float:
    """Returns the median of the seconds that an action takes on the slowest rank.

    Args:
        action: what all ranks do at the same time.
        times: number of repetitions that count; one more warms up.
    """
    seconds = []
    for _ in range(times + 1):
        dist.barrier()
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds[1:], dtype=torch.float64)  # the first one touches the memory
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.median())


def _copying(count: int) -> Callable[[], None]:
    """Returns a function that copies `count` bytes, with less overhead than a call of torch."""
    source, target = memoryview(bytearray(count)), memoryview(bytearray(count))

    def copy() -> None:
        target[:] = source

    return copy


def copy_rate() -> float:
    """Returns the GB/s at which each rank copies 16 MiB while all ranks do so."""
    return _COPIED / _median_of_slowest(_copying(_COPIED)) / 1e9


def link_rate(nodes: list[int]) -> float | None:
    """Returns the GB/s of one TCP stream from node 1 to node 0.

    Args:
        nodes: the node of each rank.

    Returns:
        None on one node, or if the connection fails.
    """
    if max(nodes) == 0:
        return None
    receiver, sender = nodes.index(0), nodes.index(1)
    rank = dist.get_rank()
    server = socket.create_server(("", 0)) if rank == receiver else None
    # All ranks have connected to MASTER_ADDR when the job began, so this address works.
    port = server.getsockname()[1] if server is not None else 0
    address: list[Any] = [(os.environ["MASTER_ADDR"], port)]
    dist.broadcast_object_list(address, receiver)
    rate = 0.0
    try:
        if server is not None:
            with server:
                server.settimeout(_TIMEOUT)
                rate = _receive(server.accept()[0])
        elif rank == sender:
            with socket.create_connection(address[0], timeout=_TIMEOUT) as stream:
                stream.sendall(bytes(_STREAMED))
    except OSError as error:
        print(f"smddp.bench: the link cannot be measured: {error}", file=sys.stderr)
    found = torch.tensor([rate], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found) or None


def _receive(stream: socket.socket) -> float:
    """Returns the GB/s of the last three quarters of the bytes."""
    with stream:
        stream.settimeout(_TIMEOUT)
        block = bytearray(1 << 20)
        received, counted_from, start = 0, 0, 0.0
        while received < _STREAMED:
            got = stream.recv_into(block)
            if got == 0:
                raise OSError("the stream ended early")
            received += got
            # The first quarter does not count: TCP starts slowly, and a traffic shaper starts fast.
            if counted_from == 0 and received >= _STREAMED // 4:
                counted_from, start = received, time.perf_counter()
        return (received - counted_from) / (time.perf_counter() - start) / 1e9


class _SharedVectors:
    """One vector per rank of a node, mapped by all ranks; freed when the last process ends."""

    def __init__(self, count: int) -> None:
        descriptor = os.memfd_create("bench")
        os.ftruncate(descriptor, max(count, 1) * 4)
        paths: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(paths, f"/proc/{os.getpid()}/fd/{descriptor}")
        self._vectors: list[memoryview[Any]] = []
        for path in paths:
            theirs = os.open(path, os.O_RDWR)
            self._vectors.append(memoryview(mmap.mmap(theirs, max(count, 1) * 4)).cast("f"))
            os.close(theirs)
        dist.barrier()  # all ranks have opened the files before one is closed
        os.close(descriptor)

    def slices(self, count: int) -> list[memoryview[Any]]:
        """Returns this rank's slice of the first `count` elements of all vectors."""
        rank, size = dist.get_rank(), dist.get_world_size()
        # Slices are whole cache lines, to avoid false sharing.
        share = -(-count // (16 * size)) * 16
        begin, end = min(rank * share, count), min((rank + 1) * share, count)
        return [vector[begin:end] for vector in self._vectors]


class _Exchange:
    """A vector of this rank, which it exchanges with all other ranks.

    Args:
        count: elements of the vector.
        streams: from mesh.connect(); close() closes them.
    """

    def __init__(self, count: int, streams: list[socket.socket | None]) -> None:
        size = max(count, 1) * 4
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._vector = memoryview(memory).cast("f")
        self._streams = streams
        self._bare = bare.BareExchange(streams, dist.get_rank())
        self.use(0)

    def use(self, count: int) -> None:
        """Selects the first `count` elements."""
        self._used = self._vector[:count]

    def clear(self) -> None:
        """Sets the elements to zero; repeated sums of other values would overflow."""
        self._tensor().zero_()

    def run(self) -> None:
        """Replaces the elements by the sums of all ranks'; all ranks call it."""
        self._bare.sum_in_place(self._used, _TIMEOUT)

    def wrong(self, shift: int) -> int:
        """See Contender."""
        task, vector = Task("allreduce", len(self._used)), self._tensor()
        data = [contribution(task, dist.get_rank(), 0, shift)]
        vector.copy_(tiled(data, task.count, vector.dtype))
        self.run()
        right = result(task, dist.get_world_size(), dist.get_rank(), shift)
        assert right is not None
        wrong = torch.tensor(differing(vector, tiled(right, task.count, torch.float64)))
        dist.all_reduce(wrong)
        return int(wrong)

    def close(self) -> None:
        """Closes the connections."""
        for stream in self._streams:
            if stream is not None:
                stream.close()

    def _tensor(self) -> torch.Tensor:
        return torch.frombuffer(self._used, dtype=torch.float32)


class BoundContender:
    """The contender that makes the rows `bound`.

    Args:
        nodes: the node of each rank.
        largest: bytes of the largest buffer that will be measured.
        link: GB/s between nodes; None if it is not known.
    """

    error: float | None = None  # results are exact

    def __init__(self, nodes: list[int], largest: int, link: float | None) -> None:
        self._num_nodes = max(nodes) + 1
        self._link = link
        floats = -(-largest // 4)
        several = len(nodes) > 1
        self._missing = bare.unavailable()
        self._vectors = _SharedVectors(floats) if several and self._num_nodes == 1 else None
        self._exchange: _Exchange | None = None
        if several and self._num_nodes == len(nodes) and not self._missing:
            try:
                streams = mesh.connect()
            except OSError as error:
                self._missing = f"the ranks cannot be connected: {error}"
            else:
                self._exchange = _Exchange(floats, streams)
        self._action: Callable[[], Any] | None = None
        self._constant = 0.0

    def close(self) -> None:
        """Closes the connections to other ranks."""
        if self._exchange is not None:
            self._exchange.close()

    def prepare(self, task: Task) -> list[str]:
        """See Contender."""
        block = task.count * DTYPES[task.dtype].itemsize
        operation, ranks = task.operation, dist.get_world_size()
        self._action, self._constant = None, 0.0
        if self._num_nodes > 1:
            self._prepare_between_nodes(task, block)
        elif task.collective == "allreduce" and self._vectors is not None:
            if self._missing:
                raise Unable(self._missing)
            self._action = bare.summing(self._vectors.slices(-(-block // 4)))
        elif task.collective in ("reduce", "reduce_scatter", "barrier") or ranks == 1:
            raise Unable("it is known for what copies, and for allreduce")
        else:
            received = block * (ranks if operation.blocks_out else 1)
            self._action = _copying(received)
        return ["in_place" if operation.in_place else "out_of_place"]

    def _prepare_between_nodes(self, task: Task, block: int) -> None:
        if task.collective != "allreduce":
            raise Unable("between nodes it is known for allreduce only")
        if self._num_nodes == dist.get_world_size() and self._missing:
            raise Unable(self._missing)
        if self._exchange is not None:
            # Also for other types and operations: as many bytes, summed as float.
            self._exchange.use(-(-block // 4))
            self._action = self._exchange.run
        elif self._link is not None:
            share = 2 * (self._num_nodes - 1) / self._num_nodes
            self._constant = share * block / self._link / 1e3
        else:
            raise Unable("the rate of the link between nodes is unknown")

    def time(self, place: str, calls: int) -> list[float]:
        """See Contender."""
        if self._action is None:
            return [self._constant] * calls
        if self._exchange is not None:
            self._exchange.clear()
        dist.barrier()
        self._action()  # after an exchange no rank is late for the first one that counts
        if self._exchange is None:
            dist.barrier()
        times = []
        for _ in range(calls):
            start = time.perf_counter_ns()
            self._action()
            times.append((time.perf_counter_ns() - start) / 1e3)
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return [float(value) for value in slowest]

    def wrong(self, place: str, shift: int) -> int | None:
        """See Contender."""
        return None if self._exchange is None else self._exchange.wrong(shift)
