"""The import surface of `smdistributed.dataparallel`: names, signatures, and a script of v1.2."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import textwrap
from pathlib import Path
from typing import Any

import programs
import pytest
import ranks
import torch
import torch.distributed as dist
from interpreters import succeed
from torch import nn

from smddp.torch import dataparallel

TORCH = "smdistributed.dataparallel.torch"

# Module -> the public names that it must have, and no others.
NAMES: dict[str, str] = {
    f"{TORCH}.distributed": "is_available init_process_group is_initialized get_world_size "
    "get_rank get_local_rank all_reduce broadcast all_gather all_to_all_single barrier ReduceOp "
    "group",
    f"{TORCH}.parallel": "DistributedDataParallel",
    f"{TORCH}.parallel.distributed": "DistributedDataParallel",
    "smdistributed.dataparallel.exceptions": "SMDDPAbortedError SMDDPCollectiveMismatchError "
    "SMDDPCollectiveTimeoutError SMDDPInternalError SMDDPPeerLostError SMDDPResourceError "
    "SMDDPTransportError",
}

# Name -> parameters in order, those with a default as name=default (contract, A.4).
SIGNATURES: dict[str, str] = {
    "is_available": "",
    "init_process_group": "*args, **kwargs",
    "is_initialized": "",
    "get_world_size": "group=group.WORLD",
    "get_rank": "group=group.WORLD",
    "get_local_rank": "",
    "all_reduce": "tensor, op=SUM, group=group.WORLD, async_op=False",
    "broadcast": "tensor, src=0, group=group.WORLD, async_op=False",
    "all_gather": "tensor_list, tensor, group=group.WORLD, async_op=False",
    "all_to_all_single": "output_t, input_t, output_split_sizes=None, input_split_sizes=None, "
    "group=group.WORLD, async_op=False",
    "barrier": "group=group.WORLD, async_op=False",
    "DistributedDataParallel": "module, device_ids=None, output_device=None, "
    "broadcast_buffers=True, process_group=None, bucket_cap_mb=None",
}


def _as_text(parameter: inspect.Parameter) -> str:
    name = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
    default = parameter.default
    if default is inspect.Parameter.empty:
        return name + parameter.name
    return f"{parameter.name}={getattr(default, 'name', default)}"


@pytest.mark.filterwarnings("ignore:smdistributed:FutureWarning")
@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    assert set(importlib.import_module(module).__all__) == set(NAMES[module].split())


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(dataparallel, name)).parameters.values()
    assert ", ".join(map(_as_text, parameters)) == SIGNATURES[name]


def test_reduce_operations_have_the_original_names() -> None:
    public = [name for name in vars(dataparallel.ReduceOp) if not name.startswith("_")]
    assert public == ["SUM", "AVERAGE", "MIN", "MAX"]
    assert dataparallel.ReduceOp.AVERAGE == dist.ReduceOp.AVG


def test_versions() -> None:
    module = importlib.import_module("smdistributed.dataparallel")
    numbers = [int(part) for part in module.__version__.split(".")]
    assert numbers >= [1, 4]  # the generation that registers a backend


def test_types_are_published() -> None:
    for package in ("smddp", "smdistributed"):
        (folder,) = importlib.import_module(package).__path__
        assert (Path(folder) / "py.typed").exists(), package


@pytest.mark.parametrize("module", [f"{TORCH}.distributed", f"{TORCH}.parallel.distributed"])
def test_the_old_interface_says_once_what_replaces_it(module: str) -> None:
    script = f"""
        import os, warnings
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            import {module}
            import {TORCH}.distributed as dist
            from {TORCH}.parallel import DistributedDataParallel
            from {TORCH}.parallel.distributed import DistributedDataParallel as DDP
        assert DDP is DistributedDataParallel
        ours = [one for one in said if "smdistributed" in str(one.message)]
        assert all(one.filename == "<string>" for one in ours), "the line that imports it"
        print(*[one.message for one in ours])
        print("it is", dist.is_available(), dist.is_initialized())
        try:
            dist.init_process_group()
        except ValueError as error:
            print(error)
    """
    text = succeed(script, LOCAL_RANK="0")
    assert text.count("smdistributed.dataparallel.torch.dist is deprecated from v1.4.0+") == 1
    assert "\n    import smdistributed.dataparallel.torch.torch_smddp\n" in text
    assert "\n    torch.distributed.init_process_group(backend='smddp')\n" in text
    assert "it is False False\nthis process is not a rank of a job: start the script with" in text
    assert "deprecated" not in succeed(script, LOCAL_RANK="1")  # one rank of a node is enough


def test_importing_the_errors_changes_nothing() -> None:
    """Launchers do it in a process that is no rank."""
    succeed(
        """
        import os

        before = dict(os.environ)
        from smdistributed.dataparallel import exceptions
        import torch

        assert os.environ == before
        assert not torch.distributed.is_initialized()
        assert not torch.cuda.is_initialized()
        assert len(os.listdir("/proc/self/task")) == 1
        with open("/proc/self/maps") as maps:
            assert "_C_torch2" not in maps.read(), "the compiled module is loaded"
        """,
        OMP_NUM_THREADS="1",
        OMPI_COMM_WORLD_LOCAL_RANK="3",
    )


def _calls() -> dict[str, Any]:
    for early in (dataparallel.get_rank, dataparallel.get_local_rank, dataparallel.barrier):
        with pytest.raises(ValueError, match="init_process_group"):
            early()
    assert dataparallel.is_available()
    assert not dataparallel.is_initialized()
    dataparallel.init_process_group("nccl", "ignored", timeout="ignored")
    assert dataparallel.is_initialized()
    assert dist.get_backend() == "smddp"
    with pytest.raises(ValueError, match="twice"):
        dataparallel.init_process_group()
    rank, size = dataparallel.get_rank(), dataparallel.get_world_size(dataparallel.group.WORLD)
    world, operations = dataparallel.group.WORLD, dataparallel.ReduceOp
    found: dict[str, Any] = {"local": dataparallel.get_local_rank()}
    assert dataparallel.barrier(world) is None
    for name in ("SUM", "AVERAGE", "MIN", "MAX"):
        tensor = torch.full((3,), rank + 1.0)
        assert dataparallel.all_reduce(tensor, getattr(operations, name), world) is None
        found[name] = tensor[0].item()
    tensor = torch.full((3,), rank + 1.0)
    work = dataparallel.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert tensor[0].item() == found["SUM"]
    dataparallel.broadcast(tensor.fill_(rank), src=1)
    assert tensor[0].item() == 1
    dataparallel.broadcast(tensor.fill_(rank))
    assert tensor[0].item() == 0
    everything = [torch.empty(2) for _ in range(size)]
    dataparallel.all_gather(everything, torch.full((2,), float(rank)))
    assert [part[0].item() for part in everything] == list(range(size))
    output = torch.empty(size)
    dataparallel.all_to_all_single(output, torch.arange(float(size)) + 10 * rank)
    assert output.tolist() == [10 * other + rank for other in range(size)]
    output = torch.empty(size * (size + 1) // 2)  # each rank sends one element more than the last
    splits = list(range(1, size + 1))
    mine = torch.full(((rank + 1) * size,), float(rank))
    dataparallel.all_to_all_single(output, mine, splits, [rank + 1] * size)
    assert output.tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    other = dist.new_group()
    with pytest.raises(ValueError, match=r"has one group, group.WORLD, but got .*torch.distrib"):
        dataparallel.all_reduce(tensor, group=other)
    dataparallel.all_reduce(tensor, group=dist.group.WORLD)
    dist.destroy_process_group()
    return found


def _beside_another_backend() -> int:
    for name in ("LOCAL_RANK", "SMDATAPARALLEL_LOCAL_RANK"):
        os.environ.pop(name, None)
    dist.init_process_group("gloo")
    local = dataparallel.get_local_rank()
    dist.destroy_process_group()
    return local


@pytest.mark.multiprocess
def test_local_ranks_beside_another_backend() -> None:
    """A script may have been started by hand, and have made the group by torch."""
    assert ranks.check_ranks(_beside_another_backend, "2") == [0, 1]


@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", ["2", "2x2"])
def test_calls(layout: str) -> None:
    found = ranks.check_ranks(_calls, layout)
    size = len(found)
    for rank, one in enumerate(found):
        total = size * (size + 1) / 2
        local = rank % 2
        assert one == {
            "local": local, "SUM": total, "AVERAGE": total / size, "MIN": 1.0, "MAX": float(size)
        }  # fmt: skip


def _under_mpirun() -> int:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        value = os.environ.pop(name)
        os.environ[f"OMPI_COMM_WORLD_{name.replace('WORLD_SIZE', 'SIZE')}"] = value
    assert dataparallel.is_available()
    dataparallel.init_process_group()
    found = dataparallel.get_rank()
    dist.destroy_process_group()
    return found


@pytest.mark.multiprocess
def test_under_mpirun() -> None:
    assert ranks.check_ranks(_under_mpirun, "2") == [0, 1]


def _buffers(broadcast: bool) -> float:
    """Returns the running mean of a rank whose input differs from those of the others."""
    dataparallel.init_process_group()
    torch.manual_seed(0)
    inner = nn.BatchNorm1d(1)
    model = dataparallel.DistributedDataParallel(
        inner, [dataparallel.get_local_rank()], dataparallel.get_local_rank(),
        broadcast_buffers=broadcast, process_group=dataparallel.group.WORLD,
    )  # fmt: skip
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    for _ in range(3):
        model(torch.tensor([[1.0], [3.0]]) * (1 + dist.get_rank()))
    # Buffers are those of rank 0 at the beginning of a forward pass, if they are broadcast.
    expected = inner.running_mean.clone()
    with model.no_sync():
        model(torch.ones(2, 1))
    dist.destroy_process_group()
    return expected.item()


@pytest.mark.multiprocess
def test_buffers_are_broadcast_if_asked() -> None:
    first, second = ranks.check_ranks(_buffers, "2", False)
    assert second == pytest.approx(2 * first)
    first, second = ranks.check_ranks(_buffers, "2", True)
    assert second < 2 * first - 0.1


# As the examples of SageMaker for version 1.2 have it; the device lines are marked.
SCRIPT = """
    import json, os, sys
    import torch
    import torch.nn as nn
    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import (
        DistributedDataParallel as DDP,
    )

    dist.init_process_group()
    local_rank = dist.get_local_rank()
    device = torch.device("cpu")          # torch.device("cuda")
    # torch.cuda.set_device(local_rank)
    batch_size = 64 // dist.get_world_size()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    model = DDP(net, device_ids=[local_rank], broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for step in range(6):
        data = torch.randn(64, 16, generator=generator)
        target = torch.randint(0, 4, (64,), generator=generator)
        mine = slice(dist.get_rank() * batch_size, (dist.get_rank() + 1) * batch_size)
        optimizer.zero_grad()
        if step == 3:
            with model.no_sync():
                nn.functional.cross_entropy(model(data[mine]), target[mine]).backward()
        loss = nn.functional.cross_entropy(model(data[mine]), target[mine])
        loss.backward()
        optimizer.step()
        average = loss.detach().clone()
        dist.all_reduce(average, op=dist.ReduceOp.AVERAGE)
        losses.append(average.item())
    dist.barrier()
    if dist.get_rank() == 0:
        weights = [parameter.tolist() for parameter in model.parameters()]
        open(sys.argv[1], "w").write(json.dumps([losses, weights]))
"""

# The same by torch's own names, on gloo.
_WITH_TORCH = (
    ("smdistributed.dataparallel.torch.distributed", "torch.distributed"),
    ("smdistributed.dataparallel.torch.parallel.distributed", "torch.nn.parallel"),
    ("init_process_group()", 'init_process_group("gloo")'),
    ("dist.get_local_rank()", 'int(os.environ["LOCAL_RANK"])'),
    ("device_ids=[local_rank], broadcast_buffers=False", ""),
    ("dist.all_reduce(average, op=dist.ReduceOp.AVERAGE)",
     "dist.all_reduce(average); average /= dist.get_world_size()"),
)  # fmt: skip


def _train(script: str, file: Path, output: Path) -> Any:
    file.write_text(textwrap.dedent(script))
    command = ["-m", "torch.distributed.run", "--standalone"]
    done = programs.run(*command, "--nproc-per-node", "2", str(file), str(output))
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text()), done.stderr


@pytest.mark.multiprocess
def test_a_script_of_version_1_2_trains_as_torch_does_on_gloo(tmp_path: Path) -> None:
    (losses, weights), said = _train(SCRIPT, tmp_path / "old.py", tmp_path / "old.json")
    assert said.count("smdistributed.dataparallel.torch.dist is deprecated") == 1
    script = SCRIPT
    for old, new in _WITH_TORCH:
        assert old in script
        script = script.replace(old, new)
    (expected, others), _ = _train(script, tmp_path / "new.py", tmp_path / "new.json")
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(expected, abs=1e-6)
    for mine, other in zip(weights, others, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=0, atol=1e-6)
