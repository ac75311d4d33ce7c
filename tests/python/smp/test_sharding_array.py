"""Models that do not fit one rank, in all combinations: the same as in one process.

Each row is a model, how it is divided, a precision, and what happens to its activations. The rows
are a covering array: any two values of two columns come together in a row. The oracle is a plain
loop in one process, which makes the same sums in the order in which smp makes them.
"""

from __future__ import annotations

import collections
import gc
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import check_ranks, rotating
from smp.common import check_state
from smp.zoo import ZOO, arguments, batch_of, device, make, train_step
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.activations import offload

pytestmark = pytest.mark.multiprocess

MICROBATCHES, STEPS, THRESHOLD = 2, 5, 20
# The control flow of this model differs between replicas, which is refused.
MODELS = [name for name in ZOO if name != "mixture of experts"]
# Name -> ranks, replicas, degree, partitions.
LAYOUTS = {
    "sdp2": (2, 2, 2, 1),
    "sdp4": (4, 4, 4, 1),
    "sdp2 x dp2": (4, 4, 2, 1),
    "pp2 x sdp2": (4, 2, 2, 2),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Only arguments of checkpointed modules are moved, so there is no offload without checkpoints.
ACTIVATIONS = ["kept", "checkpoints", "checkpoints and offload"]
SCALE = 64.0  # of losses in fp16

Row = tuple[str, str, str, str]


def covering(*columns: Sequence[Any]) -> list[Any]:
    """Returns rows in which each two values of two columns come together; always the same rows.

    Each row is the one that brings together most that have not met yet; of several, the one whose
    values have met least.
    """
    pairs = {
        row: set(itertools.combinations(enumerate(row), 2)) for row in itertools.product(*columns)
    }
    missing = set().union(*pairs.values())
    met: collections.Counter[Any] = collections.Counter()
    rows = []
    while missing:
        row = max(pairs, key=lambda r: (len(missing & pairs[r]), -sum(met[p] for p in pairs[r])))
        rows.append(row)
        missing -= pairs[row]
        met.update(pairs[row])
    return rows


ROWS: list[Row] = covering(MODELS, list(LAYOUTS), list(DTYPES), ACTIVATIONS)


def test_each_two_values_come_together() -> None:
    columns = (MODELS, LAYOUTS, DTYPES, ACTIVATIONS)
    for one, other in itertools.combinations(range(len(columns)), 2):
        together = {(row[one], row[other]) for row in ROWS}
        assert together == set(itertools.product(columns[one], columns[other]))
    # There cannot be fewer rows: each model comes in each layout.
    assert len(ROWS) == len(MODELS) * len(LAYOUTS)


# --- the oracle -----------------------------------------------------------------------------------


def convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for part in model.modules():
        own = torch.float32 if isinstance(part, nn.modules.batchnorm._BatchNorm) else dtype
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(own)
    return model


def mean(gradients: list[Tensor | None], count: int) -> Tensor | None:
    """Returns the sum, rounded once to the gradients' dtype, divided by a number."""
    found = [gradient for gradient in gradients if gradient is not None]
    total = sum((g.float() for g in found[1:]), found[0].float()) if found else None
    return None if total is None else total.to(found[0].dtype) / count


def averaged(gradients: list[list[Tensor | None]], degree: int, sharded: bool) -> Tensor | None:
    """Returns the mean of the gradients of a parameter, by replica and microbatch.

    Those of a sharded parameter are averaged over each sharding group in each microbatch, and the
    sums over microbatches then over the groups. Others are added over microbatches first.
    """
    size = degree if sharded else 1
    groups = [gradients[first : first + size] for first in range(0, len(gradients), size)]
    sums = [
        mean([mean(list(of_ranks), size) for of_ranks in zip(*group, strict=True)], MICROBATCHES)
        for group in groups
    ]
    return mean(sums, len(sums))


def whole(row: Row) -> tuple[list[float], dict[str, Tensor]]:
    """Trains a model the ordinary way; returns the losses of the first replica, and the state."""
    name, layout, kind, _ = row
    entry, dtype = ZOO[name], DTYPES[kind]
    _, replicas, degree, _ = LAYOUTS[layout]
    scale = SCALE if kind == "fp16" else 1.0
    models = [convert(make(name).to(device()), dtype) for _ in range(replicas)]
    parameters = list(models[0].parameters())
    masters = [nn.Parameter(p.detach().float().clone(), p.requires_grad) for p in parameters]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        gradients: list[list[list[Tensor | None]]] = [[] for _ in parameters]
        for replica, model in enumerate(models):
            model.load_state_dict(models[0].state_dict())
            chunks = [t.to(device()).chunk(MICROBATCHES) for t in batch_of(name, step, replica)]
            parts = []
            for found in gradients:
                found.append([])
            for part in zip(*chunks, strict=True):
                args = [t.to(dtype) if t.is_floating_point() else t for t in arguments(entry, part)]
                loss = entry.loss(model(*args).float(), *part)
                (loss * scale).backward()
                parts.append(loss.detach())
                for found, parameter in zip(gradients, model.parameters(), strict=True):
                    found[-1].append(parameter.grad)
                    parameter.grad = None
            if replica == 0:
                losses.append(float(torch.stack(parts).mean()))
        for parameter, master, found in zip(parameters, masters, gradients, strict=True):
            mine = averaged(found, degree, parameter.numel() >= THRESHOLD)
            master.grad = None if mine is None else mine.float() / scale
        grads = [master.grad for master in masters if master.grad is not None]
        assert all(bool(grad.isfinite().all()) for grad in grads), "choose a smaller scale"
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master)
    return losses, {name: value.clone() for name, value in models[0].state_dict().items()}


# --- with smp -------------------------------------------------------------------------------------


def count_moves(mover: type, moved: list[Any]) -> None:
    """Appends to a list each value that a way out of memory takes from now on."""
    move_out = mover.move_out

    def counted(self: Any, value: Any) -> Any:
        moved.append(None)
        return move_out(self, value)

    mover.move_out = counted


def trained(rows: list[Row]) -> list[Any]:
    """Trains the model of each row.

    Returns:
        For each row: losses, state, the number of sharded parameters, and that of moved arguments.
    """
    gc.freeze()
    offload.SMALL = 0  # the arguments of these models are small
    moved = []
    for mover in (offload._ScratchFile, offload._HostMemory):
        count_moves(mover, moved)
    results = []
    for name, layout, kind, activations in rows:
        _, _, degree, partitions = LAYOUTS[layout]
        half = {} if kind == "fp32" else {kind: True}
        smp.init(
            {
                "ddp": True,
                "microbatches": MICROBATCHES,
                "partitions": partitions,
                "sharded_data_parallel_degree": degree,
                "sdp_param_persistence_threshold": THRESHOLD,
                "sdp_reduce_bucket_size": 300,
                "sdp_gradient_clipping": 1e9,
                "offload_activations": activations == "checkpoints and offload",
                "activation_loading_horizon": 1,
                **half,
            }
        )
        module = make(name)
        inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        model = smp.DistributedModel(module)
        scale = SCALE if kind == "fp16" else 1.0
        optimizer = smp.DistributedOptimizer(inner, static_loss_scale=scale)
        if activations != "kept":
            for child in module.children():
                for part in child if isinstance(child, nn.ModuleList) else [child]:
                    smp.set_activation_checkpointing(part)
        losses = []
        moved.clear()
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = [tensor.to(device()) for tensor in batch_of(name, step, smp.dp_rank())]
            losses.append(float(train_step(model, name, *batch).reduce_mean()))
            optimizer.step()
        state = {key: value.clone() for key, value in model.state_dict().items()}
        results.append((losses, state, len(model.runtime.sharding.entries), len(moved)))
        smp.shutdown()
        del model, optimizer, module, inner
        gc.collect()
    return results


def check(rows: list[Row]) -> None:
    """Trains the models of rows, and compares them."""
    for count in (2, 4):
        mine = [row for row in rows if LAYOUTS[row[1]][0] == count]
        by_rank = check_ranks(trained, str(count), mine, timeout=60 + 10 * len(mine))
        for place, row in enumerate(mine):
            compare(row, [found[place] for found in by_rank], whole(row))


def compare(row: Row, by_rank: list[Any], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    """Compares what `trained` has returned for a row with what `whole` has, every bit.

    Float sums depend on their order and on where they are rounded. Both follow from the rules: two
    numbers have one sum; more are added in the order of ranks, in fp32 if they are in half
    precision, and rounded once (csrc/reduction/reduce.h); microbatches are added in their order.
    Only autograd's order of several uses in one microbatch is another one if the uses are on
    several ranks. Then fp32 differs by its rounding, and half precision by two units in the last
    place: one of the gradient's, and one of the weight to which the master is rounded.
    """
    losses, state = expected
    assert any(found[2] for found in by_rank), f"nothing is sharded: {row}"
    moved = any(found[3] for found in by_rank)
    assert moved == (row[3] == "checkpoints and offload"), f"moved: {moved}, {row}"
    partitions, dtype = LAYOUTS[row[1]][3], DTYPES[row[2]]
    exact = ZOO[row[0]].exact
    relative = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    tolerance = 0.0 if exact or partitions == 1 else relative
    for rank, (ours, values, *_) in enumerate(by_rank):
        where, first = f"{row}, rank {rank}", rank < partitions
        if first:
            assert ours == pytest.approx(losses, rel=tolerance, abs=0.0), where
        check_state(values, state, tolerance, first, where)


PARTS = 10  # of the exhaustive test


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(rotating(list(range(len(ROWS))), 5), id="turn"),
        *(
            pytest.param(range(part, len(ROWS), PARTS), marks=pytest.mark.exhaustive, id=str(part))
            for part in range(PARTS)
        ),
    ],
)
@pytest.mark.timeout(170)
def test_smp_trains_what_one_process_does(numbers: Sequence[int]) -> None:
    check([ROWS[number] for number in numbers])
