"""The transformer family, divided over 1, 2 and 4 ranks, against plain modules in one process."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from ranks import check_ranks
from smp import transformer_reference as reference
from torch import Tensor, nn

import smddp.modelparallel.torch as smp
from smddp.modelparallel.torch.job.collectives import Collectives
from smddp.modelparallel.torch.tensor.exchange import Exchange, SequenceExchange
from smddp.modelparallel.torch.tensor.module import Division, divisions_of
from smddp.modelparallel.torch.tensor.transformer.attention import DistributedAttentionLayer
from smddp.modelparallel.torch.tensor.transformer.feed_forward import (
    DistributedTransformerOutputLayer,
)
from smddp.modelparallel.torch.tensor.transformer.flash import FlashAttentionLayer, alibi
from smddp.modelparallel.torch.tensor.transformer.layers import (
    DistributedTransformer,
    DistributedTransformerLayer,
)
from smddp.modelparallel.torch.tensor.transformer.lm_head import DistributedTransformerLMHead
from smddp.modelparallel.torch.tensor.transformer.norm import FusedLayerNorm

pytestmark = pytest.mark.multiprocess

S, S2, H, V = 8, 3, 12, 16  # four ranks can divide S
Case = dict[str, Any]
NORMS = [(True, False), (False, True), (True, True)]
# What all classes with attention have.
OF_ATTENTION: dict[str, list[Any]] = {
    "norms": NORMS,
    "prescaled": [False, True],
    "sequence_parallel": [False, True],
    "mask": [None, "rows", "matrix"],
    "layer_idx": [0, 2],
    "scale_attn_weights": [True, False],
    "scale_attn_by_inverse_layer_idx": [False, True],
    "query_key_layer_scaling": [False, True],
    "attention_in_fp32": [False, True],
    "fp32_residual_addition": [False, True],
    "flash_attention": [True, False],
    "bias": [(True, True), (False, False), (False, True)],
    "size": [3, 4],
}
OF_POSITIONS: dict[str, list[Any]] = {
    "causal": [(None, None), (8, None), (8, 2)],
    "positions": [{}, {"use_alibi": True}, {"use_alibi": True, "alibi_bias_max": 4}, "rotary"],
}
OF_OUTPUT: dict[str, list[Any]] = {
    "norms": NORMS,
    "prescaled": [False, True],
    "sequence_parallel": [False, True],
    "activation": ["gelu", "gelu_new", "relu"],
    "fp32_residual_addition": [False, True],
    "initializer": [(False, False), (True, False)],
}
OF_LAYER: dict[str, list[Any]] = {
    "norms": NORMS,
    "prescaled": [False, True],
    "sequence_parallel": [False, True],
    "mask": [None, "rows"],
    **OF_POSITIONS,
    "fp32_residual_addition": [False, True],
    "activation": ["gelu", "relu"],
    "cross": [False, True],
    "parallel": [False, True],
}
OF_TRANSFORMER: dict[str, list[Any]] = {
    "norms": NORMS,
    "prescaled": [False, True],
    "sequence_parallel": [False, True],
    "causal": [(None, None), (8, None), (8, 2)],
    "scale_attn_by_inverse_layer_idx": [False, True],
    "cross": [False, True],
    "num_layers": [1, 2],
}
OF_LM_HEAD: dict[str, list[Any]] = {
    "norms": NORMS,
    "prescaled": [False, True],
    "sequence_parallel": [False, True],
    "mask": [None, "tokens"],
    "causal": [(None, None), (8, None), (8, 2)],
    "positions": [{}, {"use_alibi": True}, "rotary"],
    "position_ids": [False, True],
    "num_token_types": [0, 2],
    "cross": [False, True],
    "distribute_embedding": [False, True],
    "head": [
        {},
        {"add_lm_head": False},
        {"tie_word_embeddings": False},
        {"tie_word_embeddings": False, "lm_head_bias": True},
    ],
    "labels": [None, "loss", "both"],
    "normal": [False, True],
}


def covering(options: dict[str, list[Any]], seed: int = 1) -> list[Case]:
    """Returns cases among which every pair of values of two options appears."""
    names, source = list(options), random.Random(seed)
    counts = [range(len(options[name])) for name in names]
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in counts[i]
        for b in counts[j]
    }

    def pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    rows = []
    while missing:
        i, a, j, b = min(missing)
        candidates = []
        for _ in range(30):
            row = [source.choice(count) for count in counts]
            row[i], row[j] = a, b
            candidates.append(tuple(row))
        best = max(candidates, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append(best)
    return [{name: options[name][row[i]] for i, name in enumerate(names)} for row in rows]


def divides_sequences(case: Case) -> bool:
    """Says whether a module is to be made with sequence_parallel, as for one batch of all ranks."""
    return bool(case["sequence_parallel"] and case["prescaled"])


def arguments(case: Case, names: list[str]) -> Case:
    """Returns the constructor arguments that a case stands for; those of names as they are."""
    size = case.get("size", 4)
    causal, window = case.get("causal", (None, None))
    result: Case = {
        "hidden_size": H,
        "layernorm_epsilon": 1e-4,
        "pre_layernorm": case["norms"][0],
        "post_layernorm": case["norms"][1],
        "num_attention_heads": 4,
        "attention_head_size": size,
        "causal_mask_size": causal,
        "window_size": window,
        **{name: case[name] for name in names if name in case},
        "sequence_parallel": divides_sequences(case),
    }
    if "bias" in case:
        result["query_key_value_bias"], result["dense_bias"] = case["bias"]
    if (positions := case.get("positions")) is not None:
        result.update({"rotary_dim": 2} if positions == "rotary" else positions)
    if case.get("parallel") and case["norms"] == (True, False) and not case["cross"]:
        result["parallel_attn_output"] = True
    return result


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mask_of(kind: str | None, batch: int, keys: int) -> Tensor | None:
    """Returns a mask that hides some keys, never all of those that a query sees."""
    if kind is None:
        return None
    hidden = numbers(batch, 1, S if kind == "matrix" else 1, keys, seed=5) > 0.4
    hidden[..., ::2] = False  # a window has two
    if kind == "tokens":
        return hidden[:, 0, 0].long()
    # Large and small numbers: a mask is anything that is added.
    return hidden * -1e9 + 0.1 * numbers(batch, 1, hidden.shape[2], keys, seed=6)


class Check:
    """Compares a divided module with the reference, on one rank."""

    def __init__(self, prescaled: bool) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.exchange = Exchange(Collectives(world), prescaled)
        batch = 1 if self.exchange.size == 4 else 2  # of a rank
        self.batch = batch if prescaled else batch * self.exchange.size

    def own(self, x: Any) -> Any:
        """Returns what this rank has of values for all examples."""
        if not isinstance(x, Tensor) or self.exchange.prescaled or not x.dim():
            return x
        return x.chunk(self.exchange.size)[self.exchange.rank]

    def part(self, division: Division | None, x: Tensor) -> Tensor:
        if division is None:
            return x
        return division.part(x, self.exchange.rank, self.exchange.size)

    def load(self, module: nn.Module, model: nn.Module) -> None:
        """Gives the divided module the weights of the reference."""
        for one in module.modules():
            if not isinstance(getattr(one, "exchange", None), (SequenceExchange, type(None))):
                one.exchange = self.exchange
        state = dict(model.named_parameters())
        own, divisions = dict(module.named_parameters()), divisions_of(module)
        assert own.keys() == state.keys()
        source = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in state.items():
                parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.4)
                if "layernorm" in name:
                    parameter += 0.7
                own[name].copy_(self.part(divisions.get(name), parameter))

    def close(self, found: Tensor, wanted: Tensor, what: str) -> None:
        scale = max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(
            found / scale,
            wanted / scale,
            rtol=1e-5,
            atol=1e-5,
            check_dtype=False,
            msg=lambda text: f"{what}: {text}",
        )

    def run(self, module: nn.Module, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Compares results and gradients. The input of the modules is one tuple, or one tensor."""
        self.load(module, model)
        module.eval()
        leaves = [
            x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in inputs
        ]
        own = [
            x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
            for x in map(self.own, leaves)
        ]
        single = len(inputs) == 1
        found = module(own[0] if single else tuple(own))
        wanted = self.wanted(model, leaves[0] if single else tuple(leaves))
        if not isinstance(found, tuple):
            found, wanted = (found,), (wanted,)
        assert len(found) == len(wanted)
        total, loss = torch.zeros(()), torch.zeros(())
        for i, (y, z) in enumerate(zip(found, wanted, strict=True)):
            if not isinstance(z, Tensor):
                assert y is z
                continue
            self.close(y, self.own(z), f"result {i}")
            scale = numbers(*z.shape, seed=10 + i)
            total = total + (z * scale).sum()
            loss = loss + (y * self.own(scale)).sum()
        total.backward()
        loss.backward()
        for i, (y, x) in enumerate(zip(own, leaves, strict=True)):
            if isinstance(x, Tensor) and x.grad is not None and not self._is_mask(i, inputs):
                assert y.grad is not None
                self.close(y.grad, self.own(x.grad), f"gradient of input {i}")
        divisions = divisions_of(module)
        gradients = {name: one.grad for name, one in model.named_parameters()}
        for name, parameter in module.named_parameters():
            wanted_gradient = gradients[name]
            if wanted_gradient is None:
                assert parameter.grad is None, name
                continue
            assert parameter.grad is not None, name
            gradient = parameter.grad
            if name not in divisions and not self.exchange.prescaled:
                dist.all_reduce(gradient)  # as data parallelism does
            self.close(
                gradient, self.part(divisions.get(name), wanted_gradient), f"gradient of {name}"
            )

    def _is_mask(self, i: int, inputs: tuple[Any, ...]) -> bool:
        return inputs[i].dim() == 4

    def wanted(self, model: nn.Module, inputs: Any) -> Any:
        return model(inputs)


class CheckLoss(Check):
    """As before, where each rank has a mean over its own examples."""

    def wanted(self, model: nn.Module, inputs: Any) -> Any:
        *rest, labels = inputs
        if labels is None:
            return model(inputs)
        logits = model((*rest, None))
        parts = 1 if self.exchange.prescaled else self.exchange.size
        losses = torch.stack(
            [
                model.loss(y, z)
                for y, z in zip(logits.chunk(parts), labels.chunk(parts), strict=True)
            ]
        )
        return losses, logits

    def own(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.dim() == 1:  # one loss of each rank
            return x[0 if self.exchange.prescaled else self.exchange.rank]
        return super().own(x)


@contextlib.contextmanager
def named(case: Case) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"in case {case}")
        raise


def attention_case(case: Case) -> None:
    names = [name for name in OF_ATTENTION if name in SAME]
    options = arguments(case, names)
    cross = case["cross"]
    if cross:
        for name in (
            "causal_mask_size",
            "window_size",
            "use_alibi",
            "alibi_bias_max",
            "rotary_dim",
        ):
            options.pop(name, None)
    elif options["causal_mask_size"] is None:
        options["window_size"] = None
    check = Check(case["prescaled"])
    keys = S2 if cross else S
    inputs = (
        numbers(check.batch, S, H, seed=1),
        *((numbers(check.batch, S2, H, seed=2),) if cross else ()),
        mask_of(case["mask"], check.batch, keys),
    )
    module = DistributedAttentionLayer(cross_attention=cross, **options)
    check.run(module, reference.Attention(cross=cross, **options), inputs)


# Options that are arguments by their own name.
SAME = {
    *("layer_idx", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    *("query_key_layer_scaling", "attention_in_fp32", "fp32_residual_addition"),
    *("flash_attention", "activation", "num_layers", "num_token_types", "distribute_embedding"),
}


def output_case(case: Case) -> None:
    options = {
        "hidden_size": H,
        "intermediate_size": 20,
        "layernorm_epsilon": 1e-4,
        "pre_layernorm": case["norms"][0],
        "post_layernorm": case["norms"][1],
        "activation": case["activation"],
    }
    check = Check(case["prescaled"])
    module = DistributedTransformerOutputLayer(
        fp32_residual_addition=case["fp32_residual_addition"],
        use_normal_initialization=case["initializer"][0],
        zero_init=case["initializer"][1],
        sequence_parallel=divides_sequences(case),
        **options,
    )
    check.run(module, reference.Output(**options), (numbers(check.batch, S, H, seed=1),))


def layer_case(case: Case) -> None:
    options = {
        "activation": "gelu",
        **arguments(case, sorted(SAME)),
        "intermediate_size": 20,
        "add_cross_attention": case["cross"],
    }
    check = Check(case["prescaled"])
    cross = case["cross"]
    states = (numbers(check.batch, S2, H, seed=2),) if cross else ()
    inputs = (
        numbers(check.batch, S, H, seed=1),
        *states,
        mask_of(case.get("mask", "rows"), check.batch, S),
        *((mask_of(case.get("mask", "rows"), check.batch, S2),) if cross else ()),
    )
    if "num_layers" in case:
        options.pop("layer_idx", None)
        if options["window_size"] is not None:
            options["window_size"] = [options["window_size"], None][: case["num_layers"]]
        check.run(DistributedTransformer(**options), reference.Transformer(**options), inputs)
    else:
        check.run(DistributedTransformerLayer(**options), reference.Layer(**options), inputs)


def lm_head_case(case: Case) -> None:
    head = case["head"]
    options = {
        **arguments(case, sorted(SAME)),
        "activation": "gelu_new",
        "intermediate_size": 20,
        "num_layers": 1,
        "vocab_size": V,
        "num_positions": 8,
        "add_cross_attention": case["cross"],
        **head,
    }
    check = CheckLoss(case["prescaled"])
    source = torch.Generator().manual_seed(1)
    shape = (check.batch, S)
    labels = None
    if case["labels"] is not None and head.get("add_lm_head", True):
        labels = torch.randint(0, V, shape, generator=source)
        labels[:, 3] = -100
    positions = None
    if case["position_ids"] and not case["positions"]:
        positions = torch.randint(0, 8, shape, generator=source)
    types = None
    if case["num_token_types"] and case["mask"]:
        types = torch.randint(0, 2, shape, generator=source)
    cross = ()
    if case["cross"]:
        hidden_states = numbers(check.batch, S2, H, seed=2)
        cross = (hidden_states, mask_of(case["mask"], check.batch, S2))
    inputs = (
        torch.randint(0, V, shape, generator=source),
        mask_of(case["mask"], check.batch, S),
        *(types, positions, *cross, labels),
    )
    module = DistributedTransformerLMHead(
        return_logits=True, use_normal_initialization=case["normal"], **options
    )
    check.run(module, reference.LMHead(**options), inputs)
    if labels is None:
        return
    if case["labels"] == "loss":  # alone
        own = tuple(check.own(x) for x in inputs)
        loss, _ = module(own)
        module.return_logits = False
        torch.testing.assert_close(module(own), loss)


CASES = {
    "attention": (attention_case, {**OF_ATTENTION, **OF_POSITIONS, "cross": [False, True]}),
    "output": (output_case, OF_OUTPUT),
    "layer": (layer_case, OF_LAYER),
    "transformer": (layer_case, OF_TRANSFORMER),
    "lm_head": (lm_head_case, OF_LM_HEAD),
}


def begin() -> None:
    torch.manual_seed(0)
    degree = int(os.environ["WORLD_SIZE"])
    smp.init({"ddp": True, "tensor_parallel_degree": degree, "prescaled_batch": True})


def check_cases(kind: str) -> int:
    begin()
    run, options = CASES[kind]
    cases = covering(options)
    for case in cases:
        with named(case):
            run(case)
    return len(cases)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", list(CASES))
@pytest.mark.costly
def test_equals_plain_modules(kind: str, size: int) -> None:
    counts = check_ranks(check_cases, str(size), kind, timeout=120)
    assert min(counts) > 8


def small(**options: Any) -> DistributedTransformerLMHead:
    given = {
        "num_layers": 1,
        "num_attention_heads": 2,
        "attention_head_size": 4,
        "hidden_size": 8,
        "intermediate_size": 8,
        "vocab_size": 6,
        "num_positions": 4,
    }
    return DistributedTransformerLMHead(**{**given, **options})


@on_ranks("2")
def test_types_and_positions_may_be_those_of_one_example() -> None:
    begin()
    model = small(num_token_types=2, hidden_dropout_prob=0.0, attention_dropout_prob=0.0)
    ids = torch.tensor([[0, 5, 2], [3, 1, 4]])
    whole = torch.tensor([[0, 1, 1], [0, 1, 1]])
    expected = model((ids, None, whole, whole, ids))
    for row in (whole[:1], whole[0], whole[:1].int()):
        assert torch.equal(model((ids, None, row, row, ids)), expected)


def dropped() -> Any:
    begin()
    found = []
    for prescaled in (True, False):
        torch.manual_seed(1)
        module = DistributedAttentionLayer(
            4, 8, 16, attention_dropout_prob=0.5, hidden_dropout_prob=0.5
        )
        module.exchange = module.dense.exchange = Exchange(module.exchange.collectives, prescaled)
        module.query.weight.data.zero_()  # all weights of attention are equal
        torch.manual_seed(2)
        heads = torch.ones(1, 2, 6, 8)  # of this rank
        weighted = module._weighted(heads, heads, heads, None)
        result = module((torch.ones(1, 6, 16), None)).detach()
        found.append((weighted, result))
    return found


def test_ranks_drop_other_weights_and_the_same_features() -> None:
    first, second = check_ranks(dropped, "2")
    # Heads of two ranks drop other weights. The features of one batch are dropped alike.
    assert not torch.equal(first[0][0], second[0][0])
    torch.testing.assert_close(first[0][1], second[0][1])


@on_ranks("2")
def test_half_precision() -> None:
    begin()
    for options in [{}, {"fp32_residual_addition": True}, {"attention_in_fp32": True}]:
        for norms in NORMS:
            torch.manual_seed(1)
            model = small(
                pre_layernorm=norms[0],
                post_layernorm=norms[1],
                hidden_dropout_prob=0.0,
                attention_dropout_prob=0.0,
                causal_mask_size=4,
                **options,
            )
            ids = torch.tensor([[0, 1, 2, 3]])
            mask = torch.tensor([[1, 1, 0, 0]])  # the first queries see masked keys only
            wanted = model((ids, mask, None, None, None))
            found = model.bfloat16()((ids, mask, None, None, None))
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.05)
            found.sum().backward()
            assert all(x.grad is None or x.grad.isfinite().all() for x in model.parameters())


def test_flash_attention_layer() -> None:
    qkv = numbers(2, 5, 3, 4, 6, seed=1).requires_grad_()
    mask = numbers(2, 1, 1, 5, seed=2)
    query, key, value = (x.transpose(1, 2) for x in qkv.unbind(2))

    def check(found: Tensor, scale: float, causal: bool, bias: Tensor | float = 0.0) -> None:
        scores = query @ key.transpose(-1, -2) * scale + bias
        if causal:
            scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        wanted, factors = scores.softmax(-1) @ value, numbers(2, 4, 5, 6, seed=3)
        torch.testing.assert_close(found, wanted)
        gradients = (torch.autograd.grad(x, qkv, factors, True) for x in (found, wanted))
        torch.testing.assert_close(*gradients)

    for causal in (False, True):
        for options, scale in [
            ({"attention_head_size": 6}, 6**-0.5),
            ({"scale": 0.3}, 0.3),
            ({"scale_attention_scores": False}, 1.0),
            (
                {"attention_head_size": 6, "scale_attn_by_layer_idx": True, "layer_idx": 1},
                6**-0.5 / 2,
            ),
        ]:
            check(FlashAttentionLayer(0.0, **options)(qkv, causal=causal), scale, causal)
        layer = FlashAttentionLayer(0.5, 6, triton_flash_attention=True, use_alibi=True)
        check(layer(qkv, mask, causal), 6**-0.5, causal, mask)
    layer = FlashAttentionLayer(1.0, 6)
    assert not layer(qkv).any()
    assert layer.eval()(qkv).any()


def initialized() -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Returns whole weights of new models, and what they compute in training."""
    begin()
    states, results = [], []
    for distribute, options in itertools.product((False, True), INITIALIZERS):
        torch.manual_seed(1)
        model = DistributedTransformerLMHead(
            **{**WIDE, "hidden_dropout_prob": 0.5, "attention_dropout_prob": 0.0},
            **{**options, "distribute_embedding": distribute, "tie_word_embeddings": False},
        )
        state = {name: value.detach().clone() for name, value in model.named_parameters()}
        for name, division in divisions_of(model).items():
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, state[name])
            state[name] = division.united(parts)
        states.append(state)
        ids = torch.arange(16).view(2, 8)
        results.append(model((ids, None, None, None, ids)).detach())
    return states, results


INITIALIZERS: list[dict[str, Any]] = [
    {},
    {"use_normal_initialization": True},
    {"use_normal_initialization": True, "initializer_range": 0.3},
    {"zero_init": True},
]
WIDE = {
    "num_layers": 1,
    "num_attention_heads": 4,
    "attention_head_size": 12,
    "hidden_size": 48,
    "intermediate_size": 96,
    "vocab_size": 64,
    "num_positions": 64,
    "add_cross_attention": True,
}


def test_initial_weights_and_dropout_of_features_are_those_of_one_rank() -> None:
    (states, results), *others = [check_ranks(initialized, size)[0] for size in ("1", "2", "4")]
    for found, results_of_ranks in others:
        torch.testing.assert_close(found, states, rtol=0, atol=0)
        torch.testing.assert_close(results_of_ranks, results, rtol=1e-5, atol=1e-5)
    for options, state in zip(INITIALIZERS * 2, states, strict=True):
        normal, zeros = options.get("use_normal_initialization"), options.get("zero_init")
        for name, value in state.items():
            if name.endswith("bias"):
                assert not value.any(), name
            elif value.dim() == 2:
                as_linear = (3 * value.shape[1]) ** -0.5
                drawn = normal or "embedding" in name
                wanted = options.get("initializer_range", 0.02) if drawn else as_linear
                wanted = 0.0 if zeros else wanted
                assert value.std().item() == pytest.approx(wanted, rel=0.06), f"{name} {options}"


def test_slopes_of_alibi_for_a_number_of_heads_that_is_no_power_of_two() -> None:
    # The list in section 3 of the paper, for 8 heads, and every second slope of 16 for others.
    like = torch.zeros(1)
    eight = -alibi(8, 0, 8, 2, 2, 8, like)[0, :, 1, 0]
    torch.testing.assert_close(eight, 2.0 ** -torch.arange(1.0, 9.0))
    six = -alibi(6, 2, 4, 2, 2, 8, like)[0, :, 1, 0]
    torch.testing.assert_close(six, 2.0 ** -torch.tensor([6.0, 8.0, 1.0, 3.0]))


def test_fused_layer_norm() -> None:
    x = numbers(3, 8, seed=1)
    torch.testing.assert_close(FusedLayerNorm(8)(x), F.layer_norm(x, (8,)))
    assert FusedLayerNorm(8, elementwise_affine=False)(x).dtype == x.dtype
    half = FusedLayerNorm(8).bfloat16()(x)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, F.layer_norm(x, (8,)).bfloat16())
