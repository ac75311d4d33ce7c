"""Checkpoints of sharded models load at any degree."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import check_ranks
from smp.common import check_state, close
from smp.zoo import device
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.optimizer.distributed_optimizer import FP16_STATES

pytestmark = pytest.mark.multiprocess


class Odd(nn.Module):
    """Parameters whose sizes are no multiples of anything, one of them shared."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.inner = nn.Linear(5, 5)
        self.last = nn.Linear(5, 7, bias=False)
        self.last.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.inner(self.norm(self.words(words))))


@smp.step
def words_step(model: Any, words: Tensor) -> Any:
    loss = F.cross_entropy(model(words), words)
    model.backward(loss)
    return loss


def odd(config: dict[str, Any], seed: int) -> tuple[Any, Any]:
    # Each job computes the same: every rank has the same batch.
    sdp = {"sdp_param_persistence_threshold": 20, "sdp_gradient_clipping": 1e9}
    smp.init({"ddp": True, **sdp, **config})
    torch.manual_seed(seed)
    model = smp.DistributedModel(Odd())
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    if not config.get("fp16"):
        return model, smp.DistributedOptimizer(inner)
    scale = {"init_scale": 2.0**12, "scale_window": 2}
    return model, smp.DistributedOptimizer(inner, dynamic_loss_scale=True, **scale)


def train(model: Any, optimizer: Any, steps: range) -> dict[str, Tensor]:
    for step in steps:
        optimizer.zero_grad()
        source = torch.Generator().manual_seed(step)
        words_step(model, torch.randint(7, (6,), generator=source).to(device()))
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


# One file, or one for each partition.
WHOLE = ("whole.pt", "whole.safetensors.index.json")


def saving(config: dict[str, Any], path: str) -> Any:
    model, optimizer = odd(config, 0)
    train(model, optimizer, range(3))
    smp.save_checkpoint(path, "parts", True, model, optimizer, {"step": 3})
    for tag in WHOLE:
        smp.save_checkpoint(path, tag, False, model)
    torch.save(optimizer.state_dict(), Path(path) / f"optimizer_{smp.rank()}.pt")
    kept = copy.deepcopy((model.local_state_dict(), optimizer.local_state_dict()))
    expected = train(model, optimizer, range(3, 5))
    model.load_state_dict(kept[0], same_partition_load=True)
    optimizer.load_state_dict(kept[1])
    again = train(model, optimizer, range(3, 5))
    check_state(again, expected, 0.0, True, "loaded from local state dicts")
    return expected


def check_half(optimizer: Any, saved: Any) -> None:
    """Checks that masters and the loss scale are those that were saved, and not new ones."""
    found = optimizer.state_dict()
    assert found.keys() & {FP16_STATES} == saved.keys() & {FP16_STATES}
    if FP16_STATES not in saved:
        return
    masters, expected = found[FP16_STATES]["masters"], saved[FP16_STATES]["masters"]
    torch.testing.assert_close(masters, expected, rtol=0, atol=0)
    dtype = torch.float16 if smp.state.cfg.fp16 else torch.bfloat16
    assert any(not torch.equal(one, one.to(dtype).float()) for one in expected.values())
    assert found[FP16_STATES]["loss_scaler"] == saved[FP16_STATES]["loss_scaler"]
    assert optimizer.loss_scale == (2.0**13 if smp.state.cfg.fp16 else 1.0)


def loading(config: dict[str, Any], path: str, how: str) -> Any:
    model, optimizer = odd(config, 1)
    if config["sharded_data_parallel_degree"] > 1:
        before = optimizer.orig_state_dict()["param_groups"]
        smp.resume_from_checkpoint(path, load_sharded_optimizer_state=False)
        assert optimizer.orig_state_dict() == {"state": {}, "param_groups": before}
        check_half(optimizer, torch.load(Path(path) / "optimizer_0.pt"))
    if how == "parts":
        assert smp.resume_from_checkpoint(path) == {"step": 3}
    else:
        smp.resume_from_checkpoint(path, how, partial=False)
        optimizer.load_state_dict(torch.load(Path(path) / "optimizer_0.pt"))
    return train(model, optimizer, range(3, 5))


@pytest.mark.parametrize("half", ["", "fp16", "bf16"])
@pytest.mark.costly
def test_checkpoints_load_at_any_degree(tmp_path: Path, half: str) -> None:
    def config(degree: int) -> dict[str, Any]:
        return {"sharded_data_parallel_degree": degree, **({half: True} if half else {})}

    before = [("4", 2), ("2", 2)] if half == "" else [("2", 2)]
    after = [("2", 2), ("4", 4), ("2", 1)] if half == "" else [("4", 2), ("1", 1)]
    for number, (ranks, degree) in enumerate(before):
        path = str(tmp_path / str(number))
        expected = check_ranks(saving, ranks, config(degree), path)[0]
        if half == "bf16":
            after = [("4", 2)]  # bf16 needs sharding
        for later, other in after if number == 0 else [("4", 2)]:
            for how in ("parts", *WHOLE):
                for rank, state in enumerate(check_ranks(loading, later, config(other), path, how)):
                    where = f"{later} ranks, degree {other}, {how}, rank {rank}"
                    # Gradients are sums over more or fewer ranks.
                    close(state, expected, where, tolerance=1e-2 if half else 1e-5)
