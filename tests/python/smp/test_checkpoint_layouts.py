"""A job that is saved in one layout of ranks goes on in any other, as if it had never stopped."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import check_ranks, rotating
from smp.common import close, shards
from smp.test_sharding_checkpoints import Odd, words_step
from smp.zoo import device

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess

# Name -> ranks, partitions, degree of sharding; the other ranks are replicas.
LAYOUTS = {
    "1": (1, 1, 1),
    "dp2": (2, 1, 1),
    "pp2": (2, 2, 1),
    "sdp2": (2, 1, 2),
    "sdp4": (4, 1, 4),
    "pp2 x sdp2": (4, 2, 2),
    "sdp2 x dp2": (4, 1, 2),
    "pp2 x dp2": (4, 2, 1),
}
SAVED, END = 4, 6  # after so many steps
# The first two steps overflow. The second one makes the scale smaller, so no value of the scale is
# the first one when it is saved.
SCALE = {"init_scale": 2.0**40, "scale_factor": 2.0**32, "delayed_shift": 2, "scale_window": 10}

Pair = tuple[str, str]


def begin(layout: str, half: bool, seed: int) -> tuple[Any, Any]:
    _, partitions, degree = LAYOUTS[layout]
    config = {"ddp": True, "microbatches": 2, "partitions": partitions, "fp16": half}
    smp.init({**config, **shards(degree, 20)})
    torch.manual_seed(seed)
    model = smp.DistributedModel(Odd())
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    scaling: dict[str, Any] = (
        {"dynamic_loss_scale": True, "dynamic_loss_args": SCALE} if half else {}
    )
    return model, smp.DistributedOptimizer(inner, **scaling)


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    """Trains; all replicas have the same batch, so the mean of gradients is that of one process."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        words = torch.randint(7, (6,), generator=torch.Generator().manual_seed(step)).to(device())
        losses.append(float(words_step(model, words).reduce_mean()))
        optimizer.step()
    return losses


def save(layouts: Sequence[str], half: bool, path: str) -> dict[str, Any]:
    """Saves a job in each layout, and goes on; returns the losses and the state after that."""
    results = {}
    for layout in layouts:
        model, optimizer = begin(layout, half, seed=0)
        train(model, optimizer, range(SAVED))
        smp.save_checkpoint(path, layout, True, model, optimizer, {"layout": layout})
        results[layout] = end(model, optimizer)
    return results


def load(pairs: Sequence[Pair], half: bool, path: str) -> dict[Pair, Any]:
    """Loads what one layout has saved in another, and goes on; returns what `save` returns."""
    results = {}
    for saved, layout in pairs:
        model, optimizer = begin(layout, half, seed=1)
        assert smp.resume_from_checkpoint(path, saved) == {"layout": saved}
        results[saved, layout] = end(model, optimizer)
    return results


def end(model: Any, optimizer: Any) -> Any:
    losses = train(model, optimizer, range(SAVED, END))
    # With fp16 the state of the optimizer has the masters and the loss scale, too.
    states = dict(model.state_dict()), optimizer.state_dict()
    states = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, states)
    smp.shutdown()
    gc.collect()
    return losses, states


PAIRS: list[Pair] = list(itertools.product(LAYOUTS, LAYOUTS))
# Each layout saves once and loads once; with another turn, in another precision or another one.
[(SHIFT, HALF)] = rotating(list(itertools.product(range(len(LAYOUTS)), [False, True])), 1)
TURN: list[Pair] = list(zip(LAYOUTS, [*LAYOUTS, *LAYOUTS][SHIFT:], strict=False))


@pytest.mark.parametrize(
    ("pairs", "half"),
    [
        pytest.param(TURN, HALF, id="turn"),
        pytest.param(PAIRS, False, id="fp32", marks=pytest.mark.exhaustive),
        pytest.param(PAIRS, True, id="fp16", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.timeout(170)
def test_a_job_goes_on_in_any_layout(tmp_path: Any, pairs: list[Pair], half: bool) -> None:
    def in_jobs(function: Any, cases: list[Any], layout_of: Any) -> list[Any]:
        found = []
        for ranks in (1, 2, 4):
            mine = [case for case in cases if LAYOUTS[layout_of(case)][0] == ranks]
            found += check_ranks(function, str(ranks), mine, half, str(tmp_path), timeout=160)
        return [item for results in found for item in results.items()]

    saved = in_jobs(save, list(LAYOUTS), lambda layout: layout)
    losses, (model, optimizer) = dict(saved)["1"]
    for case, (ours, (weights, state)) in [*saved, *in_jobs(load, pairs, lambda pair: pair[1])]:
        assert ("fp16_states" in state) == half
        assert ours == losses, case
        for found, expected in ((weights, model), (state, optimizer)):
            close(dict(found), dict(expected), str(case))
