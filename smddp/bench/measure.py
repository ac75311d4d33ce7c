"""What a rank does: times one size with every backend, and checks the results."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

import smddp

DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
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
BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
# What the reference backend cannot reduce.
NOT_IN_GLOO = {"int16", "uint16", "uint32", "uint64"}

# Blocks of calls that take turns with those of the other cases: a slow second of the machine then
# hits all of them.
_ROUNDS = 5
_WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One of the things compared."""

    backend: str
    memory: str  # "ordinary", or "communication": what smddp.empty() returns


@dataclasses.dataclass
class Measurement:
    """One size with one case."""

    case: Case
    size: int  # bytes
    count: int
    dtype: str
    op: str
    ranks: int
    microseconds: list[float]  # of each call, on its slowest rank
    wrong: int  # elements, on all ranks together

    @property
    def time(self) -> float:
        """The median in microseconds."""
        return statistics.median(self.microseconds)

    @property
    def algbw(self) -> float:
        """Bytes of the vector per time, in GB/s."""
        return self.size / self.time / 1e3

    @property
    def busbw(self) -> float:
        """The same, times what any algorithm has to move per byte and rank."""
        return self.algbw * 2 * (self.ranks - 1) / self.ranks

    def percentile(self, share: float) -> float:
        """Returns the time that this share of the calls took at most."""
        ordered = sorted(self.microseconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclasses.dataclass
class Workload:
    """What is measured."""

    sizes: Sequence[int]
    cases: Sequence[Case]
    dtype: str = "float"
    op: str = "sum"
    seconds: float = 0.5  # per size and case, about
    iterations: int | None = None  # instead of `seconds`


class Bench:
    """The ranks' side of a run. Needs a default group; times only groups of its own."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.groups: dict[str, dist.ProcessGroup] = {}
        for case in workload.cases:
            if case.backend not in self.groups:
                group = dist.new_group(backend=case.backend)
                assert isinstance(group, dist.ProcessGroup)  # every rank is in it
                self.groups[case.backend] = group

    def describe(self) -> str:
        """Returns what smddp chose, if it takes part."""
        group = self.groups.get("smddp")
        return smddp.describe(group) if group is not None else ""

    def run(self) -> Iterator[list[Measurement]]:
        """Yields the measurements of one size after the other."""
        itemsize = DTYPES[self.workload.dtype].itemsize
        for size in self.workload.sizes:
            # A size that is no multiple of the element is rounded, but never to nothing.
            yield self._measure(max(size // itemsize, 1))

    def _measure(self, count: int) -> list[Measurement]:
        work = self.workload
        dtype = DTYPES[work.dtype]
        tensors = [self._tensor(case, count) for case in work.cases]
        results = [
            Measurement(case, count * dtype.itemsize, count, work.dtype, work.op, _size(), [], 0)
            for case in work.cases
        ]
        for result, tensor in zip(results, tensors, strict=True):
            result.wrong += self._count_wrong(result.case, tensor, shift=0)
        calls = [self._calls_per_round(r.case, t) for r, t in zip(results, tensors, strict=True)]
        for _ in range(_ROUNDS):
            for result, tensor, number in zip(results, tensors, calls, strict=True):
                result.microseconds += self._time(result.case, tensor, number)
        for result, tensor in zip(results, tensors, strict=True):
            result.wrong += self._count_wrong(result.case, tensor, shift=1)
        return results

    def _tensor(self, case: Case, count: int) -> torch.Tensor:
        dtype = DTYPES[self.workload.dtype]
        if case.memory == "communication":
            return smddp.empty(count, dtype=dtype)
        return torch.empty(count, dtype=dtype)

    def _reduce(self, case: Case, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, OPS[self.workload.op], group=self.groups[case.backend])

    def _calls_per_round(self, case: Case, tensor: torch.Tensor) -> int:
        if self.workload.iterations is not None:
            return max(1, self.workload.iterations // _ROUNDS)
        # Every rank sees the same times, so every rank decides alike.
        median = statistics.median(self._time(case, tensor, _WARM_UP))
        calls = int(self.workload.seconds * 1e6 / max(median, 1.0) / _ROUNDS)
        return max(2, min(calls, 2000))

    def _time(self, case: Case, tensor: torch.Tensor, calls: int) -> list[float]:
        tensor.zero_()  # stays zero: repeated sums of anything else overflow
        dist.barrier()
        self._reduce(case, tensor)  # nobody is late for the first one that counts
        times = []
        for _ in range(calls):
            start = time.perf_counter_ns()
            self._reduce(case, tensor)
            times.append((time.perf_counter_ns() - start) / 1e3)
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return [float(value) for value in slowest]

    def _count_wrong(self, case: Case, tensor: torch.Tensor, shift: int) -> int:
        """Returns how many elements of all ranks differ from an independent computation."""
        values = [_pattern(tensor.numel(), rank, shift) for rank in range(_size())]
        if tensor.dtype == torch.bool:
            values = [value - 1 for value in values]
        tensor.copy_(values[dist.get_rank()])
        self._reduce(case, tensor)
        expected = _combine(values, self.workload.op)
        if self.workload.op == "avg":
            right = torch.isclose(tensor.double(), expected, rtol=_tolerance(tensor.dtype), atol=0)
        else:
            right = tensor == expected.to(tensor.dtype)
        wrong = torch.tensor(tensor.numel() - int(right.sum()))
        dist.all_reduce(wrong)
        return int(wrong)


def _size() -> int:
    return dist.get_world_size()


def _pattern(count: int, rank: int, shift: int) -> torch.Tensor:
    """Ones and twos: sums and products of a few of them are exact in every dtype."""
    index = torch.arange(count, dtype=torch.int64)
    return ((index * 7 + rank * 3 + shift) % 5 > 2).to(torch.uint8) + 1


def _combine(values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    if op in BITWISE:
        return functools.reduce(BITWISE[op], values)
    if op in ("min", "max"):
        return functools.reduce(torch.minimum if op == "min" else torch.maximum, values)
    numbers = [value.double() for value in values]
    result = functools.reduce(torch.mul if op == "prod" else torch.add, numbers)
    return result / len(values) if op == "avg" else result


def _tolerance(dtype: torch.dtype) -> float:
    return 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
