"""One process of an MPI, started by mpi.py as a script, without torch.

It connects to rank 0 of the benchmark and executes commands, one line of JSON each. Between
commands it sleeps in the kernel and does not spin in MPI. Rank 0 of the MPI sends the answers.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

if __name__ == "__main__":
    # The environment of MPI need not have smddp.
    sys.path.insert(0, str(Path(__file__).parent))
    from operations import Task, contribution, result  # type: ignore[import-not-found]
else:
    from smddp.bench.operations import Task, contribution, result

TYPES = {
    "float": (np.float32, MPI.FLOAT),
    "double": (np.float64, MPI.DOUBLE),
    "cfloat": (np.complex64, MPI.C_FLOAT_COMPLEX),
    "cdouble": (np.complex128, MPI.C_DOUBLE_COMPLEX),
    "int8": (np.int8, MPI.INT8_T),
    "int16": (np.int16, MPI.INT16_T),
    "int32": (np.int32, MPI.INT32_T),
    "int64": (np.int64, MPI.INT64_T),
    "uint8": (np.uint8, MPI.UINT8_T),
    "uint16": (np.uint16, MPI.UINT16_T),
    "uint32": (np.uint32, MPI.UINT32_T),
    "uint64": (np.uint64, MPI.UINT64_T),
}
OPS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}
Buffer = Any  # a buffer specification of mpi4py: [array, datatype]


class Rank:
    """One rank of the MPI, with the buffers of the current task."""

    def __init__(self) -> None:
        self.world = MPI.COMM_WORLD
        self.size, self.rank = self.world.Get_size(), self.world.Get_rank()
        self.calls: dict[str, Callable[[], None]] = {}
        self.arrays: dict[str, tuple[Any, Any]] = {}

    def prepare(self, task: Task, place: str) -> None:
        """Allocates the buffers and creates the call of one place; see Contender.prepare()."""
        self.task = task
        dtype, kind = TYPES[task.dtype]
        operation, count = task.operation, task.count
        inputs = count * (self.size if operation.blocks_in else 1)
        outputs = count * (self.size if operation.blocks_out else 1)

        def empty(elements: int) -> Any:
            return np.zeros(elements + task.offset, dtype)[task.offset :]

        if place == "out_of_place":
            given, out = empty(inputs), empty(outputs)
        else:
            given = out = empty(max(inputs, outputs))
            mine = slice(self.rank * count, (self.rank + 1) * count)
            if inputs < outputs:
                given = out[mine]
            elif task.collective == "reduce_scatter":
                out = given[:count]  # MPI writes the result there
            elif outputs < inputs:
                out = given[mine]
        self.arrays[place] = (given, out)
        self.calls[place] = self._call(given, out, kind, place == "in_place")

    def _call(self, given: Any, out: Any, kind: Any, in_place: bool) -> Callable[[], None]:
        world, root, op = self.world, self.task.root, OPS[self.task.op]
        send: Buffer = MPI.IN_PLACE if in_place else [given, kind]
        receive: Buffer = [out, kind]
        at_root = self.rank == root
        whole: Buffer = [given, kind]

        def broadcast() -> None:
            if not in_place:
                out[:] = given
            world.Bcast(receive, root)

        def reduce() -> None:
            world.Reduce(send if at_root or not in_place else whole, receive, op, root)

        def gather() -> None:
            world.Gather(send if at_root else whole, receive if at_root else None, root)

        def scatter() -> None:
            world.Scatter(
                whole if at_root else None,
                MPI.IN_PLACE if at_root and in_place else receive,
                root,
            )

        neighbours = ((self.rank + 1) % self.size, (self.rank - 1) % self.size)
        calls: dict[str, Callable[[], None]] = {
            "allreduce": lambda: world.Allreduce(send, receive, op),
            "reduce": reduce,
            "broadcast": broadcast,
            "all_gather": lambda: world.Allgather(send, receive),
            "all_gather_into_tensor": lambda: world.Allgather(send, receive),
            "reduce_scatter": lambda: world.Reduce_scatter_block(
                send, whole if in_place else receive, op
            ),
            "gather": gather,
            "scatter": scatter,
            "all_to_all": lambda: world.Alltoall(send, receive),
            "sendrecv": lambda: world.Sendrecv(
                whole, neighbours[0], recvbuf=receive, source=neighbours[1]
            ),
            "barrier": world.Barrier,
        }
        return calls[self.task.collective]

    def time(self, place: str, calls: int) -> list[float]:
        """See Contender.time()."""
        for array in self.arrays[place]:
            array[:] = 0
        call = self.calls[place]
        self.world.Barrier()
        call()  # after it no rank is late for the first call that counts
        times = np.empty(calls)
        for i in range(calls):
            start = time.perf_counter_ns()
            call()
            times[i] = (time.perf_counter_ns() - start) / 1e3
        self.world.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
        return [float(value) for value in times]

    def wrong(self, place: str, shift: int) -> int:
        """See Contender.wrong()."""
        task, (given, out) = self.task, self.arrays[place]
        out[:] = 0
        blocks = self.size if task.operation.blocks_in else 1
        data = [contribution(task, self.rank, block, shift) for block in range(blocks)]
        given[:] = _tiled(data, task.count)
        self.calls[place]()
        right = result(task, self.size, self.rank, shift)
        wrong = 0 if right is None else int((out != _tiled(right, task.count)).sum())
        return int(self.world.allreduce(wrong))


def _tiled(blocks: list[list[Any]], count: int) -> Any:
    """Returns blocks of `count` elements, each filled by repeating its period."""
    return np.concatenate([np.resize(np.array(block), count) for block in blocks])


def execute(rank: Rank, command: dict[str, Any]) -> Any:
    """Executes one command; returns the answer."""
    if command["do"] == "prepare":
        rank.calls.clear()
        rank.arrays.clear()
        for place in command["places"]:
            rank.prepare(Task(**command["task"]), place)
        return None
    if command["do"] == "time":
        return rank.time(command["place"], command["calls"])
    return rank.wrong(command["place"], command["shift"])


def main() -> None:
    """Executes commands until the benchmark closes the connection."""
    rank = Rank()
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as connection:
        connection.settimeout(None)
        version = MPI.Get_library_version().splitlines()[0].split(",")[0]
        hello = {"rank": rank.rank, "library": " ".join(version.split())}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        for line in connection.makefile("r"):
            answer = execute(rank, json.loads(line))
            if rank.rank == 0:
                connection.sendall(json.dumps(answer).encode() + b"\n")
    MPI.Finalize()


if __name__ == "__main__":
    main()
