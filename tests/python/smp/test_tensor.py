"""Models of divided modules, against the same models of ordinary modules in one process."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from ranks import check_ranks
from smp.common import close, shards, squares
from smp.zoo import device
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_  # before smp.init, as scripts do

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.tensor.embedding import DistributedEmbedding
from smddp.modelparallel.torch.tensor.linear import DistributedLinear

pytestmark = pytest.mark.multiprocess

MICROBATCHES, STEPS, BATCH, LENGTH, WORDS, WIDTH = 2, 5, 4, 3, 11, 8


class Block(nn.Module):
    """Mixes positions and features, with a residual; somewhat like a layer of a transformer."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = linear(WIDTH, 3 * WIDTH)
        self.out = linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)


class Model(nn.Module):
    """Embedding, blocks and a head."""

    def __init__(self, linear: Any, embedding: Any) -> None:
        super().__init__()
        self.words = embedding(WORDS, WIDTH, padding_idx=0)
        self.blocks = nn.Sequential(*(Block(linear) for _ in range(3)))
        self.head = linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(ids)))


def ordinary() -> Model:
    """Returns the model of one process."""
    torch.manual_seed(3)
    return Model(nn.Linear, nn.Embedding)


def batch_of(step: int, number: int) -> Tensor:
    source = torch.Generator().manual_seed(1000 * step + number)
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=source)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def whole(batches: int) -> dict[str, Any]:
    """Trains in one process, on so many batches per step."""
    model = ordinary()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        found = [loss_of(model(ids), ids) for ids in (batch_of(step, n) for n in range(batches))]
        (sum(found[1:], found[0]) / batches).backward()
        losses.append([loss.item() for loss in found])
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {
        "losses": losses,
        "norms": norms,
        "state": state,
        "gradients": gradients,
        "optimizer": optimizer.state_dict()["state"],
    }


@smp.step
def train(model: Any, ids: Tensor) -> Tensor:
    loss = loss_of(model(ids), ids)
    model.backward(loss)
    return loss


def divided(config: dict[str, Any]) -> dict[str, Any]:
    """Trains on the ranks of a job."""
    smp.init({"ddp": True, "microbatches": MICROBATCHES, **config})
    number = smp.rdp_rank() if config.get("prescaled_batch") else smp.dp_rank()
    module = Model(DistributedLinear, DistributedEmbedding)
    oracle = ordinary()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model.load_state_dict(oracle.state_dict())
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        output = train(model, batch_of(step, number).to(device()))
        losses.append(float(output.reduce_mean()))
        if step == 0 and model.runtime.sharding is None:
            names = {id(p): name for name, p in module.named_parameters()}
            gradients = {names[id(p)]: p.grad.clone() for p in model.local_parameters()}
        if config.get("prescaled_batch") and model.runtime.sharding is None:
            norms.append(float(clip_grad_norm_(model.parameters(), 0.5)))
        else:
            norms.append(float(smp.clip_grad_norm(0.5)))
        optimizer.step()
    parts = {name: p for name, p in module.named_parameters() if model.is_distributed_parameter(p)}
    return {
        "number": number,
        "tp": (smp.tp_rank(), smp.tp_size()),
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "divided": sorted(parts),
        "state": {name: value.cpu() for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict()["state"],
    }


# Some parameters stay whole. The norm is clipped by `smp.clip_grad_norm`.
SHARDED = shards(2, 20)
CASES = [
    ({"tensor_parallel_degree": 2}, "2"),
    ({"tensor_parallel_degree": 4}, "4"),
    ({"tensor_parallel_degree": 2}, "4"),
    ({"tensor_parallel_degree": 2, "partitions": 2}, "4"),
    ({"tensor_parallel_degree": 2, "partitions": 2, "placement_strategy": "TPD"}, "8"),
    ({"tensor_parallel_degree": 2, **SHARDED}, "4"),
    pytest.param(
        {"tensor_parallel_degree": 2, "partitions": 2, **SHARDED, "sdp_reduce_bucket_size": 100},
        "8",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        {"tensor_parallel_degree": 2, **SHARDED, "placement_strategy": "TDP"},
        "8",
        marks=pytest.mark.exhaustive,
    ),
]


@pytest.mark.parametrize("prescaled", [False, True], ids=["own batches", "one batch"])
@pytest.mark.parametrize(("config", "layout"), CASES)
@pytest.mark.costly
def test_training_is_that_of_one_process(
    config: dict[str, Any], layout: str, prescaled: bool
) -> None:
    results = check_ranks(divided, layout, {**config, "prescaled_batch": prescaled})
    expected = whole(1 + max(result["number"] for result in results))
    for rank, result in enumerate(results):
        place, size = result["tp"]
        assert result["divided"] == sorted(
            name for name in expected["state"] if "norm" not in name and "bias" not in name
        )
        losses = [of_all[result["number"]] for of_all in expected["losses"]]
        close(result["losses"], losses, f"losses of rank {rank}", 1e-5)
        close(result["norms"], expected["norms"], f"norms of rank {rank}", 1e-5)
        for name, value in result["gradients"].items():
            of_all = expected["gradients"][name]
            mine = of_all.chunk(size, 1)[place] if name in result["divided"] else of_all
            close(value.cpu(), mine, f"gradient of {name} on rank {rank}", 1e-5)
        assert result["state"].keys() == expected["state"].keys()
        for name, value in result["state"].items():
            close(value, expected["state"][name], f"{name} on rank {rank}", 1e-5)
        for index, entry in expected["optimizer"].items():
            for key, value in entry.items():
                close(result["optimizer"][index][key].cpu(), value, f"{key} of {index}", 1e-5)


def accumulated(config: dict[str, Any], outside: bool) -> dict[str, Any]:
    """Adds up the gradients of two steps, each of which reduces them over replicas."""
    smp.init({"ddp": True, "microbatches": MICROBATCHES, **config})
    model = smp.DistributedModel(Model(DistributedLinear, DistributedEmbedding))
    model.load_state_dict(ordinary().state_dict())
    number = smp.rdp_rank() if config.get("prescaled_batch") else smp.dp_rank()
    for step in range(2):
        ids = batch_of(step, number).to(device())
        if outside:
            loss_of(model(ids), ids).backward()
        else:
            train(model, ids)
    return {
        "number": number,
        "tp": (smp.tp_rank(), smp.tp_size()),
        "norm": float(smp.clip_grad_norm(1e9)),
        "gradients": {
            name: p.grad.cpu()
            for name, p in model.local_named_parameters()
            if model.runtime.sharding is None
        },
    }


@pytest.mark.parametrize(
    ("config", "layout", "outside"),
    [
        ({}, "2", False),
        ({}, "2", True),
        ({}, "4", False),
        ({"prescaled_batch": True}, "4", True),
        (SHARDED, "4", False),
    ],
)
def test_gradients_accumulate_over_steps(
    config: dict[str, Any], layout: str, outside: bool
) -> None:
    results = check_ranks(accumulated, layout, {"tensor_parallel_degree": 2, **config}, outside)
    oracle, batches = ordinary(), 1 + max(result["number"] for result in results)
    for step in range(2):
        for ids in (batch_of(step, number) for number in range(batches)):
            (loss_of(oracle(ids), ids) / batches).backward()
    wanted = {name: p.grad for name, p in oracle.named_parameters() if p.grad is not None}
    norm = float(nn.utils.get_total_norm(wanted.values()))
    for rank, result in enumerate(results):
        close(result["norm"], norm, f"norm of rank {rank}", 1e-5)
        place, size = result["tp"]
        for name, value in result["gradients"].items():
            is_part = value.shape != wanted[name].shape
            mine = wanted[name].chunk(size, 1)[place] if is_part else wanted[name]
            close(value, mine, f"{name} on rank {rank}", 1e-5)


class WithDropout(nn.Module):
    """Dropout of whole features, which all ranks of a tp group have to do alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first = DistributedLinear(WIDTH, WIDTH)
        self.last = DistributedLinear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(self.first(x), 0.5))


def seeded_by_rank(pp: int) -> Any:
    config = {"tensor_parallel_degree": 2, "prescaled_batch": True, "partitions": pp}
    smp.init({"ddp": True, "microbatches": 2, **config})
    torch.manual_seed(3)
    model = smp.DistributedModel(WithDropout())
    torch.manual_seed(smp.rank())
    x = torch.ones(4, WIDTH, device=device())
    losses = [float(squares(model, x).reduce_mean()) for _ in range(4)]
    biases = {n: p.grad for n, p in model.local_named_parameters() if n.endswith("bias")}
    return losses, {name: gradient.cpu() for name, gradient in biases.items()}


@pytest.mark.parametrize("pp", [1, 2])
def test_ranks_with_one_batch_leave_out_the_same(pp: int) -> None:
    found = check_ranks(seeded_by_rank, str(2 * pp), pp)
    losses = [result[0] for result in found]
    assert len(set(losses[0])) == 4  # each step draws anew
    assert all(one == losses[0] for one in losses)
    gradients = [result[1] for result in found]
    for name in {name for one in gradients for name in one}:
        same = [one[name] for one in gradients if name in one]
        assert len(same) == 2
        assert torch.equal(*same)


@on_ranks("2")
def test_hooks_of_gradients_are_refused() -> None:
    smp.init({"ddp": True, "tensor_parallel_degree": 2})
    model = smp.DistributedModel(WithDropout())
    with pytest.raises(smp.SMPUsageError, match=r"join\(\) does not work with tensor_parallel_"):
        model.join()
    with pytest.raises(smp.SMPUsageError, match="register_comm_hook does not work with tensor_"):
        model.register_comm_hook(None, lambda state, bucket: None)


def fused(size: int) -> list[Any]:
    """Trains with each fused optimizer; returns states of the model."""
    found = []
    for name in ("FusedAdam", "FusedLAMB", "FusedNovoGrad"):
        smp.init({"ddp": True, "tensor_parallel_degree": size, "prescaled_batch": True})
        model = smp.DistributedModel(Model(DistributedLinear, DistributedEmbedding))
        model.load_state_dict(ordinary().state_dict())
        # With a small eps the biases of keys, whose gradients are rounding errors, would move.
        options = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
        inner = getattr(smp.optimizers, name)(model.parameters(), **options)
        optimizer = smp.DistributedOptimizer(inner)
        for step in range(3):
            optimizer.zero_grad()
            train(model, batch_of(step, 0).to(device()))
            optimizer.step()
        found.append({key: value.cpu().clone() for key, value in model.state_dict().items()})
        del model, inner, optimizer
        gc.collect()
        smp.shutdown()
    return found


def test_fused_optimizers_use_norms_of_whole_parameters() -> None:
    expected = check_ranks(fused, "1", 1)[0]
    for found in check_ranks(fused, "2", 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@on_ranks("2")
def test_arguments_of_embeddings() -> None:
    """Compares embeddings with arguments of every kind to torch's."""
    smp.init({"ddp": True, "tensor_parallel_degree": 2})
    weight = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(1))
    ids = [batch_of(0, number) for number in range(2)]
    whole = nn.Embedding(WORDS, WIDTH, padding_idx=0, scale_grad_by_freq=True, _weight=weight)
    whole(torch.cat(ids)).square().sum().backward()
    arguments: dict[str, Any] = {"padding_idx": 0, "scale_grad_by_freq": True, "_weight": weight}
    part = DistributedEmbedding(WORDS, WIDTH, **arguments)
    rows = part(ids[smp.tp_rank()])
    torch.testing.assert_close(rows, whole(ids[smp.tp_rank()]))
    rows.square().sum().backward()
    assert whole.weight.grad is not None
    torch.testing.assert_close(part.weight.grad, whole.weight.grad.chunk(2, 1)[smp.tp_rank()])
    # Without one exchange, or both.
    own, everything = ids[smp.tp_rank()], torch.cat(ids)
    features = whole(everything).chunk(2, -1)[smp.tp_rank()]
    for gathers, unites in ((False, True), (True, False), (False, False)):
        skips = {"_skip_allgather": not gathers, "_skip_scatter_and_merge": not unites}
        part = DistributedEmbedding(WORDS, WIDTH, **arguments, **skips)
        found = part(own if gathers else everything)
        torch.testing.assert_close(found, whole(own) if unites else features)
        found.square().sum().backward()
        torch.testing.assert_close(part.weight.grad, whole.weight.grad.chunk(2, 1)[smp.tp_rank()])
    for options, deviation in (({}, 0.02), ({"initializer_range": 0.5}, 0.5)):
        torch.manual_seed(1)
        new = DistributedEmbedding(100, 100, padding_idx=3, **options).weight
        assert not new[3].any()
        assert new[4:].std().item() == pytest.approx(deviation, rel=0.05)
    with smp.tensor_parallelism():
        net = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0), nn.Embedding(4, 4, sparse=True))
    for wrong, text in (
        ({"max_norm": 1.0}, "max_norm=1.0 is not possible"),
        ({"sparse": True}, "sparse=True is not possible"),
        ({"_weight": weight[:, :4]}, r"whole, of shape \[11, 8\]; it has \[11, 4\]"),
        ({"padding_idx": WORDS}, "padding_idx 11 is no row"),
    ):
        with pytest.raises(smp.SMPUsageError, match=text):
            DistributedEmbedding(WORDS, WIDTH, **wrong)
    model = smp.DistributedModel(net)
    assert not list(model.distributed_modules())


def in_half() -> tuple[list[float], list[float]]:
    """Trains in half precision; returns losses and loss scales."""
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True, "fp16": True})
    model = smp.DistributedModel(Model(DistributedLinear, DistributedEmbedding))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {"init_scale": 2.0**20, "scale_window": 100}
    optimizer = smp.DistributedOptimizer(
        inner, dynamic_loss_scale=True, dynamic_loss_args=arguments
    )
    model.load_state_dict(ordinary().state_dict())
    losses, scales = [], []
    for _ in range(STEPS + 3):
        optimizer.zero_grad()
        losses.append(float(train(model, batch_of(0, 0).to(device())).reduce_mean()))
        optimizer.clip_master_grads(0.5)
        optimizer.step()
        scales.append(float(optimizer.loss_scale))
    return losses, scales


def test_half_precision_agrees_on_overflows() -> None:
    (losses, scales), other = check_ranks(in_half, "2")
    assert (losses, scales) == other
    # Some steps overflow and are left out; then the model trains.
    assert scales[0] < 2.0**20
    assert scales[-1] == scales[-2]
    assert losses[0] == losses[1]
    assert losses[-1] < losses[0]
