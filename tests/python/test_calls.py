"""Calls that are not in test_collectives.py, and tensors with strides, compared with gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["3", "2x2"])
COUNTS = [0, 1, 1021, 100_003]


def same(mine: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(mine, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def _reduce() -> None:
    with ranks.job(oracle=True) as gloo:
        me, size = dist.get_rank(), dist.get_world_size()
        for case, count in enumerate(COUNTS):
            root = case % size
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                mine = ranks.whole_numbers((count,), torch.float32, case)
                before, expected = mine.clone(), mine.clone()
                dist.reduce(mine, root, op)
                dist.all_reduce(expected, op, group=gloo)
                same(mine, expected if me == root else before, f"reduce {op} {count}")


def _rooted() -> None:
    with ranks.job(oracle=True) as gloo:
        me, size = dist.get_rank(), dist.get_world_size()
        for case, count in enumerate(COUNTS):
            root = case % size
            block = ranks.whole_numbers((count,), torch.int64, case)
            blocks = [torch.zeros_like(block) for _ in range(size)]
            expected_blocks = [torch.zeros_like(block) for _ in range(size)]
            dist.gather(block, blocks if me == root else None, root)
            dist.gather(block, expected_blocks if me == root else None, root, group=gloo)
            same(blocks, expected_blocks, f"gather {count}")

            got, wanted = torch.zeros_like(block), torch.zeros_like(block)
            given = [block + r for r in range(size)]
            dist.scatter(got, given if me == root else None, root)
            dist.scatter(wanted, given if me == root else None, root, group=gloo)
            same(got, wanted, f"scatter {count}")
        said: list[Any] = [None] * size
        dist.gather_object({"rank": me}, said if me == 1 else None, 1)
        assert said == ([{"rank": r} for r in range(size)] if me == 1 else [None] * size)
        one: list[Any] = [None]
        dist.scatter_object_list(one, list("abcd"[:size]) if me == 0 else None, 0)
        assert one == ["abcd"[me]]


def _all_to_all() -> None:
    with ranks.job(oracle=True) as gloo:
        me, size = dist.get_rank(), dist.get_world_size()
        for case, count in enumerate(COUNTS):
            given = ranks.whole_numbers((size * count, 2), torch.float64, case)
            got, wanted = torch.zeros_like(given), torch.zeros_like(given)
            dist.all_to_all_single(got, given)
            dist.all_to_all_single(wanted, given, group=gloo)
            same(got, wanted, f"equal {count}")
        # Rank s sends s + r rows to rank r. Some send nothing, and the totals of the ranks differ.
        to, come = [me + r for r in range(size)], [s + me for s in range(size)]
        given = ranks.whole_numbers((sum(to), 3), torch.float32, 9)
        got, wanted = torch.zeros(sum(come), 3), torch.zeros(sum(come), 3)
        dist.all_to_all_single(got, given, come, to)
        dist.all_to_all_single(wanted, given, come, to, group=gloo)
        same(got, wanted, "unequal")
        pieces = [torch.zeros(n, 3) for n in come]
        dist.all_to_all(pieces, list(given.split(to)))
        same(torch.cat(pieces), wanted, "list")
        work = dist.all_to_all(pieces, list(given.split(to)), async_op=True)
        same(work.get_future().wait(), list(wanted.split(come)), "future of a list")


def _unequal_blocks() -> None:
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()
        outputs = [torch.zeros(r + 2, 3) for r in range(size)]
        dist.all_gather(outputs, torch.full((me + 2, 3), float(me)))
        same(outputs, [torch.full((r + 2, 3), float(r)) for r in range(size)], "all_gather")
        inputs = [torch.full((r + 2,), float(me + r)) for r in range(size)]
        output = torch.zeros(me + 2)
        dist.reduce_scatter(output, inputs)
        same(output, torch.full((me + 2,), float(sum(range(size)) + size * me)), "reduce_scatter")


def _layouts_of_tensors() -> None:
    """Tensors with gaps and with permuted dimensions; each rank may have different strides."""
    with ranks.job(oracle=True) as gloo:
        me, size = dist.get_rank(), dist.get_world_size()
        views: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda t: t[::2],
            lambda t: t.t(),
            lambda t: t[:, 1:3],
            lambda t: t[me % 2 :: 2] if me % 2 else t[::2],
        ]
        for number, view in enumerate(views):
            what = f"view {number}"
            values = ranks.whole_numbers((6, 6), torch.float64, number)
            plain = view(values).contiguous()
            expected = plain.clone()
            dist.all_reduce(expected, group=gloo)
            mine = view(values.clone())
            dist.all_reduce(mine)
            same(mine, expected, f"all_reduce {what}")
            mine = view(values.clone())
            (value,) = dist.all_reduce(mine, async_op=True).get_future().wait()
            same(value, expected, f"future {what}")

            wanted = [torch.zeros_like(plain) for _ in range(size)]
            dist.all_gather(wanted, plain, group=gloo)
            blocks = [view(torch.zeros_like(values)) for _ in range(size)]
            dist.all_gather(blocks, view(values.clone()))
            same(blocks, wanted, f"all_gather {what}")
            gathered = torch.zeros(size, *plain.shape, dtype=plain.dtype)
            dist.all_gather_into_tensor(gathered, view(values.clone()))
            same(gathered, torch.stack(wanted), f"all_gather_into_tensor {what}")
            exchanged = [view(torch.zeros_like(values)) for _ in range(size)]
            dist.all_to_all(exchanged, [view(values + r) for r in range(size)])
            same(exchanged, [block + me for block in wanted], f"all_to_all {what}")

            mine = view(values.clone())
            dist.broadcast(mine, 1)
            same(mine, wanted[1], f"broadcast {what}")
            before = (me - 1) % size
            work = dist.irecv(mine, before)
            dist.send(plain, (me + 1) % size)
            work.wait()
            same(mine, wanted[before], f"message {what}")
        # The memory between the elements is unchanged.
        whole = torch.full((10,), float(me))
        dist.all_reduce(whole[::2])
        same(whole[1::2], torch.full((5,), float(me)), "between")


def _pending_conjugation() -> None:
    """Torch's own layers reject conjugated views or resolve them; calls that arrive are right."""
    with ranks.job():
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
        values = torch.complex(torch.arange(4.0), torch.full((4,), dist.get_rank() + 1.0))
        mine = values.clone().conj()
        options = dist.BroadcastOptions()
        options.rootRank = 1
        backend.broadcast([mine], options).wait()
        same(mine.resolve_conj(), torch.complex(torch.arange(4.0), torch.full((4,), -2.0)), "conj")
        mine = torch._neg_view(torch.ones(3))
        backend.allreduce([mine], dist.AllreduceOptions()).wait()
        same(mine.resolve_neg(), torch.full((3,), -float(dist.get_world_size())), "neg")


def _sparse() -> None:
    with ranks.job(oracle=True) as gloo:
        me = dist.get_rank()
        for case, non_zeros in enumerate([5, 0, 40]):
            generator = torch.Generator().manual_seed(case * 10 + me)
            # Indices occur twice. Rank 0 may have no elements.
            count = non_zeros if me else 0
            indices = torch.randint(0, 6, (2, count), generator=generator)
            values = torch.randint(1, 9, (count, 3), generator=generator).float()
            mine = torch.sparse_coo_tensor(indices, values, (6, 6, 3))
            expected = mine.to_dense()
            work = dist.all_reduce(mine, async_op=True)
            dense = torch.ones(100)
            dist.all_reduce(dense)  # runs before parts of the sparse one
            work.wait()
            dist.all_reduce(expected, group=gloo)
            same(mine.to_dense(), expected, f"sparse {non_zeros}")
            assert mine.is_sparse


def _coalescing() -> None:
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()
        total = float(sum(range(size)))
        mine = [torch.full((n,), float(me)) for n in (3, 5000)]
        views = torch.zeros(8)
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            for tensor in mine:
                dist.all_reduce(tensor, async_op=True)
            dist.broadcast(views[::2].add_(me), 1, async_op=True)
            dist.broadcast(views[1::2], 1, async_op=True)
        manager.wait()
        same(mine, [torch.full((n,), total) for n in (3, 5000)], "coalesced")
        outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
        dist.all_gather_coalesced(outputs, [torch.full((2,), me + 0.0), torch.full((3,), me + 9.0)])
        for r, (two, three) in enumerate(outputs):
            same(two, torch.full((2,), r + 0.0), "two")
            same(three, torch.full((3,), r + 9.0), "three")


@layouts
@pytest.mark.parametrize(
    "cases",
    [
        _reduce,
        _rooted,
        _all_to_all,
        _unequal_blocks,
        _layouts_of_tensors,
        _pending_conjugation,
        _sparse,
        _coalescing,
    ],
)
def test_calls(layout: str, cases: Callable[[], None]) -> None:
    ranks.check_ranks(cases, layout)


# --- monitored barrier ----------------------------------------------------------------------------


def _late(missing: list[int], wait_all: bool) -> str:
    with ranks.job():
        dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=wait_all)
        if dist.get_rank() in missing:
            # The rank must stay alive, because a lost rank is another error.
            ranks.await_ranks("told", dist.get_world_size() - len(missing))
            return ""
        text = "passed"
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=wait_all)
        except dist.DistBackendError as error:
            text = f"{type(error).__name__}: {error}"
        ranks.arrive("told")
        return text


@layouts
@pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch refuses all names but gloo")
def test_monitored_barrier_names_who_is_missing(layout: str) -> None:
    size = sum(ranks.nodes_of(layout))
    found = ranks.check_ranks(_late, layout, [1], False)
    assert "Rank 1 failed to pass monitoredBarrier in 1000 ms" in found[0]
    for rank in range(2, size):
        assert f"Rank {rank} successfully reached monitoredBarrier, but received" in found[rank]
        assert "Rank 1 failed to pass monitoredBarrier" in found[rank]
    missing = list(range(1, size))
    found = ranks.check_ranks(_late, layout, missing, True)
    assert f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier" in found[0]


# --- what torch builds on top ---------------------------------------------------------------------


def _functional() -> None:
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        to, come = [me + r for r in range(size)], [s + me for s in range(size)]
        result = funcol.all_to_all_single(torch.full((sum(to),), float(me)), come, to, group)
        assert isinstance(result, funcol.AsyncCollectiveTensor)
        wanted = torch.cat([torch.full((n,), float(s)) for s, n in enumerate(come)])
        same(result + 0, wanted, "all_to_all_single")
        ones = funcol.all_reduce_coalesced([torch.ones(3), torch.ones(5)], "sum", group)
        same([one + 0 for one in ones], [torch.full((n,), size + 0.0) for n in (3, 5)], "coalesced")
        given = torch.full((2, 3), me + 1.0, requires_grad=True)
        gathered = funcol.all_gather_tensor_autograd(given, 0, group)
        # torch 2.11 needs a contiguous gradient, and the gradient of sum() is not contiguous.
        (gathered * torch.ones_like(gathered)).sum().backward()
        same(given.grad, torch.full((2, 3), float(size)), "gradient")


def _dtensor() -> None:
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        whole = torch.arange(7.0 * 10).reshape(7, 10)
        for before in (Shard(0), Shard(1), Replicate()):
            for after in (Shard(0), Shard(1), Replicate()):
                tensor = distribute_tensor(whole, mesh, [before]).redistribute(mesh, [after])
                same(tensor.full_tensor(), whole, f"{before} to {after}")
        from torch.distributed.tensor import DTensor

        partial = DTensor.from_local(torch.full((4, 4), me + 1.0), mesh, [Partial()])
        total = torch.full((4, 4), float(sum(range(1, size + 1))))
        same(partial.redistribute(mesh, [Shard(1)]).full_tensor(), total, "partial to shard")
        same(partial.full_tensor(), total, "partial")


@pytest.mark.parametrize("cases", [_functional, _dtensor])
@pytest.mark.parametrize("detail", ["OFF", "DETAIL"])
@layouts
def test_on_top(layout: str, detail: str, cases: Callable[[], None]) -> None:
    ranks.check_ranks(cases, layout, env={"TORCH_DISTRIBUTED_DEBUG": detail})


@pytest.mark.parametrize("layout", ["4", "2x2"])
@on_ranks("{layout}")
def test_mesh_of_two_dimensions(layout: str) -> None:
    with ranks.job():
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
        for name in ("dp", "tp"):
            members = dist.get_process_group_ranks(mesh.get_group(name))
            tensor = torch.full((3,), float(dist.get_rank()))
            dist.all_reduce(tensor, group=mesh.get_group(name))
            same(tensor, torch.full((3,), float(sum(members))), name)


@pytest.mark.parametrize("cases", [_rooted, _all_to_all, _coalescing])
def test_with_torchs_own_checks(cases: Callable[[], None]) -> None:
    """Detail mode first compares the arguments of each call, in a gloo group of its own."""
    ranks.check_ranks(cases, "3", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


# Inductor starts a compiler on each rank. What it compiles is what the other backend calls.
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
@pytest.mark.slow
@on_ranks("2", timeout=300)
def test_compiled(backend: str) -> None:
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()

        @torch.compile(fullgraph=True, backend=backend)
        def step(tensor: torch.Tensor) -> torch.Tensor:
            return funcol.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1

        total = 2.0 * sum(range(1, size + 1)) + 1
        same(step(torch.full((5,), me + 1.0)), torch.full((5,), total), "compiled")


# --- groups ---------------------------------------------------------------------------------------


def _split() -> list[int]:
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()
        halves = [list(range(size // 2)), list(range(size // 2, size))]
        mine = halves[0] if me in halves[0] else halves[1]
        half = dist.split_group(split_ranks=halves)
        alone = dist.split_group(split_ranks=[[r] for r in range(size)])
        again = dist.split_group(half, split_ranks=[[len(mine) - 1, 0]] if len(mine) > 1 else [[0]])
        for count in (1, 100_000):
            tensor = torch.full((count,), float(me))
            dist.all_reduce(tensor, group=half)
            same(tensor, torch.full((count,), float(sum(mine))), "half")
            dist.all_reduce(tensor, group=alone)
            same(tensor, torch.full((count,), float(sum(mine))), "alone")
            if mine.index(me) in (0, len(mine) - 1):
                dist.broadcast(tensor.fill_(me), mine[-1], group=again)
                same(tensor, torch.full((count,), float(mine[-1])), "again")
        dist.destroy_process_group(half)
        dist.barrier()
        return mine


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="torch splits no groups without GPUs")
@pytest.mark.parametrize("layout", ["4", "2x2", "3+1"])
def test_split_group(layout: str) -> None:
    ranks.check_ranks(_split, layout)
