"""Many groups, groups used from several threads, groups created and destroyed repeatedly."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.multiprocessing
from on_ranks import on_ranks

import smddp

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["2", "2x2"])


def _check_sum(group: dist.ProcessGroup | None, members: list[int], count: int) -> None:
    tensor = torch.full((count,), float(dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((count,), float(sum(members))))


def _sixty_four() -> None:
    with ranks.job():
        size = dist.get_world_size()
        everybody = list(range(size))
        groups = [dist.new_group(everybody) for _ in range(64)]
        works = []
        for number, group in enumerate(groups):
            tensor = torch.full((100 + number,), float(number))
            works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor))
        for number, (work, tensor) in reversed(list(enumerate(works))):
            work.wait()
            assert torch.equal(tensor, torch.full_like(tensor, float(number * size)))


def _threads() -> None:
    with ranks.job():
        everybody = list(range(dist.get_world_size()))
        groups = [dist.new_group(everybody) for _ in range(6)]
        failures: list[BaseException] = []

        def work(group: dist.ProcessGroup, number: int) -> None:
            try:
                for turn in range(50):
                    _check_sum(group, everybody, 1 + 997 * ((turn + number) % 5))
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=(group, number))
            for number, group in enumerate(groups)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures


def _subgroups() -> None:
    with ranks.job():
        me = dist.get_rank()
        mine, _ = dist.new_subgroups(2)
        _check_sum(mine, [me - me % 2, me - me % 2 + 1], 1000)
        pairs = [[r, (r + 1) % dist.get_world_size()] for r in range(0, dist.get_world_size(), 2)]
        mine, _ = dist.new_subgroups_by_enumeration(pairs)
        _check_sum(mine, next(pair for pair in pairs if me in pair), 1000)
        local = dist.new_group([me - me % 2, me - me % 2 + 1], use_local_synchronization=True)
        _check_sum(local, [me - me % 2, me - me % 2 + 1], 1000)
        # Its name is a hash, of which messages have ten digits.
        assert re.match('group "[0-9a-f]{10}": rank ', smddp.describe(local))


@layouts
@pytest.mark.parametrize("cases", [_sixty_four, _threads, _subgroups])
def test_groups(layout: str, cases: Callable[[], None]) -> None:
    ranks.check_ranks(cases, layout, timeout=120)


@pytest.mark.costly
@on_ranks("1+1", timeout=170)
def test_a_thousand_groups_at_a_time() -> None:
    with ranks.job(timeout=120):
        everybody = list(range(dist.get_world_size()))
        groups = [dist.new_group(everybody) for _ in range(1000)]
        for group in groups:
            _check_sum(group, everybody, 1)
        for group in groups:
            dist.destroy_process_group(group)
        _check_sum(None, everybody, 100)


# --- nothing grows --------------------------------------------------------------------------------


def _footprint() -> tuple[int, int]:
    gc.collect()
    process = psutil.Process()
    return process.num_fds(), process.memory_info().rss


def _collectives(count: int) -> list[tuple[int, int]]:
    sizes = [1, 100, 5000, 70_000]
    tensors = [torch.ones(n) for n in sizes]
    gathered = [torch.ones(dist.get_world_size() * n) for n in sizes]
    found = []
    for part in range(5):
        for turn in range(count // 5):
            tensor, whole = tensors[turn % 4], gathered[turn % 4]
            if turn % 3 == 0:
                dist.all_reduce(tensor, dist.ReduceOp.MAX)
            elif turn % 3 == 1:
                dist.all_gather_into_tensor(whole, tensor)
            else:
                dist.broadcast(tensor, turn % dist.get_world_size(), async_op=True).wait()
        found.append(_footprint())
        assert part < 5
    return found


def _groups(count: int) -> list[tuple[int, int]]:
    found = []
    for turn in range(count):
        group = dist.new_group(list(range(dist.get_world_size())))
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
        if turn % (count // 5) == count // 5 - 1:
            dist.barrier()
            found.append(_footprint())
    return found


def _flat(layout: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    with ranks.job(timeout=60):
        across = layout != "2"
        return _collectives(2_000 if across else 10_000), _groups(40 if across else 200)


@layouts
@pytest.mark.costly
def test_memory_and_descriptors_stay_flat(layout: str) -> None:
    for parts in ranks.check_ranks(_flat, layout, layout, timeout=170):
        for found in parts:
            (files, memory), (last_files, last_memory) = found[1], found[-1]
            assert last_files <= files + 2, f"descriptors: {found}"
            assert last_memory <= memory + (12 << 20), f"resident bytes: {found}"


# --- beginnings -----------------------------------------------------------------------------------


def _restart(generation: int) -> float:
    """Runs a worker of torchrun, which after a restart has the same store and the same prefix."""
    me, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "smddp", store=store, rank=me, world_size=size, timeout=timedelta(seconds=30)
    )
    tensor = torch.full((10,), float(me + generation))
    dist.all_reduce(tensor)
    if generation == 0:
        os._exit(0)  # the workers end without destroying the group
    dist.destroy_process_group()
    return float(tensor[0])


def _generations() -> list[float]:
    """Forks one worker per restart, as the agent of torchrun does."""
    context: Any = torch.multiprocessing.get_context("fork")
    values = []
    for generation in range(3):
        queue = context.SimpleQueue()
        worker = context.Process(target=lambda g=generation, q=queue: q.put(_restart(g)))
        worker.start()
        worker.join(60)
        assert worker.exitcode == 0
        if generation:
            values.append(queue.get())
    return values


@layouts
def test_elastic_restart_on_one_store(layout: str) -> None:
    size = sum(ranks.nodes_of(layout))
    for values in ranks.check_ranks(_generations, layout, timeout=120):
        assert values == [float(sum(range(size)) + size * g) for g in (1, 2)]


ELASTIC = """
import os
import torch, torch.distributed as dist
import smddp

dist.init_process_group("smddp")
rank = dist.get_rank()
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(20):
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.unique().tolist() == [3.0]
    if generation == 0 and rank == 1 and step == 10:
        os._exit(1)
print(f"rank {rank} of generation {generation} is through", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.costly
def test_restart_by_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "elastic.py"
    script.write_text(ELASTIC)
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    done = programs.run(*launcher, "--nproc-per-node=2", "--max-restarts=1", str(script))
    for rank in range(2):
        assert f"rank {rank} of generation 1 is through" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


# The number of agents changes between the generations: the first agent begins alone, and goes on
# alone when the second one is lost, with all that it has started, as a host is.
MEMBERS = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import smddp

dist.init_process_group("smddp")
size = dist.get_world_size()
folder = Path(sys.argv[1])
for step in range(100000):
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert tensor.unique().tolist() == [float(size)]
    if size == 2 and step == 20:
        print(f"rank {dist.get_rank()} of {size} is through", flush=True)
        if "LOST" in os.environ:
            (folder / "lost").touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(1)
    if size == 1 and (folder / "lost").exists():
        print("the other one goes on", flush=True)
        break
    (folder / "alone").touch()
    time.sleep(0.01)
dist.destroy_process_group()
"""


def _agent(arguments: list[str], variables: dict[str, str], alone: Path) -> None:
    if os.environ["RANK"] == "1":
        variables["LOST"] = "1"
        while not alone.exists():
            time.sleep(0.05)
    programs.become(arguments, variables)


@pytest.mark.costly
def test_an_agent_that_joins_and_is_lost(tmp_path: Path) -> None:
    """Elastic membership: with --nnodes 1:2 the ranks start again when a second agent comes.

    They do so when it is lost. Only this counts as a restart.
    """
    script = tmp_path / "members.py"
    script.write_text(MEMBERS)
    with ranks.reserved_port() as port:
        command = ["-m", "torch.distributed.run", "--nnodes", "1:2"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        command += ["--rdzv-id", "members", "--rdzv-conf", "last_call_timeout=1"]
        command += ["--max-restarts", "1", "--monitor-interval", "0.1", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", "1", str(script), str(tmp_path)]
        # Otherwise an agent that stays the first one does not tell the new one where it serves the
        # store (torch 2.15).
        environment = programs.environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        done = ranks.run_ranks(_agent, "1+1", command, environment, tmp_path / "alone", timeout=100)
    text = "".join(agent.stdout for agent in done)
    for rank in range(2):
        assert f"rank {rank} of 2 is through" in text, done
    assert "the other one goes on" in done[0].stdout, done
    assert "SMDDPPeerLostError" in done[0].stderr, done
    assert [agent.status for agent in done] == [0, -signal.SIGKILL], done


SPAWNING = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import smddp

def work(rank, path):
    dist.init_process_group("smddp", init_method=f"file://{path}", rank=rank, world_size=2)
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.unique().tolist() == [3.0]
    dist.destroy_process_group()

if __name__ == "__main__":
    path, method = sys.argv[1:]
    if method == "spawn":
        mp.spawn(work, args=(path,), nprocs=2)
    else:
        mp.start_processes(work, args=(path,), nprocs=2, start_method=method)
    print("all have ended")
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork", "fork in a notebook"])
@pytest.mark.costly
def test_start_methods(method: str, tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    method, _, notebook = method.partition(" ")
    # A cell of a notebook is in no file, as what `python -c` runs. Others than forked children
    # could not import its functions.
    arguments = [str(tmp_path / "store"), method]
    if notebook:
        ended = programs.run("-c", SPAWNING, *arguments)
    else:
        ended = programs.run(str(script), *arguments)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "all have ended\n"


def _begin(unnamed: bool = False) -> None:
    if unnamed and os.environ["RANK"] == "0":
        del os.environ["SMDDP_NODE_ID"]
    with ranks.job():
        dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("name", ["SMDDP_INTERFACE", "SMDDP_PROVIDER"])
def test_a_setting_for_networks_on_one_node(name: str) -> None:
    value = "lo" if name == "SMDDP_INTERFACE" else "sockets"
    first, second = ranks.run_ranks(_begin, "2", env={name: value})
    assert f"{name}={value} has no effect: all ranks are on one node" in first.stderr
    assert "has no effect" not in second.stderr
    first, _ = ranks.run_ranks(_begin, "1+1", env={name: value})
    assert "has no effect" not in first.stderr


def test_node_names_on_some_ranks_only() -> None:
    first, second = ranks.run_ranks(_begin, "2", True)
    assert first.returned, first
    assert "SMDDP_NODE_ID is set on some ranks of host" in first.stderr
    assert "SMDDP_NODE_ID is set" not in second.stderr
