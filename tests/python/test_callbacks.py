"""Futures of calls and their callbacks; hooks of a group.

A callback may wait for anything, also for a thread that makes other calls. So it runs on a thread
of smddp, or in the wait for its own call, where gloo has run it before, too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["2", "1+1"])


def _callback_waits_for_a_caller() -> None:
    with ranks.job():
        # The call ends while this thread makes the next one, which the callback waits for.
        for count in (10, 100_000):
            if dist.get_rank() != 0:
                time.sleep(0.3)  # so that the call is open when rank 0 adds its callback
            made, ran = threading.Event(), threading.Event()

            def wait(_: object, made: threading.Event = made, ran: threading.Event = ran) -> None:
                assert made.wait(60)
                ran.set()

            first = dist.all_reduce(torch.ones(count), async_op=True)
            if dist.get_rank() == 0:
                first.get_future().add_done_callback(wait)
            second = dist.all_reduce(torch.ones(count), async_op=True)
            dist.barrier()
            made.set()
            second.wait()
            assert dist.get_rank() != 0 or ran.wait(60)


def _callback_takes_the_lock_of_a_caller() -> None:
    with ranks.job():
        lock, done, works = threading.Lock(), [], []

        def note(_: object) -> None:
            with lock:
                done.append(1)

        for _ in range(300):
            with lock:
                work = dist.all_reduce(torch.ones(100), async_op=True)
            work.get_future().add_done_callback(note)
            works.append(work)
        for work in works:
            work.wait()
        deadline = time.monotonic() + 60
        while len(done) < len(works) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(done) == len(works)


def _future_is_complete_after_the_wait() -> None:
    with ranks.job():
        size = float(dist.get_world_size())
        for number in range(200):
            work = dist.all_reduce(torch.ones(1 + number % 7 * 5000), async_op=True)
            future = work.get_future()
            if number % 2:
                work.wait()
            else:
                while not work.is_completed():
                    time.sleep(0)
            assert future.done()
            assert future.value()[0][0] == size
            # Within a callback, too.
            inside = future.then(lambda f, work=work: (work.wait(), f.value()[0][0].item())[1])
            assert inside.wait() == size


@layouts
@pytest.mark.parametrize(
    "cases",
    [
        _callback_waits_for_a_caller,
        _callback_takes_the_lock_of_a_caller,
        _future_is_complete_after_the_wait,
    ],
)
def test_callbacks(layout: str, cases: Callable[[], None]) -> None:
    ranks.check_ranks(cases, layout)


def _end_with_an_open_receive() -> list[str]:
    said: list[str] = []
    ended = threading.Event()

    def note(future: torch.futures.Future[object]) -> None:
        try:
            future.value()
        except RuntimeError as error:
            said.append(str(error))
        ended.set()

    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    dist.irecv(torch.ones(1), 1 - dist.get_rank()).get_future().add_done_callback(note)
    dist.barrier()
    dist.destroy_process_group()
    assert ended.wait(30)
    return said


@layouts
def test_a_future_ends_with_its_group(layout: str) -> None:
    for said in ranks.check_ranks(_end_with_an_open_receive, layout):
        assert len(said) == 1
        assert "left the group" in said[0]


def _hooks() -> list[str]:
    ran: list[str] = []

    def fail() -> None:
        ran.append("fails")
        raise RuntimeError("of the hook")

    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.register_abort_hook(900_001, fail)
    backend.register_abort_hook(900_002, lambda: ran.append("works"))
    backend.abort()
    deadline = time.monotonic() + 30
    while "works" not in ran and time.monotonic() < deadline:
        time.sleep(0.001)
    return ran


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d.Backend, "register_abort_hook"),
    reason="this torch has no hooks",
)
def test_a_hook_that_fails_stops_no_other() -> None:
    for ran in ranks.check_ranks(_hooks, "2"):
        assert {"fails", "works"} <= set(ran)


def _hook_of_a_failure(how: str) -> tuple[list[str], str]:
    said: list[str] = []
    caught, ended = threading.Event(), threading.Event()
    threads: list[str] = []

    def hook() -> None:
        name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        threads.append(name.read_text().strip())
        # If the caller's error waited for the hook, this would be first.
        said.append("hook" if caught.wait(20) else "the error is late")
        ended.set()

    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.register_abort_hook(900_001, hook)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(7)
    try:
        while True:
            dist.all_reduce(torch.ones(4), async_op=how == "waits").wait()
    except (dist.DistBackendError, AttributeError):
        said.append("error")
    for _ in range(3):  # each of them meets the same failure
        with pytest.raises(dist.DistBackendError):
            dist.barrier()
    if how == "destroys":
        dist.destroy_process_group()
    caught.set()
    assert ended.wait(30)
    time.sleep(0.05)
    return said, threads[0]


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d.Backend, "register_abort_hook"),
    reason="this torch has no hooks",
)
@pytest.mark.parametrize("how", ["raises", "waits", "destroys"])
def test_a_hook_comes_after_the_error_and_once(how: str) -> None:
    outcomes = ranks.run_ranks(_hook_of_a_failure, "3", how)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value == (["error", "hook"], "smddp-hooks"), str(outcome)


def _hook_that_does_not_end(how: str) -> None:
    def hook() -> None:
        Path(os.environ["BEGUN"] + os.environ["RANK"]).touch()
        while True:
            time.sleep(0.01)

    dist.init_process_group("smddp", timeout=timedelta(seconds=60))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.register_abort_hook(900_001, hook)
    if how == "interrupt":
        begun = Path(os.environ["BEGUN"] + os.environ["RANK"])

        def interrupt() -> None:
            while not begun.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
    backend.abort()
    raise SystemExit(3)


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d.Backend, "register_abort_hook"),
    reason="this torch has no hooks",
)
@pytest.mark.parametrize(("how", "seconds"), [("interrupt", "86400"), ("wait", "1")])
def test_a_process_ends_despite_a_hook(how: str, seconds: str, tmp_path: Path) -> None:
    """The interpreter ends as it would without hooks: a thread in Python code would abort it."""
    env = {"SMDDP_DUMP_SECONDS": seconds, "BEGUN": str(tmp_path / "begun")}
    for outcome in ranks.run_ranks(_hook_that_does_not_end, "2", how, env=env, full_exit=True):
        assert outcome.status == 3, str(outcome)
        assert "SMDDP_DUMP_SECONDS" in outcome.stderr


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _leave_coalescing_open() -> None:
    with ranks.job():
        with (
            pytest.raises(ValueError, match="99"),
            dist._coalescing_manager(device=torch.device("cpu")),
        ):
            dist.broadcast(torch.ones(3), 99)
        before = _resident()
        for _ in range(100):
            dist.broadcast(torch.ones(1 << 18), 0)
        assert _resident() - before < 30 << 20


def test_an_error_while_coalescing_keeps_no_later_tensors() -> None:
    ranks.check_ranks(_leave_coalescing_open, "2")
