"""Calls on tensors of a device, on a device made of threads: order, lifetimes, errors, values."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import device_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from device_cases import error_of

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(device_cases.find_fake() is None, reason="the C++ tests are not built"),
]


@pytest.mark.parametrize("layout", ["1", "2", "2x2"])
@pytest.mark.parametrize("cases", device_cases.VALUES)
def test_values(layout: str, cases: Callable[[str], None]) -> None:
    ranks.check_ranks(cases, layout, "fake", timeout=90)


@pytest.mark.parametrize("layout", ["2", "2x2"])
@pytest.mark.parametrize("cases", device_cases.ORDER)
def test_order(layout: str, cases: Callable[[str], None]) -> None:
    ranks.check_ranks(cases, layout, "fake", timeout=90)


# --- errors ---------------------------------------------------------------------------------------


def test_refused_calls() -> None:
    for said in ranks.check_ranks(device_cases.refuses, "2", "fake"):
        mixed, wrong_size, undefined = said
        assert mixed == (
            "ValueError: smddp: all tensors of a call must be on one device, got fake:0 and cpu"
        )
        assert wrong_size.startswith("ValueError: smddp: all_gather_into_tensor: the output must")
        assert undefined.startswith("TypeError: smddp: all_reduce: BAND of float32 is undefined")


def test_absent_rank() -> None:
    first, second, _ = ranks.check_ranks(device_cases.times_out, "3", "fake")
    for said in (first, second):
        assert said.startswith("CollectiveTimeoutError")
        assert "rank 2" in said


def _device_that_never_comes() -> list[str]:
    with device_cases.job("fake") as device:
        ranks.limit(2, device.device)
        tensor = torch.zeros(10, device=device.device)
        device.module.gate()
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(2)]
        said = [error_of(work.wait) for work in works]
        said.append(error_of(lambda: dist.all_reduce(tensor)))
        device.module.open()
        return said


def test_device_that_never_comes() -> None:
    """A call whose stream is stuck ends with the time-out, on this rank and on the others."""
    for said in ranks.check_ranks(_device_that_never_comes, "2"):
        assert all(text.startswith("CollectiveTimeoutError: smddp") for text in said), said
        assert "before the device had come to this call" in said[0]


def _device_that_breaks() -> str:
    with device_cases.job("fake") as device:
        tensor = torch.zeros(10, device=device.device)
        device.synchronize()
        device.module.gate()
        work = dist.all_reduce(tensor, async_op=True)
        later = work.get_future()
        device.module.break_copies()
        device.module.open()
        said = error_of(work.wait)
        assert "the device is broken" in error_of(later.wait)
        assert error_of(work.wait) == said
        return said


def test_device_that_breaks() -> None:
    """An error of the copies back reaches whoever waits."""
    for said in ranks.check_ranks(_device_that_breaks, "2"):
        assert said.startswith("TransportError")
        assert "the device is broken" in said


def _leaving(how: str) -> list[str]:
    device = device_cases.Fake()
    dist.init_process_group(device.backend)
    tensor = torch.zeros(10, device=device.device)
    device.synchronize()
    device.module.gate()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    if how == "abort":
        dist.group.WORLD.abort()
    else:
        dist.destroy_process_group()
    said = [error_of(work.wait) for work in works]
    device.module.open()
    device.finish()
    return said


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_leaving_while_the_device_is_busy(how: str) -> None:
    """What has not begun ends when the group does."""
    for said in ranks.check_ranks(_leaving, "2", how):
        assert all(text.startswith("AbortedError") for text in said), said


# --- a peer ---------------------------------------------------------------------------------------


def _with_peer(cases: str, shared: bool) -> tuple[str, int, int]:
    """Runs cases in a group that leaves calls to a peer.

    Returns which way collectives went, how many the peers served, and how many peers were made.
    """
    from smddp import _load, backend

    made = []

    def make_peer(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(_load.load().ProcessGroup(store, rank, size, timeout, "peer"))
        return made[-1]

    def name_of(index: int) -> str:
        return "one for all" if shared else f"GPU {os.environ['RANK']}"

    backend._gpu_peer = lambda: ("fake", name_of, make_peer)
    paths = []
    destroy = dist.destroy_process_group

    def destroy_and_tell(group: Any = None) -> None:
        paths.append(dist.group.WORLD._get_backend(torch.device("fake")).gpu_path())
        destroy(group)

    dist.destroy_process_group = destroy_and_tell
    getattr(device_cases, cases)("fake")
    served = sum(use["calls"] for group in made for use in group.statistics().values())
    return paths[0], served, len(made)


@pytest.mark.parametrize("cases", ["reduces", "moves", "overlaps", "follows_streams", "trains"])
def test_peer_serves_ranks_with_gpus_of_their_own(cases: str) -> None:
    for path, served, _ in ranks.check_ranks(_with_peer, "2", cases, False, timeout=90):
        assert path == "nccl"
        assert served >= 3


@pytest.mark.parametrize("shared", [False, True])
def test_messages_go_the_way_of_two_ranks(shared: bool) -> None:
    """They need no choice for the group."""
    for path, _, peers in ranks.check_ranks(_with_peer, "2", "messages", shared):
        assert path == ""
        assert peers == (0 if shared else 1)


@pytest.mark.parametrize(("layout", "shared"), [("2", True), ("1+1", False)])
def test_host_serves_shared_gpus_and_several_nodes(layout: str, shared: bool) -> None:
    outcomes = ranks.run_ranks(_with_peer, layout, "moves", shared)
    for outcome in outcomes:
        assert outcome.value == ("host", 0, 0), str(outcome)
    why = "share GPU one for all" if shared else "several nodes"
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if why in line]
    assert len(said) == 1, said


@pytest.mark.parametrize(
    ("setting", "shared", "expected"), [("host", False, "host"), ("nccl", True, "nccl")]
)
def test_setting_decides(setting: str, shared: bool, expected: str) -> None:
    env = {"SMDDP_GPU_PATH": setting}
    for path, served, _ in ranks.check_ranks(_with_peer, "2", "moves", shared, env=env):
        assert path == expected
        assert (served > 0) == (expected == "nccl")


# --- NCCL inside nodes, the host between them ----------------------------------------------------


def _on_rails(cases: str) -> tuple[str, int, int]:
    return _with_peer(cases, False)


RAILS = {"SMDDP_GPU_PATH": "rails", "SMDDP_POOL_BYTES": "262144"}


@pytest.mark.parametrize(
    "cases",
    [
        "reduces",
        "moves",
        "overlaps",
        "follows_streams",
        "outlives_its_tensors",
        "futures",
        "trains",
    ],
)
def test_rails(cases: str) -> None:
    """Peers inside the nodes, two on each rank, and the group's own way between them."""
    served = ranks.check_ranks(_on_rails, "2x2", cases, env=RAILS, timeout=120)
    for path, calls, peers in served:
        assert path == "rails"
        assert peers == 2
        assert calls >= 2


def test_rails_of_several_chunks() -> None:
    """A vector of 1.2 MB on nodes whose ranks take 256 KiB at a time: two calls a chunk."""
    for path, calls, _ in ranks.check_ranks(_on_rails, "2x2", "averages", env=RAILS):
        assert path == "rails"
        assert calls == 2 * 3


@pytest.mark.parametrize(
    ("layout", "shared", "why"),
    [("2+1", False, "nodes have different numbers of ranks"), ("1+1", False, "one rank each")],
)
def test_rails_that_are_impossible(layout: str, shared: bool, why: str) -> None:
    outcomes = ranks.run_ranks(_with_peer, layout, "moves", shared, env=RAILS)
    for outcome in outcomes:
        assert outcome.value == ("host", 0, 0), str(outcome)
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if why in line]
    assert len(said) == 1, said
    assert "SMDDP_GPU_PATH=rails is not possible" in said[0]


@contextlib.contextmanager
def _rails_job(timeout: float) -> Iterator[Any]:
    from smddp import _load, backend

    def make_peer(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return _load.load().ProcessGroup(store, rank, size, timeout, "peer")

    backend._gpu_peer = lambda: ("fake", lambda index: os.environ["RANK"], make_peer)
    with device_cases.job("fake", timeout=timeout) as device:
        dist.all_reduce(torch.zeros(10, device=device.device))
        yield device


def _rail_breaks() -> list[str]:
    with _rails_job(5) as device:
        if dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        tensor = torch.zeros(10, device=device.device)
        # Its mate may hear of it from the peer, which then refuses the call.
        return [
            error_of(lambda: dist.all_reduce(tensor, async_op=True).wait()),
            error_of(lambda: dist.all_reduce(tensor)),
        ]


def _leaving_the_rail(how: str) -> list[str]:
    with _rails_job(20) as device:
        if dist.get_rank() >= 2:
            return []
        works, said = [], []
        for _ in range(3):
            try:
                works.append(dist.all_reduce(torch.zeros(10, device=device.device), async_op=True))
            except dist.DistBackendError as error:  # its mate on the node has left already
                said.append(f"{type(error).__name__}: {error}")
        if how == "abort":
            dist.group.WORLD.abort()
        else:
            dist.group.WORLD._get_backend(device.device).shutdown()
        return said + [error_of(work.wait) for work in works]


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_leaving_while_the_rail_is_busy(how: str) -> None:
    """The other node does not come; what waits for it ends when the group does."""
    for said in ranks.check_ranks(_leaving_the_rail, "2x2", how, env=RAILS)[:2]:
        assert len(said) == 3
        assert all("Error: smddp" in text for text in said), said


def test_rank_that_dies_on_a_rail() -> None:
    """Every survivor hears of it, on whichever rail it is."""
    outcomes = ranks.run_ranks(_rail_breaks, "2x2", env=RAILS, timeout=60)
    for outcome in outcomes[:3]:
        assert outcome.returned, str(outcome)
        assert all("Error: smddp" in text for text in outcome.value), str(outcome)


# --- which device ---------------------------------------------------------------------------------


def _bound_with_peer() -> tuple[str, int, int]:
    # destroy_and_tell() of _with_peer asks the default group, whose calls here are barriers alone.
    return _with_peer("bound", False)


def test_bound_device() -> None:
    """The groups of a mesh are split off, and leave calls to peers of their own."""
    ranks.check_ranks(device_cases.bound, "4", "fake", timeout=60)
    for _, served, peers in ranks.check_ranks(_bound_with_peer, "4", timeout=60):
        assert served >= 2
        assert peers >= 2


def _pinned(local_rank: str, count: int, used: bool) -> list[int]:
    """Returns the devices that are set when CUDA is first used."""
    from smddp import backend

    os.environ["LOCAL_RANK"] = local_rank
    waiting: list[Callable[[], None]] = []
    chosen: list[int] = []
    torch.cuda.device_count = lambda: count
    torch.cuda.is_initialized = lambda: used
    torch.cuda._lazy_call = waiting.append
    torch.cuda.set_device = chosen.append
    for _ in range(2):  # groups
        backend._pin_device()
    assert not chosen
    for call in waiting:
        call()
    return chosen


@pytest.mark.parametrize(
    ("local_rank", "count", "used", "expected"),
    [
        ("3", 4, False, [3]),
        ("5", 4, False, [1]),  # ranks that share GPUs
        ("0", 1, False, []),
        ("3", 1, False, []),  # each rank sees a GPU of its own, or all share one
        ("3", 4, True, []),  # the script has a current device
        ("", 4, False, []),
    ],
)
def test_device_of_the_local_rank(
    local_rank: str, count: int, used: bool, expected: list[int]
) -> None:
    """What a script leaves open that never calls torch.cuda.set_device()."""
    assert ranks.check_ranks(_pinned, "1", local_rank, count, used) == [expected]


# --- memory of one GPU that ranks share -----------------------------------------------------------


def _in_shared_memory(
    cases: str, shares: bool = True, part: str | None = None, tensors: bool = True
) -> tuple[str, int]:
    """Runs cases in a group whose ranks share a GPU, and its memory or at least workspaces in it.

    Returns which way collectives went, and how many kernels there were.
    """
    from smddp import backend

    library = str(device_cases.find_fake()) if part is None else part
    backend._gpu_peer = lambda: ("fake", lambda index: "one for all", None, library)
    paths = []
    make_fake, destroy = device_cases.Fake, dist.destroy_process_group

    def make() -> Any:
        device = make_fake()
        device.module.share_memory(shares)
        device.module.share_tensors(tensors)
        return device

    def destroy_and_tell(group: Any = None) -> None:
        paths.append(dist.group.WORLD._get_backend(torch.device("fake")).gpu_path())
        destroy(group)

    device_cases.DEVICES["fake"] = make
    dist.destroy_process_group = destroy_and_tell
    getattr(device_cases, cases)("fake")
    return paths[0], make_fake.module.jobs()


IPC = {"SMDDP_GPU_PATH": "ipc"}
# Several pieces of a tensor where the memory of others cannot be opened.
PIECES = {"SMDDP_POOL_BYTES": "262144"}


@pytest.mark.parametrize("layout", ["2", "3"])
@pytest.mark.parametrize(
    "cases", [case.__name__ for case in (*device_cases.VALUES, *device_cases.ORDER)]
)
def test_shared_memory(layout: str, cases: str) -> None:
    served = ranks.check_ranks(_in_shared_memory, layout, cases, env=IPC | PIECES, timeout=90)
    for path, jobs in served:
        # Messages go through the host, and need no choice for the group.
        assert path == ("" if cases in ("messages", "any_source") else "ipc")
        assert (jobs > 0) == (path == "ipc")


@pytest.mark.parametrize("cases", ["reduces", "moves", "overlaps", "follows_streams"])
def test_shared_memory_that_cannot_be_opened(cases: str) -> None:
    """Where tensors cannot be opened, only workspaces, they are copied piece by piece."""
    served = ranks.check_ranks(
        _in_shared_memory, "3", cases, True, None, False, env=IPC | PIECES, timeout=90
    )
    assert all(path == "ipc" and jobs > 0 for path, jobs in served)


def _lists(shares_tensors: bool) -> set[str]:
    """Returns which calls this rank had no kernel for in the memory of the device."""
    with _sharing_job(shares_tensors) as device:
        dist.all_reduce(torch.ones(1, device=device.device))
        lists = itertools.chain(device_cases.movements(), device_cases.coalesced())
        elsewhere = set()
        for case in lists:
            before = device.module.jobs()
            device_cases.check(case, device)
            if device.module.jobs() == before:
                elsewhere.add(case.name)
        return elsewhere


@contextlib.contextmanager
def _sharing_job(shares_tensors: bool) -> Iterator[Any]:
    from smddp import backend

    library = str(device_cases.find_fake())
    backend._gpu_peer = lambda: ("fake", lambda index: "one for all", None, library)
    with device_cases.job("fake") as device:
        device.module.share_tensors(shares_tensors)
        yield device


@pytest.mark.parametrize("shares", [True, False])
def test_lists_stay_in_shared_memory(shares: bool) -> None:
    """So do coalesced calls; what has no counterpart in the device's memory does not."""
    said = ranks.check_ranks(_lists, "3", shares, env=IPC | PIECES, timeout=90)
    # Short calls are no work for some ranks.
    elsewhere = {name.split(" ")[0] for name in set.intersection(*said)}
    assert elsewhere == {"all_to_all", "all_to_all_single", "gather", "scatter"}


def _bucket_jobs() -> tuple[bool, int, int]:
    """Returns whether there is memory for buckets, and the kernels for one there and elsewhere."""
    with _sharing_job(False) as device:
        backend = dist.group.WORLD._get_backend(device.device)
        assert not backend.supports_tensor_alloc(device.device)  # as long as nobody knows the way
        kernels = []
        dist.all_reduce(torch.ones(1, device=device.device))
        able = backend.supports_tensor_alloc(device.device)
        elsewhere = torch.empty(100_000, device=device.device)
        there = elsewhere
        if able:
            there = backend.allocate_tensor(100_000, dtype=torch.float32, device=device.device)
        for tensor in (there, elsewhere):
            device.fill(tensor, dist.get_rank() + 1)
            before = device.module.jobs()
            dist.all_reduce(tensor)
            assert tensor.cpu().eq(6).all()
            kernels.append(device.module.jobs() - before)
        return able, *kernels


def test_memory_for_buckets() -> None:
    """What the group allocates can be opened by others, where torch's own memory cannot."""
    env = IPC | PIECES
    for able, _, _ in ranks.check_ranks(_bucket_jobs, "3", env=env):
        assert not able
    env["SMDDP_GPU_COMM_MEMORY"] = "1"
    for able, there, elsewhere in ranks.check_ranks(_bucket_jobs, "3", env=env):
        assert able
        assert there == 1  # straight from tensor to tensor
        assert elsewhere > 4  # in pieces, through the workspaces


def test_training_in_memory_for_buckets() -> None:
    env = IPC | PIECES | {"SMDDP_GPU_COMM_MEMORY": "1"}
    served = ranks.check_ranks(
        _in_shared_memory, "2", "trains", True, None, False, env=env, timeout=90
    )
    assert all(path == "ipc" and jobs > 0 for path, jobs in served)


@pytest.mark.parametrize(
    ("shares", "part", "why"),
    [
        (False, None, "sharing memory of the GPU: the made-up device does not share its memory"),
        (True, "", "this smddp was built without its CUDA part"),
        (True, "/nowhere/libsmddp_cuda.so", "the CUDA part cannot be loaded: /nowhere"),
    ],
)
def test_shared_memory_that_is_impossible(shares: bool, part: str | None, why: str) -> None:
    """The host serves such groups, and one rank says why."""
    outcomes = ranks.run_ranks(_in_shared_memory, "2", "moves", shares, part, env=IPC)
    for outcome in outcomes:
        assert outcome.value == ("host", 0), str(outcome)
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if why in line]
    assert len(said) == 1, said
    assert "SMDDP_GPU_PATH=ipc is not possible: rank 0: " in said[0]


def _shared(of: Callable[[Any], list[str]], seconds: float = 3) -> list[str]:
    from smddp import backend

    library = str(device_cases.find_fake())
    backend._gpu_peer = lambda: ("fake", lambda index: "one for all", None, library)
    with device_cases.job("fake") as device:
        dist.all_reduce(torch.zeros(10, device=device.device))
        ranks.limit(seconds, device.device)
        return of(device)


def _absent(device: Any) -> list[str]:
    if dist.get_rank() == 1:
        ranks.await_ranks("failed", 1)
        return []
    tensor = torch.zeros(10, device=device.device)
    work = dist.all_reduce(tensor, async_op=True)
    said = [error_of(work.wait), error_of(lambda: dist.all_reduce(tensor))]
    ranks.arrive("failed")
    return said


def _stuck(device: Any) -> list[str]:
    tensor = torch.zeros(10, device=device.device)
    device.module.gate()
    said = error_of(dist.all_reduce(tensor, async_op=True).wait)
    device.module.open()
    return [said]


def _differing(device: Any) -> list[str]:
    op = dist.ReduceOp.MAX if dist.get_rank() == 1 else dist.ReduceOp.SUM
    return [error_of(lambda: dist.all_reduce(torch.zeros(10, device=device.device), op))]


def _dying(device: Any) -> list[str]:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.zeros(10, device=device.device)
    return [error_of(lambda: dist.all_reduce(tensor))]


def test_absent_rank_in_shared_memory() -> None:
    for said in ranks.check_ranks(_shared, "2", _absent, env=IPC)[0]:
        assert said.startswith("CollectiveTimeoutError")
        assert "rank 1" in said


def test_device_that_never_comes_in_shared_memory() -> None:
    for said in ranks.check_ranks(_shared, "2", _stuck, env=IPC):
        assert said[0].startswith("CollectiveTimeoutError"), said
        assert "before the device had come to this call" in said[0]


def test_different_calls_in_shared_memory() -> None:
    for said in ranks.check_ranks(_shared, "2", _differing, env=IPC):
        assert said[0].startswith("CollectiveMismatchError"), said
        assert "MAX" in said[0]
        assert "SUM" in said[0]


def test_rank_that_dies_in_shared_memory() -> None:
    outcomes = ranks.run_ranks(_shared, "2", _dying, 30, env=IPC)
    assert outcomes[0].value[0].startswith("PeerLostError"), str(outcomes[0])
    assert "rank 1" in outcomes[0].value[0]


def test_peer_that_some_rank_does_not_ask_for() -> None:
    """A rank that makes no call on the device is named."""
    outcomes = ranks.run_ranks(_one_calls, "2")
    assert "rank 1 of group" in str(outcomes[0].value)
    assert "has made no call on GPU tensors" in str(outcomes[0].value)


def _one_calls() -> str:
    from smddp import backend

    backend._gpu_peer = lambda: ("fake", lambda index: os.environ["RANK"], lambda *rest: None)
    with device_cases.job("fake") as device:
        if dist.get_rank() == 1:
            return ""
        ranks.limit(2, device.device)
        return error_of(lambda: dist.all_reduce(torch.zeros(3, device=device.device)))
