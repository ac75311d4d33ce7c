"""DDP and FSDP2 train the same parameters as with gloo, and DDP's buckets are not staged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import smddp

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["2", "2x2"])

STEPS = 5
Parameters = list[torch.Tensor]


class Model(nn.Module):
    """A model with several buckets of 64 KiB. A step can leave one layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.spare = nn.Linear(256, 256)
        self.last = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = torch.relu(self.first(x))
        if not skip:
            x = torch.relu(self.spare(x))
        out: torch.Tensor = self.last(x)
        return out


def _batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [
        (torch.randn(16, 64, generator=generator), torch.randint(0, 10, (16,), generator=generator))
        for _ in range(count)
    ]


def _train(wrap: Callable[[nn.Module], nn.Module], how: str = "") -> Parameters:
    torch.manual_seed(0)
    model = wrap(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (x, y) in enumerate(_batches(STEPS)):
        skip = how == "unused" and (step + dist.get_rank()) % 2 == 0
        if how == "no_sync" and step % 2 == 0:
            with model.no_sync():
                nn.functional.cross_entropy(model(x), y).backward()
            continue
        nn.functional.cross_entropy(model(x, skip), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for p in model.parameters()
    ]


def _same(mine: Parameters, expected: Parameters) -> None:
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


@layouts
@on_ranks("{layout}")
def test_ddp_learns_the_same_as_with_gloo(layout: str) -> None:
    with ranks.job(oracle=True) as gloo:
        for views in (True, False):
            for how in ("", "no_sync", "unused"):
                options: dict[str, Any] = {
                    "gradient_as_bucket_view": views,
                    "bucket_cap_mb": 1 / 16,
                    "find_unused_parameters": how == "unused",
                }
                mine = _train(lambda m: DistributedDataParallel(m, **options), how)  # noqa: B023
                options["process_group"] = gloo
                expected = _train(lambda m: DistributedDataParallel(m, **options), how)  # noqa: B023
                _same(mine, expected)


@layouts
@on_ranks("{layout}")
def test_fsdp2_learns_the_same_as_with_gloo(layout: str) -> None:
    with ranks.job(oracle=True) as gloo:

        def on(group: dist.ProcessGroup) -> Callable[[nn.Module], nn.Module]:
            mesh = DeviceMesh.from_group(group, "cpu")

            def wrap(model: nn.Module) -> nn.Module:
                for layer in model.children():
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
                return model

            return wrap

        mine = _train(on(dist.group.WORLD))
        _same(mine, _train(on(gloo)))


# --- communication memory -------------------------------------------------------------------------


def _zero_copy_calls() -> tuple[int, int]:
    """Runs a DDP step; returns the number of all_reduces without staging, and of all."""
    with ranks.job():
        _train(DistributedDataParallel)
        used = smddp.statistics()
        calls = sum(use["calls"] for use in used.values())
        return sum(use["zero_copy"] for use in used.values()), calls


@pytest.mark.parametrize(
    ("env", "expected"),
    [({}, True), ({"DDP_DISABLE_COMM_MEM": "1"}, False), ({"SMDDP_COMM_MEMORY": "0"}, False)],
    ids=["default", "DDP_DISABLE_COMM_MEM", "SMDDP_COMM_MEMORY"],
)
def test_buckets_of_ddp_are_not_staged(env: dict[str, str], expected: bool) -> None:
    for zero_copy, calls in ranks.check_ranks(_zero_copy_calls, "2", env=env):
        assert calls >= STEPS
        assert (zero_copy >= STEPS) if expected else (zero_copy == 0)


def _mapped() -> int:
    """Returns the bytes of shared memory that this process uses."""
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith("RssShmem")]
    return int(line.split()[1]) * 1024


@layouts
@on_ranks("{layout}")
def test_own_tensors_in_communication_memory(layout: str) -> None:
    elements = 8 << 20
    dist.init_process_group("smddp")
    size = dist.get_world_size()
    tensor = smddp.empty(elements)
    assert tensor.dtype == torch.float32
    assert smddp.empty(2, 3, dtype=torch.int64).shape == (2, 3)
    assert smddp.empty((2, 3)).shape == (2, 3)
    assert smddp.empty(np.int64(2), torch.tensor(3)).shape == (2, 3)
    assert smddp.empty(np.array([2, 3])).shape == (2, 3)
    assert smddp.empty(0).numel() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the failure must not look like a lack of memory
        with pytest.raises(RuntimeError, match="negative dimension -3"):
            smddp.empty(-3)
        with pytest.raises(RuntimeError, match="overflowed"):
            smddp.empty(1 << 62)
    for part in (tensor, tensor[1:], tensor[: elements // 2]):
        part.fill_(1)
        dist.all_reduce(part)
        assert part.min() == part.max() == size
    ordinary = torch.ones(elements)
    dist.all_reduce(ordinary)
    # One rank's tensor is in communication memory, the other's is not: both must use the same
    # algorithm.
    mixed = smddp.empty(100_000) if dist.get_rank() == 0 else torch.empty(100_000)
    mixed.fill_(1)
    dist.all_reduce(mixed)
    assert mixed.min() == mixed.max() == size
    use = smddp.statistics()
    assert sum(one["zero_copy"] for one in use.values()) == 3, use

    # Freed memory is reused, and a tensor may outlive the group that communicated it.
    del part, mixed
    for _ in range(20):
        again = smddp.empty(elements)
        again.fill_(1)
        dist.all_reduce(again)
        del again
    assert _mapped() < (10 << 20) * 4 * (size + 2), _mapped()
    tensor.fill_(3)
    dist.destroy_process_group()
    assert tensor.sum().item() == 3 * elements
    smddp.torch._load.load().shutdown()
    assert tensor.sum().item() == 3 * elements
    tensor.fill_(4)
    assert tensor.sum().item() == 4 * elements


def _too_much() -> None:
    with ranks.job():
        # More than any machine has, so ordinary memory is too small as well.
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            smddp.empty(1 << 60, dtype=torch.uint8)
        dist.all_reduce(smddp.empty(1000))


def test_more_memory_than_there_is() -> None:
    for outcome in ranks.run_ranks(_too_much, "2"):
        assert outcome.status == 0, str(outcome)
        assert "no communication memory, ordinary memory is used instead" in outcome.stderr


@pytest.mark.parametrize("layout", ["2", "1+1"])
@on_ranks("{layout}")
def test_storages_in_communication_memory_change_their_size(layout: str) -> None:
    with ranks.job():
        for grow, make in ((True, smddp.empty), (False, smddp.empty), (True, torch.empty)):
            tensor = make(1000).fill_(dist.get_rank() + 1)
            tensor.resize_(100_000 if grow else 10)
            assert (tensor[:1000] == dist.get_rank() + 1).all()
            tensor[1000:] = 1.0
            dist.all_reduce(tensor)
            assert (tensor[:1000] == 3).all()
            assert (tensor[1000:] == 2).all()
            tensor.untyped_storage().resize_(0)
            assert tensor.untyped_storage().nbytes() == 0


def _pad(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A hook that makes the bucket longer, so that it can be divided among the ranks."""
    grads, size = bucket.buffer(), dist.get_world_size()
    count = grads.numel()
    grads.resize_(count + 1000)
    grads[count:] = 0
    work = dist.all_reduce(grads.div_(size), async_op=True)
    return work.get_future().then(lambda future: future.value()[0][:count])  # type: ignore[no-any-return]


_pad.__annotations__.clear()  # torch compares them, and they are texts here


@on_ranks("2")
def test_hooks_may_make_buckets_longer() -> None:
    with ranks.job():

        def padded(model: nn.Module) -> nn.Module:
            wrapped = DistributedDataParallel(model, bucket_cap_mb=0.06)
            wrapped.register_comm_hook(None, _pad)
            return wrapped

        for one, two in zip(_train(padded), _train(DistributedDataParallel), strict=True):
            torch.testing.assert_close(one, two)
