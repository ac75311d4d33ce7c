"""What ends a wait: a signal, a rank that dies before it comes, a rank that cannot come."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import programs
import pytest
import ranks
import torch
import torch.distributed as dist

import smddp

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["3", "2x2", "1+1+1"])

# Longer than any test may take: no error comes from it.
FOREVER = timedelta(seconds=3600)
CULPRIT = 1


def _error_of(action: Callable[[], Any]) -> tuple[str, str, float]:
    """Runs `action`, which must raise; returns the class, the text and the time of its error."""
    try:
        action()
    except (KeyboardInterrupt, ValueError, dist.DistBackendError) as error:
        return type(error).__name__, str(error), time.monotonic()
    raise AssertionError("nothing was raised")


of_this_torch = pytest.mark.skipif(
    torch.__version__ < (2, 15), reason="torch splits no groups without GPUs"
)


def _init() -> None:
    dist.init_process_group("smddp", timeout=FOREVER)


def _members() -> list[int]:
    return list(range(dist.get_world_size()))


# --- signals --------------------------------------------------------------------------------------

_WAITS: dict[str, Callable[[], Any]] = {
    "init": _init,
    "new_group": lambda: dist.new_group(_members()),
    "split_group": lambda: dist.split_group(split_ranks=[_members()]),
    "all_reduce": lambda: dist.all_reduce(torch.ones(10)),
    "large all_reduce": lambda: dist.all_reduce(torch.ones(1_000_000)),
    "work.wait": lambda: dist.all_reduce(torch.ones(10), async_op=True).wait(),
    "work.wait with a timeout": lambda: dist.all_reduce(torch.ones(10), async_op=True).wait(
        timedelta(seconds=3000)
    ),
    "recv": lambda: dist.recv(torch.ones(10), CULPRIT),
    "barrier": dist.barrier,
    "monitored_barrier": lambda: dist.group.WORLD._get_backend(
        torch.device("cpu")
    ).monitored_barrier(FOREVER),
    "all_to_all": lambda: dist.all_to_all_single(
        torch.ones(len(_members())),
        torch.ones(len(_members())),
        [1] * len(_members()),
        [1] * len(_members()),
    ),
    "destroy": lambda: (
        dist.all_reduce(torch.ones(10), async_op=True),
        dist.destroy_process_group(),
    ),
}


def _interrupted(wait: str) -> tuple[tuple[str, str, float], float]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if wait != "init":
        _init()
        dist.all_reduce(torch.ones(10))
    if dist.get_rank() == CULPRIT if wait != "init" else os.environ["RANK"] == str(CULPRIT):
        # Does not come, and is not interrupted.
        ranks.await_ranks("out", int(os.environ["WORLD_SIZE"]) - 1)
        return ("", "", 0.0), 0.0
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    if os.environ["RANK"] == "0":
        # Before the wait in init, the module has to be loaded.
        threading.Timer(3 if wait == "init" else 0.5, interrupt).start()
    elif wait == "destroy":
        # Leaves, whatever has become of its calls.
        _WAITS[wait]()
        ranks.arrive("out")
        return ("", "", 0.0), 0.0
    error = _error_of(_WAITS[wait])
    ranks.arrive("out")
    return error, sent[0] if sent else 0.0


@pytest.mark.parametrize("layout", ["3", "1+1+1"])
@pytest.mark.parametrize(
    "wait",
    [pytest.param(wait, marks=[of_this_torch] * (wait == "split_group")) for wait in _WAITS],
)
def test_a_signal_ends_the_wait(layout: str, wait: str) -> None:
    outcomes = ranks.check_ranks(_interrupted, layout, wait)
    (kind, text, at), sent = outcomes[0]
    assert kind == "KeyboardInterrupt", text
    print(f"{layout} {wait}: {(at - sent) * 1000:.0f} ms")
    if wait != "destroy":
        (kind, text, at), _ = outcomes[2]
        print(f"{layout} {wait}: rank 2 after {(at - sent) * 1000:.0f} ms: {kind}: {text}")
        assert kind in ("SMDDPAbortedError", "SMDDPPeerLostError")
        assert "rank 0" in text
        if kind == "SMDDPAbortedError":
            assert "was interrupted by a signal" in text


def _all_interrupted(wait: str) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if wait != "init":
        _init()
    me = int(os.environ["RANK"])
    if me == CULPRIT:
        ranks.await_ranks("out", int(os.environ["WORLD_SIZE"]) - 1)
        return ""
    ranks.arrive("in")
    ranks.await_ranks("in", int(os.environ["WORLD_SIZE"]) - 1)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        kind = _error_of(_WAITS[wait])[0]
        time.sleep(1)  # where it comes if another rank was quicker to break the group
    except KeyboardInterrupt:
        kind = "KeyboardInterrupt"
    ranks.arrive("out")
    return kind


@pytest.mark.parametrize("wait", ["init", "new_group", "all_reduce", "recv"])
def test_a_signal_to_all(wait: str) -> None:
    kinds = ranks.check_ranks(_all_interrupted, "3", wait)
    assert (kinds[0], kinds[2]) == ("KeyboardInterrupt", "KeyboardInterrupt")


def _handled() -> float:
    seen: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    _init()
    if dist.get_rank() == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    else:
        time.sleep(1)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert len(seen) == (1 if dist.get_rank() == 0 else 0)
    return float(tensor[0])


def test_a_handler_that_returns_ends_nothing() -> None:
    assert ranks.check_ranks(_handled, "2") == [2.0, 2.0]


# --- death ----------------------------------------------------------------------------------------


def _dies_before_it_comes(call: str) -> tuple[tuple[str, str, float], int]:
    _init()
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == CULPRIT:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return _error_of(_WAITS[call]), os.getpid()


@layouts
@pytest.mark.parametrize("call", ["new_group", pytest.param("split_group", marks=of_this_torch)])
def test_death_of_a_rank_that_is_to_come(layout: str, call: str) -> None:
    outcomes = ranks.run_ranks(_dies_before_it_comes, layout, call)
    dead = outcomes[CULPRIT]
    for outcome in outcomes:
        if outcome.rank == CULPRIT:
            continue
        assert outcome.returned, "\n".join(map(str, outcomes))
        (kind, text, at), _ = outcome.value
        assert kind == "SMDDPPeerLostError", text
        assert f"rank {CULPRIT} (pid {dead.pid} on " in text
        print(f"{layout} {call}: rank {outcome.rank} {(at - dead.ended_at) * 1000:.0f} ms: {text}")


def _some_die_before_they_come() -> tuple[str, str, float]:
    """The group has other numbers for its ranks than the world."""
    _init()
    dist.all_reduce(torch.ones(10))
    members = [3, 2, 1]
    if dist.get_rank() == 0:
        dist.new_group(members)
        ranks.await_ranks("out", 2)
        return "", "", 0.0
    if dist.get_rank() == CULPRIT:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    error = _error_of(lambda: dist.new_group(members))
    ranks.arrive("out")
    return error


@pytest.mark.parametrize("layout", ["4", "2x2"])
def test_the_rank_of_the_world_is_named(layout: str) -> None:
    outcomes = ranks.run_ranks(_some_die_before_they_come, layout)
    for rank in (2, 3):
        assert outcomes[rank].returned, str(outcomes[rank])
        kind, text, _ = outcomes[rank].value
        assert kind == "SMDDPPeerLostError"
        assert f"rank {CULPRIT} (pid {outcomes[CULPRIT].pid} on " in text


def _server_dies() -> tuple[str, str, float]:
    _init()
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return _error_of(_WAITS["new_group"])


@layouts
def test_death_of_the_rank_that_serves_the_store(layout: str) -> None:
    outcomes = ranks.run_ranks(_server_dies, layout, rank_0_serves=True)
    for outcome in outcomes[1:]:
        assert outcome.returned, str(outcome)
        kind, text, _ = outcome.value
        assert kind == "SMDDPPeerLostError"
        assert f"rank 0 (pid {outcomes[0].pid} on " in text


# --- what a rank knows to be wrong ----------------------------------------------------------------


def _cannot_come(changed: dict[str, str]) -> tuple[str, str, float]:
    me, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if me == size - 1:
        # Comes when the others have given up.
        ranks.await_ranks("out", size - 1)
    if me == CULPRIT:
        time.sleep(0.5)
        os.environ.update(changed)
    error = _error_of(_init)
    os.environ["RANK"] = str(me)
    ranks.arrive("out")
    return error


@pytest.mark.parametrize(
    ("changed", "kind", "texts"),
    [
        ({"SMDDP_CHUNK_BYTES": "many"}, "ValueError", ["SMDDP_CHUNK_BYTES=many"]),
        ({"SMDDP_ALGORITHM": "allreduce=best"}, "ValueError", ['no algorithm "best"']),
        ({"SMDDP_CHUNK_BYTES": "65536"}, "SMDDPCollectiveMismatchError", ["SMDDP_CHUNK_BYTES is "]),
        ({"WORLD_SIZE": "7"}, "SMDDPCollectiveMismatchError", ["groups of 3 and 7 ranks"]),
        ({"RANK": "9"}, "ValueError", ["rank 9", "which has 3 ranks"]),
    ],
)
@pytest.mark.parametrize("layout", ["3", "1+1+1"])
def test_all_hear_that_a_rank_cannot_come(
    layout: str, changed: dict[str, str], kind: str, texts: list[str]
) -> None:
    outcomes = ranks.check_ranks(_cannot_come, layout, changed)
    for rank, (found, text, at) in enumerate(outcomes):
        assert found == kind, text
        for part in texts:
            assert part in text
        if rank != CULPRIT:
            named = changed.get("RANK", str(CULPRIT))
            assert f"rank {named} (" in text
        print(f"{layout} {changed}: {rank} after {at - outcomes[CULPRIT][2]:.2f} s: {text}")


def _rank_0_cannot_come() -> tuple[str, str, float]:
    if os.environ["RANK"] == "0":
        time.sleep(0.5)
        os.environ["SMDDP_CHUNK_BYTES"] = "many"
    return _error_of(_init)


def test_all_hear_that_rank_0_cannot_come() -> None:
    for rank, (kind, text, _) in enumerate(ranks.check_ranks(_rank_0_cannot_come, "2")):
        assert kind == "ValueError"
        assert "SMDDP_CHUNK_BYTES=many" in text
        assert rank == 0 or "rank 0 (" in text


def _no_provider() -> tuple[str, str, float]:
    if os.environ["RANK"] == str(CULPRIT):
        os.environ["SMDDP_PROVIDER"] = "verbs"
    return _error_of(_init)


def test_all_hear_of_a_missing_provider() -> None:
    for rank, (kind, text, _) in enumerate(ranks.check_ranks(_no_provider, "1+1+1")):
        assert kind in ("ValueError", "SMDDPTransportError", "SMDDPResourceError"), (kind, text)
        assert "SMDDP_PROVIDER=verbs" in text
        assert rank == CULPRIT or f"rank {CULPRIT} (" in text


# --- split_group ----------------------------------------------------------------------------------


def _split(lists: list[list[list[int]]]) -> tuple[str, str]:
    _init()
    said = ("", "")
    try:
        dist.split_group(split_ranks=lists[dist.get_rank() % len(lists)])
    except (ValueError, dist.DistBackendError) as error:
        said = (type(error).__name__, str(error))
    # The group that was to be split is as good as before.
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    return said


@of_this_torch
@pytest.mark.parametrize("layout", ["2", "2x1"])
@pytest.mark.parametrize(
    ("lists", "text"),
    [
        ([], "split_ranks cannot be None or empty"),
        ([[]], "list 0, [], is empty"),
        ([[0], []], "list 1, [], is empty"),
        ([[0, 0, 1]], "list 0, [0, 0, 1], names rank 0 again"),
        ([[0, 1], [1]], "list 1, [1], names rank 1 again"),
        ([[0], [0, 1]], "list 1, [0, 1], names rank 0 again"),
        ([[0, 1, 2]], "rank 2 in list 0, [0, 1, 2], is not a rank of the group"),
        ([[0], [5]], "rank 5 in list 1, [5], is not a rank of the group"),
        ([[0, -1]], "rank -1 in list 0, [0, -1], is not a rank of the group"),
    ],
    ids=str,
)
def test_wrong_lists_for_split_group(layout: str, lists: list[list[int]], text: str) -> None:
    for kind, said in ranks.check_ranks(_split, layout, [lists]):
        assert kind == "ValueError"
        assert text in said


@of_this_torch
@pytest.mark.parametrize("layout", ["2", "2x1"])
@pytest.mark.parametrize(
    ("lists", "text"),
    [
        ([[[0, 1]], [[1, 0]]], "[0, 1] on rank 0, [1, 0] on rank 1"),
        ([[[0], [1]], [[0, 1]]], "[0, 1] on rank 1, [0] on rank 0"),
        ([[[0, 1]], [[1]]], "[0, 1] on rank 0, [1] on rank 1"),
    ],
    ids=str,
)
def test_lists_for_split_group_that_differ(
    layout: str, lists: list[list[list[int]]], text: str
) -> None:
    for kind, said in ranks.check_ranks(_split, layout, lists):
        assert kind == "SMDDPCollectiveMismatchError"
        assert text in said


@of_this_torch
def test_lists_for_split_group_in_another_order() -> None:
    """Every rank is in the group that it names, however the groups are listed."""
    assert ranks.check_ranks(_split, "2", [[[0], [1]], [[1], [0]]]) == [("", "")] * 2
    assert ranks.check_ranks(_split, "3", [[[0, 2]], [[0, 2]]]) == [("", "")] * 3


# --- leaving --------------------------------------------------------------------------------------


def _left_unwaited(barrier: bool) -> list[float]:
    _init()
    me = dist.get_rank()
    tensors = [torch.full((count,), float(me + 1)) for count in (10, 300_000, 100, 1_000_000) * 3]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if barrier:
        dist.barrier()
        assert all(work.is_completed() for work in works)
    if me > 0:
        # Slower than rank 0, which has left by then.
        for work in works:
            time.sleep(0.01)
            work.wait()
    dist.destroy_process_group()
    return [float(tensor[-1]) for tensor in tensors]


@pytest.mark.parametrize("layout", ["2", "2x1", "2x2"])
@pytest.mark.parametrize("barrier", [True, False])
def test_leaving_with_calls_in_flight(layout: str, barrier: bool) -> None:
    results = ranks.check_ranks(_left_unwaited, layout, barrier)
    size = len(results)
    for result in results:
        assert result == [size * (size + 1) / 2] * 12


def _sends_and_leaves() -> float:
    _init()
    tensor = torch.full((500_000,), float(dist.get_rank()))
    if dist.get_rank() == 0:
        dist.isend(tensor, 1)
    else:
        time.sleep(0.5)
        dist.recv(tensor, 0)
    dist.destroy_process_group()
    return float(tensor.sum())


@pytest.mark.parametrize("layout", ["2", "2x1"])
def test_leaving_with_a_send_in_flight(layout: str) -> None:
    assert ranks.check_ranks(_sends_and_leaves, layout) == [0.0, 0.0]


# --- fork -----------------------------------------------------------------------------------------


def _job_of_children() -> str:
    _init()
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    shared = smddp.empty(1000)
    assert shared.shape == (1000,)
    return f"sum {tensor[0]:.0f}"


def _forked_after_destroy() -> str:
    assert _job_of_children().startswith("sum")
    return programs.in_a_child(_job_of_children)


@pytest.mark.parametrize("layout", ["2", "2x1"])
def test_a_child_may_begin_after_its_parent_has_ended(layout: str) -> None:
    assert ranks.check_ranks(_forked_after_destroy, layout) == ["sum 2", "sum 2"]


def _forked_in_between() -> str:
    _init()
    dist.new_group(_members())
    text = programs.in_a_child(lambda: str(dist.new_group(_members())))
    dist.destroy_process_group()
    return text


def test_a_child_hears_what_its_parent_left_open() -> None:
    for text in ranks.check_ranks(_forked_in_between, "2"):
        assert "ValueError" in text, text
        assert "its parent had not destroyed group" in text, text
