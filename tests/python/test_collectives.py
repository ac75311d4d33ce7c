"""Every collective, compared with gloo in the same processes, on one node and on two."""

from __future__ import annotations

import atexit
import itertools
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import programs
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from on_ranks import on_ranks

import smddp
from smddp.torch import backend

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["2", "2x2"])

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
# No element, one, fewer than ranks, a number without small divisors, and several chunks of staging.
COUNTS = [0, 1, 3, 1021, 300_007]


def same(mine: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(mine, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


# --- all_reduce -----------------------------------------------------------------------------------


def _all_reduce() -> None:
    with ranks.job(oracle=True) as gloo:
        for case, (dtype, op, count) in enumerate(
            itertools.product(FLOATS + INTEGERS, OPS, COUNTS)
        ):
            mine = ranks.whole_numbers((count,), dtype, case)
            # gloo's arithmetic in half precision is not the reference.
            expected = mine.to(torch.float64, copy=True)
            dist.all_reduce(mine, op)
            dist.all_reduce(expected, op, group=gloo)
            same(mine, expected.to(dtype), f"{dtype} {op} {count}")
        for case, dtype in enumerate(FLOATS):
            mine = ranks.whole_numbers((1021,), dtype, 1000 + case) * dist.get_world_size()
            expected = mine.to(torch.float64, copy=True)
            dist.all_reduce(mine, dist.ReduceOp.AVG)
            dist.all_reduce(expected, group=gloo)
            same(mine, (expected / dist.get_world_size()).to(dtype), f"AVG {dtype}")
            mine = ranks.whole_numbers((1021,), dtype, 2000 + case)
            expected = mine.double() * 0.25
            dist.all_reduce(mine, dist._make_nccl_premul_sum(0.25))
            dist.all_reduce(expected, group=gloo)
            same(mine, expected.to(dtype), f"PREMUL_SUM {dtype}")


def _all_reduce_shapes() -> None:
    """Tensors with permuted dimensions, views, and misaligned addresses."""
    with ranks.job(oracle=True) as gloo:
        values = ranks.whole_numbers((4, 3, 5, 7), torch.float32, 7)
        views: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda t: t,
            lambda t: t.to(memory_format=torch.channels_last),
            lambda t: t.permute(3, 1, 0, 2),
            lambda t: t[1:3],
            lambda t: t.flatten()[1:],  # not aligned to a vector register
            lambda t: t[0, 0, 0, 0],
        ]
        for number, view in enumerate(views):
            mine, expected = view(values.clone()), view(values.clone()).contiguous()
            dist.all_reduce(mine)
            dist.all_reduce(expected, group=gloo)
            same(mine, expected, f"view {number}")


def _same_bits() -> bytes:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]))
    with ranks.job():
        tensors = [torch.randn(count) for count in (5, 10_007, 1_000_003)]
        for tensor in tensors:
            dist.all_reduce(tensor)
        return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def _coalesced() -> None:
    with ranks.job(oracle=True) as gloo:
        mine = [ranks.whole_numbers((n,), torch.float32, n) for n in (3, 1, 5000, 0, 77)]
        expected = [tensor.clone() for tensor in mine]
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in mine:
                dist.all_reduce(tensor)
        manager.wait()
        for tensor in expected:
            dist.all_reduce(tensor, group=gloo)
        same(mine, expected, "all_reduce")

        size = dist.get_world_size()
        inputs = [ranks.whole_numbers((n,), torch.float32, n) for n in (3, 500)]
        outputs = [torch.empty(n * size) for n in (3, 500)]
        with dist._coalescing_manager():
            for into, one in zip(outputs, inputs, strict=True):
                dist.all_gather_into_tensor(into, one)
        for into, one in zip(outputs, inputs, strict=True):
            wanted = torch.empty_like(into)
            dist.all_gather_into_tensor(wanted, one, group=gloo)
            same(into, wanted, "all_gather_into_tensor")

        inputs = [ranks.whole_numbers((n * size,), torch.float32, n) for n in (3, 500)]
        outputs = [torch.empty(n) for n in (3, 500)]
        with dist._coalescing_manager():
            for into, one in zip(outputs, inputs, strict=True):
                dist.reduce_scatter_tensor(into, one)
        for into, one in zip(outputs, inputs, strict=True):
            dist.all_reduce(one, group=gloo)
            same(into, one.chunk(size)[dist.get_rank()], "reduce_scatter_tensor")


@layouts
@pytest.mark.parametrize("cases", [_all_reduce, _all_reduce_shapes, _coalesced])
def test_all_reduce(layout: str, cases: Callable[[], None]) -> None:
    ranks.check_ranks(cases, layout)


def test_all_reduce_has_the_same_bits_on_all_ranks_and_in_every_run() -> None:
    first = ranks.check_ranks(_same_bits, "2x2")
    second = ranks.check_ranks(_same_bits, "2x2")
    assert len({*first, *second}) == 1


# --- collectives that move blocks
# ----------------------------------------------------------------------------


def _gather_and_scatter() -> None:
    with ranks.job(oracle=True) as gloo:
        me, size = dist.get_rank(), dist.get_world_size()
        dtypes = [*FLOATS, *INTEGERS, torch.uint8, torch.bool]
        for case, (dtype, count) in enumerate(itertools.product(dtypes, COUNTS)):
            what = f"{dtype} {count}"
            block = ranks.whole_numbers((count,), dtype, case)
            blocks = [torch.zeros_like(block) for _ in range(size)]
            expected = [torch.zeros_like(block) for _ in range(size)]
            dist.all_gather(blocks, block)
            dist.all_gather(expected, block, group=gloo)
            same(blocks, expected, f"all_gather {what}")
            whole = torch.zeros(count * size, dtype=dtype)
            dist.all_gather_into_tensor(whole, block)
            same(whole, torch.cat(expected), f"all_gather_into_tensor {what}")

            root = case % size
            mine, wanted = block.clone(), block.clone()
            dist.broadcast(mine, root)
            dist.broadcast(wanted, root, group=gloo)
            same(mine, wanted, f"broadcast {what}")

            if dtype not in FLOATS + INTEGERS:
                continue
            op = OPS[case % len(OPS)]
            parts = ranks.whole_numbers((size, count), dtype, case)
            reduced = parts.to(torch.float64, copy=True)
            dist.all_reduce(reduced, op, group=gloo)
            wanted = reduced[me].to(dtype)
            mine = torch.zeros_like(block)
            dist.reduce_scatter(mine, list(parts.unbind()), op)
            same(mine, wanted, f"reduce_scatter {op} {what}")
            mine = torch.zeros_like(block)
            dist.reduce_scatter_tensor(mine, parts.flatten(), op)
            same(mine, wanted, f"reduce_scatter_tensor {op} {what}")


def _objects() -> None:
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()
        said: list[Any] = [None] * size
        dist.all_gather_object(said, {"rank": me, "text": "x" * me * 1000})
        assert said == [{"rank": r, "text": "x" * r * 1000} for r in range(size)]
        objects = [f"from {me}", [me]] if me == 1 else [None, None]
        dist.broadcast_object_list(objects, src=1)
        assert objects == ["from 1", [1]]


def _functional() -> None:
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        one = torch.full((6,), float(me + 1))
        total = float(sum(range(1, size + 1)))
        same(funcol.all_reduce(one, "sum", group).wait(), torch.full((6,), total), "all_reduce")
        gathered = funcol.all_gather_tensor(one, 0, group)
        wanted = torch.arange(1.0, size + 1).repeat_interleave(6)
        same(gathered + 0, wanted, "all_gather_tensor")
        scattered = funcol.reduce_scatter_tensor(wanted, "avg", 0, group)
        same(scattered + 0, one, "reduce_scatter_tensor")
        same(funcol.broadcast(one, 1, group) + 0, torch.full((6,), 2.0), "broadcast")


@layouts
@pytest.mark.parametrize("cases", [_gather_and_scatter, _objects, _functional])
def test_blocks(layout: str, cases: Callable[[], None]) -> None:
    ranks.check_ranks(cases, layout)


def _barrier() -> tuple[float, float]:
    with ranks.job():
        dist.barrier()
        time.sleep(0.2 * dist.get_rank())
        before = time.monotonic()
        dist.barrier()
        return before, time.monotonic()


@layouts
def test_barrier_ends_after_all_have_come(layout: str) -> None:
    times = ranks.check_ranks(_barrier, layout)
    assert max(came for came, _ in times) <= min(went for _, went in times)


# --- send and recv --------------------------------------------------------------------------------


@layouts
@on_ranks("{layout}")
def test_messages(layout: str) -> None:
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()
        after, before = (me + 1) % size, (me - 1) % size
        for count in (0, 1, 1021, 400_000):
            mine = torch.full((count,), float(me))
            # A ring in which every rank receives first: the calls must not block before both are
            # posted.
            got = torch.zeros(count)
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, got, before), dist.P2POp(dist.isend, mine, after)]
            )
            for work in works:
                work.wait()
            same(got, torch.full((count,), float(before)), f"batch {count}")
            # Ranks send in turn.
            got = torch.zeros(count)
            if me % 2 == 0:
                dist.send(mine, after)
                assert dist.recv(got, before) == before
            else:
                assert dist.recv(got, before) == before
                dist.send(mine, after)
            same(got, torch.full((count,), float(before)), f"send and recv {count}")
        # Messages with different tags may be received in any order; those with one tag keep their
        # order.
        if me == 0:
            works = [dist.isend(torch.full((5,), v), 1, tag=t) for v, t in ((1.0, 7), (2.0, 8))]
            works.append(dist.isend(torch.full((5,), 3.0), 1, tag=7))
            for work in works:
                work.wait()
        elif me == 1:
            for tag, value in ((8, 2.0), (7, 1.0), (7, 3.0)):
                got = torch.zeros(5)
                dist.recv(got, 0, tag=tag)
                same(got, torch.full((5,), value), f"tag {tag}")
        # From any source.
        if me == 0:
            senders = set()
            for _ in range(size - 1):
                got = torch.zeros(3)
                sender = dist.recv(got)
                same(got, torch.full((3,), float(sender)), "any source")
                senders.add(sender)
            assert senders == set(range(1, size))
        else:
            dist.send(torch.full((3,), float(me)), 0)
        # A collective between a posted receive and its message.
        got = torch.zeros(4)
        work = dist.irecv(got, before)
        ones = torch.ones(1000)
        dist.all_reduce(ones)
        dist.send(torch.full((4,), float(me)), after)
        work.wait()
        same((ones[0].item(), got[0].item()), (float(size), float(before)), "between")


# --- Work and its future --------------------------------------------------------------------------


def _work() -> None:
    with ranks.job():
        size = dist.get_world_size()
        tensor = torch.ones(1000)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        # Before 2.15 torch's binding cannot convert the result to a Python object.
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
            assert work.exception() is None
        work.wait()  # a second time
        same(work.result(), [tensor], "result")
        same(tensor, torch.full((1000,), float(size)), "all_reduce")

        # It completes even if nobody waits.
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        deadline = time.monotonic() + 30
        while not work.is_completed():
            assert time.monotonic() < deadline
            time.sleep(0.001)

        # Many calls in flight; wait() in the opposite order.
        tensors = [torch.full((n * 997,), float(n)) for n in range(1, 30)]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        for work in reversed(works):
            work.wait()
        for n, t in enumerate(tensors, 1):
            same(t, torch.full((n * 997,), float(n * size)), f"in flight {n}")


def _future() -> None:
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()
        future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
        halved = future.then(lambda done: done.value()[0] / 2)
        same(halved.wait(), torch.full((10,), size / 2), "then")
        blocks = [torch.zeros(2) for _ in range(size)]
        work = dist.all_gather(blocks, torch.full((2,), float(me)), async_op=True)
        wanted = [torch.full((2,), float(r)) for r in range(size)]
        same(work.get_future().wait(), wanted, "list")
        assert dist.barrier(async_op=True).get_future().wait() == []

        # A continuation may make calls and wait for them.
        def again(done: torch.futures.Future[Any]) -> torch.Tensor:
            tensor = done.value()[0].clone()
            dist.all_reduce(tensor)
            return tensor

        for count in (4, 100_000):
            chained = dist.all_reduce(torch.ones(count), async_op=True).get_future().then(again)
            same(chained.wait(), torch.full((count,), float(size * size)), "chain")


@layouts
@pytest.mark.parametrize("cases", [_work, _future])
def test_work(layout: str, cases: Callable[[], None]) -> None:
    ranks.check_ranks(cases, layout)


# --- groups ---------------------------------------------------------------------------------------


def _sub_groups() -> None:
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()
        even = dist.new_group([r for r in range(size) if r % 2 == 0])
        halves = [dist.new_group(list(range(size // 2))), dist.new_group(range(size // 2, size))]
        alone = [dist.new_group([r]) for r in range(size)][me]
        for turn in range(20):
            works, expected = [], []
            members = [list(range(size)), list(range(size // 2)), list(range(size // 2, size))]
            members.append([r for r in range(size) if r % 2 == 0])
            members.append([me])
            for group, ids in zip([dist.group.WORLD, *halves, even, alone], members, strict=True):
                if me not in ids:
                    continue
                tensor = torch.full((100 * turn + 1,), float(me + turn))
                works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor))
                expected.append(float(sum(r + turn for r in ids)))
            # Each rank waits in a different order.
            order = list(zip(works, expected, strict=True))
            for (work, tensor), value in order[:: 1 if me % 2 else -1]:
                work.wait()
                same(tensor, torch.full_like(tensor, value), f"turn {turn}")
        dist.destroy_process_group(even)
        dist.barrier()


def _again() -> list[int]:
    """Destroys and creates groups repeatedly, with one store."""
    me, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    files = []
    for turn in range(12):
        dist.init_process_group(
            "smddp", store=store, rank=me, world_size=size, timeout=timedelta(seconds=30)
        )
        tensor = torch.full((10,), float(turn))
        dist.all_reduce(tensor)
        same(tensor, torch.full((10,), float(turn * size)), f"turn {turn}")
        dist.destroy_process_group()
        files.append(len(os.listdir("/proc/self/fd")))
    return files


@layouts
@pytest.mark.parametrize("cases", [_sub_groups])
def test_groups(layout: str, cases: Callable[[], None]) -> None:
    ranks.check_ranks(cases, layout)


@layouts
def test_init_again_on_the_same_store(layout: str) -> None:
    for files in ranks.check_ranks(_again, layout):
        # libfabric connects lazily, so a few more descriptors are not a leak; one per round is.
        assert files[-1] - files[1] < 6, f"descriptors leak: {files}"


# --- the life of a process ------------------------------------------------------------------------


def _exit_without_destroy() -> None:
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(100))
    dist.all_reduce(torch.ones(100_000), async_op=True).wait()


def _late_use(layout: str) -> None:
    def use() -> None:
        # smddp leaves its groups after the functions that a script registers.
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == dist.get_world_size()
        backend.leave_at_exit()
        smddp.empty(100).fill_(1)
        smddp.statistics(group)
        if layout == "2x2":
            with pytest.raises(ValueError, match="smddp has been shut down"):
                smddp.describe(group)
        with pytest.raises(ValueError, match="smddp has been shut down"):
            dist.all_reduce(torch.ones(1), group=group)
        print("all was refused or worked", file=sys.stderr)

    atexit.register(use)
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    group = dist.group.WORLD
    dist.all_reduce(torch.ones(100))


@pytest.mark.parametrize("layout", ["2", "2x2"])
def test_use_after_the_engine_has_been_shut_down(layout: str) -> None:
    for outcome in ranks.run_ranks(_late_use, layout, layout, full_exit=True):
        assert outcome.status == 0, str(outcome)
        assert "all was refused or worked" in outcome.stderr, str(outcome)


# Two pairs have every layout and every place of the store.
@pytest.mark.parametrize(
    ("layout", "rank_0_serves"),
    [
        ("2", False),
        ("2x2", True),
        pytest.param("2", True, marks=pytest.mark.exhaustive),
        pytest.param("2x2", False, marks=pytest.mark.exhaustive),
    ],
)
def test_exit_without_destroy(layout: str, rank_0_serves: bool) -> None:
    options = {"rank_0_serves": rank_0_serves, "full_exit": True}
    for outcome in ranks.run_ranks(_exit_without_destroy, layout, **options):
        assert outcome.status == 0, str(outcome)
        # An earlier test may have imported Triton, whose bindings list at exit what they leak.
        bindings = re.compile(r"nanobind: | - |See https://nanobind")
        said = [line for line in outcome.stderr.splitlines() if not bindings.match(line)]
        assert said == []


class _Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


def _fork() -> str:
    with ranks.job():
        tensor = torch.ones(100)
        dist.all_reduce(tensor)
        for _ in range(2):
            loader = torch.utils.data.DataLoader(_Numbers(), batch_size=4, num_workers=2)
            total = sum(int(batch.sum()) for batch in loader)
            assert total == sum(range(40))
            dist.all_reduce(tensor)
        text = programs.in_a_child(lambda: str(dist.all_reduce(tensor)))
        dist.all_reduce(tensor)  # the parent still works
        return text


@layouts
def test_fork_after_init(layout: str) -> None:
    for text in ranks.check_ranks(_fork, layout):
        assert text.startswith("ValueError: ")
        assert "forked after init_process_group" in text


def _profile() -> list[str]:
    with ranks.job():
        with torch.profiler.profile() as profile:
            dist.all_reduce(torch.ones(10))
            dist.barrier()
            dist.broadcast(torch.ones(10), 0)
        return [event.key for event in profile.key_averages()]


def test_profiler_names() -> None:
    for names in ranks.check_ranks(_profile, "2"):
        assert {"smddp:all_reduce", "smddp:barrier", "smddp:broadcast"} <= set(names)


@layouts
@on_ranks("{layout}")
def test_introspection(layout: str) -> None:
    with ranks.job():
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10))
        (used,) = smddp.statistics().items()
        assert used[0].startswith("allreduce/")
        assert used[1]["calls"] == 2
        assert used[1]["bytes"] == 80
        assert f"rank {dist.get_rank()} of {dist.get_world_size()}" in smddp.describe()
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.name() == "smddp"
        assert backend._get_sequence_number_for_group() == 2
        # Several collectives have algorithms with the same name.
        dist.broadcast(torch.ones(10), 0)
        dist.all_gather_into_tensor(torch.empty(10 * dist.get_world_size()), torch.ones(10))
        kinds = sorted(name.split("/")[0] for name in smddp.statistics())
        assert kinds == ["allgather", "allreduce", "broadcast"]
