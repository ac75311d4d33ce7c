"""A divided model learns the same as the whole model: losses and parameters are equal.

The oracle is a plain loop over microbatches in one process, without any of our code.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from ranks import check_ranks
from smp.common import check_state
from smp.zoo import ZOO, arguments, batch_of, device, make, train_step

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess

MICROBATCHES = 4
STEPS = 3

# pp, replicas, pipeline, further configuration
LAYOUTS = [
    (1, 1, "interleaved", {}),
    (2, 1, "interleaved", {}),
    (2, 1, "simple", {"partitioner": "tree"}),
    (4, 1, "interleaved", {"active_microbatches": 2}),
    (4, 1, "simple", {"direct_forwarding": False}),
    (2, 2, "interleaved", {}),
    (2, 2, "simple", {"placement_strategy": "spread"}),
]


def whole(name: str, replicas: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains a model the ordinary way; with replicas, each has its own batch."""
    entry = ZOO[name]
    models = [make(name).to(device())]
    models += [copy.deepcopy(models[0]) for _ in range(replicas - 1)]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        state = copy.deepcopy(models[0].state_dict())
        grads: list[dict[str, torch.Tensor]] = []
        for replica, model in enumerate(models):
            model.load_state_dict(state)
            model.zero_grad()
            total = 0.0
            batch = [tensor.to(device()) for tensor in batch_of(name, step, replica)]
            chunks = [tensor.chunk(MICROBATCHES) for tensor in batch]
            for part in zip(*chunks, strict=True):
                loss = entry.loss(model(*arguments(entry, part)), *part)
                loss.backward()
                total += loss.item()
            if replica == 0:
                losses.append(total / MICROBATCHES)
            grads.append(
                {
                    n: p.grad / MICROBATCHES
                    for n, p in model.named_parameters()
                    if p.grad is not None
                }
            )
        for key, parameter in models[0].named_parameters():
            found = [grad[key] for grad in grads if key in grad]
            parameter.grad = sum(found[1:], found[0]) / replicas if found else None
        optimizer.step()
    return losses, {n: v.clone() for n, v in models[0].state_dict().items()}


def divided(config: dict[str, Any], names: Iterable[str] = ZOO) -> dict[str, Any]:
    """Trains models, each divided; returns losses and state dicts by name."""
    gc.freeze()  # so that collecting a model does not visit all objects of torch
    smp.init({"ddp": True, "microbatches": MICROBATCHES, **config})
    results = {}
    for name in names:
        module = make(name)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(optimizer)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = [tensor.to(device()) for tensor in batch_of(name, step, smp.rdp_rank())]
            output = train_step(model, name, *batch)
            optimizer.step()
            losses.append(sum(float(loss) for loss in output.outputs) / MICROBATCHES)
        owners = {o for o in model.runtime.placement.decision.owners if o is not None}
        state = {n: v.clone() for n, v in model.state_dict().items()}
        results[name] = (losses, state, owners)
        del model, optimizer, module
        gc.collect()
    return results


@pytest.mark.parametrize(
    ("pp", "replicas", "pipeline", "more"),
    LAYOUTS,
    ids=lambda value: str(value) if not isinstance(value, dict) else "-".join(map(str, value)),
)
@pytest.mark.timeout(170)
@pytest.mark.costly
def test_divided_models_learn_the_same(pp: int, replicas: int, pipeline: str, more: Any) -> None:
    config = {"partitions": pp, "pipeline": pipeline, **more}
    # With "spread", the ranks of a pipeline are on different nodes.
    layout = "2x2" if "placement_strategy" in more else str(pp * replicas)
    ranks = check_ranks(divided, layout, config, timeout=150)
    for name, entry in ZOO.items():
        losses, state = whole(name, replicas)
        for rank, result in enumerate(ranks):
            found_losses, found_state, owners = result[name]
            where = f"{name} on rank {rank}"
            assert len(owners) >= min(pp, 2), f"{where}: nothing was divided"
            replica_0 = rank < pp if more.get("placement_strategy") != "spread" else rank % 2 == 0
            # On GPUs, sums with atomic operations have no fixed order.
            exact = entry.exact and replicas == 1 and device().type == "cpu"
            check_state(found_state, state, 0.0 if exact else 1e-6, replica_0, where)
            if replica_0:
                assert found_losses == pytest.approx(losses, abs=1e-6), where
