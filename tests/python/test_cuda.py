"""The cases of test_device.py on GPUs: through the host, and by NCCL.

One GPU is enough: its ranks share it, and NCCL takes them for several hosts (NCCL_HOSTID).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import device_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from smddp import _load

GPUS = torch.cuda.device_count()
several_nodes = pytest.mark.skipif(
    not _load.load().build_info()["fabric"], reason="built without libfabric"
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(GPUS == 0, reason="no GPU"),
    pytest.mark.timeout(300),
]
layouts = pytest.mark.parametrize(
    "layout", ["1", "2", "4", pytest.param("2x2", marks=several_nodes)]
)
HOST = {"SMDDP_GPU_PATH": "host"}


@layouts
@pytest.mark.parametrize("cases", device_cases.VALUES)
def test_values_through_the_host(layout: str, cases: Callable[[str], None]) -> None:
    ranks.check_ranks(cases, layout, "cuda", env=HOST, timeout=200)


@pytest.mark.parametrize("layout", ["2", pytest.param("2x2", marks=several_nodes)])
@pytest.mark.parametrize("cases", device_cases.ORDER)
def test_order_through_the_host(layout: str, cases: Callable[[str], None]) -> None:
    ranks.check_ranks(cases, layout, "cuda", env=HOST, timeout=120)


def test_absent_rank() -> None:
    first, second, _ = ranks.check_ranks(device_cases.times_out, "3", "cuda", env=HOST)
    for said in (first, second):
        assert said.startswith("CollectiveTimeoutError")


def test_refused_calls() -> None:
    for mixed, wrong_size, undefined in ranks.check_ranks(
        device_cases.refuses, "2", "cuda", env=HOST
    ):
        assert mixed.startswith("ValueError: smddp: all tensors of a call must be on one device")
        assert wrong_size.startswith("ValueError")
        assert undefined.startswith("TypeError")


# --- NCCL -----------------------------------------------------------------------------------------


def _by_nccl(cases: str) -> str:
    # Before NCCL reads it: it refuses two ranks on one GPU of one host.
    os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    getattr(device_cases, cases)("cuda")
    return torch.cuda.get_device_name()


@pytest.mark.parametrize("layout", ["1", "2"])
@pytest.mark.parametrize(
    "cases",
    ["reduces", "moves_plainly", "follows_streams", "does_not_block", "barrier_covers", "trains"],
)
def test_nccl(layout: str, cases: str) -> None:
    ranks.check_ranks(_by_nccl, layout, cases, env={"SMDDP_GPU_PATH": "nccl"}, timeout=200)


def _chosen_path() -> tuple[str, str]:
    with device_cases.job("cuda") as device:
        dist.all_reduce(torch.ones(10, device=device.device))
        backend = dist.group.WORLD._get_backend(device.device)
        part = dist.new_group([0])
        if dist.get_rank() == 0:
            tensor = torch.ones(10, device=device.device)
            dist.all_reduce(tensor, group=part)
            assert tensor.cpu().eq(1).all()
            return backend.gpu_path(), part._get_backend(device.device).gpu_path()
        return backend.gpu_path(), "nccl"


@pytest.mark.parametrize("layout", ["1", "2"])
def test_path_that_is_chosen(layout: str) -> None:
    """NCCL where every rank has a GPU; the host, said once, where they share one."""
    size = int(layout)
    outcomes = ranks.run_ranks(_chosen_path, layout)
    for outcome in outcomes:
        assert outcome.value == ("nccl" if size <= GPUS else "host", "nccl"), str(outcome)
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if "share" in line]
    assert len(said) == (0 if size <= GPUS else 1), said


# --- torch's own ----------------------------------------------------------------------------------


def _shards() -> None:
    """FSDP2 on the GPU ends with the weights of the plain model on all the data."""
    with device_cases.job("cuda") as device:
        size, me = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(5)
        nn = torch.nn
        plain = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(device.device)
        sharded = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(device.device)
        sharded.load_state_dict(plain.state_dict())
        mesh = init_device_mesh("cuda", (size,))
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
        data = torch.randn(8 * size, 32, device=device.device)
        for _ in range(3):
            for model, part in ((plain, data), (sharded, data[8 * me : 8 * (me + 1)])):
                model(part).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(one, other.full_tensor(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["2", pytest.param("2x2", marks=several_nodes)])
def test_fsdp2(layout: str) -> None:
    ranks.check_ranks(_shards, layout, env=HOST, timeout=120)


def _bound() -> None:
    """init_process_group(device_id=...), and a mesh whose groups are split from the default one."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % GPUS)
    dist.init_process_group("smddp", device_id=device, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        tensor = torch.ones(100, device=device)
        dist.all_reduce(tensor, group=mesh.get_group(name))
        assert tensor.cpu().eq(mesh.size(("a", "b").index(name))).all()
    dist.destroy_process_group()


def test_bound_device_and_mesh() -> None:
    ranks.check_ranks(_bound, "4", timeout=120)
