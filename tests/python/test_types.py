"""Every dtype can be copied, and reduced exactly if docs/operations.md says so."""

from __future__ import annotations

import warnings

import pytest
import ranks
import torch
import torch.distributed as dist
from on_ranks import on_ranks

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["2", "2x2"])

FACTOR = 0.5
OPS = {
    "SUM": dist.ReduceOp.SUM,
    "AVG": dist.ReduceOp.AVG,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "BAND": dist.ReduceOp.BAND,
    "BOR": dist.ReduceOp.BOR,
    "BXOR": dist.ReduceOp.BXOR,
    "PREMUL_SUM": dist._make_nccl_premul_sum(FACTOR),
}
ONLY_MOVED = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex32,
    torch.bits8,
    torch.bits16,
]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _documented() -> dict[torch.dtype, set[str]]:
    """Returns the reduce operations that docs/operations.md lists for each dtype."""
    lines = iter((ranks.ROOT / "docs/operations.md").read_text().splitlines())
    head = next(_cells(line) for line in lines if line.startswith("| dtype "))
    next(lines)
    table: dict[torch.dtype, set[str]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        names, *entries = _cells(line)
        defined = [title for title, entry in zip(head[1:], entries, strict=True) if entry != "–"]
        for name in names.split(", "):
            table[getattr(torch, name)] = set(", ".join(defined).split(", "))
    return table


DOCUMENTED = _documented()


def _values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Returns numbers whose sums, products and averages over two or four ranks are exact."""
    if dtype.is_complex:
        return torch.complex(
            _values(count, dtype.to_real(), seed), _values(count, dtype.to_real(), seed + 500)
        )
    numbers = ranks.whole_numbers((count,), torch.int64, seed)
    if dtype == torch.bool:
        return numbers > 1
    return (numbers - 2 if dtype.is_signed else numbers).to(dtype)


def _reduced(mine: torch.Tensor, op: str, gloo: dist.ProcessGroup) -> torch.Tensor:
    """Returns the expected result, computed by gloo in a dtype that represents all values."""
    dtype = mine.dtype
    wide = torch.int64
    if dtype.is_complex or dtype.is_floating_point:
        wide = torch.complex128 if dtype.is_complex else torch.float64
    result = mine.to(wide, copy=True)
    if op == "PREMUL_SUM":
        result *= FACTOR
    sums = op in ("SUM", "AVG", "PREMUL_SUM")
    dist.all_reduce(result, dist.ReduceOp.SUM if sums else OPS[op], group=gloo)
    if op == "AVG":
        truncates = wide == torch.int64
        result = torch.div(
            result, dist.get_world_size(), rounding_mode="trunc" if truncates else None
        )
    return result.to(dtype)


def _same(mine: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(mine, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def _backend() -> dist.Backend:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


@layouts
@on_ranks("{layout}")
def test_what_is_documented_is_reduced(layout: str) -> None:
    with ranks.job(oracle=True) as gloo:
        assert gloo is not None
        me, size = dist.get_rank(), dist.get_world_size()
        cells = [(dtype, op) for dtype, ops in DOCUMENTED.items() for op in sorted(ops)]
        for seed, (dtype, op) in enumerate(cells):
            for count in (3, 1021):
                what = f"{op} of {count} {dtype}"
                whole = _values(count * size, dtype, seed)
                expected = _reduced(whole, op, gloo)
                part = torch.zeros(count, dtype=dtype)
                dist.reduce_scatter_tensor(part, whole, OPS[op])
                _same(part, expected[me * count :][:count], f"reduce_scatter_tensor: {what}")
                below = whole.clone()
                root = seed % size
                rooted = whole.clone()
                dist.reduce(rooted, root, OPS[op])
                _same(rooted, expected if me == root else whole, f"reduce: {what}")
                dist.all_reduce(whole, OPS[op])
                _same(whole, expected, f"all_reduce: {what}")
                # Calls the group directly: torch's functions pass complex numbers as pairs of real
                # ones.
                options = dist.AllreduceOptions()
                options.reduceOp = OPS[op]
                _backend().allreduce([below], options).wait()
                _same(below, expected, f"allreduce: {what}")


@on_ranks("2")
def test_what_is_not_documented_is_refused_before_anything_moves() -> None:
    """Only rank 0 makes the unsupported call. If it moved data, the next call would not match."""
    with ranks.job():
        for dtype in [*DOCUMENTED, *ONLY_MOVED]:
            for op in OPS.keys() - DOCUMENTED.get(dtype, set()):
                options = dist.AllreduceOptions()
                options.reduceOp = OPS[op]
                if dist.get_rank() == 0:
                    tensor = torch.zeros(48, dtype=torch.uint8).view(dtype)
                    with pytest.raises(TypeError, match="smddp: all_reduce: "):
                        _backend().allreduce([tensor], options)
            after = torch.ones(3)
            dist.all_reduce(after)
            _same(after, torch.full((3,), 2.0), f"after {dtype}")


@layouts
@on_ranks("{layout}")
def test_every_type_is_moved_bit_by_bit(layout: str) -> None:
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()
        following, previous = (me + 1) % size, (me - 1) % size
        for seed, dtype in enumerate([*DOCUMENTED, *ONLY_MOVED]):
            generator = torch.Generator().manual_seed(seed)
            # Random bytes, with NaNs, and with bool values other than 0 and 1.
            blocks = torch.randint(0, 256, (size, 480), dtype=torch.uint8, generator=generator)
            mine = blocks[me].clone().view(dtype)

            def check(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
                _same(got.view(torch.uint8), wanted, f"{what} of {dtype}")  # noqa: B023

            outputs = [torch.zeros(480, dtype=torch.uint8).view(dtype) for _ in range(size)]
            dist.all_gather(outputs, mine)
            for rank, output in enumerate(outputs):
                check(output, blocks[rank], "all_gather")
            whole = torch.zeros(size * 480, dtype=torch.uint8).view(dtype)
            dist.all_gather_into_tensor(whole, mine)
            check(whole, blocks.flatten(), "all_gather_into_tensor")
            root = seed % size
            outputs = [torch.zeros(480, dtype=torch.uint8).view(dtype) for _ in range(size)]
            dist.gather(mine, outputs if me == root else None, root)
            for rank, output in enumerate(outputs):
                check(output, blocks[rank] * (me == root), "gather")
            got = torch.zeros(480, dtype=torch.uint8).view(dtype)
            given = [block.clone().view(dtype) for block in blocks]
            dist.scatter(got, given if me == root else None, root)
            check(got, blocks[me], "scatter")
            # Block r of rank s is filled with s + r.
            turned = torch.cat([blocks[me:], blocks[:me]])
            dist.all_to_all_single(whole, turned.flatten().view(dtype))
            check(whole, turned.flatten(), "all_to_all_single")
            got = torch.zeros(480, dtype=torch.uint8).view(dtype)
            dist.all_to_all(outputs, list(turned.view(dtype)))
            for rank, output in enumerate(outputs):
                check(output, turned[rank], "all_to_all")
            work = dist.irecv(got, previous)
            dist.send(mine, following)
            assert work is not None
            work.wait()
            check(got, blocks[previous], "send and recv")
            dist.broadcast(mine, 1)
            check(mine, blocks[1], "broadcast")


def test_the_table_names_every_operation() -> None:
    assert set().union(*DOCUMENTED.values()) == OPS.keys()
    assert len(DOCUMENTED) == 15
