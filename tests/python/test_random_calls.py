"""Random calls against an exact oracle.

A program is made from a seed: calls, dtypes, operations, sizes, groups, roots, whether a call is
waited for at once, and where in memory each rank has its tensors: apart, overlapping, with gaps, in
ordinary or in communication memory. All ranks know the program of all, so each one knows what its
memory must hold after a call. Sums are of small whole numbers, exact in any order.

A failure names the seed and the number of the call. `RANDOM_CALLS_SEED=17` runs one seed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

pytestmark = pytest.mark.multiprocess

Spec = tuple[int, int, int]  # of a tensor in its rank's memory: first element, number, step
Tensors = list[torch.Tensor]

_FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
_INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
_TYPES = [*_FLOATS, *_INTEGERS, torch.bool, torch.complex64]


def _operations(dtype: torch.dtype) -> list[Any]:
    op = dist.ReduceOp
    if dtype == torch.complex64:
        return [op.SUM]
    if dtype == torch.bool:
        return [op.SUM, op.PRODUCT, op.MIN, op.MAX, op.BAND, op.BOR, op.BXOR]
    if dtype in _INTEGERS:
        return [op.SUM, op.PRODUCT, op.MIN, op.MAX, op.BAND, op.BOR, op.BXOR]
    return [op.SUM, op.AVG, op.PRODUCT, op.MIN, op.MAX]


def _reduced(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    dtype, (first, *rest) = tensors[0].dtype, tensors
    kind = dist.ReduceOp
    if dtype == torch.bool:
        every = {kind.PRODUCT, kind.MIN, kind.BAND}
        combine = torch.logical_xor if op == kind.BXOR else torch.logical_or
        if any(op == one for one in every):
            combine = torch.logical_and
        return functools.reduce(combine, rest, first)
    if op == kind.AVG:
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        return (sum(t.to(wide) for t in tensors) / len(tensors)).to(dtype)  # type: ignore[union-attr]
    functions: dict[Any, Callable[..., torch.Tensor]] = {
        kind.SUM: torch.add,
        kind.PRODUCT: torch.mul,
        kind.MIN: torch.minimum,
        kind.MAX: torch.maximum,
        kind.BAND: torch.bitwise_and,
        kind.BOR: torch.bitwise_or,
        kind.BXOR: torch.bitwise_xor,
    }
    (combine,) = [function for name, function in functions.items() if name == op]
    return functools.reduce(combine, rest, first)


@dataclasses.dataclass
class Call:
    """One call of a group, as all its ranks know it. Ranks here count within the group."""

    name: str
    size: int
    root: int
    op: Any
    dtype: torch.dtype
    outputs: list[list[Spec]]  # of each rank
    inputs: list[list[Spec]]
    memories: Tensors  # of each rank, before the call

    def of(self, rank: int, specs: list[list[Spec]]) -> Tensors:
        return views(self.memories[rank], specs[rank])

    def expected(self, me: int) -> torch.Tensor:
        """Returns this rank's memory after the call."""
        memory = self.memories[me].clone()
        into = views(memory, self.outputs[me])
        for output, result in zip(into, _RESULTS[self.name](self, me), strict=True):
            output.copy_(result.reshape(output.shape))
        return memory

    def ins(self, rank: int) -> Tensors:
        return [t.clone() for t in self.of(rank, self.inputs)]

    def outs(self, rank: int) -> Tensors:
        return [t.clone() for t in self.of(rank, self.outputs)]


def views(memory: torch.Tensor, specs: list[Spec]) -> Tensors:
    return [memory[f : f + n * step : step] if n else memory[:0] for f, n, step in specs]


def _block(tensor: torch.Tensor, index: int, size: int) -> torch.Tensor:
    return tensor.chunk(size)[index] if tensor.numel() else tensor


# What the outputs of a rank hold after each call.
_RESULTS: dict[str, Callable[[Call, int], Tensors]] = {
    "all_reduce": lambda c, me: [_reduced([c.outs(r)[0] for r in range(c.size)], c.op)],
    "all_reduce_coalesced": lambda c, me: [
        _reduced([c.outs(r)[i] for r in range(c.size)], c.op) for i in range(len(c.outputs[me]))
    ],
    "reduce": lambda c, me: [
        _reduced([c.outs(r)[0] for r in range(c.size)], c.op) if me == c.root else c.outs(me)[0]
    ],
    "broadcast": lambda c, me: c.outs(c.root),
    "all_gather": lambda c, me: [c.ins(r)[0] for r in range(c.size)],
    "all_gather_into_tensor": lambda c, me: [torch.cat([c.ins(r)[0] for r in range(c.size)])],
    "reduce_scatter": lambda c, me: [_reduced([c.ins(r)[me] for r in range(c.size)], c.op)],
    "reduce_scatter_tensor": lambda c, me: [
        _reduced([_block(c.ins(r)[0], me, c.size) for r in range(c.size)], c.op)
    ],
    "gather": lambda c, me: [c.ins(r)[0] for r in range(c.size)] if me == c.root else [],
    "scatter": lambda c, me: [c.ins(c.root)[me]],
    "all_to_all": lambda c, me: [c.ins(r)[me] for r in range(c.size)],
    "all_to_all_single": lambda c, me: [
        torch.cat([_block(c.ins(r)[0], me, c.size) for r in range(c.size)])
    ],
    "all_to_all_splits": lambda c, me: [
        torch.cat([c.ins(r)[0].split(_splits(c, r))[me] for r in range(c.size)])
    ],
    "ring": lambda c, me: [c.ins((me - 1) % c.size)[0]],
    "barrier": lambda c, me: [],
}


def _splits(call: Call, rank: int) -> list[int]:
    """Returns how many elements `rank` sends to each: rank + receiver, times a unit."""
    unit = call.root  # any number that all ranks know
    return [(rank + to) % 3 * unit for to in range(call.size)]


def _shapes(name: str, rank: int, size: int, root: int, count: int, uneven: bool) -> Any:
    """Returns the numbers of elements of a rank's outputs and inputs."""

    def of(r: int) -> int:  # blocks of different sizes, where a call may have them
        return count + 3 * r if uneven else count

    at_root = rank == root
    return {
        "all_reduce": ([count], []),
        "all_reduce_coalesced": ([count, 1, 2 * count], []),
        "reduce": ([count], []),
        "broadcast": ([count], []),
        "all_gather": ([of(r) for r in range(size)], [of(rank)]),
        "all_gather_into_tensor": ([size * count], [count]),
        "reduce_scatter": ([of(rank)], [of(r) for r in range(size)]),
        "reduce_scatter_tensor": ([count], [size * count]),
        "gather": ([count] * size if at_root else [], [count]),
        "scatter": ([count], [count] * size if at_root else []),
        "all_to_all": ([of(r + rank) for r in range(size)], [of(r + rank) for r in range(size)]),
        "all_to_all_single": ([size * count], [size * count]),
        "all_to_all_splits": (
            [sum((r + rank) % 3 * root for r in range(size))],
            [sum((rank + to) % 3 * root for to in range(size))],
        ),
        "ring": ([count], [count]),
        "barrier": ([], []),
    }[name]


def _begin(call: Call, me: int, memory: torch.Tensor, members: list[int], group: Any) -> list[Any]:
    """Begins the call on `memory`; returns the works that are to be waited for."""
    outs, ins = views(memory, call.outputs[me]), views(memory, call.inputs[me])
    op, root, later = call.op, members[call.root % call.size], {"group": group, "async_op": True}
    single = {**later, "dst": root}
    is_root = me == call.root
    if call.name == "ring":
        to, source = members[(me + 1) % call.size], members[(me - 1) % call.size]
        receive = dist.irecv(outs[0], source, group=group)
        return [dist.isend(ins[0], to, group=group), receive]
    begin: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(outs[0], op, **later),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(outs, op, **later),
        "reduce": lambda: dist.reduce(outs[0], op=op, **single),
        "broadcast": lambda: dist.broadcast(outs[0], src=root, **later),
        "all_gather": lambda: dist.all_gather(outs, ins[0], **later),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(outs[0], ins[0], **later),
        "reduce_scatter": lambda: dist.reduce_scatter(outs[0], ins, op, **later),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(outs[0], ins[0], op, **later),
        "gather": lambda: dist.gather(ins[0], outs if is_root else None, **single),
        "scatter": lambda: dist.scatter(outs[0], ins if is_root else None, src=root, **later),
        "all_to_all": lambda: dist.all_to_all(outs, ins, **later),
        "all_to_all_single": lambda: dist.all_to_all_single(outs[0], ins[0], **later),
        "all_to_all_splits": lambda: dist.all_to_all_single(
            outs[0], ins[0], [_splits(call, r)[me] for r in range(call.size)], _splits(call, me),
            **later,
        ),
        "barrier": lambda: dist.barrier(**later),
    }  # fmt: skip
    return [begin[call.name]()]


def _values(key: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random.Random(key).getrandbits(40))
    numbers = torch.randint(0 if dtype == torch.bool else 1, 3, (count,), generator=generator)
    return numbers.to(dtype)


def _random_call(shared: random.Random, key: str, size: int) -> Call:
    name = shared.choice(list(_RESULTS))
    dtype = shared.choice(_TYPES)
    op = shared.choice(_operations(dtype))
    count = shared.choice([0, 1, 2, 7, 64, 1000, shared.randrange(5000), 70_001])
    root, uneven = shared.randrange(size), shared.random() < 0.3
    aliased = shared.random() < 0.4
    outputs, inputs, memories = [], [], []
    for rank in range(size):
        own = random.Random(f"{key} {rank}")
        lengths = _shapes(name, rank, size, root, count, uneven)
        steps = [[own.choice([1, 1, 1, 2]) for _ in list_] for list_ in lengths]
        total = sum(
            n * s for list_, list_steps in zip(lengths, steps, strict=True)
            for n, s in zip(list_, list_steps, strict=True)
        )  # fmt: skip
        # Messages of a ring are calls of their own, so that their tensors must not overlap.
        overlap = aliased and own.random() < 0.7 and name != "ring"
        free = 0
        specs: list[list[Spec]] = []
        for list_, list_steps in zip(lengths, steps, strict=True):
            specs.append([])
            for n, step in zip(list_, list_steps, strict=True):
                if overlap:
                    places = [0, count, own.randrange(total + 1)]
                    specs[-1].append((min(own.choice(places), total - n * step), n, step))
                else:
                    specs[-1].append((free, n, step))
                    free += n * step
        outputs.append(specs[0])
        inputs.append(specs[1])
        memories.append(_values(f"{key} {rank} values", total, dtype))
    return Call(name, size, root, op, dtype, outputs, inputs, memories)


@dataclasses.dataclass
class _Pending:
    works: list[Any]
    memory: torch.Tensor
    expected: torch.Tensor
    what: str

    def finish(self) -> None:
        for work in self.works:
            work.wait()
        torch.testing.assert_close(
            self.memory, self.expected, rtol=0, atol=0, msg=lambda text: f"{self.what}: {text}"
        )


def _run_program(seed: str, groups: list[tuple[list[int], Any]], first: int, calls: int) -> None:
    """Makes `calls` random calls in groups of this process, one thread."""
    import smddp

    me = dist.get_rank()
    pending: list[_Pending] = []
    for number in range(first, first + calls):
        key = f"{seed} {number}"
        shared, own = random.Random(key), random.Random(f"{key} of {me}")
        members, group = shared.choice(groups)
        waits = shared.random() < 0.5
        call = _random_call(shared, key, len(members))
        if me not in members:
            continue
        index = members.index(me)
        memory = call.memories[index].clone()
        if own.random() < 0.5:
            memory = smddp.empty(memory.shape, dtype=call.dtype).copy_(memory)
        what = (
            f"seed {seed}, call {number}: {call.name} of {call.dtype} with {call.op} in {members}, "
            f"outputs {call.outputs[index]}, inputs {call.inputs[index]}"
        )
        works = _begin(call, index, memory, members, group)
        pending.append(_Pending(works, memory, call.expected(index), what))
        while pending and (waits or len(pending) > 5):
            pending.pop(own.randrange(len(pending))).finish()
    for left in pending:
        left.finish()


def _for_a_while(seed: int, seconds: float, threads: int) -> int:
    """Runs programs until the time is over; returns the number of calls."""
    with ranks.job(timeout=60):
        size = dist.get_world_size()
        choices = random.Random(seed)
        programs: list[list[tuple[list[int], Any]]] = []
        for _ in range(threads):
            everybody = list(range(size))
            members = [everybody] + [
                sorted(choices.sample(everybody, choices.randrange(1, size + 1))) for _ in range(2)
            ]
            programs.append([(m, dist.new_group(m)) for m in members])
        end = time.monotonic() + seconds
        done, errors = 0, list[BaseException]()

        def run(thread: int, first: int) -> None:
            try:
                _run_program(f"{seed}.{thread}", programs[thread], first, 40)
            except BaseException as error:
                errors.append(error)

        more = torch.ones(1)
        while more.item():
            workers = [threading.Thread(target=run, args=(t, done)) for t in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            if errors:
                raise errors[0]
            done += 40
            more.fill_(time.monotonic() < end)
            dist.all_reduce(more, dist.ReduceOp.MIN)
        return done


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "threads"), [("2", 1), ("4", 1), ("2x2", 1), ("2+1", 2), ("1+1", 2)]
)
def test_random_calls(layout: str, threads: int) -> None:
    everything = "ALL_SEEDS" in os.environ
    seconds = 120 if everything else 4
    seed = int(os.environ.get("RANDOM_CALLS_SEED", ranks.rotating(list(range(1000)), 1)[0]))
    done = ranks.check_ranks(_for_a_while, layout, seed, seconds, threads, timeout=seconds + 240)
    assert min(done) > 0
