"""Test cases for calls on tensors of a device, for any device.

test_device.py runs these functions on a device made of threads, test_cuda.py on GPUs. The expected
result of a call is that of the same call on the CPU, which test_collectives.py compares with gloo.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

Tensors = list[torch.Tensor]

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
BITS = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
COUNTS = [0, 1, 1021, 300_007]
# torch cannot compare tensors of these dtypes, so their bytes are compared.
UNCOMPARED = [torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2]
TYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, *UNCOMPARED]


def find_fake() -> Path | None:
    """Returns the module of the device made of threads; None if the C++ tests were not built."""
    release = ".".join(torch.__version__.split(".")[:2])
    folder = ranks.ROOT / "build" / f"torch-{release}" / "tests" / "cpp" / "process_group"
    return next(folder.glob("fake_device.*.so"), None)


class Fake:
    """The device of tests/cpp/process_group/fake_device.cc."""

    name = "fake"
    backend = "cpu:smddp,fake:smddp"
    module: ClassVar[Any]

    def __init__(self) -> None:
        import importlib.util

        path = find_fake()
        assert path is not None
        spec = importlib.util.spec_from_file_location("fake_device", path)
        assert spec is not None
        assert spec.loader is not None
        Fake.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(Fake.module)
        torch.utils.rename_privateuse1_backend("fake")

        class Device:
            """The functions that torch expects in the module of a device."""

            is_available = staticmethod(lambda: True)
            current_device = staticmethod(lambda: 0)
            device_count = staticmethod(lambda: 1)
            set_device = staticmethod(lambda device: None)
            is_initialized = staticmethod(lambda: True)
            _is_in_bad_fork = staticmethod(lambda: False)
            get_amp_supported_dtype = staticmethod(lambda: [])

        torch._register_device_module("fake", Device)
        self.device = torch.device("fake", 0)

    def delay(self) -> None:
        """Blocks the current stream for 0.2 s."""
        self.module.gate()
        threading.Timer(0.2, self.module.open).start()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Blocks the current stream until the end of the with statement."""
        self.module.gate()
        try:
            yield
        finally:
            self.module.open()

    def slow_down(self) -> None:
        """Makes copies slow, so that a program that does not wait for them reads the old values."""
        self.module.slow_down(30)

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        """Fills a tensor, by a kernel on the current stream."""
        self.module.fill(tensor, value)

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.Stream(device=self.device)

    def synchronize(self) -> None:
        self.module.synchronize()

    def finish(self) -> None:
        """Checks at the end of a test that no freed memory was used."""
        self.module.synchronize()
        assert self.module.violations() == 0


class Cuda:
    """A GPU. Ranks share GPUs if there are fewer GPUs than ranks."""

    name = "cuda"
    backend = "smddp"

    def __init__(self) -> None:
        self.device = torch.device(
            "cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        )
        torch.cuda.set_device(self.device)

    def delay(self) -> None:
        torch.cuda._sleep(400_000_000)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Blocks the current stream for a second or two, because no call can end a kernel."""
        torch.cuda._sleep(3_000_000_000)
        yield

    def slow_down(self) -> None:
        """Does nothing: copies of the sizes used here take long enough."""

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        tensor.fill_(value)

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(torch.cuda.Stream())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def finish(self) -> None:
        torch.cuda.synchronize()


DEVICES: dict[str, Callable[[], Any]] = {"fake": Fake, "cuda": Cuda}


@contextlib.contextmanager
def job(name: str, timeout: float = 60) -> Iterator[Any]:
    """Creates the default group; yields the device."""
    device = DEVICES[name]()
    dist.init_process_group(device.backend, timeout=timedelta(seconds=timeout))
    try:
        yield device
    finally:
        dist.destroy_process_group()
        device.finish()


# --- values ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """A call, on tensors that exist twice: on the CPU and on the device."""

    name: str
    given: Tensors
    call: Callable[[Tensors, bool], tuple[Any, Tensors]]  # (tensors, async) -> (work, results)


def reductions(dtypes: list[torch.dtype]) -> Iterator[Case]:
    seeds = itertools.count(100)

    def reduce_with(op: Any) -> Callable[[Tensors, bool], tuple[Any, Tensors]]:
        return lambda t, later: (dist.all_reduce(t[0], op, async_op=later), t)

    for dtype in dtypes:
        ops = OPS + ([] if dtype.is_floating_point else BITS)
        if dtype.is_floating_point:
            ops = [*ops, dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.25)]
        for number, op in enumerate(ops):
            for count in COUNTS if dtype == torch.float32 else COUNTS[2:3]:
                given = ranks.whole_numbers((count,), dtype, next(seeds))
                if op == dist.ReduceOp.AVG:
                    given = given * dist.get_world_size()
                yield Case(f"all_reduce {dtype} op {number} of {count}", [given], reduce_with(op))


def movements() -> Iterator[Case]:
    """Calls that move blocks, and reductions other than all_reduce."""
    size, me = dist.get_world_size(), dist.get_rank()
    root = size - 1

    def new(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return ranks.whole_numbers((count,), dtype, count + 7)

    def case(name: str, given: Tensors, call: Callable[[Tensors, bool], Any]) -> Case:
        return Case(name, given, lambda tensors, later: (call(tensors, later), tensors))

    for n in (1, 1021, 70_001):
        yield case(f"broadcast {n}", [new(n)], lambda t, a: dist.broadcast(t[0], root, async_op=a))
        yield case(
            f"all_gather {n}",
            [new(n) * 0 for _ in range(size)] + [new(n)],
            lambda t, a: dist.all_gather(t[:-1], t[-1], async_op=a),
        )
        yield case(
            f"all_gather_into_tensor {n}",
            [new(n * size) * 0, new(n)],
            lambda t, a: dist.all_gather_into_tensor(t[0], t[1], async_op=a),
        )
        yield case(
            f"reduce_scatter_tensor {n}",
            [new(n) * 0, new(n * size)],
            lambda t, a: dist.reduce_scatter_tensor(t[0], t[1], async_op=a),
        )
        yield case(
            f"reduce_scatter {n}",
            [new(n) * 0] + [new(n) + r for r in range(size)],
            lambda t, a: dist.reduce_scatter(t[0], t[1:], async_op=a),
        )
        yield case(
            f"all_to_all_single {n}",
            [new(n * size) * 0, new(n * size)],
            lambda t, a: dist.all_to_all_single(t[0], t[1], async_op=a),
        )
        yield case(
            f"gather {n}",
            [new(n)] + [new(n) * 0 for _ in range(size)],
            lambda t, a: dist.gather(t[0], t[1:] if me == root else None, root, async_op=a),
        )
        yield case(
            f"scatter {n}",
            [new(n) * 0] + [new(n) + r for r in range(size)],
            lambda t, a: dist.scatter(t[0], t[1:] if me == root else None, root, async_op=a),
        )

        def reduce_to_root(tensors: Tensors, later: bool) -> tuple[Any, Tensors]:
            # The results of the other ranks are undefined.
            work = dist.reduce(tensors[0], root, async_op=later)
            return work, tensors if me == root else []

        yield Case(f"reduce {n}", [new(n)], reduce_to_root)

    # Blocks whose sizes all ranks know, then blocks whose sizes only two ranks know.
    yield case(
        "all_gather of several sizes",
        [torch.zeros(r * 100 + 5) for r in range(size)] + [new(me * 100 + 5)],
        lambda t, a: dist.all_gather(t[:-1], t[-1], async_op=a),
    )
    to, come = [me + r for r in range(size)], [s + me for s in range(size)]
    yield case(
        "all_to_all_single with splits",
        [torch.zeros(sum(come)), new(sum(to))],
        lambda t, a: dist.all_to_all_single(t[0], t[1], come, to, async_op=a),
    )
    yield case(
        "all_to_all of lists",
        [torch.zeros(n) for n in come] + [new(n) for n in to],
        lambda t, a: dist.all_to_all(t[:size], t[size:], async_op=a),
    )
    yield case(
        "all_reduce of bools",
        [new(77) > 2],
        lambda t, a: dist.all_reduce(t[0], dist.ReduceOp.MAX, async_op=a),
    )
    yield case(
        "broadcast of complex numbers",
        [torch.complex(new(50), new(50) + 1)],
        lambda t, a: dist.broadcast(t[0], root, async_op=a),
    )


def coalesced() -> Iterator[Case]:
    size = dist.get_world_size()

    def block(count: int) -> torch.Tensor:
        return ranks.whole_numbers((count,), torch.float32, count)

    def within(call: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
        def run(tensors: Tensors, later: bool) -> tuple[Any, Tensors]:
            device = tensors[0].device
            with dist._coalescing_manager(device=device, async_ops=True) as manager:
                for into, one in zip(tensors[::2], tensors[1::2], strict=True):
                    call(into, one)
            if later:
                return manager, tensors
            manager.wait()
            return None, tensors

        return run

    def run_all(tensors: Tensors, later: bool) -> tuple[Any, Tensors]:
        with dist._coalescing_manager(device=tensors[0].device, async_ops=later) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        return manager if later else None, tensors

    yield Case("all_reduce, coalesced", [block(3), block(1), block(70_001)], run_all)
    yield Case(
        "all_gather_into_tensor, coalesced",
        [block(3 * size) * 0, block(3), block(500 * size) * 0, block(500)],
        within(dist.all_gather_into_tensor),
    )
    yield Case(
        "reduce_scatter_tensor, coalesced",
        [block(3) * 0, block(3 * size), block(500) * 0, block(500 * size)],
        within(dist.reduce_scatter_tensor),
    )


def views() -> Iterator[Case]:
    """Tensors with strides, which a copy to the host has to make contiguous."""
    shapes: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
        ("channels last", lambda t: t.to(memory_format=torch.channels_last)),
        ("permuted", lambda t: t.permute(3, 1, 0, 2)),
        ("a part", lambda t: t[1:3]),
        ("every other", lambda t: t[..., ::2]),
        ("one element", lambda t: t[0, 0, 0, 0]),
        ("transposed in part", lambda t: t[:, 1:].transpose(0, 3)),
    ]
    for name, view in shapes:

        def call(
            tensors: Tensors, later: bool, view: Callable[[torch.Tensor], torch.Tensor] = view
        ) -> tuple[Any, Tensors]:
            seen = view(tensors[0])
            return dist.all_reduce(seen, async_op=later), [tensors[0], seen]

        yield Case(name, [ranks.whole_numbers((4, 3, 6, 8), torch.float32, 7)], call)


def blocks() -> Iterator[Case]:
    """Blocks for each rank: of any dtype, empty, of rows, in tensors with any strides."""
    size, me = dist.get_world_size(), dist.get_rank()
    # Some pairs of ranks exchange nothing, and rank 0 sends nothing at all.
    rows = [
        [0 if r == 0 or (r + s) % 3 == 0 else r + 2 * s for s in range(size)] for r in range(size)
    ]
    to, come = rows[me], [row[me] for row in rows]

    def new(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return ranks.whole_numbers(shape, torch.uint8, sum(shape) + me).to(dtype)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8).to(dtype)

    def exchange(tensors: Tensors, later: bool) -> tuple[Any, Tensors]:
        return dist.all_to_all_single(*tensors, come, to, async_op=later), tensors

    def exchange_lists(tensors: Tensors, later: bool) -> tuple[Any, Tensors]:
        return dist.all_to_all(tensors[:size], tensors[size:], async_op=later), tensors

    def exchange_evenly(tensors: Tensors, later: bool) -> tuple[Any, Tensors]:
        return dist.all_to_all_single(*tensors, async_op=later), tensors

    def exchange_every_other(tensors: Tensors, later: bool) -> tuple[Any, Tensors]:
        columns = [tensor[..., ::2] for tensor in tensors]
        return dist.all_to_all_single(*columns, async_op=later), tensors

    def gather_at(root: int) -> Callable[[Tensors, bool], tuple[Any, Tensors]]:
        def call(tensors: Tensors, later: bool) -> tuple[Any, Tensors]:
            parts = tensors[1:] if me == root else None
            return dist.gather(tensors[0], parts, root, async_op=later), tensors

        return call

    def scatter_from(root: int) -> Callable[[Tensors, bool], tuple[Any, Tensors]]:
        def call(tensors: Tensors, later: bool) -> tuple[Any, Tensors]:
            parts = tensors[1:] if me == root else None
            return dist.scatter(tensors[0], parts, root, async_op=later), tensors

        return call

    for dtype in TYPES:
        yield Case(
            f"all_to_all_single of rows of {dtype}",
            [empty((sum(come), 3), dtype), new((sum(to), 3), dtype)],
            exchange,
        )
        yield Case(
            f"all_to_all of {dtype}",
            [empty((n,), dtype) for n in come] + [new((n,), dtype) for n in to],
            exchange_lists,
        )
        yield Case(
            f"all_to_all_single of {dtype}",
            [empty((size * 5,), dtype), new((size * 5,), dtype)],
            exchange_evenly,
        )
        parts = [new((7,), dtype) for _ in range(size)]
        yield Case(f"gather of {dtype}", [new((7,), dtype), *parts], gather_at(size - 1))
        yield Case(f"scatter of {dtype}", [empty((7,), dtype), *parts], scatter_from(0))
    # Longer than one chunk, in blocks of very different sizes.
    long = [[r * 50_001 + s * 20_000 for s in range(size)] for r in range(size)]
    given, expected = long[me], [row[me] for row in long]
    yield Case(
        "all_to_all_single of long blocks",
        [empty((sum(expected),), torch.float32), new((sum(given),), torch.float32)],
        lambda t, a: (dist.all_to_all_single(*t, expected, given, async_op=a), t),
    )
    for shape in ((0,), (size * 2, 6)):
        # Every other column of a wider tensor, and transposed tensors.
        wide = [new((*shape[:-1], 2 * shape[-1]), torch.float32) for _ in range(2)]
        yield Case(f"all_to_all_single of every other of {shape}", wide, exchange_every_other)
        turned = [new(shape[::-1], torch.float32).t() for _ in range(1 + size)]
        yield Case(f"gather of transposed {shape}", turned, gather_at(0))
        yield Case(f"scatter of transposed {shape}", turned, scatter_from(size - 1))


def check(case: Case, device: Any) -> None:
    """Compares a call on the device with the same call on the CPU."""
    there = [tensor.to(device.device) for tensor in case.given]
    here = [tensor.clone() for tensor in case.given]
    _, expected = case.call(here, False)
    _, got = case.call(there, False)
    compare(case.name, got, expected)


def compare(name: str, got: Tensors, expected: Tensors) -> None:
    for number, (one, wanted) in enumerate(zip(got, expected, strict=True)):

        def say(text: str, number: int = number) -> str:
            return f"{name}, tensor {number}: {text}"

        here = one.cpu()
        if wanted.dtype in UNCOMPARED:
            here, wanted = (t.contiguous().view(torch.uint8) for t in (here, wanted))
        torch.testing.assert_close(here, wanted, rtol=0, atol=0, msg=say)


def reduces(name: str) -> None:
    with job(name) as device:
        for case in reductions(FLOATS + INTEGERS):
            check(case, device)
        # A case whose result is known without another call.
        mine = torch.full((1000,), dist.get_rank() + 1.0, device=device.device)
        dist.all_reduce(mine)
        size = dist.get_world_size()
        assert mine.cpu().eq(size * (size + 1) / 2).all()


def averages(name: str) -> None:
    """Averages a vector whose length is odd."""
    with job(name) as device:
        values = ranks.whole_numbers((300_007,), torch.float32, dist.get_rank())
        expected = values.clone()
        dist.all_reduce(expected, dist.ReduceOp.AVG)
        mine = values.to(device.device)
        dist.all_reduce(mine, dist.ReduceOp.AVG)
        compare("AVG", [mine], [expected])


def moves(name: str) -> None:
    with job(name) as device:
        for case in itertools.chain(movements(), coalesced(), views()):
            check(case, device)


def moves_blocks(name: str) -> None:
    with job(name) as device:
        for case in blocks():
            check(case, device)


def moves_chunks(name: str) -> None:
    """Blocks and a vector of odd length, several times as long as 256 KiB."""
    with job(name) as device:
        size, me = dist.get_world_size(), dist.get_rank()
        block = ranks.whole_numbers((100_003,), torch.float32, me)
        blocks = ranks.whole_numbers((size * 100_003,), torch.float32, me)
        vector = ranks.whole_numbers((300_007,), torch.float32, me)
        for case in [
            Case(
                "all_gather_into_tensor",
                [blocks * 0, block],
                lambda t, a: (dist.all_gather_into_tensor(*t, async_op=a), t),
            ),
            Case(
                "reduce_scatter_tensor",
                [block * 0, blocks],
                lambda t, a: (dist.reduce_scatter_tensor(*t, async_op=a), t),
            ),
            Case(
                "broadcast",
                [vector],
                lambda t, a: (dist.broadcast(t[0], size - 1, async_op=a), t),
            ),
        ]:
            check(case, device)


def shards_in_place(name: str) -> None:
    """A rank's block is a part of the whole tensor, as in FSDP."""
    with job(name) as device:
        size, me = dist.get_world_size(), dist.get_rank()
        whole = ranks.whole_numbers((size * 100_003,), torch.float32, me)

        def gather(tensors: Tensors, later: bool) -> tuple[Any, Tensors]:
            own = tensors[0].chunk(size)[me]
            return dist.all_gather_into_tensor(tensors[0], own, async_op=later), tensors

        def scatter(tensors: Tensors, later: bool) -> tuple[Any, Tensors]:
            own = tensors[0].chunk(size)[me]
            return dist.reduce_scatter_tensor(own, tensors[0], async_op=later), [own]

        for number, call in enumerate((gather, scatter)):
            given = whole.to(device.device)
            expected = [torch.zeros_like(whole) for _ in range(size)]
            dist.all_gather(expected, whole)
            if call is gather:
                parts = [one.chunk(size)[r] for r, one in enumerate(expected)]
                wanted = torch.cat(parts)
            else:
                wanted = sum(one.chunk(size)[me] for one in expected)
            _, got = call([given], bool(number))
            dist.barrier()
            compare(call.__name__, got, [wanted])


def moves_plainly(name: str) -> None:
    """Only contiguous tensors, because NCCL accepts no others."""
    with job(name) as device:
        for case in itertools.chain(movements(), coalesced()):
            check(case, device)


def overlaps(name: str) -> None:
    """Many concurrent calls, with wait() in another order, and calls on the CPU between them."""
    with job(name) as device:
        cases = list(itertools.chain(movements(), coalesced(), views()))
        expected = []
        for case in cases:
            here = [tensor.clone() for tensor in case.given]
            expected.append(case.call(here, False)[1])
        pending = []
        device.delay()
        for number, case in enumerate(cases):
            there = [tensor.to(device.device, non_blocking=True) for tensor in case.given]
            pending.append(case.call(there, True))
            if number % 5 == 0:
                value = torch.ones(number + 1)
                dist.all_reduce(value, async_op=number % 2 == 0)
        for number in reversed(range(len(cases))):
            work, results = pending[number]
            if work is not None:
                work.wait()
            compare(cases[number].name, results, expected[number])


def messages(name: str) -> None:
    with job(name) as device:
        size, me = dist.get_world_size(), dist.get_rank()
        before, after = (me - 1) % size, (me + 1) % size
        for count in (1, 1000, 300_001):
            mine = torch.full((count,), float(me), device=device.device)
            theirs = torch.full((count,), -1.0, device=device.device)
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, theirs, before)]
            )
            for work in works:
                work.wait()
            assert theirs.cpu().eq(before).all()
            # Messages arrive in the order sent, also if the device is busy.
            device.delay()
            sent = [
                dist.isend(torch.full((count,), float(n), device=device.device), after)
                for n in range(3)
            ]
            for n in range(3):
                dist.recv(theirs, before)
                assert theirs.cpu().eq(n).all()
            for work in sent:
                work.wait()
        dist.barrier()


def any_source(name: str) -> None:
    with job(name) as device:
        me = dist.get_rank()
        if me != 0:
            dist.send(torch.full((100,), float(me), device=device.device), 0)
            return
        come = set()
        for _ in range(dist.get_world_size() - 1):
            theirs = torch.zeros(100, device=device.device)
            source = dist.recv(theirs)
            assert theirs.cpu().eq(float(source)).all()
            come.add(source)
        assert come == set(range(1, dist.get_world_size()))


# --- order ----------------------------------------------------------------------------------------


def follows_streams(name: str) -> None:
    """A call reads what its stream wrote before it; work after wait() reads the result."""
    with job(name) as device:
        size = dist.get_world_size()
        for later in (False, True):
            tensor = torch.zeros(100_000, device=device.device)
            device.synchronize()
            device.delay()
            device.fill(tensor, 1)
            work = dist.all_reduce(tensor, async_op=later)
            if work is not None:
                work.wait()
            # On the current stream; the host has not waited for the result.
            doubled = tensor + tensor
            assert doubled.cpu().eq(2 * size).all()
        # The same on another stream than the default one, which does not wait for it.
        with device.stream():
            tensor = torch.zeros(100_000, device=device.device)
            device.delay()
            device.fill(tensor, 3)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            assert tensor.cpu().eq(3 * size).all()
        device.synchronize()


def does_not_block(name: str) -> None:
    """An asynchronous call returns while the device is still busy."""
    with job(name) as device:
        tensor = torch.zeros(1000, device=device.device)
        # The first call sets up the path, so it may block.
        dist.all_reduce(tensor)
        device.synchronize()
        with device.busy():
            device.fill(tensor, 1)
            work = dist.all_reduce(tensor, async_op=True)
            assert not work.is_completed()
        work.wait()
        device.synchronize()
        assert work.is_completed()
        assert tensor.cpu().eq(dist.get_world_size()).all()


def barrier_covers(name: str) -> None:
    """After a barrier, calls whose Work was dropped have written their results."""
    with job(name) as device:
        device.slow_down()
        tensors = [torch.zeros(50_000, device=device.device) for _ in range(4)]
        device.synchronize()
        device.delay()
        for number, tensor in enumerate(tensors):
            device.fill(tensor, number + 1)
            dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        with device.stream():  # a stream that waits for nothing
            for number, tensor in enumerate(tensors):
                assert tensor.cpu().eq((number + 1) * dist.get_world_size()).all()


def outlives_its_tensors(name: str) -> None:
    """The memory of a tensor that is deleted is not reused while a call still uses it, but then."""
    with job(name) as device:
        device.slow_down()
        device.delay()
        memory = []
        for number in range(20):
            tensor = torch.empty(100_000, device=device.device)
            memory.append(StorageWeakRef(tensor.untyped_storage()))
            device.fill(tensor, number)
            # Those of odd number are copied before the call, and back.
            dist.all_reduce(tensor.view(200, 500).t() if number % 2 else tensor, async_op=True)
            assert not memory[-1].expired()
            del tensor
            fresh = torch.empty(100_000, device=device.device)
            device.fill(fresh, -1)
            del fresh
        dist.barrier()
        deadline = time.monotonic() + 20
        while not all(one.expired() for one in memory):
            assert time.monotonic() < deadline, f"kept: {[one.expired() for one in memory]}"
            time.sleep(0.001)


def futures(name: str) -> None:
    with job(name) as device:
        size = dist.get_world_size()
        device.slow_down()
        tensor = torch.zeros(100_000, device=device.device)
        device.synchronize()
        device.delay()
        device.fill(tensor, 2)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        assert doubled.wait().cpu().eq(4 * size).all()
        assert future.wait()[0].cpu().eq(2 * size).all()


def trains(name: str) -> None:
    """DDP on the device trains the same weights as DDP on the CPU with gloo."""
    with job(name) as device:
        gloo = dist.new_group(backend="gloo")
        torch.manual_seed(3)
        nn = torch.nn
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
        weights = []
        for where, group in ((device.device, None), (torch.device("cpu"), gloo)):
            mine = copy.deepcopy(model).to(where)
            wrapped = DistributedDataParallel(mine, process_group=group, bucket_cap_mb=0.01)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, foreach=False)
            generator = torch.Generator().manual_seed(dist.get_rank())
            for _ in range(5):
                data = torch.randn(8, 32, generator=generator).to(where)
                wrapped(data).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append([parameter.detach().cpu() for parameter in mine.parameters()])
        for one, other in zip(*weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def bound(name: str) -> None:
    """Groups with device_id: the groups of a mesh, which torch splits off, and a new group."""
    device = DEVICES[name]()
    dist.init_process_group(device.backend, device_id=device.device, timeout=timedelta(seconds=60))
    half = dist.get_world_size() // 2
    mesh = init_device_mesh(device.device.type, (2, half), mesh_dim_names=("a", "b"))
    group = dist.new_group(range(half))
    groups = [(mesh.get_group("a"), 2), (mesh.get_group("b"), half)]
    if dist.get_rank() < half:
        groups.append((group, half))
    for group, size in groups:
        tensor = torch.ones(100, device=device.device)
        dist.all_reduce(tensor, group=group)
        assert tensor.cpu().eq(size).all()
    dist.barrier()
    dist.destroy_process_group()
    device.finish()


# --- errors ---------------------------------------------------------------------------------------


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refuses(name: str) -> list[str]:
    """Invalid calls raise an error before any data moves; the group still works afterwards."""
    with job(name) as device:
        size = dist.get_world_size()
        there, here = torch.zeros(4, device=device.device), torch.zeros(4)
        parts = [there.clone()] * (size - 1)
        said = [
            error_of(lambda: dist.all_gather([*parts, here], there)),
            error_of(
                lambda: dist.all_gather_into_tensor(torch.zeros(3, device=device.device), there)
            ),
            error_of(lambda: dist.all_reduce(there, dist.ReduceOp.BAND)),
        ]
        dist.all_reduce(there.fill_(1))
        assert there.cpu().eq(size).all()
        return said


def times_out(name: str) -> str:
    """The last rank makes no call; the calls of the others time out."""
    with job(name) as device:
        others = dist.get_world_size() - 1
        if dist.get_rank() == others:
            ranks.await_ranks("failed", others)
            return ""
        ranks.limit(3, device.device)
        tensor = torch.ones(100, device=device.device)
        said = error_of(lambda: dist.all_reduce(tensor, async_op=True).wait())
        ranks.arrive("failed")
        return said


# --- lists of cases for test_device.py and test_cuda.py ---------------------------------------

VALUES = [reduces, moves, moves_blocks, overlaps]
ORDER = [
    messages,
    any_source,
    follows_streams,
    does_not_block,
    barrier_covers,
    outlives_its_tensors,
    futures,
    trains,
]
