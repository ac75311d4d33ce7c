"""The cases of device_cases.py on GPUs: through the host, in the memory of one GPU, and by NCCL.

One GPU is enough. The ranks share it, and NCCL_HOSTID tells NCCL that they are on several hosts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta

import device_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(GPUS == 0, reason="no GPU"),
    pytest.mark.timeout(300),
]
layouts = pytest.mark.parametrize("layout", ["1", "2", "4", "2x2"])
HOST = {"SMDDP_GPU_PATH": "host"}


@layouts
@pytest.mark.parametrize("cases", device_cases.VALUES)
def test_values_through_the_host(layout: str, cases: Callable[[str], None]) -> None:
    ranks.check_ranks(cases, layout, "cuda", env=HOST, timeout=200)


@pytest.mark.parametrize("layout", ["2", "2x2"])
@pytest.mark.parametrize("cases", device_cases.ORDER)
def test_order_through_the_host(layout: str, cases: Callable[[str], None]) -> None:
    ranks.check_ranks(cases, layout, "cuda", env=HOST, timeout=120)


@pytest.mark.parametrize("cases", [device_cases.moves, device_cases.moves_blocks])
def test_values_straight_from_memory(cases: Callable[[str], None]) -> None:
    """If libfabric has no provider for GPU memory, calls use the host, and each rank logs why."""
    env = HOST | {"SMDDP_GPU_DIRECT": "1"}
    outcomes = ranks.run_ranks(cases, "1+1", "cuda", env=env, timeout=200)
    for outcome in outcomes:
        assert outcome.returned, str(outcome)
        assert outcome.stderr.count("whatever SMDDP_GPU_DIRECT says") <= 1


def test_absent_rank() -> None:
    first, second, _ = ranks.check_ranks(device_cases.times_out, "3", "cuda", env=HOST)
    for said in (first, second):
        assert said.startswith("SMDDPCollectiveTimeoutError")


def test_refused_calls() -> None:
    for mixed, wrong_size, undefined in ranks.check_ranks(
        device_cases.refuses, "2", "cuda", env=HOST
    ):
        assert mixed.startswith("ValueError: smddp: all tensors of a call must be on one device")
        assert wrong_size.startswith("ValueError")
        assert undefined.startswith("TypeError")


# --- the memory of one GPU that ranks share -------------------------------------------------------

IPC = {"SMDDP_GPU_PATH": "ipc", "CUDA_VISIBLE_DEVICES": "0"}
# Memory that other processes cannot map.
UNSHARED = {**IPC, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
SMALL_PIECES = {**UNSHARED, "SMDDP_POOL_BYTES": "262144"}


def _in_memory(cases: str) -> list[str]:
    paths = []
    destroy = dist.destroy_process_group

    def destroy_and_tell(group: dist.ProcessGroup | None = None) -> None:
        paths.append(dist.group.WORLD._get_backend(torch.device("cuda")).gpu_path())
        destroy(group)

    dist.destroy_process_group = destroy_and_tell
    getattr(device_cases, cases)("cuda")
    return paths


@pytest.mark.parametrize("layout", ["2", "4"])
@pytest.mark.parametrize("cases", [case.__name__ for case in device_cases.VALUES])
def test_values_in_memory(layout: str, cases: str) -> None:
    for paths in ranks.check_ranks(_in_memory, layout, cases, env=IPC, timeout=200):
        assert set(paths) == {"ipc"}


@pytest.mark.parametrize(
    "cases",
    ["follows_streams", "does_not_block", "barrier_covers", "outlives_its_tensors", "futures"],
)
def test_order_in_memory(cases: str) -> None:
    for paths in ranks.check_ranks(_in_memory, "2", cases, env=IPC, timeout=120):
        assert set(paths) == {"ipc"}


def test_shards_in_memory() -> None:
    for paths in ranks.check_ranks(_in_memory, "2", "shards_in_place", env=IPC, timeout=120):
        assert set(paths) == {"ipc"}


def _sends_too_much() -> str:
    with device_cases.job("cuda") as device:
        tensor = torch.zeros(6, device=device.device)
        to = [4, 2] if dist.get_rank() == 1 else [3, 3]
        dist.all_reduce(tensor)
        return device_cases.error_of(
            lambda: dist.all_to_all_single(torch.zeros_like(tensor), tensor, [3, 3], to)
        )


def test_different_blocks_in_memory() -> None:
    for said in ranks.check_ranks(_sends_too_much, "2", env=IPC, timeout=60):
        assert said.startswith("SMDDPCollectiveMismatchError"), said
        assert "rank 1 sends 16 bytes to rank 0, which expects 12" in said


def test_training_in_memory() -> None:
    ranks.check_ranks(_in_memory, "4", "trains", env=IPC, timeout=120)


@pytest.mark.parametrize("env", [UNSHARED, SMALL_PIECES], ids=["whole", "several"])
@pytest.mark.parametrize(
    "cases", ["reduces", "moves", "moves_blocks", "shards_in_place", "overlaps"]
)
def test_values_in_pieces(cases: str, env: dict[str, str]) -> None:
    for paths in ranks.check_ranks(_in_memory, "3", cases, env=env, timeout=200):
        assert set(paths) == {"ipc"}


@on_ranks("3", env=IPC, timeout=120)
def test_memory_that_is_freed_in_memory() -> None:
    """A freed address that the driver uses for other memory is mapped again."""
    with device_cases.job("cuda") as device:
        me, size = dist.get_rank(), dist.get_world_size()
        for number in range(8):
            tensor = torch.full(((4 + number % 3) << 20,), float(number + me), device=device.device)
            dist.all_reduce(tensor)
            assert tensor.cpu().eq(size * number + sum(range(size))).all()
            del tensor
            if number % 2:
                torch.cuda.empty_cache()


def _dies() -> str:
    with device_cases.job("cuda", timeout=30) as device:
        tensor = torch.ones(1000, device=device.device)
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        said = device_cases.error_of(lambda: dist.all_reduce(tensor))
        torch.cuda.synchronize()  # no stream hangs
        return said


def test_rank_that_dies_in_memory() -> None:
    outcomes = ranks.run_ranks(_dies, "2", env=IPC, timeout=60)
    assert str(outcomes[0].value).startswith("SMDDPPeerLostError"), str(outcomes[0])


def _captured() -> str:
    with device_cases.job("cuda") as device:
        tensor = torch.ones(1000, device=device.device)
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.mul_(2)
            said = device_cases.error_of(lambda: dist.all_reduce(tensor))
        graph.replay()
        dist.all_reduce(tensor)
        assert tensor.cpu().eq(2 * dist.get_world_size() ** 2).all()
        return said


@pytest.mark.parametrize("env", [HOST, IPC], ids=["host", "in_memory"])
def test_capture_is_refused(env: dict[str, str]) -> None:
    """The call raises an error before it has any effect."""
    for said in ranks.check_ranks(_captured, "2", env=env, timeout=60):
        assert said.startswith("NotImplementedError: smddp: this call cannot be captured"), said


# --- NCCL -----------------------------------------------------------------------------------------


def _be_on_a_host_of_its_own() -> None:
    """NCCL, which reads this when it begins, rejects two ranks that share a GPU of one host."""
    os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _by_nccl(cases: str) -> str:
    _be_on_a_host_of_its_own()
    getattr(device_cases, cases)("cuda")
    return torch.cuda.get_device_name()


@pytest.mark.parametrize("layout", ["1", "2"])
@pytest.mark.parametrize(
    "cases",
    ["reduces", "moves_plainly", "follows_streams", "does_not_block", "barrier_covers", "trains"],
)
def test_nccl(layout: str, cases: str) -> None:
    ranks.check_ranks(_by_nccl, layout, cases, env={"SMDDP_GPU_PATH": "nccl"}, timeout=200)


def _captured_by_nccl() -> tuple[str, str]:
    _be_on_a_host_of_its_own()
    with device_cases.job("cuda") as device:
        size = dist.get_world_size()
        tensor = torch.ones(1000, device=device.device)
        parts = torch.ones(1000 * size, device=device.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            first = device_cases.error_of(lambda: dist.all_reduce(tensor))
        for _ in range(3):
            dist.all_reduce(tensor.clone())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(tensor)
            dist.all_gather_into_tensor(parts, tensor)
            dist.reduce_scatter_tensor(tensor, parts)
            barrier = device_cases.error_of(dist.barrier)
        for number in range(3):
            graph.replay()
            # all_reduce and reduce_scatter multiply by the number of ranks, once each.
            assert tensor.cpu().eq(float(size) ** (2 * number + 2)).all()
        del graph  # NCCL waits for it when the group is destroyed
        return first, barrier


@pytest.mark.parametrize("layout", ["1", "2"])
def test_calls_of_nccl_can_be_captured(layout: str) -> None:
    env = {"SMDDP_GPU_PATH": "nccl"}
    for first, barrier in ranks.check_ranks(_captured_by_nccl, layout, env=env, timeout=120):
        assert first.startswith("NotImplementedError: smddp: the first call of a group on GPU")
        assert barrier.startswith("NotImplementedError: smddp: barrier() cannot be captured")


# --- memory for buckets ---------------------------------------------------------------------------


def _buckets(by_nccl: bool) -> tuple[str, bool]:
    """Returns the path of the calls, and whether it has memory for buckets."""
    if by_nccl:
        _be_on_a_host_of_its_own()
    with device_cases.job("cuda") as device:
        backend = dist.group.WORLD._get_backend(device.device)
        dist.all_reduce(torch.ones(1, device=device.device))
        able = backend.supports_tensor_alloc(device.device)
        if able:
            size = dist.get_world_size()
            for count in (1000, 3_000_000):
                mine = backend.allocate_tensor(count, dtype=torch.float32, device=device.device)
                mine.fill_(dist.get_rank() + 1)
                dist.all_reduce(mine)
                assert mine.cpu().eq(size * (size + 1) / 2).all()
                del mine
        return backend.gpu_path(), able


def test_buckets_in_memory() -> None:
    env = {**UNSHARED, "SMDDP_GPU_COMM_MEMORY": "1"}
    assert set(ranks.check_ranks(_buckets, "2", False, env=env)) == {("ipc", True)}
    ranks.check_ranks(_in_memory, "2", "trains", env=env, timeout=120)


def test_buckets_of_nccl() -> None:
    """Whether NCCL has memory for buckets depends on the machine. If it has, DDP works with it."""
    env = {"SMDDP_GPU_PATH": "nccl", "SMDDP_GPU_COMM_MEMORY": "1"}
    said = ranks.check_ranks(_buckets, "2", True, env=env)
    print("memory of NCCL's own:", said)
    assert {path for path, _ in said} == {"nccl"}
    ranks.check_ranks(_by_nccl, "2", "trains", env=env, timeout=120)


# --- NCCL inside nodes, the host between them -----------------------------------------------------


def _on_rails(cases: str) -> list[str]:
    """Runs cases on rails. NCCL sees each rank on its own host, smddp sees it with its own GPU."""
    from smddp.torch import backend

    _be_on_a_host_of_its_own()
    backend._gpu_name = lambda index: f"GPU {os.environ['RANK']}"
    return _in_memory(cases)


RAILS = {"SMDDP_GPU_PATH": "rails", "SMDDP_POOL_BYTES": "262144"}


@pytest.mark.parametrize(
    "cases",
    [
        "reduces",
        "averages",
        "moves_plainly",
        "moves_chunks",
        "shards_in_place",
        "follows_streams",
        "does_not_block",
        "barrier_covers",
        "trains",
    ],
)
def test_rails(cases: str) -> None:
    for paths in ranks.check_ranks(_on_rails, "2x2", cases, env=RAILS, timeout=200):
        assert set(paths) == {"rails"}


@on_ranks("2x2", env=RAILS, timeout=120)
def test_fsdp2_on_rails() -> None:
    from smddp.torch import backend

    _be_on_a_host_of_its_own()
    backend._gpu_name = lambda index: f"GPU {os.environ['RANK']}"
    _shards()


# --- choice of the path
# ------------------------------------------------------------------------------------


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
    """NCCL if each rank has a GPU; the host if ranks share one, and one rank logs it."""
    size = int(layout)
    outcomes = ranks.run_ranks(_chosen_path, layout)
    for outcome in outcomes:
        assert outcome.value == ("nccl" if size <= GPUS else "host", "nccl"), str(outcome)
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if "share" in line]
    assert len(said) == (0 if size <= GPUS else 1), said


# --- FSDP2, meshes, the device of a rank
# ----------------------------------------------------------------------------------


def _shards() -> None:
    """FSDP2 on the GPU trains the same weights as the plain model with all data."""
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


@pytest.mark.parametrize("layout", ["2", "2x2"])
def test_fsdp2(layout: str) -> None:
    ranks.check_ranks(_shards, layout, env=HOST, timeout=120)


def test_bound_device_and_mesh() -> None:
    """Split groups use the GPU of each rank, as the default group does."""
    ranks.check_ranks(device_cases.bound, "4", "cuda", timeout=120)


def _unchosen() -> int:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    tensor = torch.ones(10, device="cuda")
    dist.all_reduce(tensor)
    assert tensor.cpu().eq(dist.get_world_size()).all()
    dist.destroy_process_group()
    return tensor.device.index


def test_device_that_nobody_has_chosen() -> None:
    """Each rank uses the GPU with the number of its local rank, modulo the number of GPUs."""
    used = ranks.check_ranks(_unchosen, "2", timeout=120)
    assert used == [rank % GPUS for rank in range(2)]
