"""Invalid calls raise an error with a clear text, before any data moves."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import smddp

pytestmark = pytest.mark.multiprocess

ONES = torch.ones
CPU = torch.device("cpu")


def backend() -> Any:
    return dist.group.WORLD._get_backend(CPU)


class Case(NamedTuple):
    call: Callable[[], Any]
    error: type[Exception]
    text: str


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


def _without_storage() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


# Calls in a job of two ranks. pytest prints the names.
def _gather_options(root: int) -> c10d.GatherOptions:
    options = c10d.GatherOptions()
    options.rootRank = root
    return options


REFUSED: dict[str, Case] = {
    "dtype of a reduction": Case(
        lambda: dist.all_reduce(ONES(3).to(torch.float8_e5m2)),
        TypeError,
        "all_reduce: Float8_e5m2 can be moved, but not reduced; convert the tensor",
    ),
    "bitwise operation": Case(
        lambda: dist.all_reduce(ONES(3), dist.ReduceOp.BAND),
        TypeError,
        "BAND of float32 is undefined; float32 has SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM",
    ),
    "mean of bool": Case(
        lambda: dist.all_reduce(ONES(3) > 0, dist.ReduceOp.AVG),
        TypeError,
        "AVG of bool is undefined; bool has SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR",
    ),
    "complex factor": Case(
        lambda: dist.all_reduce(ONES(3), dist._make_nccl_premul_sum(torch.tensor([1j]))),
        ValueError,
        "the factor of PREMUL_SUM must be one real number, got a ComplexFloat tensor",
    ),
    "no storage": Case(
        lambda: dist.broadcast(_without_storage(), 0),
        ValueError,
        "a Float tensor of shape [3] reaches beyond the 0 bytes of its storage",
    ),
    "device": Case(
        lambda: backend().allreduce([ONES(3, device="meta")], dist.AllreduceOptions()),
        NotImplementedError,
        "all_reduce is not implemented: for tensors on meta; move them to the CPU",
    ),
    "overlap": Case(
        lambda: dist.all_reduce(ONES(1).expand(4)),
        ValueError,
        "elements of a Float tensor of shape [4] share memory",
    ),
    "two tensors": Case(
        lambda: backend().allreduce([ONES(3), ONES(3)], dist.AllreduceOptions()),
        ValueError,
        "all_reduce: expects one tensor per rank, got 2",
    ),
    "no tensors": Case(
        lambda: backend().allreduce_coalesced([], dist.AllreduceCoalescedOptions()),
        ValueError,
        "all_reduce_coalesced: no tensors",
    ),
    "mixed types": Case(
        lambda: backend().allreduce_coalesced(
            [ONES(3), ONES(3).double()], dist.AllreduceCoalescedOptions()
        ),
        TypeError,
        "must have one dtype, got Double and Float",
    ),
    "short list": Case(
        lambda: backend().allgather([[_empty(3)]], [ONES(3)], c10d.AllgatherOptions()),
        ValueError,
        "all_gather: the output list must have one tensor per rank (2), got 1",
    ),
    "uneven list": Case(
        lambda: backend().allgather([[_empty(4), _empty(4)]], [ONES(3)], c10d.AllgatherOptions()),
        ValueError,
        "all_gather: all tensors of the output list, at its own rank, must have 3 elements, got 4",
    ),
    "short list of splits": Case(
        lambda: dist.all_to_all_single(_empty(4), ONES(4), [4], [4]),
        ValueError,
        "all_to_all_single: the input needs one split size per rank (2), got 1",
    ),
    "splits of another size": Case(
        lambda: dist.all_to_all_single(_empty(4), ONES(4), [2, 2], [2, 3]),
        ValueError,
        "the split sizes of the input add up to 5, but it has 4 rows",
    ),
    "splits whose sum no integer holds": Case(
        lambda: dist.all_to_all_single(_empty(4), ONES(4), [2, 2], [2**62, 2**62]),
        ValueError,
        "the split sizes of the input add up to more than 2^63, but it has 4 rows",
    ),
    "no equal splits": Case(
        lambda: dist.all_to_all_single(_empty(3), ONES(3)),
        ValueError,
        "3 rows of the input do not divide among 2 ranks; pass its split sizes",
    ),
    "list of the wrong rank": Case(
        lambda: backend().gather(
            [[_empty(3)]], [ONES(3)], _gather_options((dist.get_rank() + 1) % 2)
        ),
        ValueError,
        "gather: only the root rank has an output list",
    ),
    "sparse product": Case(
        lambda: dist.all_reduce(ONES(3).to_sparse(), dist.ReduceOp.PRODUCT),
        ValueError,
        "all_reduce: sparse tensors can only be summed",
    ),
    "negative tag": Case(
        lambda: backend().send([ONES(3)], 1, -1), ValueError, "send: a tag must not be negative"
    ),
    "types of a list": Case(
        lambda: backend().allgather(
            [[_empty(3), _empty(3).double()]], [ONES(3)], c10d.AllgatherOptions()
        ),
        TypeError,
        "must have one dtype",
    ),
    "gathered size": Case(
        lambda: backend()._allgather_base(_empty(7), ONES(3), c10d.AllgatherOptions()),
        ValueError,
        "the output must have 2 times the elements of the input (one part per rank), got 7 and 3",
    ),
    "gathered type": Case(
        lambda: backend()._allgather_base(_empty(6).half(), ONES(3), c10d.AllgatherOptions()),
        TypeError,
        "must have one dtype",
    ),
    "scattered size": Case(
        lambda: backend()._reduce_scatter_base(_empty(3), ONES(7), dist.ReduceScatterOptions()),
        ValueError,
        "the input must have 2 times the elements of the output",
    ),
    "scattered list": Case(
        lambda: backend().reduce_scatter([_empty(3)], [[ONES(3)]], dist.ReduceScatterOptions()),
        ValueError,
        "reduce_scatter: the input list must have one tensor per rank (2), got 1",
    ),
    "destination": Case(
        lambda: backend().send([ONES(3)], 2, 0), ValueError, "destination rank 2 is not in 0"
    ),
    "source": Case(
        lambda: backend().recv([ONES(3)], -3, 0), ValueError, "source rank -3 is not in 0"
    ),
}


def _caught() -> dict[str, tuple[str, str, float]]:
    """Returns the error of each case, and the result of the next collective."""
    found = {}
    with ranks.job():
        for name, case in REFUSED.items():
            kind, text = "", "nothing was raised"
            try:
                case.call()
            except Exception as error:
                kind = next(t.__name__ for t in type(error).__mro__ if t.__module__ == "builtins")
                text = str(error)
            tensor = torch.ones(5)
            dist.all_reduce(tensor)
            found[name] = (kind, text, tensor.sum().item())
    return found


@pytest.fixture(scope="module")
def caught() -> list[dict[str, tuple[str, str, float]]]:
    found: list[dict[str, tuple[str, str, float]]] = ranks.check_ranks(_caught, "2")
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_refused(caught: list[dict[str, tuple[str, str, float]]], name: str) -> None:
    for rank in caught:
        kind, text, following = rank[name]
        assert REFUSED[name].text in text
        assert text.startswith("smddp: ")
        assert kind == REFUSED[name].error.__name__
        assert following == 10.0, "the collective after the refused one"


def _after_destroy() -> list[str]:
    texts = []
    dist.init_process_group("smddp")
    held = backend()
    dist.destroy_process_group()
    for call in (
        lambda: held.allreduce([ONES(3)], dist.AllreduceOptions()),
        lambda: held.barrier(dist.BarrierOptions()),
    ):
        try:
            call()
            texts.append("nothing was raised")
        except ValueError as error:
            texts.append(str(error))
    held.abort()  # and a second shutdown is not an error
    held.shutdown()
    return texts


def test_use_after_destroy() -> None:
    for texts in ranks.check_ranks(_after_destroy, "2"):
        for text in texts:
            assert "this process group has been destroyed" in text


def _other_backend() -> str:
    dist.init_process_group("gloo")
    dist.barrier()  # a rank that leaves while others connect breaks their connections
    try:
        smddp.statistics()
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "nothing was raised"


def test_statistics_of_another_backend() -> None:
    for text in ranks.check_ranks(_other_backend, "2"):
        assert 'does not use backend "smddp"' in text


def _inspected() -> list[str]:
    """Asks groups of several kinds for their statistics; returns the errors."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers "fake"
    errors = []
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    with ranks.job():
        dist.all_reduce(torch.ones(3))
        assert any(name.startswith("allreduce/") for name in smddp.statistics())
        assert "rank" in smddp.describe()
        for group in (dist.new_group([0]), dist.new_group(backend="cuda:fake")):
            try:
                smddp.statistics(group)
            except ValueError as error:
                errors.append(str(error))
    return errors


def test_statistics_of_wrapped_and_other_groups() -> None:
    other = 'the group does not use backend "smddp" for CPU tensors'
    assert ranks.check_ranks(_inspected, "2") == [[other], ["this rank is not in the group", other]]


def _bad_setting() -> str:
    try:
        dist.init_process_group("smddp")
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("SMDDP_CHUNK_BYTES", "many", "write digits only, without a unit, for example SMDDP_CHUNK"),
        ("SMDDP_CHUNK_BYTES", "256KiB", "for example SMDDP_CHUNK_BYTES=262144"),
        ("SMDDP_FABRIC_WINDOW", "-1", "is not a whole number of messages from 1 to 256"),
        ("SMDDP_FABRIC_RMA", "maybe", "use 1, true or on, or 0, false or off, for example"),
        ("SMDDP_FABRIC_WINDOW", "0", "is not a whole number of messages from 1 to 256"),
        ("SMDDP_POOL_BYTES", "16383", "is not a whole number of bytes from 16384 to"),
        ("SMDDP_POOL_BYTES", "1", "SMDDP_POOL_BYTES=8388608 (the default), or unset it"),
        ("SMDDP_CHUNK_BYTES", "9223372036854775807", "bytes from 64 to 1099511627776; write"),
        # Otherwise two operations in flight would have the same number.
        ("SMDDP_IN_FLIGHT", "255", "is not a whole number of operations from 0 to 254"),
        ("SMDDP_SIMD", "avx1024", "expects auto, scalar, avx2 or avx512; unset it for auto"),
        ("SMDDP_SIMD", "or", "expects auto, scalar, avx2 or avx512"),
        ("SMDDP_CONGESTION_CONTROL", "cubik", "expects auto, system, cubic, reno, bbr or dctcp"),
        ("SMDDP_STAGING_STORES", "fast", "expects auto, ordinary or streaming"),
        ("SMDDP_GPU_PATH", "ncc", "expects auto, host, nccl, ipc or rails"),
        ("SMDDP_ALGORITHM", "allreduce=rign", 'allreduce has no algorithm "rign", only one_shot'),
        ("SMDDP_ALGORITHM", "rign", '"rign" is not a collective; write collective=name'),
    ],
)
def test_bad_setting_is_refused_at_init(variable: str, value: str, text: str) -> None:
    for said in ranks.check_ranks(_bad_setting, "1", env={variable: value}):
        assert f"{variable}={value}" in said
        assert text in said


def _different_settings(variable: str, value: str) -> str:
    if int(os.environ["RANK"]) == 1:
        os.environ[variable] = value
    try:
        dist.init_process_group("smddp")
    except dist.DistBackendError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("variable", "value", "common"),
    [
        ("SMDDP_CHUNK_BYTES", "4096", "262144"),
        ("SMDDP_GPU_PATH", "rails", "auto"),
    ],
)
def test_settings_that_differ_between_ranks(variable: str, value: str, common: str) -> None:
    for text in ranks.check_ranks(_different_settings, "3", variable, value):
        assert text.startswith("SMDDPCollectiveMismatchError: rank 0 (")
        # Rank 1 says so without waiting for rank 2.
        assert re.search(f"{variable} is {common} on ranks? 0(, 2)? and {value} on rank 1", text)
