"""The errors of the other ranks when one dies, leaves, stalls or makes another call."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import freezer
import psutil
import pytest
import ranks
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import smddp

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["2", "2x2"])

CULPRIT = 1


class Failure(NamedTuple):
    kind: str
    text: str
    at: float  # time.monotonic()
    pid: int


def failure_of(action: Callable[[], Any]) -> Failure:
    """Runs `action`, which must raise an error of smddp; returns it."""
    try:
        action()
    except dist.DistBackendError as error:
        kind = type(error)
        if kind.__module__ != "smddp.torch.errors":
            raise
        return Failure(kind.__name__, str(error), time.monotonic(), os.getpid())
    raise AssertionError("nothing was raised")


def survivors_of(
    function: Callable[..., Any], layout: str, *arguments: Any, **options: Any
) -> tuple[list[Failure], ranks.Outcome]:
    """Runs the ranks; returns the errors of all except CULPRIT, and how CULPRIT ended."""
    outcomes = ranks.run_ranks(function, layout, *arguments, **options)
    survivors = [outcome for outcome in outcomes if outcome.rank != CULPRIT]
    for outcome in survivors:
        assert outcome.returned, "\n".join(map(str, outcomes))
        assert outcome.status == 0, str(outcome)
    return [outcome.value for outcome in survivors], outcomes[CULPRIT]


# --- death ----------------------------------------------------------------------------------------


def _die_in_backward() -> str:
    dist.init_process_group("smddp")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    try:
        for step in range(1000):
            if step == 3 and dist.get_rank() == CULPRIT:
                os._exit(7)
            model(torch.ones(2, 8)).sum().backward()
    except dist.DistBackendError:
        return traceback.format_exc()
    return "nothing was raised"


def test_the_stack_trace_of_ddp_has_the_name_of_the_error() -> None:
    """Launchers search standard error for it; DDP keeps the text of an error, but not its class."""
    traces, _ = survivors_of(_die_in_backward, "2")
    assert "\ntorch.distributed.DistBackendError: SMDDPPeerLostError: smddp: " in str(traces[0])


def _die(how: str, count: int, warm_up: int) -> Failure:
    # The group is not destroyed: a broken group must not block the exit of the process.
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    tensor = torch.ones(count)
    for _ in range(warm_up):
        dist.all_reduce(tensor)
    if dist.get_rank() == CULPRIT:
        time.sleep(0.3)  # by then the others are in the call
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "kill in mid-call":
            # At a random point of a call that takes some time.
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                dist.all_reduce(tensor)
        if how == "raise":
            raise RuntimeError("the training script has a bug")
        os._exit(7)
    return failure_of(lambda: [dist.all_reduce(tensor) for _ in range(1_000_000)])


@layouts
@pytest.mark.parametrize(
    ("how", "count", "warm_up"),
    [
        ("kill", 10, 3),
        ("kill", 1_000_000, 0),
        ("kill in mid-call", 1_000_000, 3),
        ("_exit", 10, 3),
        ("raise", 100_000, 3),
    ],
)
def test_death_in_all_reduce(layout: str, how: str, count: int, warm_up: int) -> None:
    failures, culprit = survivors_of(_die, layout, how, count, warm_up)
    assert culprit.status == {"raise": 1, "_exit": 7}.get(how, -signal.SIGKILL), str(culprit)
    for failure in failures:
        # The error must not come from the timeout: that would be a CollectiveTimeoutError.
        assert failure.kind == "SMDDPPeerLostError", failure
        named = f"rank {CULPRIT} (pid {culprit.pid} on {socket.gethostname()}) is gone: "
        assert named in failure.text
        assert failure.text.count(f"pid {culprit.pid}") == 1, failure.text
        assert "allreduce" in failure.text
    late = max(failure.at - culprit.ended_at for failure in failures)
    print(f"{layout} {how}: all survivors know {late * 1000:.1f} ms after the end was noticed here")


def _fail_on(tensor: torch.Tensor) -> StorageWeakRef:
    dist.all_reduce(tensor)
    if dist.get_rank() == CULPRIT:
        os._exit(7)
    failure_of(lambda: [dist.all_reduce(tensor) for _ in range(1_000_000)])
    return StorageWeakRef(tensor.untyped_storage())


def _is_freed_after_death(shared: bool) -> bool:
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    memory = _fail_on(smddp.empty(1_000_000) if shared else torch.empty(1_000_000))
    return memory.expired()


@pytest.mark.parametrize("layout", ["2", "1+1"])
@pytest.mark.parametrize("shared", [False, True])
def test_memory_of_a_call_that_failed_is_not_freed(layout: str, shared: bool) -> None:
    """The network may still read the tensor, and a mate may still write to it."""
    freed, _ = survivors_of(_is_freed_after_death, layout, shared)
    assert freed == [False]


def _store_dies() -> Failure:
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    failure = failure_of(lambda: [dist.all_reduce(torch.ones(10)) for _ in range(1_000_000)])
    dist.destroy_process_group()
    return failure


@layouts
def test_death_of_the_rank_that_serves_the_store(layout: str) -> None:
    outcomes = ranks.run_ranks(_store_dies, layout, rank_0_serves=True)
    for outcome in outcomes[1:]:
        assert outcome.returned, str(outcome)
        assert outcome.value.kind == "SMDDPPeerLostError"
        assert f"rank 0 (pid {outcomes[0].pid}" in outcome.value.text


def _after_death() -> list[str]:
    """One failure breaks the group forever. Other groups of the surviving ranks still work."""
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    living = [rank for rank in range(dist.get_world_size()) if rank != CULPRIT]
    group = dist.new_group(living)
    dist.all_reduce(torch.ones(10))
    works = []
    if dist.get_rank() == CULPRIT:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(10):
        # A call on a broken group may raise at once.
        with contextlib.suppress(smddp.PeerLostError):
            works.append(dist.all_reduce(torch.ones(100_000), async_op=True))
    kinds = [failure_of(work.wait).kind for work in works]
    kinds.append(failure_of(lambda: dist.all_reduce(torch.ones(10))).kind)
    kinds.append(failure_of(dist.barrier).kind)
    kinds.append(failure_of(lambda: dist.recv(torch.ones(1), CULPRIT)).kind)
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == len(living)
    dist.destroy_process_group()
    return kinds


@layouts
def test_everything_after_a_death_fails_but_other_groups(layout: str) -> None:
    kinds, _ = survivors_of(_after_death, layout)
    for each in kinds:
        assert set(each) == {"SMDDPPeerLostError"}


def _leave_early() -> Failure | None:
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == CULPRIT:
        dist.destroy_process_group()
        return None
    return failure_of(lambda: dist.all_reduce(torch.ones(10)))


@layouts
def test_rank_that_leaves_while_others_go_on(layout: str) -> None:
    failures, culprit = survivors_of(_leave_early, layout)
    assert culprit.status == 0
    for failure in failures:
        assert failure.kind == "SMDDPPeerLostError", failure
        assert f"rank {CULPRIT}" in failure.text


def _culprit_dies_soon() -> None:
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    dist.barrier()
    if dist.get_rank() == CULPRIT:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)


def _messages_from_the_dead() -> Failure:
    _culprit_dies_soon()
    # So long that it cannot be sent before the receive is posted.
    if dist.get_rank() == 0:
        return failure_of(lambda: dist.send(torch.ones(10_000_000), CULPRIT))
    return failure_of(lambda: dist.recv(torch.ones(1000), CULPRIT))


@layouts
def test_death_of_the_other_end_of_a_message(layout: str) -> None:
    failures, culprit = survivors_of(_messages_from_the_dead, layout)
    for failure in failures:
        assert failure.kind == "SMDDPPeerLostError"
        assert f"pid {culprit.pid}" in failure.text


def _message_from_anyone() -> Failure:
    _culprit_dies_soon()
    return failure_of(lambda: dist.recv(torch.ones(1000)))


@pytest.mark.parametrize("layout", ["2", "1+1"])
def test_death_of_all_who_could_send(layout: str) -> None:
    (failure,), culprit = survivors_of(_message_from_anyone, layout)
    assert failure.kind == "SMDDPPeerLostError"
    assert f"pid {culprit.pid}" in failure.text


def _message_from_anyone_alive() -> Failure | None:
    _culprit_dies_soon()
    if dist.get_rank() == 2:
        ranks.await_ranks("failed", 1)
        return None
    ranks.limit(2)
    failure = failure_of(lambda: dist.recv(torch.ones(1000)))
    ranks.arrive("failed")
    return failure


@pytest.mark.parametrize("layout", ["3", "1+2"])
def test_death_of_one_who_could_send(layout: str) -> None:
    """Another rank could still send: the call waits until its time-out, and names the lost one."""
    (failure, _), culprit = survivors_of(_message_from_anyone_alive, layout)
    assert failure.kind == "SMDDPCollectiveTimeoutError"
    assert "waits to receive from any rank" in failure.text
    assert f"pid {culprit.pid}" in failure.text
    assert "is gone" in failure.text


# --- time -----------------------------------------------------------------------------------------


def _others_failed() -> None:
    """Keeps CULPRIT alive until the others have finished, however slow they are."""
    ranks.await_ranks("failed", dist.get_world_size() - 1)


def _stall(what: str) -> Failure | None:
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    if dist.get_rank() == CULPRIT:
        _others_failed()
        return None
    if what != "wait":
        ranks.limit(2)
    if what == "all_reduce":
        failure = failure_of(lambda: dist.all_reduce(tensor))
    elif what == "future":
        failure = failure_of(dist.all_reduce(tensor, async_op=True).get_future().wait)
    elif what == "wait":
        work = dist.all_reduce(tensor, async_op=True)
        failure = failure_of(lambda: work.wait(timedelta(milliseconds=200)))
    else:
        failure = failure_of(lambda: dist.recv(tensor, CULPRIT))
    ranks.arrive("failed")
    return failure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "what"),
    [("2", "all_reduce"), ("2x2", "all_reduce"), ("2", "wait"), ("2", "recv"), ("2", "future")],
)
def test_rank_that_stops_calling(layout: str, what: str) -> None:
    failures, culprit = survivors_of(_stall, layout, what)
    for failure in failures:
        # c10d's own tests and elastic launchers look for this text, spaces included.
        assert " Timed out " in failure.text
        assert failure.kind == "SMDDPCollectiveTimeoutError", failure
        if what in ("all_reduce", "future"):
            named = f"rank {CULPRIT} (pid {culprit.pid} on {socket.gethostname()})"
            assert f"{named} has not made this call yet" in failure.text


def _never_init() -> str:
    if int(os.environ["RANK"]) == CULPRIT:
        return ""
    # All start together. A rank that starts two seconds later would also be reported as missing.
    ranks.arrive("begin")
    ranks.await_ranks("begin", 2)
    try:
        dist.init_process_group("smddp", timeout=timedelta(seconds=2))
    except dist.DistBackendError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_rank_that_never_comes() -> None:
    texts = ranks.check_ranks(_never_init, "3")
    for rank in (0, 2):
        assert texts[rank].startswith("SMDDPCollectiveTimeoutError"), texts[rank]
        assert f"rank {CULPRIT}" in texts[rank]


def _lose_the_store() -> Failure:
    address, port = "127.0.0.1", int(os.environ["MASTER_PORT"])
    rank, owner, server = int(os.environ["RANK"]), os.getpid(), 0
    if rank == 0:
        server = os.fork()
        if server == 0:
            kept = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
            while os.getppid() == owner:
                time.sleep(0.1)
            del kept
            os._exit(0)
    wait = timedelta(seconds=20)
    store = dist.TCPStore(address, port, is_master=False, timeout=wait)
    dist.init_process_group("smddp", store=store, rank=rank, world_size=2, timeout=wait)
    dist.barrier()
    if rank == 0:
        os.kill(server, signal.SIGKILL)
    # A group that exists does not need the store.
    dist.barrier()
    return failure_of(dist.new_group)


def test_store_that_is_gone() -> None:
    for failure in ranks.check_ranks(_lose_the_store, "2", rank_0_serves=True):
        assert failure.kind == "SMDDPPeerLostError", failure
        assert "the store does not answer" in failure.text, failure


def _meet_where_the_epoch_is_garbage(kind: str, path: str) -> Failure:
    wait = timedelta(seconds=10)
    if kind == "file":
        store: dist.Store = dist.FileStore(path)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # torch puts its prefix before the name.
    store.set("0//cpu//smddp/0/epoch", "garbage")
    return failure_of(
        lambda: dist.init_process_group("smddp", store=store, rank=0, world_size=2, timeout=wait)
    )


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_store_in_which_another_program_writes(kind: str, tmp_path: Path) -> None:
    [failure] = ranks.check_ranks(
        _meet_where_the_epoch_is_garbage, "1", kind, str(tmp_path / "store")
    )
    assert "smddp/0/epoch" in failure.text, failure
    assert "another program" in failure.text, failure


# --- different calls ------------------------------------------------------------------------------


def _diverge(what: str) -> Failure:
    dist.init_process_group("smddp", timeout=timedelta(seconds=10))
    dist.all_reduce(torch.ones(10))
    other = dist.get_rank() == CULPRIT
    calls: dict[str, Callable[[], Any]] = {
        "dtype": lambda: dist.all_reduce(torch.ones(10, dtype=torch.int32 if other else None)),
        "size": lambda: dist.all_reduce(torch.ones(11 if other else 10)),
        "big size": lambda: dist.all_reduce(torch.ones(1_000_001 if other else 1_000_000)),
        "big and small": lambda: dist.all_reduce(torch.ones(10 if other else 1_000_000)),
        "op": lambda: dist.all_reduce(
            torch.ones(10), dist.ReduceOp.MAX if other else dist.ReduceOp.SUM
        ),
        "factor": lambda: dist.all_reduce(
            torch.ones(10), dist._make_nccl_premul_sum(0.5 if other else 0.25)
        ),
        "root": lambda: dist.broadcast(torch.ones(10), 1 if other else 0),
        "collective": lambda: (
            dist.broadcast(torch.ones(10), 0) if other else dist.all_reduce(torch.ones(10))
        ),
        "barrier": lambda: dist.barrier() if other else dist.all_reduce(torch.ones(10)),
        "splits": lambda: _all_to_all(given=3 if other else 2, expected=2),
        "expected splits": lambda: _all_to_all(given=2, expected=3 if other else 2),
        "splits and barrier": lambda: dist.barrier() if other else _all_to_all(2, 2),
        "splits and none": lambda: (
            dist.all_to_all_single(*torch.ones(2, 2 * dist.get_world_size()))
            if other
            else _all_to_all(2, 2)
        ),
        "shape of a sparse one": lambda: dist.all_reduce(torch.eye(4 if other else 5).to_sparse()),
        "sparse and dense": lambda: dist.all_reduce(
            torch.eye(5) if other else torch.eye(5).to_sparse()
        ),
        "gathered blocks": lambda: _gather_blocks(7 if other else 6),
        "gathered blocks and broadcast": lambda: (
            dist.broadcast(torch.ones(5), 0) if other else _gather_blocks(6)
        ),
    }
    return failure_of(calls[what])


def _all_to_all(given: int, expected: int) -> None:
    size = dist.get_world_size()
    output, into = torch.ones(size * expected), [expected] * size
    dist.all_to_all_single(output, torch.ones(size * given), into, [given] * size)


def _gather_blocks(last: int) -> None:
    size = dist.get_world_size()
    blocks = [torch.ones(5) for _ in range(size - 1)] + [torch.ones(last)]
    dist.all_gather(blocks, torch.ones(blocks[dist.get_rank()].numel()))


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        ("2", "dtype"),
        ("2", "size"),
        ("2", "op"),
        ("2", "root"),
        ("2", "big and small"),
        ("2", "barrier"),
        ("2x2", "dtype"),
        ("2x2", "big size"),
        ("2x2", "collective"),
        ("2x2", "factor"),
        # With one rank per node there is no comparison inside a node.
        ("2x1", "op"),
        ("2x1", "size"),
        ("2x1", "big and small"),
        ("2x1", "collective"),
        ("2x1", "barrier"),
        ("2x1", "root"),
        ("3", "splits"),
        ("3", "expected splits"),
        ("3", "splits and barrier"),
        ("3", "splits and none"),
        ("3", "shape of a sparse one"),
        ("3", "sparse and dense"),
        ("2x1", "splits"),
        ("2x1", "splits and barrier"),
        ("2x1", "splits and none"),
        ("2x1", "shape of a sparse one"),
        ("2x1", "sparse and dense"),
        ("3", "gathered blocks"),
        ("2x1", "gathered blocks and broadcast"),
    ],
)
def test_mismatch(layout: str, what: str) -> None:
    # Every rank gets the error, also the one that differs.
    outcomes = ranks.run_ranks(_diverge, layout, what)
    for outcome in outcomes:
        assert outcome.returned, "\n".join(map(str, outcomes))
        assert outcome.value.kind == "SMDDPCollectiveMismatchError", outcome.value
        assert f"rank {CULPRIT}" in outcome.value.text, outcome.value
        if what == "gathered blocks":
            assert "for all_gather of blocks of several sizes" in outcome.value.text


def _diverge_behind_others() -> Failure:
    """The third of four calls differs. They are fused, since the first waits for the other rank."""
    dist.init_process_group("smddp", timeout=timedelta(seconds=10))
    if dist.get_rank() == CULPRIT:
        dist.recv(torch.empty(1), 0)
    counts = [10, 20, 31 if dist.get_rank() == CULPRIT else 30, 40]
    works = [dist.all_reduce(torch.ones(count), async_op=True) for count in counts]
    if dist.get_rank() == 0:
        dist.send(torch.empty(1), CULPRIT)

    def wait_for_all() -> None:
        for work in works:
            work.wait()

    return failure_of(wait_for_all)


def test_mismatch_of_a_call_behind_others() -> None:
    for outcome in ranks.run_ranks(_diverge_behind_others, "2"):
        assert outcome.returned, outcome
        assert outcome.value.kind == "SMDDPCollectiveMismatchError", outcome.value
        assert "30 float32" in outcome.value.text, outcome.value
        assert "31 float32" in outcome.value.text, outcome.value


# --- a frozen container -----------------------------------------------------------------------


def _wait_for_a_frozen_rank(kind: str) -> Failure:
    with ranks.job():
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(pids, torch.tensor([os.getpid()]))
        dist.barrier()
        ranks.limit(1.5)
        if dist.get_rank() == CULPRIT:
            time.sleep(0.5)  # it is frozen here
            return failure_of(lambda: [dist.barrier() for _ in range(1_000_000)])
        with freezer.frozen(int(pids[CULPRIT]), kind):
            return failure_of(dist.barrier)


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_a_rank_in_a_frozen_container(kind: str) -> None:
    if not freezer.can_freeze(kind):
        pytest.skip("needs root, and cgroups of that version")
    outcome = ranks.run_ranks(_wait_for_a_frozen_rank, "2", kind)[0]
    assert outcome.returned, str(outcome)
    assert "is stopped (SIGSTOP, a debugger or a frozen container)" in outcome.value.text
    assert "is stopped" in outcome.stderr.splitlines()[0]  # a second before the time-out


# --- abort ----------------------------------------------------------------------------------------


def _abort(by: str) -> Failure | None:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(10))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if dist.get_rank() == CULPRIT:
        if by == "peer":
            backend.abort()
        else:
            _others_failed()
        return None
    if by == "thread":
        threading.Timer(0.3, backend.abort).start()
    failure = failure_of(lambda: dist.all_reduce(torch.ones(10)))
    ranks.arrive("failed")
    return failure


@layouts
@pytest.mark.parametrize("by", ["thread", "peer"])
def test_abort(layout: str, by: str) -> None:
    failures, _ = survivors_of(_abort, layout, by)
    for failure in failures:
        assert failure.kind == "SMDDPAbortedError", failure
        assert "called abort()" in failure.text


def _shutdown_in_flight() -> str:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == CULPRIT:
        _others_failed()
        return ""
    ranks.limit(1)
    work = dist.all_reduce(torch.ones(10), async_op=True)
    dist.destroy_process_group()
    assert work.is_completed()
    ranks.arrive("failed")
    return failure_of(work.wait).kind


@layouts
def test_destroy_waits_for_what_is_in_flight(layout: str) -> None:
    kinds, culprit = survivors_of(_shutdown_in_flight, layout)
    assert culprit.status == 0
    assert set(kinds) == {"SMDDPCollectiveTimeoutError"}


# --- a connection that fails alone ----------------------------------------------------------------


def _lose_the_connection() -> tuple[Failure, float]:
    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    started = time.monotonic()
    if dist.get_rank() == 0:
        store = int(os.environ["MASTER_PORT"])
        for connection in psutil.Process().net_connections("tcp"):
            if connection.status != psutil.CONN_ESTABLISHED or connection.raddr.port == store:
                continue
            with socket.socket(fileno=os.dup(connection.fd)) as ours:
                # Lifelines have it, what carries data does not.
                if not ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                    ours.shutdown(socket.SHUT_RDWR)
    failure = failure_of(lambda: [dist.all_reduce(tensor) for _ in range(10)])
    took = time.monotonic() - started
    # Both are alive until both know.
    ranks.arrive("failed")
    ranks.await_ranks("failed", 2)
    return failure, took


def test_connection_that_fails_while_both_processes_live() -> None:
    env = {"SMDDP_PROVIDER": "sockets", "SMDDP_HOST_TIMEOUT": "1"}
    for rank, (failure, took) in enumerate(ranks.check_ranks(_lose_the_connection, "1+1", env=env)):
        assert failure.kind == "SMDDPPeerLostError", failure
        assert f"rank {1 - rank} (pid " in failure.text
        assert "closed the connection" in failure.text or "sending to it failed" in failure.text
        assert 0.9 < took < 20
