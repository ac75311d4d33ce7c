"""torch's Flight Recorder sees calls of smddp end, and its analyzer names the rank that strayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15),
        reason="torch before 2.15 does not record what other backends do, or not that it ends",
    ),
]


def _recorded() -> list[dict[str, object]]:
    text = torch._C._distributed_c10d._dump_fr_trace_json(backend="smddp")
    entries: list[dict[str, object]] = json.loads(text)["entries"]
    return entries


def _calls() -> list[tuple[object, object, float | None]]:
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    me, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    dist.all_reduce(torch.ones(1 << 20), async_op=True).wait()
    dist.barrier()
    dist.all_gather([torch.empty(3) for _ in range(size)], torch.ones(3))
    dist.send(tensor, 1) if me == 0 else dist.recv(tensor, 0)
    if me == 0:
        waits = dist.all_reduce(tensor, async_op=True)
        state = _recorded()[-1]["state"]
        dist.send(tensor, 1)
        waits.wait()
        assert state == "scheduled", "rank 1 has not called it yet"
    else:
        dist.recv(tensor, 0)
        dist.all_reduce(tensor)
    deadline = time.monotonic() + 10  # the recorder hears of ends a moment later
    while any("duration_ms" not in e for e in _recorded()) and time.monotonic() < deadline:
        time.sleep(0.01)
    found = [(e["profiling_name"], e["state"], e.get("duration_ms")) for e in _recorded()]
    dist.destroy_process_group()
    return found  # type: ignore[return-value]


def test_entries_end_when_calls_end() -> None:
    for found in ranks.check_ranks(_calls, "1+1"):
        assert len(found) == 7
        assert found[0][0] == "smddp:all_reduce"
        for name, state, duration in found:
            assert state == "completed", name
            assert duration is not None, name
            assert 0 < duration < 30_000, name


def _stray(kind: str, culprit: int, folder: str) -> str:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/rank_"
    dist.init_process_group("smddp", timeout=timedelta(seconds=20))
    strays = dist.get_rank() == culprit
    tensor, size = torch.ones(999), dist.get_world_size()
    outputs = [torch.empty(999) for _ in range(size)]
    try:
        for _ in range(3):
            dist.all_reduce(tensor)
        if not (kind == "skips" and strays):
            dist.broadcast(tensor, 0)
        if kind == "repeats" and strays:
            dist.broadcast(tensor, 0)
        if strays:  # the others make the next call, and record it, before they hear of the failure
            time.sleep(0.5)
        if kind == "size" and strays:
            tensor = torch.ones(1000)
        if kind == "dtype" and strays:
            tensor = tensor.double()
        if kind == "gathers" and strays:
            dist.all_gather(outputs, tensor)
        else:
            dist.all_reduce(tensor)
        dist.all_gather(outputs, tensor)
        dist.barrier()
    except dist.DistBackendError as error:
        return type(error).__name__
    return "no error"


def _ask(port: int, question: str) -> dict[str, object]:
    """Returns what a rank's worker server answers, as torch's debug server asks it."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/handler/{question}", method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def _health() -> list[dict[str, object]]:
    dist.init_process_group("smddp", timeout=timedelta(seconds=20))
    server = torch._C._distributed_c10d._WorkerServer("127.0.0.1", 0)
    dist.all_reduce(torch.ones(4))
    found = [_ask(server.port, "c10d_health_check")]
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(4 if dist.get_rank() == 0 else 8))
    deadline = time.monotonic() + 20  # a thread of its own tells it
    while (state := _ask(server.port, "c10d_health_check"))["healthy"] and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    found.append(state)
    assert _ask(server.port, "fr_trace_json?backend=smddp")["entries"]
    server.shutdown()
    return found


def test_the_debug_server_hears_of_a_failure() -> None:
    assert (
        ranks.check_ranks(_health, "2")
        == [
            [
                {"healthy": True, "unhealthy_backends": []},
                {"healthy": False, "unhealthy_backends": ["smddp"]},
            ]
        ]
        * 2
    )


# The analyzer takes what rank 2 did for right, and names those who did something else.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "culprit"),
    [
        ("skips", 1),
        ("size", 0),
        *(
            pytest.param(kind, culprit, marks=pytest.mark.exhaustive)
            for kind, culprit in [
                ("skips", 0), ("size", 1), ("repeats", 0), ("repeats", 1), ("dtype", 0),
                ("dtype", 1), ("gathers", 0), ("gathers", 1),
            ]
        ),
    ],
)  # fmt: skip
def test_the_analyzer_names_the_rank_that_strayed(kind: str, culprit: int, tmp_path: Path) -> None:
    outcomes = ranks.check_ranks(_stray, "2+1", kind, culprit, str(tmp_path))
    assert outcomes == ["SMDDPCollectiveMismatchError"] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0", "rank_1", "rank_2"]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path),
         "-p", "rank_"],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert f"Culprit rank {culprit};" in ended.stdout + ended.stderr
