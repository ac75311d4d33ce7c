"""The contender that calls torch.distributed, with any backend."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import smddp
from smddp._torch_internals import register_fake_backend
from smddp.bench.contender import PLACES, Unable
from smddp.bench.operations import Task, contribution, result
from smddp.torch import _load

__all__ = ["DTYPES", "OPS", "TorchContender", "differing", "preferring", "tiled"]

DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "bool": torch.bool,
}
OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
# The error that one encoding may make, relative to the largest magnitude: half the last of 8 bits,
# or half a step of 1/127; and a little for rounding in float32.
_STEPS = {"bf16": 2.0**-8 * 1.01, "int8": 0.5 / 127 * 1.01}
# Vectors of so many bytes travel as they are (kTinyBytes in csrc/collectives/selection.cc).
_NEVER_ENCODED = 8 << 10


def encoding(group: dist.ProcessGroup) -> tuple[str, float]:
    """Returns the format in which sums of a group of smddp travel between its nodes.

    Returns:
        Its name, which is empty on one node, and by how much one encoding may be off, relative to
        the largest magnitude encoded.
    """
    # The group knows what `auto` has chosen, and whether there are several nodes.
    found = re.search(r", (\w+)( with error feedback)? between nodes", smddp.describe(group))
    if found is None:
        return "", 0.0
    # With feedback, what the encoding before was off comes on top.
    return found[1], _STEPS.get(found[1], 0.0) * (2.02 if found[2] else 1)


# Parts of the errors with which backends reject a call that they do not support.
_REFUSALS = ("not support", "unsupported", "not implement", "invalid scalar", "unhandled")


def preferring(algorithm: str) -> str:
    """Returns a value for SMDDP_ALGORITHM that uses an algorithm wherever it can serve a call.

    Args:
        algorithm: such as "allreduce/ring".
    """
    collective, name = algorithm.split("/")
    known = [row[1] for row in _load.load().list_algorithms() if row[0] == collective]
    # The others follow in reverse order. The library's table begins with algorithms for few bytes.
    # They copy the input whatever memory it is in, so they would serve every call.
    order = [name, *(other for other in reversed(known) if other != name)]
    return ",".join(f"{collective}={each}" for each in order)


class TorchContender:
    """A group of one backend, and the tensors of the current task.

    Args:
        backend: as for new_group().
        memory: "ordinary", "communication" for tensors from smddp.empty(), or "gpu".
        algorithm: of smddp, as in statistics() ("allreduce/ring"); empty: smddp chooses.
        wire: of smddp, as in GroupOptions; empty: its setting.
    """

    def __init__(self, backend: str, memory: str, algorithm: str = "", wire: str = "") -> None:
        if backend == "fake":
            register_fake_backend()
        options = None
        if algorithm or wire:
            preferred = preferring(algorithm) if algorithm else ""
            options = smddp.GroupOptions(algorithm=preferred, wire=wire)
        group = dist.new_group(backend=backend, pg_options=options)
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        self.group = group
        self._algorithm = algorithm
        self._encoding = encoding(group)[1] if backend == "smddp" else 0.0
        self._step = 0.0  # the error of one encoding of the current task; 0: nothing is encoded
        self.error: float | None = None
        self._moves_data = backend != "fake"
        self._communication = memory == "communication"
        self._cuda = backend == "nccl" or memory == "gpu"
        if self._cuda:
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        self._calls: dict[str, Callable[[], None]] = {}
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(self, task: Task) -> list[str]:
        """See Contender."""
        self._calls.clear()
        self.error = None
        self._buffers.clear()  # free them before new ones are allocated
        self._task = task
        is_sum = task.operation.reduces and task.op in ("sum", "avg") and task.dtype == "float"
        is_long = task.count * torch.float32.itemsize > _NEVER_ENCODED
        self._step = self._encoding if is_sum and is_long else 0.0
        for place in PLACES:
            if place == "in_place" and not task.operation.in_place:
                continue
            self._buffers[place] = self._allocate(place)
            self._calls[place] = self._call(*self._buffers[place], copies=place == PLACES[0])
            self._agree(self._attempt(place))
        return list(self._calls)

    def _attempt(self, place: str) -> str:
        """Calls once; returns the reason if this backend cannot do the call, else ""."""
        self._clear(place)
        before = self._uses()
        try:
            self._calls[place]()
        except (NotImplementedError, TypeError, ValueError) as error:
            return str(error) or type(error).__name__
        except RuntimeError as error:
            text = str(error)
            if not any(refusal in text.lower() for refusal in _REFUSALS):
                raise
            return text
        if self._algorithm and before == self._uses():
            return f"{self._algorithm} cannot serve it"
        return ""

    def _uses(self) -> int:
        """Returns the number of calls that the algorithm has served so far."""
        use = smddp.statistics(self.group).get(self._algorithm) if self._algorithm else None
        return use["calls"] if use is not None else 0

    def _agree(self, reason: str) -> None:
        refused = torch.tensor(int(bool(reason)))
        dist.all_reduce(refused, dist.ReduceOp.MAX)
        if refused:
            raise Unable(reason.splitlines()[0] if reason else "another rank refused")

    def _empty(self, count: int) -> torch.Tensor:
        dtype, offset = DTYPES[self._task.dtype], self._task.offset
        if self._communication:
            whole = smddp.empty(count + offset, dtype=dtype)
        else:
            whole = torch.empty(count + offset, dtype=dtype, device="cuda" if self._cuda else "cpu")
        return whole[offset:]

    def _allocate(self, place: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns input and output."""
        task, size, rank = self._task, dist.get_world_size(), dist.get_rank()
        operation, count = task.operation, task.count
        inputs = count * (size if operation.blocks_in else 1)
        outputs = count * (size if operation.blocks_out else 1)
        if place == "out_of_place":
            return self._empty(inputs), self._empty(outputs)
        whole = self._empty(max(inputs, outputs))
        mine = whole[rank * count : (rank + 1) * count]
        return (
            mine if inputs < outputs else whole,
            mine if outputs < inputs else whole,
        )

    def _call(self, given: torch.Tensor, out: torch.Tensor, copies: bool) -> Callable[[], None]:
        """Returns a function that makes the call; everything else is done here, before timing."""
        task, group, size = self._task, self.group, dist.get_world_size()
        op, root, at_root = OPS[task.op], task.root, task.root == dist.get_rank()

        def after_copy(call: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
            # Torch runs these in place only, so a program that keeps its input has to copy it.
            def run() -> Any:
                out.copy_(given)
                call(out)

            return run if copies else lambda: call(out)

        def blocks(tensor: torch.Tensor) -> list[torch.Tensor]:
            return list(tensor.view(size, -1).unbind(0))

        calls: dict[str, Callable[[], Callable[[], Any]]] = {
            "allreduce": lambda: after_copy(lambda t: dist.all_reduce(t, op, group)),
            "reduce": lambda: after_copy(lambda t: dist.reduce(t, root, op, group)),
            "broadcast": lambda: after_copy(lambda t: dist.broadcast(t, root, group)),
            "all_gather": lambda: _bind(dist.all_gather, blocks(out), given, group),
            "all_gather_into_tensor": lambda: _bind(dist.all_gather_into_tensor, out, given, group),
            "reduce_scatter": lambda: _bind(dist.reduce_scatter_tensor, out, given, op, group),
            "gather": lambda: _bind(
                dist.gather, given, blocks(out) if at_root else None, root, group
            ),
            "scatter": lambda: _bind(
                dist.scatter, out, blocks(given) if at_root else None, root, group
            ),
            "all_to_all": lambda: _bind(dist.all_to_all_single, out, given, None, None, group),
            "sendrecv": lambda: _bind(_send_and_receive, out, given, group),
            "barrier": lambda: _bind(dist.barrier, group),
        }
        call = calls[task.collective]()
        if not self._cuda:
            return call

        def synchronous() -> None:
            call()
            torch.cuda.synchronize()

        return synchronous

    def _clear(self, place: str) -> None:
        for tensor in self._buffers[place]:
            tensor.zero_()  # repeated sums of other values would overflow

    def time(self, place: str, calls: int) -> list[float]:
        """See Contender."""
        self._clear(place)
        call = self._calls[place]
        dist.barrier()
        call()  # after it no rank is late for the first call that counts
        times = []
        for _ in range(calls):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1e3)
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return [float(value) for value in slowest]

    def wrong(self, place: str, shift: int) -> int | None:
        """See Contender."""
        task, size, rank = self._task, dist.get_world_size(), dist.get_rank()
        if not self._moves_data or task.collective == "barrier":
            return None
        given, out = self._buffers[place]
        out.zero_()
        blocks = size if task.operation.blocks_in else 1
        data = [contribution(task, rank, block, shift) for block in range(blocks)]
        given.copy_(tiled(data, task.count, given.dtype))
        self._calls[place]()
        wrong = torch.zeros((), dtype=torch.int64)
        right = result(task, size, rank, shift)
        if right is not None:
            expected = tiled(right, task.count, torch.float64)
            if self._step:
                wrong += self._differing_by_more(out, expected, data)
            else:
                wrong += differing(out.cpu(), expected)
        dist.all_reduce(wrong)
        return int(wrong)

    def _differing_by_more(self, out: torch.Tensor, right: torch.Tensor, data: list[Any]) -> int:
        """Returns the number of elements that encoding alone does not explain; sets `error`.

        Each contribution is encoded at most once, and the result once.
        """
        largest = max(float(right.abs().max()), sys.float_info.min)
        contributions = torch.tensor(data, dtype=torch.float64).abs().max()
        dist.all_reduce(contributions)
        errors = (out.cpu() - right).abs()
        found = errors.max() / largest
        dist.all_reduce(found, dist.ReduceOp.MAX)
        self.error = max(self.error or 0.0, float(found))
        return int((errors > self._step * (float(contributions) + 1.1 * largest)).sum())


def _bind(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


def _send_and_receive(out: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    receiving = dist.irecv(out, (rank - 1) % size, group)
    sending = dist.isend(given, (rank + 1) % size, group)
    assert receiving is not None
    assert sending is not None
    receiving.wait()
    sending.wait()


def tiled(blocks: list[Any], count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns blocks of `count` elements, each filled by repeating its period."""
    periods = torch.tensor(blocks, dtype=torch.float64).to(dtype)
    times = -(-count // periods.shape[1])
    return periods.repeat(1, times)[:, :count].reshape(-1)


def differing(out: torch.Tensor, right: torch.Tensor) -> int:
    """Returns the number of elements that differ from the right ones by more than rounding."""
    if out.dtype.is_floating_point or out.dtype.is_complex:
        # Results are exact, except averages if the number of ranks is not a power of two.
        wide = out.to(torch.complex128 if out.dtype.is_complex else torch.float64)
        same = torch.isclose(
            wide, right.to(wide.dtype), rtol=4 * torch.finfo(out.dtype).eps, atol=0
        )
    else:
        same = out == right.to(out.dtype)
    return out.numel() - int(same.sum())
