"""What several tests of checkpoints train."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from smp.zoo import batch_of, make, train_step

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPUsageError
from smdistributed.modelparallel.test.torch.utils import dump_model, verify

NAME = "tied gpt"


def begin(pp: int, seed: int = 0, name: str = NAME, **config: Any) -> tuple[Any, Any]:
    smp.init({"partitions": pp, "ddp": True, "microbatches": 2, **config})
    module = make(name)
    if seed:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    model = smp.DistributedModel(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, smp.DistributedOptimizer(optimizer)


def train(model: Any, optimizer: Any, steps: range, name: str = NAME) -> None:
    for step in steps:
        optimizer.zero_grad()
        train_step(model, name, *batch_of(name, step, 0))
        optimizer.step()


def state_of(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(model.state_dict()), optimizer.state_dict()


class Traces:
    """Notes that unpickling has run its code."""

    run = False

    def __setstate__(self, state: Any) -> None:
        Traces.run = True

    def __getstate__(self) -> Any:
        return "anything"


def saving(pp: int, path: str) -> Any:
    model, optimizer = begin(pp)
    train(model, optimizer, range(2))
    content = {"epoch": 3, "anything": {1, 2}}
    smp.save_checkpoint(path, "old", model=model, optimizer=optimizer, user_content=content)
    if smp.rank() == 0:  # as if the clock had been set back since
        os.utime(Path(path, "old_partial", "manifest.json"), (2.0**32, 2.0**32))
    smp.save_checkpoint(
        path,
        "two",
        model=model,
        optimizer=optimizer,
        user_content=content,
        num_kept_partial_checkpoints=1,
    )
    with pytest.raises(SMPUsageError, match="num_kept_partial_checkpoints must be at least 1"):
        smp.save_checkpoint(path, "three", model=model, num_kept_partial_checkpoints=0)
    dump_model(model, f"{path}/two.whole")
    smp.barrier()
    verify(model, f"{path}/two.whole")
    names = smp.state.param_index_to_name_tp_group[0]
    assert names == dict(enumerate(name for name, _ in model.get_module().named_parameters()))
    assert smp.state.param_name_to_index_tp_group[0]["norm.weight"] in names
    smp.save_checkpoint(path, "full", partial=False, model=model)
    assert smp.resume_from_checkpoint(path, partial=False) == {}
    smp.save({"rank": smp.pp_rank(), "sets": {1}}, f"{path}/mine.pt")
    assert smp.load(f"{path}/mine.pt") == {"rank": smp.pp_rank(), "sets": {1}}
    smp.save(Traces(), f"{path}/object.pt")
    Traces.run = False
    for options in ({}, {"pickle_module": pickle}, {"weights_only": True}, {"weights_only": None}):
        with pytest.raises(pickle.UnpicklingError, match=r"smp.load: .*object.pt_.*weights_only=F"):
            smp.load(f"{path}/object.pt", **options)  # type: ignore[arg-type]
    assert not Traces.run
    assert isinstance(smp.load(f"{path}/object.pt", weights_only=False), Traces)
    assert Traces.run
    smp.save({"rank": -1}, f"{path}/one.pt", partial=False)
    assert smp.load(f"{path}/one.pt", partial=False) == {"rank": -1}
    if smp.rank() == 0:
        Path(path, "cut.pt").write_bytes(Path(path, "one.pt").read_bytes()[:-100])
    smp.barrier()
    with pytest.raises(ValueError, match=r"cut.pt is damaged"):
        smp.load(f"{path}/cut.pt", partial=False)
    smp.save([1], f"{path}/v3.pt", v3=True)
    assert smp.load(f"{path}/v3.pt") == [1]
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*absent.pt_"):
        smp.load(f"{path}/absent.pt")
    with pytest.raises(SMPUsageError, match="f must be a str"):
        smp.save(1, Path(path))  # type: ignore[arg-type]
    names = sorted(optimizer.local_state_dict()["state"])
    parts = smp.allgather(names, smp.PP_GROUP)
    assert sorted(n for part in parts for n in part) == list(range(len(list(model.parameters()))))
    assert model.local_state_dict()["_smp_is_partial"] is True
    only_first = model.state_dict(gather_to_rank0=True)
    assert (len(only_first) > 0) == (smp.rank() == 0)
    train(model, optimizer, range(2, 4))
    return state_of(model, optimizer)


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)
