"""Transformers whose sequences are divided over tensor-parallel ranks, against one process.

Results and gradients of single layers are compared in test_transformer_layers.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import check_ranks
from smp import transformer_reference as reference
from smp.common import close
from smp.test_tensor import SHARDED
from smp.zoo import device
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.tensor.exchange import SequenceExchange
from smddp.modelparallel.torch.tensor.module import DistributedModule

pytestmark = pytest.mark.multiprocess

STEPS, BATCH, LENGTH, WORDS = 5, 4, 8, 16
MODEL: dict[str, Any] = {
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_size": 4,
    "hidden_size": 12,
    "intermediate_size": 20,
    "vocab_size": WORDS,
    "num_positions": LENGTH,
    "causal_mask_size": LENGTH,
    "activation": "gelu_new",
    "layernorm_epsilon": 1e-5,
}
PRE, POST, BOTH = (
    {"pre_layernorm": pre, "post_layernorm": post} for pre, post in [(1, 0), (0, 1), (1, 1)]
)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_dropout_prob": 0.0}
# Ranks leave out other weights of attention than one process does. So only features are left out.
DROPOUT = {"hidden_dropout_prob": 0.3, "attention_dropout_prob": 0.0}
DIVIDED_WORDS = {"distribute_embedding": True}


def oracle(options: dict[str, Any]) -> reference.LMHead:
    """Returns the model of one process."""
    torch.manual_seed(3)
    return reference.LMHead(**MODEL, **options)


def batch_of(step: int, number: int) -> Tensor:
    source = torch.Generator().manual_seed(1000 * step + number)
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=source)


def whole(options: dict[str, Any], batches: int) -> dict[str, Any]:
    """Trains in one process, without dropout, on so many batches per step."""
    model = oracle(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        texts = [batch_of(step, number) for number in range(batches)]
        found = [model((ids, None, None, None, ids)) for ids in texts]
        (sum(found[1:], found[0]) / batches).backward()
        losses.append([loss.item() for loss in found])
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return {"losses": losses, "norms": norms, "state": dict(model.state_dict())}


@smp.step
def train(model: Any, ids: Tensor, autocast: bool = False) -> Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        loss = model((ids, None, None, None, ids))
    model.backward(loss)
    return loss


def trained(
    config: dict[str, Any],
    options: dict[str, Any],
    checkpoints: bool = False,
    autocast: bool = False,
    elsewhere: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Trains on the ranks of a job.

    Args:
        config: of smp.
        options: of the model.
        checkpoints: compute the activations of layers again?
        autocast: compute in bf16?
        elsewhere: modules for the second partition.
    """
    smp.init({"ddp": True, "microbatches": 2, "prescaled_batch": True, **config})
    module = smp.nn.DistributedTransformerLMHead(**{"sequence_parallel": True, **MODEL, **options})
    model = smp.DistributedModel(module)
    for name in elsewhere:
        smp.set_partition(module.get_submodule(name), 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = smp.DistributedOptimizer(inner, static_loss_scale=64.0)
    model.load_state_dict(oracle(options).state_dict())
    if checkpoints:
        smp.set_activation_checkpointing(module.transformer.seq_layers)
    torch.manual_seed(4)  # of dropout
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(
            float(train(model, batch_of(step, smp.rdp_rank()).to(device())).reduce_mean())
        )
        norms.append(float(smp.clip_grad_norm(0.5)))
        optimizer.step()
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    return {"number": smp.rdp_rank(), "losses": losses, "norms": norms, "state": state}


def check_same(result: dict[str, Any], losses: Any, norms: Any, state: Any) -> None:
    found = result["losses"], result["norms"], result["state"]
    close(found, (losses, norms, state), tolerance=1e-5)


TWO, FOUR = {"tensor_parallel_degree": 2}, {"tensor_parallel_degree": 4}
# Ranks, configuration, model, activation checkpointing.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    "2": ("2", TWO, PRE, False),
    "2, post": ("2", TWO, {**POST, **DIVIDED_WORDS}, False),
    "4, both": ("4", FOUR, {**BOTH, **DIVIDED_WORDS}, False),
    "2, parallel": ("2", TWO, {**PRE, "parallel_attn_output": True, "rotary_dim": 2}, False),
    "2 replicas": ("4", TWO, {**PRE, **DIVIDED_WORDS}, False),
    "2 partitions": ("4", {**TWO, "partitions": 2}, {**PRE, **DIVIDED_WORDS}, False),
    "2 partitions, post": ("4", {**TWO, "partitions": 2}, POST, False),
    "checkpoints": ("2", TWO, PRE, True),
    "checkpoints, 2 partitions": ("4", {**TWO, "partitions": 2}, BOTH, True),
    "offload": ("2", {**TWO, "offload_activations": True}, PRE, True),
    "sharded": ("4", {**TWO, **SHARDED}, PRE, False),
    "sharded optimizer": ("4", {**TWO, "shard_optimizer_state": True}, PRE, False),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.costly
def test_training_is_that_of_one_process(name: str) -> None:
    layout, config, options, checkpoints = CASES[name]
    options = {**options, **NO_DROPOUT}
    results = check_ranks(trained, layout, config, options, checkpoints)
    wanted = whole(options, 1 + max(result["number"] for result in results))
    for result in results:
        losses = [of_all[result["number"]] for of_all in wanted["losses"]]
        check_same(result, losses, wanted["norms"], wanted["state"])


@pytest.mark.costly
def test_a_layer_may_be_on_two_partitions() -> None:
    # What one rank gathers is used on the other, which has no part of it.
    layer = "transformer.seq_layers.0."
    elsewhere = tuple(
        layer + name
        for name in ("attention.query", "attention.dense", "output.layernorm", "output.dense1")
    )
    config = {**TWO, "partitions": 2, "auto_partition": False, "default_partition": 0}
    options = {**BOTH, **DIVIDED_WORDS, **NO_DROPOUT}
    wanted = whole(options, 1)
    losses = [one for (one,) in wanted["losses"]]
    for result in check_ranks(trained, "4", config, options, False, False, elsewhere):
        check_same(result, losses, wanted["norms"], wanted["state"])


@pytest.mark.parametrize(("config", "autocast"), [(TWO, True), ({**TWO, "fp16": True}, False)])
@pytest.mark.costly
def test_half_precision(config: dict[str, Any], autocast: bool) -> None:
    options = {**PRE, **DIVIDED_WORDS, **NO_DROPOUT}
    plain = {**options, "sequence_parallel": False}
    (wanted, _), results = (
        check_ranks(trained, "2", config, one, False, autocast) for one in (plain, options)
    )
    for result in results:
        assert result["losses"] == pytest.approx(wanted["losses"], rel=2e-3)
        assert result["norms"] == pytest.approx(wanted["norms"], rel=2e-2)


@pytest.mark.parametrize("name", ["2", "4, both", "2 partitions", "checkpoints"])
@pytest.mark.costly
def test_dropout_leaves_out_what_one_process_leaves_out(name: str) -> None:
    layout, config, options, checkpoints = CASES[name]
    options = {**options, **DROPOUT}
    (wanted,) = check_ranks(trained, "1", {}, options, checkpoints)
    plain = whole({**options, **NO_DROPOUT}, 1)
    assert wanted["losses"][0] != pytest.approx(plain["losses"][0][0], rel=1e-3)
    for result in check_ranks(trained, layout, config, options, checkpoints):
        check_same(result, wanted["losses"], wanted["norms"], wanted["state"])


# --- memory ---------------------------------------------------------------------------------------

HIDDEN, POSITIONS, HEADS = 64, 64, 4


@contextlib.contextmanager
def kept(model: nn.Module, found: dict[int, Tensor]) -> Iterator[None]:
    """Notes what autograd keeps of the code inside, without parameters, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x: Tensor) -> Tensor:
        place = x.untyped_storage().data_ptr()
        if place not in parameters:
            found[place] = x  # alive, so that no other storage comes to its place
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield


@smp.step
def measured(model: Any, x: Tensor) -> int:
    found: dict[int, Tensor] = {}
    x.requires_grad_()
    with kept(model, found):
        y = model((x, None))[0]
    model.backward(y.sum())
    return sum(x.untyped_storage().nbytes() for x in found.values())


def kept_by_layers(sequence_parallel: bool, layers: int, batch: int) -> int:
    """Returns the bytes that autograd keeps for some layers on one rank."""
    size = int(os.environ["WORLD_SIZE"])
    smp.init({"ddp": True, "tensor_parallel_degree": size, "prescaled_batch": True})
    module = smp.nn.DistributedTransformer(
        num_layers=layers,
        num_attention_heads=HEADS,
        attention_head_size=HIDDEN // HEADS,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        attention_dropout_prob=0.0,
        hidden_dropout_prob=0.1,
        causal_mask_size=POSITIONS,
        pre_layernorm=True,
        post_layernorm=False,
        sequence_parallel=sequence_parallel,
    )
    model = smp.DistributedModel(module)
    x = torch.ones(batch, POSITIONS, HIDDEN, device=device())
    for _ in range(2):  # in the first step smp learns
        (result,) = measured(model, x)
    return int(result)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_rank_keeps_its_part_of_activations(size: int, batch: int) -> None:
    layers = 3
    # Bytes per position and feature. Section 4.1 of the paper counts 34 in 16 bits: 32 of values,
    # which have 4 bytes here, and 2 of dropout's masks.
    of_layer = 2 * 32 + 2
    values = layers * batch * POSITIONS * HIDDEN
    for found in check_ranks(kept_by_layers, str(size), True, layers, batch):
        assert found == pytest.approx(of_layer * values / size, rel=0.1)
    # Else each rank keeps whole states: before and after two norms, and dropout's factors.
    for found in check_ranks(kept_by_layers, str(size), False, layers, batch):
        assert found > (4 * 4 + 2) * values


def exchanged(sequence_parallel: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Returns elements that a layer gathers, scatters and sums, forward and backward."""
    smp.init({"ddp": True, "prescaled_batch": True, **TWO})
    layer = smp.nn.DistributedTransformerLayer(
        *(4, 4, HIDDEN, 32),
        pre_layernorm=True,
        post_layernorm=False,
        sequence_parallel=sequence_parallel,
    )
    layer._outermost = False  # as in a stack
    counts: dict[str, int] = {}
    collectives = layer.exchange.collectives
    make = collectives.make

    def counting(kind: str, result: Tensor, argument: Tensor) -> None:
        counts[kind] = counts.get(kind, 0) + max(result.numel(), argument.numel())
        make(kind, result, argument)

    collectives.make = counting
    positions = POSITIONS // 2 if sequence_parallel else POSITIONS
    y = layer((torch.ones(1, positions, HIDDEN, requires_grad=True), None))[0]
    forward = dict(counts)
    counts.clear()
    y.sum().backward()
    return forward, counts


def test_a_layer_exchanges_what_the_guide_says() -> None:
    states = POSITIONS * HIDDEN
    for forward, backward in check_ranks(exchanged, "2", False):
        assert forward == backward == {"sum": 2 * states}
    of_parameters = 6 * HIDDEN  # two norms, and the biases of two linear layers
    for forward, backward in check_ranks(exchanged, "2", True):
        assert forward == {"all_gather": 2 * states, "reduce_scatter": 2 * states}
        assert backward == {
            "all_gather": 4 * states,
            "reduce_scatter": 2 * states,
            "sum": of_parameters,
        }


# --- generation, misuse ---------------------------------------------------------------------------


class Writer(nn.Module):
    """Takes what `smp.generate` gives."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.model = smp.nn.DistributedTransformerLMHead(
            sequence_parallel=sequence_parallel, **MODEL, **PRE, **DIVIDED_WORDS
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        mask = None if attention_mask is None else 1 - attention_mask
        result: Tensor = self.model((input_ids, mask, None, position_ids, None))
        return result


def written(config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    smp.init({"ddp": True, "microbatches": 2, "prescaled_batch": True, **config})
    torch.manual_seed(3)
    model = smp.DistributedModel(Writer(sequence_parallel=True))
    torch.manual_seed(5)
    model.load_state_dict({name: torch.randn(x.shape) for name, x in model.state_dict().items()})
    ids = batch_of(0, 0)[:, :3].to(device())
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return smp.generate(model, ids, 5).cpu(), smp.generate(model, ids, 5, mask).cpu()


@pytest.mark.parametrize(("layout", "config"), [("2", TWO), ("4", {**TWO, "partitions": 2})])
@pytest.mark.costly
def test_generated_texts_are_those_of_one_process(layout: str, config: dict[str, Any]) -> None:
    (wanted,) = check_ranks(written, "1", {})
    for found in check_ranks(written, layout, config):
        for text, expected in zip(found, wanted, strict=True):
            assert text.shape == (BATCH, 8)
            assert torch.equal(text, expected)


def misused() -> list[str]:
    smp.init({"ddp": True, "microbatches": 2, "prescaled_batch": True, **TWO})
    texts = []

    def model(sequence_parallel: bool) -> nn.Module:
        torch.manual_seed(3)
        options = {**MODEL, **PRE, **NO_DROPOUT}
        return smp.nn.DistributedTransformerLMHead(sequence_parallel=sequence_parallel, **options)

    with pytest.raises(smp.SMPUsageError) as caught:
        smp.DistributedModel(model(smp.rank() == 0))
    texts.append(str(caught.value))
    divided = smp.DistributedModel(model(True))
    with pytest.raises(smp.SMPError) as caught:
        train(divided, batch_of(0, 0)[:, :5].to(device()))
    texts.append(str(caught.value).partition("\n")[0])
    train(divided, batch_of(0, 0).to(device()))
    return texts


def test_misuse_raises_on_all_ranks() -> None:
    for differ, odd in check_ranks(misused, "2"):
        assert "all ranks have to divide the same modules" in differ
        assert "sequence_parallel=True" in differ
        assert "5 positions cannot be divided over 2 tensor-parallel ranks; pad it" in odd


def own_batches() -> list[bool]:
    smp.init({"ddp": True, **TWO})
    module = smp.nn.DistributedTransformerLMHead(sequence_parallel=True, **MODEL)
    return [
        isinstance(one.exchange, SequenceExchange)
        for one in module.modules()
        if isinstance(one, DistributedModule)
    ]


def test_there_is_nothing_to_divide_if_each_rank_has_its_own_batch() -> None:
    for found in check_ranks(own_batches, "2"):
        assert found
        assert not any(found)


class Plain(nn.Module):
    """A layer of the script."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, inputs: Any) -> Any:
        raise AssertionError("it is replaced")


def replaced() -> list[bool]:
    smp.init({"ddp": True, "prescaled_batch": True, **TWO})
    smp.tp_register(smp.nn.DistributedTransformerLayer, lambda: ((), {"num_attention_heads": 4}))(
        Plain
    )
    found = []
    for options in ({}, {"sequence_parallel": True}):
        module = nn.Sequential(Plain())
        smp.set_tensor_parallelism(module, True, **options)
        layer = smp.DistributedModel(module).get_module()[0]
        found.append(isinstance(layer.sequence, SequenceExchange))
    return found


def test_options_of_marked_modules_turn_it_on() -> None:
    assert check_ranks(replaced, "2") == [[False, True]] * 2
