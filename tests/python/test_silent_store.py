"""The process of the store is stopped: waits end at their deadline, or by a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import ranks
import torch.distributed as dist

pytestmark = pytest.mark.multiprocess


@contextlib.contextmanager
def _stored() -> Iterator[tuple[int, int]]:
    """Yields the port and the process of a store, which rank 0 starts and ends."""
    place, pid = ranks._folder / "port", 0
    if os.environ["RANK"] == "0":
        pid = os.fork()
        if pid == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            place.with_suffix(".part").write_text(f"{store.port} {os.getpid()}")
            place.with_suffix(".part").rename(place)
            signal.pause()
            os._exit(0)
    while not place.exists():
        time.sleep(0.01)
    port, server = (int(word) for word in place.read_text().split())
    try:
        yield port, server
    finally:
        ranks.arrive("end")
        ranks.await_ranks("end", int(os.environ["WORLD_SIZE"]))
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _wait(what: str) -> tuple[str, str, int]:
    with _stored() as (port, pid):
        return *_ended(what, port, pid), port


def _ended(what: str, port: int, pid: int) -> tuple[str, str]:
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    patience = timedelta(seconds=2 if "time" in what else 100)
    if "init" not in what:
        dist.init_process_group("smddp", store=store, rank=rank, world_size=size)
        dist.barrier()
    ranks.arrive("here")
    ranks.await_ranks("here", size)
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)
    ranks.arrive("stopped")
    ranks.await_ranks("stopped", size)
    if "signal" in what:
        child = os.fork()
        if child == 0:
            time.sleep(0.5)
            os.kill(os.getppid(), signal.SIGINT)
            os._exit(0)
    try:
        if "init" in what:
            dist.init_process_group(
                "smddp", store=store, rank=rank, world_size=size, timeout=patience
            )
        else:
            dist.new_group(timeout=patience)
    except (dist.DistBackendError, KeyboardInterrupt) as error:
        found = (type(error).__name__, str(error))
    else:
        found = ("nothing", "")
    return found


@pytest.mark.parametrize(
    "what", ["init, time-out", "init, signal", "group, time-out", "group, signal"]
)
def test_waits_for_a_silent_store_end(what: str) -> None:
    for outcome in ranks.run_ranks(_wait, "2", what):
        assert outcome.returned, str(outcome)
        name, text, port = outcome.value
        if "signal" in what:
            assert name == "KeyboardInterrupt", str(outcome)
        else:
            assert name == "SMDDPCollectiveTimeoutError", str(outcome)
            assert f"the store at 127.0.0.1:{port} has not answered within 2.0 s" in text
