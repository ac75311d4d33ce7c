"""Limits of the system: file descriptors, space in /dev/shm. A call works or raises its error."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import smddp.tools.env
import smddp.torch._load
from smddp.torch import _C

pytestmark = pytest.mark.multiprocess

POOR = 1  # the rank that runs out


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) - 1


def _limited(spare: int) -> tuple[str, str, int]:
    """Returns class and text of the error, and the descriptors in use after another attempt."""
    smddp.torch._load.load()
    importlib.import_module("smddp.torch.backend")  # a first group would import it
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    before = _descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kind = text = ""

    def train(name: str) -> None:
        options: dict[str, Any] = {"rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
        options["store"] = dist.PrefixStore(name, store)
        # As long as the other rank waits for one that could not even report its lack of
        # descriptors.
        dist.init_process_group("smddp", timeout=timedelta(seconds=8), **options)
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor)
        assert tensor.sum() == 200_000
        dist.destroy_process_group()

    if rank == POOR:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + spare, hard))
    try:
        train("limited")
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # The other ranks may wait longer.
    store.add("ready", 1)
    while store.add("ready", 0) < 2:
        time.sleep(0.01)
    train("again")
    return kind, text, _descriptors() - before


PLENTY = 100


@pytest.mark.parametrize("layout", ["2", "1+1"])
def test_few_descriptors(layout: str) -> None:
    in_use = [count for _, _, count in ranks.check_ranks(_limited, layout, PLENTY)]
    for spare in (0, 1, 2, 4, 8, 16, 22, 30):
        rich, poor = ranks.check_ranks(_limited, layout, spare)
        if poor[0]:
            assert poor[0] == "SMDDPResourceError", poor
            assert "ulimit -n" in poor[1]
            # Either it ended before it could report, and is missing; or it reported.
            assert rich[0] in ("SMDDPResourceError", "SMDDPCollectiveTimeoutError"), rich
            assert "rank 1" in rich[1]
            assert spare == 0 or rich[0] == "SMDDPResourceError", rich
        else:
            assert not rich[0]
        # The failed attempt has leaked no descriptors. Without a free one there is no status board.
        assert rich[2] == in_use[0]
        assert poor[2] in (in_use[1] - 1, in_use[1])
    assert not poor[0], "30 are enough for 2 ranks"


def _runs_out_after_the_start(wire: str, provider: str) -> tuple[str, str]:
    """Returns class and text of the error of the first call that needs connections."""
    os.environ |= {"SMDDP_WIRE": wire, "SMDDP_PROVIDER": provider}
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    dist.init_process_group("smddp", timeout=timedelta(seconds=6))
    held = []
    if dist.get_rank() == POOR:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
    else:
        time.sleep(0.5)
    try:
        dist.all_reduce(torch.ones(100_000))
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        for descriptor in held:
            os.close(descriptor)
    return "", ""


@pytest.mark.parametrize(("layout", "wire"), [("1+1", "fp32"), ("3x1", "int8"), ("2x2", "fp32")])
def test_a_rank_that_runs_out_after_the_start_ends_the_call(layout: str, wire: str) -> None:
    outcomes = ranks.check_ranks(_runs_out_after_the_start, layout, wire, "sockets")
    assert outcomes[POOR][0] == "SMDDPResourceError"
    assert "raise the limit of open files (ulimit -n)" in outcomes[POOR][1]
    for rank, (kind, text) in enumerate(outcomes):
        assert kind == "SMDDPResourceError"
        assert rank == POOR or f"rank {POOR} (" in text


def test_with_libfabric_the_error_names_the_limit_too() -> None:
    if why := smddp.torch._load.load().build_info()["no_libfabric"]:
        pytest.skip(why)
    outcomes = ranks.check_ranks(_runs_out_after_the_start, "1+1", "fp32", "tcp")
    assert outcomes[POOR][0] == "SMDDPResourceError"
    assert "raise the limit of open files (ulimit -n)" in outcomes[POOR][1]
    # It could not connect to tell the other one.
    assert outcomes[1 - POOR][0] in ("SMDDPResourceError", "SMDDPPeerLostError")


def _in_small_shared_memory() -> float:
    clone_newns = 0x00020000
    if ctypes.CDLL(None, use_errno=True).unshare(clone_newns) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", "/dev/shm"], check=True)
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    tensor = torch.ones(4_000_000)
    dist.all_reduce(tensor)
    assert list(Path("/dev/shm").iterdir()) == []
    dist.destroy_process_group()
    return float(tensor.mean())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("layout", ["2", "1+1"])
def test_the_size_of_dev_shm_does_not_matter(layout: str) -> None:
    assert ranks.check_ranks(_in_small_shared_memory, layout) == [2.0, 2.0]


@contextlib.contextmanager
def _control_group(limits: dict[str, dict[str, int]]) -> Iterator[Path]:
    """Makes a control group with limits, and yields its file for processes; skips where it may not.

    Args:
        limits: for each controller the limits, by the name of the file of version 1; that of
            version 2, which has one folder for all, is "memory.max" or "pids.max".
    """
    ((controller, files),) = limits.items()
    ours = next(iter(_C.ControlGroups().folders(controller)), None)
    if ours is not None:
        around = Path(ours)
    else:
        around, files = Path("/sys/fs/cgroup"), {f"{controller}.max": next(iter(files.values()))}
    folder = around / f"smddp-test-{os.getpid()}"
    try:
        if ours is None:
            (around / "cgroup.subtree_control").write_text(f"+{controller}")
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            for name, limit in files.items():
                (folder / name).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no limit can be set here: {error}")
        yield folder / "cgroup.procs"
    finally:
        # The ranks have ended; the kernel may need a moment to see it.
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.02)


def _with_few_threads(members: Path) -> tuple[str, str]:
    """Returns class and text of the error where rank POOR has limits."""
    if int(os.environ["RANK"]) == POOR:
        members.write_text(str(os.getpid()))
    try:
        dist.init_process_group("smddp", timeout=timedelta(seconds=15))
        dist.all_reduce(torch.ones(100_000))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _takes_tensors(members: Path) -> int:
    """Returns how many bytes of memory many tensors take that nobody has written to."""
    dist.init_process_group("smddp", timeout=timedelta(seconds=15))
    members.write_text(str(os.getpid()))
    before = _C.ControlGroups().available_memory()
    kept = [smddp.empty(2 << 20, dtype=torch.float32) for _ in range(20)]
    after = _C.ControlGroups().available_memory()
    assert len(kept) == 20
    assert before is not None
    assert after is not None
    return before - after


def test_tensors_beyond_the_memory_limit_lie_in_ordinary_memory() -> None:
    """Without the check the kernel would kill the rank."""
    with _control_group({"memory": {"memory.limit_in_bytes": 64 << 20}}) as members:
        (outcome,) = ranks.run_ranks(_takes_tensors, "1", members)
    assert outcome.returned, outcome
    assert 32 << 20 < outcome.value < 64 << 20
    assert "ordinary memory is used instead" in outcome.stderr


@pytest.mark.parametrize("more", [0, 1, 2, 3])
def test_the_limit_on_processes_of_a_container(more: int) -> None:
    """A rank that cannot start its threads raises an error, and the other one hears of it."""
    with _control_group({"pids": {"pids.max": 1 + more}}) as members:
        outcomes = ranks.check_ranks(_with_few_threads, "1+1", members)
    assert {kind for kind, _ in outcomes} <= {"", "SMDDPResourceError", "SMDDPPeerLostError"}
    if more == 0:
        assert outcomes[POOR][0] == "SMDDPResourceError", outcomes
        assert "pids" in outcomes[POOR][1]
        assert f"rank {POOR}" in outcomes[1 - POOR][1]
