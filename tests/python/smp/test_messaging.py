"""Ranks, groups and messages on real processes."""

from __future__ import annotations

import collections
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import check_ranks, reserved_port

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPInitializationError, SMPUsageError

pytestmark = pytest.mark.multiprocess


class Special(collections.OrderedDict):
    pass


def talk() -> dict[str, Any]:
    assert not smp.is_initialized()
    with pytest.raises(SMPInitializationError, match=r"call smp.init\(\) first"):
        smp.rank()
    smp.init({"partitions": 2, "ddp": True})
    smp.init({"partitions": 4})  # the first call stays in force
    assert smp.is_initialized()
    assert (smp.size(), smp.pp_size(), smp.dp_size(), smp.rdp_size(), smp.tp_size()) == (
        4,
        2,
        2,
        2,
        1,
    )
    assert smp.state.cfg.microbatches == 1
    assert smp.state.module_manager.translate_functions == []
    assert smp.get_mp_group() == smp.get_pp_group()
    assert smp.get_world_group() == [0, 1, 2, 3]
    assert dist.get_process_group_ranks(smp.get_dp_process_group()) == smp.get_dp_group()
    assert (smp.local_rank(), smp.local_size(), smp.instance_id()) == (smp.rank(), 4, 0)
    found: dict[str, Any] = {}
    # A message between neighbours, both ways at once.
    value = Special(a=torch.arange(3), b=[smp.rank(), {"x": (None, 1.5)}])
    other = 1 - smp.pp_rank()
    if smp.pp_rank() == 0:
        smp.send(value, other, smp.PP_RANK)
        got = smp.recv_from(other, smp.RankType.PP_RANK)
    else:
        got = smp.recv_from(other, smp.PP_RANK)
        smp.send(value, other, smp.PP_RANK)
    assert type(got) is Special
    assert torch.equal(got["a"], torch.arange(3))
    found["neighbour"] = got["b"][0]
    # Only the sender calls broadcast.
    if smp.rank() == 2:
        smp.broadcast("news", smp.WORLD)
        found["news"] = "news"
    else:
        found["news"] = smp.recv_from(2, smp.WORLD_RANK)
    smp.broadcast("to nobody", smp.TP_GROUP)
    found["all"] = smp.allgather((smp.rank(), "x" * smp.rank()), smp.CommGroup.DP_GROUP)
    big = torch.full((3, 1 << 18), float(smp.rank()))
    gathered = smp.allgather(big, smp.WORLD)
    assert [float(t[2, 5]) for t in gathered] == [0.0, 1.0, 2.0, 3.0]
    for barrier in (smp.barrier, smp.dp_barrier, smp.mp_barrier, smp.pp_barrier, smp.tp_barrier):
        barrier()
    # A script may have called torch.set_default_device.
    with torch.device("meta"):
        assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1, 2, 3]
        if smp.pp_rank() == 0:
            smp.send([1, 2], other, smp.PP_RANK)
        else:
            assert smp.recv_from(other, smp.PP_RANK) == [1, 2]
    for wrong in ("dp", smp.get_dp_process_group(), None):
        with pytest.raises(SMPUsageError, match=r"barrier takes a kind of groups such as smp\.DP_"):
            smp.barrier(wrong)
        with pytest.raises(SMPUsageError, match=r"send takes a kind of groups such as smp\.DP_"):
            smp.send(1, other, wrong)
    with pytest.raises(SMPUsageError, match="recv_from takes the number of a rank, not '0'"):
        smp.recv_from("0", smp.PP_RANK)  # type: ignore[arg-type]
    with pytest.raises(SMPInitializationError, match="there is no rank 7"):
        smp.send(1, 7, smp.MP_RANK)
    with pytest.raises(SMPUsageError, match="cannot send to itself"):
        smp.send(1, smp.rank(), smp.WORLD_RANK)
    return found


def test_messages() -> None:
    results = check_ranks(talk, "4")
    assert [result["neighbour"] for result in results] == [1, 0, 3, 2]
    assert {result["news"] for result in results} == {"news"}
    assert results[3]["all"] == [(1, "x"), (3, "xxx")]


def talk_in_tp_groups(folder: str) -> list[str]:
    smp.init({"tensor_parallel_degree": 2, "partitions": 2, "ddp": True})
    rank, me, other = smp.rank(), smp.tp_rank(), 1 - smp.tp_rank()
    group = smp.get_tp_group()
    assert smp.tp_size() == 2
    assert group[me] == rank
    assert dist.get_process_group_ranks(smp.get_tp_process_group()) == group
    if me == 0:
        smp.send(rank, other, smp.TP_RANK)
        assert smp.recv_from(other, smp.TP_RANK) == group[other]
        smp.broadcast([rank], smp.TP_GROUP)
    else:
        assert smp.recv_from(other, smp.TP_RANK) == group[other]
        smp.send(rank, other, smp.TP_RANK)
        assert smp.recv_from(other, smp.TP_RANK) == [group[0]]
    assert smp.allgather(rank, smp.TP_GROUP) == group
    smp.barrier(smp.TP_GROUP)
    place = f"{smp.pp_rank()}_{me}"
    smp.save(place, f"{folder}/of_parts")
    smp.save(rank, f"{folder}/of_all", v3=True)
    assert smp.load(f"{folder}/of_parts") == place
    return [f"of_parts_{place}", f"of_all_{place}_{smp.rdp_rank()}"]


def test_messages_and_files_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    names = check_ranks(talk_in_tp_groups, "8", str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {name for some in names for name in some}
    assert sorted(file.name for file in tmp_path.glob("of_parts*")) == [
        f"of_parts_{pp}_{tp}" for pp in (0, 1) for tp in (0, 1)
    ]


# The variables that each launcher sets for RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                 "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}  # fmt: skip


def launched(launcher: str, port: int) -> tuple[int, int, int, int]:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        del os.environ[name]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name, theirs in zip(names, LAUNCHERS[launcher], strict=True):
        os.environ[theirs] = os.environ.pop(name)
    # Each test is a job of its own with a port of its own.
    os.environ["SLURM_JOB_ID"] = str(port)
    os.environ["SLURM_STEP_ID"] = "0"
    smp.init({"partitions": 2})
    for kind in ("world", "mp", "dp", "tp", "pp", "rdp"):
        with pytest.raises(SMPUsageError, match=f"get_{kind}_process_group.* needs ddp: True"):
            getattr(smp, f"get_{kind}_process_group")()
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    with pytest.raises(SMPUsageError, match="register_comm_hook needs ddp"):
        model.register_comm_hook(None, print)
    with pytest.raises(SMPUsageError, match=r"join\(\) needs ddp"):
        model.join()
    assert dist.get_backend() == "smddp"
    assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1]
    return smp.rank(), smp.pp_rank(), smp.local_rank(), smp.local_size()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_come_from_any_launcher(launcher: str) -> None:
    with reserved_port() as port:
        results = check_ranks(launched, "2", launcher, port)
    assert results == [(0, 0, 0, 2), (1, 1, 1, 2)]


def without_ddp() -> str:
    with pytest.raises(SMPInitializationError) as caught:
        smp.init({"partitions": 1})
    return str(caught.value)


def test_replicas_need_ddp() -> None:
    assert "needs ddp: True" in check_ranks(without_ddp, "2")[0]


def taken() -> list[bool]:
    """Returns for each message whether its sender went on before it was received."""
    smp.init({"partitions": 2})
    store = dist.distributed_c10d._get_default_store()
    found = []
    for number, say in enumerate((smp.send, smp.broadcast)):
        key = f"message {number} was sent"
        if smp.rank() == 0:
            say(number, *((1, smp.WORLD_RANK) if say is smp.send else (smp.WORLD,)))
            store.set(key, "")
            continue
        time.sleep(0.2)  # a sender that does not wait would go on in this time, in nearly every run
        found.append(store.check([key]))
        assert smp.recv_from(0, smp.PP_RANK) == number
        store.wait([key])
    return found


def test_senders_wait_until_they_are_heard() -> None:
    assert check_ranks(taken, "2") == [[], [False, False]]


def sent_by_all(call: str) -> list[str]:
    """Every rank of a group sends; twice, to show that the first time leaves nothing behind."""
    smp.init({"partitions": 2, "ddp": True})
    say = {
        "broadcast": lambda: smp.broadcast("news", smp.PP_GROUP),
        "send": lambda: smp.send("news", 1 - smp.pp_rank(), smp.PP_RANK),
    }[call]
    seen = []
    for _ in range(2):
        with pytest.raises(SMPUsageError) as caught:
            say()
        seen.append(str(caught.value))
    # Messages still work.
    if smp.pp_rank() == 0:
        smp.broadcast(smp.rank(), smp.PP_GROUP)
    else:
        assert smp.recv_from(0, smp.PP_RANK) == smp.rank() - 1
    return seen


@pytest.mark.parametrize("call", ["broadcast", "send"])
def test_ranks_that_all_send_are_told_at_once(call: str) -> None:
    for rank, (first, second) in enumerate(check_ranks(sent_by_all, "4", call)):
        other = rank ^ 1
        assert first == second
        assert first == (
            f"smp.{call}: rank {rank} sends to rank {other}, which sends to rank {rank} and does "
            f"not receive. Only the sender calls broadcast or send; each other rank calls "
            f"recv_from({rank}, smp.WORLD_RANK)"
        )


def on_two_hosts(port: int) -> tuple[int, str]:
    for name in ("MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        del os.environ[name]
    smp.init({"partitions": 2, "ddp": True, "ddp_port": port})
    assert os.environ["MASTER_PORT"] == str(port)
    assert smp.state_mod.state is smp.state
    smp.barrier()  # rank 0 serves the store, which the others need to begin
    return smp.instance_id(), smp.utils.rmsg("here")


def test_ranks_on_two_hosts_meet_at_the_port_of_the_configuration() -> None:
    with reserved_port() as port:
        found = check_ranks(on_two_hosts, "2x2", port)
    assert found == [(rank // 2, f"[{rank}] here") for rank in range(4)]
