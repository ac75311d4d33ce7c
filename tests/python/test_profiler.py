"""Traces of torch.profiler have, of each call, what tools read that compare the ranks' traces."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.multiprocess


def _events(profile: torch.profiler.profile, folder: str) -> list[dict[str, Any]]:
    """Returns the arguments of all events "record_param_comms" of a profile."""
    path = Path(folder) / f"{os.environ['RANK']}.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event["args"] for event in events if event["name"] == "record_param_comms"]


def _ddp(folder: str) -> list[dict[str, Any]]:
    with ranks.job():
        model = DistributedDataParallel(torch.nn.Linear(30, 10))
        with torch.profiler.profile() as profile:
            model(torch.ones(4, 30)).sum().backward()
        return _events(profile, folder)


def test_a_step_of_ddp(tmp_path: Path) -> None:
    for events in ranks.check_ranks(_ddp, "2", str(tmp_path)):
        (reduced,) = [event for event in events if event["Collective name"] == "allreduce"]
        assert reduced["In msg nelems"] == reduced["Out msg nelems"] == 310
        assert reduced["dtype"] == "Float"
        assert reduced["Group size"] == 2
        assert reduced["Process Group Name"] == "0"
        assert reduced["Process Group Description"] == "default_pg"
        assert json.loads(reduced["Process Group Ranks"]) == [0, 1]


def _calls(folder: str) -> tuple[str, list[dict[str, Any]]]:
    with ranks.job():
        group = dist.new_group([1, 3])
        me, size = dist.get_rank(), dist.get_world_size()
        with torch.profiler.profile() as profile:
            dist.all_gather_into_tensor(torch.empty(5 * size), torch.ones(5))
            dist.all_gather([torch.empty(3) for _ in range(size)], torch.ones(3))
            dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * size))
            dist.broadcast(torch.ones(6, dtype=torch.int64), 0)
            dist.barrier()
            splits = [1 + (me + other) % 2 for other in range(size)]
            dist.all_to_all_single(
                torch.empty(sum(splits)), torch.ones(sum(splits)), splits, splits
            )
            if me < 2:
                dist.send(torch.ones(7), 1) if me == 0 else dist.recv(torch.ones(7), 0)
            if me in (1, 3):
                dist.all_reduce(torch.ones(8, dtype=torch.bfloat16), group=group)
        name = "" if group == dist.GroupMember.NON_GROUP_MEMBER else group.group_name
        return name, _events(profile, folder)


def test_calls_and_groups(tmp_path: Path) -> None:
    for rank, (group, events) in enumerate(ranks.check_ranks(_calls, "4", str(tmp_path))):
        found = [
            (e["Collective name"], e["In msg nelems"], e["Out msg nelems"], e["dtype"])
            for e in events
        ]
        total = sum(1 + (rank + other) % 2 for other in range(4))
        expected = [
            ("_allgather_base", 5, 20, "Float"),
            ("allgather", 3, 12, "Float"),
            ("_reduce_scatter_base", 8, 2, "Float"),
            ("broadcast", 6, 6, "Long"),
            ("barrier", 0, 0, "Byte"),
            ("all_to_allv", total, total, "Float"),
        ]
        if rank < 2:
            expected.append((("send", "recv")[rank], 7, 7, "Float"))
        if rank in (1, 3):
            expected.append(("allreduce", 8, 8, "BFloat16"))
            assert events[-1]["Process Group Name"] == group
            assert events[-1]["Group size"] == 2
            assert json.loads(events[-1]["Process Group Ranks"]) == [1, 3]
        assert found == expected
        splits = next(e for e in events if e["Collective name"] == "all_to_allv")
        assert json.loads(splits["In split size"]) == [1 + (rank + other) % 2 for other in range(4)]


def _split(folder: str) -> list[dict[str, Any]]:
    with ranks.job():
        half = dist.split_group(split_ranks=[[0, 2], [1, 3]])
        with torch.profiler.profile() as profile:
            dist.all_reduce(torch.ones(8), group=half)
        return _events(profile, folder)


def test_groups_that_were_split_off(tmp_path: Path) -> None:
    for rank, events in enumerate(ranks.check_ranks(_split, "4", str(tmp_path))):
        (event,) = events
        assert json.loads(event["Process Group Ranks"]) == [rank % 2, rank % 2 + 2]
