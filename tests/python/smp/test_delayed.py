"""Delayed initialization gives the values of ordinary creation, and memory only where they live."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import hashlib
import io
import math
import pickle
import random
import resource
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch._dynamo
from ranks import check_ranks
from smp.census import Census
from smp.zoo import ZOO, arguments, batch_of, device
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError, SMPUsageError
from smddp.modelparallel.torch.delayed.life import come_to_life, is_delayed, with_values

STEPS = 2
MANUAL = {"auto_partition": False, "default_partition": 0, "microbatches": 2, "ddp": True}


# --- models whose constructors do much ------------------------------------------------------------


class Projection(nn.Module):
    """A linear layer with a transposed weight, as in GPT-2 of a model library."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    """Has masks as buffers."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        mask = torch.tril(torch.ones((length, length), dtype=torch.bool))
        self.register_buffer("bias", mask.view(1, 1, length, length), persistent=False)
        self.register_buffer("masked_bias", torch.tensor(-1e4), persistent=False)
        self.norm = nn.LayerNorm(width)
        self.c_attn = Projection(width, 3 * width)
        self.c_proj = Projection(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.norm(x)).split(x.shape[-1], -1)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(x.shape[-1])
        mask = self.bias[0, :, : x.shape[1], : x.shape[1]]
        scores = torch.where(mask, scores, self.masked_bias.to(scores.dtype))
        return x + self.c_proj(scores.softmax(-1) @ v)


class GPT2(nn.Module):
    """Initializes all modules again when it is complete, and ties its last layer."""

    def __init__(self, width: int = 32, layers: int = 2, words: int = 40) -> None:
        super().__init__()
        self.wte = nn.Embedding(words, width, padding_idx=0)
        self.wpe = nn.Embedding(8, width)
        self.h = nn.ModuleList([Attention(width, 8) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | Projection):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)
        for name, parameter in module.named_parameters():
            if name == "c_proj.weight":
                parameter.data.normal_(mean=0.0, std=0.02 / math.sqrt(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class InPlace(nn.Module):
    """Changes parameters in place, in all the ways of torch.nn.init and others."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 40, padding_idx=3)
        self.words.weight.data[3].zero_()
        self.linear = nn.Linear(40, 50)
        self.linear.weight.data *= 3
        self.linear.weight.data.mul_(0.5).add_(1)
        with torch.no_grad():
            self.linear.bias.copy_(torch.linspace(0, 1, 50))
            self.linear.weight[0] = 7
            self.linear.weight[:, 1:3] += torch.randn(50, 2)
        self.square = nn.Linear(60, 60)
        nn.init.orthogonal_(self.square.weight)
        nn.init.trunc_normal_(self.square.bias, std=0.2)
        self.sparse = nn.Linear(60, 60)
        nn.init.sparse_(self.sparse.weight, 0.5)
        nn.init.eye_(self.sparse.weight.data[:4, :4])
        self.conv = nn.Conv2d(4, 4, 3)
        nn.init.dirac_(self.conv.weight)
        self.copies = nn.ModuleList([copy.deepcopy(self.square) for _ in range(2)])
        self.lstm = nn.LSTM(8, 8, 2)
        for name, parameter in self.lstm.named_parameters():
            if "bias" in name:
                parameter.data[8:16].fill_(1.0)
            else:
                nn.init.xavier_uniform_(parameter)
        self.doubled = nn.Linear(40, 40).double()
        torch._foreach_mul_([parameter.data for parameter in self.doubled.parameters()], 2)
        self.halved = nn.Linear(8, 8).half()
        self.norm = nn.BatchNorm2d(4)
        self.norm.running_mean += 2  # type: ignore[operator]
        self.norm.num_batches_tracked += 5  # type: ignore[operator]
        self.turned = nn.Parameter(torch.randn(60, 50))
        self.turned.data = self.turned.data.t()
        self.longer = nn.Parameter(torch.ones(3))
        self.longer.data = torch.randn(2000)
        self.set = nn.Parameter(torch.ones(3))
        with torch.no_grad():
            kept = self.set.clone()
            self.set.set_(torch.randn(2000))
            self.set[:3] += kept


class Drawn(nn.Module):
    """Draws random numbers in many ways."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.rand(50, 50) > 0.5
        own = torch.Generator().manual_seed(5)
        drawn = {
            "normal": torch.randn(100, 100) / 3,
            "few": torch.randn(7),
            "order": torch.randperm(3000).float(),
            "own": torch.empty(2000).normal_(generator=own),
            "more_own": torch.randn(2000, generator=own),
            "bernoulli": torch.bernoulli(torch.rand(5000)),
            "multinomial": torch.multinomial(torch.rand(100), 50).float(),
            "exponential": torch.empty(3000).exponential_(2.0),
            "dropout": nn.functional.dropout(torch.ones(3000), 0.5),
            "means": torch.normal(torch.zeros(3000), torch.rand(3000)),
            "turned": torch.empty(50, 60).t().normal_(),
            "strided": torch.empty(50, 60)[:, ::2].uniform_(),
            "like": torch.randn_like(torch.ones(60, 60, dtype=torch.float64)),
            "integers": torch.randint(0, 9, (3000,)) / 2,
            "masked": torch.where(mask, torch.rand(50, 50), torch.zeros(())),
            "vectors": torch.linalg.svd(torch.randn(20, 20))[0],
        }
        for name, value in drawn.items():
            self.register_parameter(name, nn.Parameter(value))
        torch.manual_seed(11)
        self.seeded = nn.Parameter(torch.randn(2000))
        with torch.random.fork_rng():
            torch.manual_seed(12)
            self.forked = nn.Parameter(torch.randn(2000))
        self.after = nn.Parameter(torch.randn(2000))


class Computed(nn.Module):
    """Has buffers and attributes that are computed; values decide what is created."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 0.3, 5)]
        self.list = torch.linspace(0, 0.3, 5).tolist()
        self.register_buffer("positions", torch.arange(16).expand((1, -1)))
        steps = torch.arange(0, 8, 2, dtype=torch.int64).float() / 8
        self.register_buffer("frequencies", 1.0 / 10000**steps)
        self.register_buffer("same", self.frequencies)
        self.register_buffer("part", self.frequencies[1:3])
        self.attribute = torch.outer(torch.arange(5.0), self.frequencies)
        table = np.array([[p / (j + 1) for j in range(4)] for p in range(6)])
        values = torch.empty(6, 4)
        values[:, :2] = torch.FloatTensor(np.sin(table[:, 0::2]))
        values[:, 2:] = torch.from_numpy(np.cos(table[:, 1::2]))
        self.table = nn.Parameter(values, requires_grad=False)
        self.array = nn.Parameter(torch.from_numpy(torch.rand(4).numpy() * 2))
        mask = torch.rand(10, 10) > 0.5
        self.register_buffer("places", mask.nonzero())
        self.masked = nn.Parameter(torch.zeros(10, 10))
        with torch.no_grad():
            self.masked[mask] = 4.0
        self.chosen = nn.Linear(2, 2) if float(torch.rand(1)) > 0.5 else nn.Linear(3, 3)
        whole = torch.randn(30, 30)
        self.first, self.second = nn.Parameter(whole[:10]), nn.Parameter(whole[10:].clone())
        self.third = nn.Parameter(whole[5:20])  # shares memory with the first
        self.joined = nn.Parameter(torch.cat([self.first.detach(), self.second.detach()]))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.rotation = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
        self.halves = nn.Parameter(torch.arange(9) / 2)
        self.scale = nn.Parameter(torch.tensor(1.5))


MODELS = {**{name: entry.make for name, entry in ZOO.items()}}
MODELS |= {kind.__name__: kind for kind in (GPT2, InPlace, Drawn, Computed)}


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def check_equal(made: nn.Module, expected: nn.Module) -> None:
    """Checks that two models are the same, bit for bit."""
    found, right = tensors(made), tensors(expected)
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        one = found[name]
        assert type(one) is type(tensor), name
        assert one.requires_grad == tensor.requires_grad, name
        assert (one.dtype, one.stride()) == (tensor.dtype, tensor.stride()), name
        assert torch.equal(one, tensor), name


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_ordinary_creation(name: str) -> None:
    torch.manual_seed(0)
    expected = MODELS[name]()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    with smp.delay_param_initialization():
        made = MODELS[name]()
    assert torch.equal(torch.get_rng_state(), after)
    objects = {name: id(tensor) for name, tensor in tensors(made).items()}
    assert all(map(is_delayed, tensors(made).values()))
    # Values can be had before, and in any order.
    early = {name: with_values(tensor) for name, tensor in tensors(made).items()}
    for tensor in reversed(tensors(made).values()):
        come_to_life(tensor)
    assert torch.equal(torch.get_rng_state(), after)
    assert {name: id(tensor) for name, tensor in tensors(made).items()} == objects
    check_equal(made, expected)
    for part, tensor in tensors(expected).items():
        assert torch.equal(early[part], tensor)


def test_what_constructors_compute_is_real_or_comes_to_life() -> None:
    torch.manual_seed(0)
    expected = Computed()
    torch.manual_seed(0)
    with smp.delay_param_initialization():
        made = Computed()
    assert (made.rates, made.list) == (expected.rates, expected.list)
    assert made.same is made.frequencies
    assert torch.equal(with_values(made.attribute), expected.attribute)
    for tensor in tensors(made).values():
        come_to_life(tensor)
    for module in (made, expected):
        with torch.no_grad():
            module.first[7] = 1.0
            module.frequencies[1] = 5.0
    check_equal(made, expected)


def program(choose: random.Random, length: int) -> list[Tensor]:
    """Runs random operations on square tensors, many of which share memory; returns them all."""
    size = choose.choice([3, 40])  # few random numbers are kept, many are drawn again
    made = [torch.randn(size, size), torch.zeros(size, size)]

    def assign(one: Tensor, other: Tensor) -> None:
        one.data = other.data

    new: list[Any] = [
        lambda one, other: torch.randn(size, size),
        lambda one, other: one + other,
        lambda one, other: one.clone(),
        lambda one, other: one.t(),
        lambda one, other: one.detach(),
        lambda one, other: one.view_as(one),
        lambda one, other: torch.where(one > 0, one, other),
        lambda one, other: torch.rand(size) * one,
    ]
    change: list[Any] = [
        lambda one, other: one.normal_(),
        lambda one, other: one.zero_(),
        lambda one, other: one[1:].fill_(2.0),
        lambda one, other: one[:, 0].uniform_(),
        lambda one, other: one.t().mul_(0.5),
        lambda one, other: one.copy_(other * 1),
        lambda one, other: one.add_(other.clone(), alpha=0.25),
        lambda one, other: one[0].copy_(other[1] * 1),
        lambda one, other: one.bernoulli_(0.5),
        lambda one, other: one.set_(other.clone()),
        lambda one, other: one.t_(),
        assign,
        lambda one, other: float(one.sum()) > 0 and one.neg_(),
    ]
    for _ in range(length):
        one, other = choose.choice(made), choose.choice(made)
        if choose.random() < 0.4:
            made.append(choose.choice(new)(one, other))
        else:
            choose.choice(change)(one, other)
    return made


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 1000), marks=pytest.mark.exhaustive)]
)
def test_random_programs(seeds: range) -> None:
    for seed in seeds:
        results = []
        for delay in (False, True):
            torch.manual_seed(seed)
            with smp.delay_param_initialization(enabled=delay):
                made = program(random.Random(seed), 30)
            drawn = torch.rand(1)
            order = list(made)
            random.Random(seed).shuffle(order)
            for tensor in order:
                come_to_life(tensor)
            made[seed % len(made)].add_(1.0)  # what shares memory changes, too
            results.append([drawn, *made])
        for one, other in zip(*results, strict=True):
            assert one.stride() == other.stride(), seed
            assert torch.equal(one, other), seed


def test_changes_after_the_context() -> None:
    """Modules may be initialized, converted, loaded and copied after the context, too."""

    def change(module: nn.Module, given: dict[str, Tensor]) -> list[nn.Module]:
        module.apply(lambda part: nn.init.normal_(part.weight) if type(part) is nn.Linear else 0)
        before = copy.deepcopy(module)
        module.double()
        module.load_state_dict(given, strict=False)
        module.requires_grad_(False)
        module[0].weight.data = torch.full((300, 300), 0.5)
        module[0].weight.mark = "of a library"
        return [module, before, copy.deepcopy(module).half()]

    def create() -> nn.Sequential:
        return nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(9), nn.LSTM(4, 4), nn.Linear(9, 9))

    torch.manual_seed(1)
    given = {"3.bias": torch.randn(9), "1.running_mean": torch.randn(9)}
    torch.manual_seed(0)
    expected = change(create(), given)
    torch.manual_seed(0)
    with smp.delay_param_initialization():
        made = create()
    found = change(made, given)
    for one, right in zip(found, expected, strict=True):
        assert all(map(is_delayed, tensors(one).values()))
        for tensor in tensors(one).values():
            come_to_life(tensor)
        check_equal(one, right)
    assert made[0].weight.mark == "of a library"
    assert made[2]._flat_weights[0] is made[2].weight_ih_l0
    made[2].float()(torch.ones(1, 4))


def test_hooks_of_parameters_stay() -> None:
    with smp.delay_param_initialization():
        linear = nn.Linear(2, 2)
    calls = []
    linear.weight.register_hook(lambda gradient: calls.append("one"))
    linear.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("two"))
    for parameter in linear.parameters():
        come_to_life(parameter)
    linear(torch.ones(1, 2)).sum().backward()
    assert calls == ["one", "two"]


def test_the_innermost_context_counts() -> None:
    original = nn.Parameter.__new__, torch.Tensor._make_subclass
    with smp.delay_param_initialization():
        outer = nn.Linear(2, 2)
        with smp.delayed_parameter_initialization(enabled=False):
            real = nn.Linear(2, 2)
            with smp.delay_param_initialization():
                inner = nn.Linear(2, 2)
        later = nn.Linear(2, 2)
    after = nn.Linear(2, 2)
    assert [is_delayed(m.weight) for m in (outer, real, inner, later, after)] == [1, 0, 1, 1, 0]
    with pytest.raises(ZeroDivisionError), smp.delay_param_initialization():
        raise ZeroDivisionError
    assert not is_delayed(torch.ones(1))
    assert (nn.Parameter.__new__, torch.Tensor._make_subclass) == original
    with smp.delay_param_initialization(enabled=False):
        assert not is_delayed(torch.ones(1))


def test_real_tensors_from_outside_stay_real() -> None:
    outside = torch.ones(3)
    with smp.delay_param_initialization():
        outside.add_(torch.full((3,), 2.0))
        outside[0] = torch.rand(5).mul(0)[1]
        parameter = nn.Parameter(outside)
        mixed = torch.zeros(3) + outside
        meta = torch.empty(3, device="meta")
    assert outside.tolist() == [0.0, 3.0, 3.0]
    assert parameter.data_ptr() == outside.data_ptr()
    assert meta.is_meta
    outside += 1  # small tensors are copied
    assert with_values(mixed).tolist() == [0.0, 3.0, 3.0]


class Marked(nn.Parameter):
    """A parameter with a class of its own."""


def test_files_are_loaded_in_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pretrained(nn.Module):
        """Loads and pickles in its constructor."""

        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(3, 3), nn.Linear(200, 200)
            self.large.load_state_dict(torch.load(tmp_path / "large.pt"))
            with smp.delay_param_initialization(enabled=False):
                mapped = torch.load(tmp_path / "large.pt", mmap=True)
            self.weight = nn.Parameter(mapped["weight"] * 2)
            self.same = pickle.loads(pickle.dumps(self.small))
            file = io.BytesIO()
            torch.save(self.large.state_dict(), file)
            file.seek(0)
            self.again = nn.Linear(200, 200)
            self.again.load_state_dict(torch.load(file))

    # Scripts replace it by one with other defaults.
    load = functools.partial(torch.load, weights_only=True)
    monkeypatch.setattr(torch, "load", load)
    torch.save(nn.Linear(200, 200).state_dict(), tmp_path / "large.pt")
    torch.manual_seed(0)
    ordinary = Pretrained()
    torch.manual_seed(0)
    with smp.delay_param_initialization():
        module = Pretrained()
    assert torch.load is load
    assert is_delayed(module.large.weight)
    for name, parameter in module.named_parameters():
        come_to_life(parameter)
        assert torch.equal(parameter, ordinary.get_parameter(name)), name


def test_parameters_of_other_classes_are_made_at_once() -> None:
    torch.manual_seed(0)
    expected = Marked(torch.randn(3)), nn.LazyLinear(2), torch.rand(3)
    torch.manual_seed(0)
    with smp.delay_param_initialization():
        with pytest.warns(UserWarning, match="not delayed, because its class is Marked"):
            parameter = Marked(torch.randn(3))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            lazy = nn.LazyLinear(2)
    assert type(parameter) is Marked
    assert torch.equal(parameter, expected[0])
    assert torch.equal(torch.rand(3), expected[2])
    lazy(torch.ones(1, 3))
    assert type(lazy.weight) is nn.Parameter


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:The PyTorch API of nested")
def test_what_cannot_be_delayed_is_refused() -> None:
    with smp.delay_param_initialization():
        whole = torch.zeros(3)
        cases: list[Any] = [
            lambda: torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2)),
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        ]
        for case in cases:
            with pytest.raises(SMPUsageError, match=r"test_delayed.py:\d+.*sparse, nested"):
                case()
        with pytest.raises(SMPUsageError, match=r"shape \(3,\) has no memory yet"):
            whole.data_ptr()
        with pytest.raises(
            RuntimeError, match="cannot be multiplied"
        ):  # the error that torch would raise
            torch.ones(2, 3) @ torch.ones(2, 3)
    large = torch.ones(200, 200)
    with torch.no_grad(), smp.delay_param_initialization():
        parameter = nn.Parameter(torch.empty(200, 200))
        parameter.copy_(large)
    assert torch.equal(with_values(parameter), large)
    large.add_(1)
    with pytest.raises(SMPUsageError, match=r"shape \(200, 200\) was changed after aten::copy_"):
        come_to_life(parameter)


# --- in a job -------------------------------------------------------------------------------------


@smp.step
def train(model: Any, name: str, batch: tuple[Tensor, ...]) -> Any:
    entry = ZOO[name]
    loss = entry.loss(model(*arguments(entry, batch)), *batch)
    model.backward(loss)
    return loss


def zoo(delay: bool, names: list[str], parts: int) -> Any:
    gc.freeze()  # so that collecting a model does not visit all objects of torch
    smp.init({"partitions": parts, "microbatches": 2, "ddp": True})
    found = {}
    for name in names:
        torch.manual_seed(0)
        with smp.delay_param_initialization(enabled=delay):
            net = ZOO[name].make()
        drawn = torch.rand(1)
        inner = torch.optim.Adam(net.parameters())
        model = smp.DistributedModel(net)
        assert any(map(is_delayed, net.parameters())) == (delay and parts > 1)
        optimizer = smp.DistributedOptimizer(inner)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = tuple(one.to(device()) for one in batch_of(name, step, smp.dp_rank()))
            losses.append(train(model, name, batch).outputs)
            optimizer.step()
        assert not any(map(is_delayed, tensors(net).values()))
        found[name] = drawn, losses, dict(model.state_dict())
        del model, optimizer, inner, net
        gc.collect()
    return found


# Fake tensors, values that decide, shared parameters, state that is computed: one model of each.
FEW = ["resnet", "tied gpt", "mixture of experts", "recurrent", "parametrized", "shared layer"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("parts", "names"),
    [(1, FEW), (2, FEW), pytest.param(2, list(ZOO), marks=pytest.mark.exhaustive)],
)
@pytest.mark.costly
def test_training_is_that_of_ordinary_creation(parts: int, names: list[str]) -> None:
    expected = check_ranks(zoo, "2", False, names, parts)
    for one, other in zip(check_ranks(zoo, "2", True, names, parts), expected, strict=True):
        for name in names:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


@smp.step
def language(model: Any, ids: Tensor) -> Any:
    """Runs one step of GPT2."""
    loss = nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
    model.backward(loss)
    return loss


def gpt2(delay: bool, config: dict[str, Any], path: str) -> Any:
    """Uses a model in all ways before it is divided; returns what each of them gives."""
    gc.freeze()
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True, **config})
    assert smp.state.cfg.delayed_parameter_initialization == delay
    half = torch.float16 if config.get("fp16") else None
    results = []
    ids = torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(3)).to(device())
    for use in ("plain", "load", "resume", "state", "hooks"):
        torch.manual_seed(0)
        with smp.model_creation(dtype=half, zero_init=True, flash_attention=True):
            net = GPT2()
        assert is_delayed(net.wte.weight) == delay
        inner = torch.optim.Adagrad(
            net.parameters(), lr=0.1, eps=1e-3
        )  # it has state from the beginning
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(inner, static_loss_scale=4.0)
        if use == "load":
            other = torch.Generator().manual_seed(1)
            given = {
                name: torch.randn(tensor.shape, generator=other).to(tensor.dtype)
                for name, tensor in model.state_dict().items()
                if "lm_head" not in name
            }
            model.load_state_dict(given)
        if use == "resume":
            smp.resume_from_checkpoint(path, "delayed", partial=True)
        if use == "state":
            results.append({n: t.clone() for n, t in model.state_dict().items()})
            results.append(copy.deepcopy(net).state_dict())
            assert is_delayed(net.wte.weight) == delay
        if use == "hooks":
            model.register_post_partition_hook(
                lambda m, _, kept=results: kept.append([p.clone() for p in m.local_parameters()])
            )
        for _ in range(STEPS):
            optimizer.zero_grad()
            results.append(language(model, ids).outputs)
            optimizer.step()
        assert not any(map(is_delayed, tensors(net).values()))
        assert all(
            not entry["sum"].is_meta and not is_delayed(entry["sum"])
            for parameter, entry in optimizer.state.items()
            if not parameter.is_meta
        )
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        results += [state, optimizer.state_dict()["state"]]
        if use == "plain":
            smp.save_checkpoint(path, "delayed", model=model, optimizer=optimizer)
        del model, optimizer, inner, net
        gc.collect()
    return results


@pytest.mark.multiprocess
@pytest.mark.parametrize("config", [{}, {"fp16": True, "_fp32_grad_accumulation": True}])
@pytest.mark.costly
def test_uses_of_a_model_before_it_is_divided(config: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for delay in (False, True):
        path = str(tmp_path / str(delay))
        config = {**config, "delayed_parameter_initialization": delay}
        found.append(check_ranks(gpt2, "2", delay, config, path))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


WIDTH, LAYERS = 1024, 32  # 4 MiB each
SMALL = 2**18  # what biases that are computed, states of random generators and activations need


class Peak(threading.Thread):
    """Looks all the time how much memory the process uses.

    Attributes:
        most: the largest number of bytes that it has seen.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ended = 0, threading.Event()
        self.start()

    def run(self) -> None:
        process = psutil.Process()
        while not self.ended.wait(0.001):
            self.most = max(self.most, process.memory_info().rss)


def give_back_at_once() -> ctypes.CDLL:
    """Lets malloc give to the system what is freed, also if small tensors came to lie beside it.

    Returns:
        The functions of malloc.
    """
    malloc = ctypes.CDLL(None)
    malloc.mallopt(-8, 1)  # M_ARENA_MAX
    malloc.mallopt(-3, 2**18)  # M_MMAP_THRESHOLD
    return malloc


def large(config: dict[str, int], width: int) -> tuple[int, int, int, int]:
    """Returns the bytes of what is here of parameters; of all storages; and the peaks.

    These are of tensors, and of the process.
    """
    give_back_at_once()
    smp.init({**MANUAL, **config, "microbatches": 1})
    parts = config.get("partitions", 1)

    def build(width: int) -> Any:
        with smp.delay_param_initialization():
            layers = []
            for number in range(LAYERS):
                with smp.partition(number * parts // LAYERS):
                    layers.append(nn.Linear(width, width))
                    layers[-1].bias = nn.Parameter(torch.randn(width))
            net = nn.Sequential(*layers)
            net.apply(lambda part: part.reset_parameters() if hasattr(part, "bias") else None)
        model = smp.DistributedModel(net)
        model.runtime.executor.baton.watch = Census
        with torch.no_grad():
            evaluate(model, torch.ones(1, width).to(device()))
        return model

    with Census():
        model = build(4)  # imports modules, starts threads
    del model
    gc.collect()
    before = psutil.Process().memory_info().rss
    Census.peak = 0
    watch = Peak()
    with Census():
        model = build(width)
    watch.ended.set()
    watch.join()
    peak = watch.most - before
    mine = sum(p.nbytes for p in model.runtime.optimised())
    gc.collect()
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if isinstance(one, Tensor) and not one.is_meta
    }
    return mine, sum(storages.values()), Census.peak, peak


@smp.step
def evaluate(model: Any, x: Tensor) -> Any:
    """Runs the model forward."""
    return model(x)


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="measures memory of the host")
@pytest.mark.costly
def test_a_rank_needs_memory_for_its_own_part_only() -> None:
    layer = 4 * WIDTH * (WIDTH + 1)
    for mine, storages, tensors, process in check_ranks(large, "4", {"partitions": 4}, WIDTH):
        assert mine == layer * LAYERS // 4
        assert storages < mine + SMALL
        assert tensors < mine + layer + SMALL
        assert process < mine + 3 * layer  # messages between ranks, and what torch itself needs


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="measures memory of the host")
@pytest.mark.costly
def test_a_rank_needs_memory_for_its_shards_only() -> None:
    width = WIDTH - 1  # the elements of a layer are no multiple of the degree
    layer = 4 * width * (width + 1)
    config = {"sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": width + 1}
    for mine, storages, tensors, process in check_ranks(large, "4", config, width):
        assert mine == LAYERS * 4 * (-(-width * width // 4) + width)
        assert storages < mine + SMALL
        # One that is gathered, and the one before: a thread of the backend gives that back, perhaps
        # a moment later.
        assert tensors < mine + 2 * layer + SMALL
        assert process < mine + 3 * layer  # messages between ranks, and what torch itself needs


LIMIT = 5 * 2**25  # more than a rank needs for its part of `Huge` and a step, and less than `Huge`


class Huge(nn.Sequential):
    """48 layers of 4 MiB, unless the width is another one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(48)))


@smp.step
def descend(model: Any, x: Tensor) -> None:
    """Makes the gradients of a loss."""
    model.backward(model(x).square().mean())


def digest(tensor: Tensor) -> str:
    """Returns a name for the bits of a tensor."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy()).hexdigest()


def trained_whole(copies: int) -> list[dict[str, list[str]]]:
    """Returns, at creation and after a step, the digests of each parameter whole and in parts."""
    torch.manual_seed(0)
    net = Huge()

    def digests() -> dict[str, list[str]]:
        return {
            name: [digest(p), *map(digest, p.reshape(-1).chunk(4))]
            for name, p in net.named_parameters()
        }

    found = [digests()]
    net(torch.ones(1, WIDTH)).square().mean().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            assert parameter.grad is not None
            mean = sum([parameter.grad] * copies) / copies  # in the order of replicas
            parameter.sub_(mean, alpha=0.5)
    return [*found, digests()]


def trained_within_limit(config: dict[str, Any]) -> list[dict[str, str]]:
    """Returns, at creation and after a step, the digests of what lives here."""
    malloc = give_back_at_once()

    def train(width: int) -> list[dict[str, str]]:
        fixed = {"ddp": True, "microbatches": 1, "delayed_parameter_initialization": True}
        smp.init({**fixed, **config})
        torch.manual_seed(0)
        with smp.model_creation():
            net = Huge(width)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        found: list[dict[str, str]] = []

        def note(*_: Any) -> None:
            local = model.local_state_dict().items()
            found.append({name: digest(t) for name, t in local if isinstance(t, Tensor)})

        model.register_post_partition_hook(note)
        descend(model, torch.ones(1, width))
        optimizer.step()
        note()
        smp.shutdown()
        return found

    train(8)  # imports modules, starts threads
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    (used,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        Huge()
    gc.collect()
    malloc.malloc_trim(0)
    return train(WIDTH)


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="limits memory of the host")
@pytest.mark.parametrize(
    "config",
    [
        {"partitions": 4},
        {
            "sharded_data_parallel_degree": 4,
            "sdp_param_persistence_threshold": WIDTH + 1,
            "sdp_reduce_bucket_size": WIDTH * WIDTH,
        },
    ],
    ids=["partitions", "sharding"],
)
@pytest.mark.costly
def test_a_model_larger_than_the_memory_of_a_rank(config: dict[str, Any]) -> None:
    layer = 4 * WIDTH * (WIDTH + 1)
    assert 48 * layer > LIMIT
    sharded = "partitions" not in config
    (whole,) = check_ranks(trained_whole, "1", 4 if sharded else 1)
    ranks = check_ranks(trained_within_limit, "4", config)
    for moment, expected in enumerate(whole):
        seen: set[str] = set()
        for rank, found in enumerate(ranks):
            for name, value in found[moment].items():
                part = sharded and name.endswith("weight")
                assert value == expected[name][1 + rank if part else 0], (moment, rank, name)
                seen.add(name)
        assert seen == expected.keys()


def left_over() -> None:
    smp.init({**MANUAL, "partitions": 2})
    with smp.delay_param_initialization():
        net = nn.Sequential(nn.Linear(2, 2), nn.utils.weight_norm(nn.Linear(2, 2)))
        net.scaled = net[0].weight * 2
        net.attribute = torch.full((2,), 3.0)
    with pytest.raises(SMPUsageError, match="trace_execution_times needs parameters with values"):
        smp.DistributedModel(net, trace_execution_times=True)
    model = smp.DistributedModel(net)
    smp.set_partition(net[1], 1)
    kept = net.attribute[:1]
    for _ in range(2):
        with torch.no_grad():
            evaluate(model, torch.ones(2, 2).to(device()))
    # The attribute belongs to the root, on rank 0; elsewhere it has values when code uses it.
    assert is_delayed(net.attribute) == (smp.rank() == 1)
    assert (net.attribute + 1).tolist() == [4.0, 4.0]
    net.attribute.add_(1)
    assert torch.equal(kept * 1, torch.full((1,), 4.0))
    with smp.delay_param_initialization():  # that of another model
        assert not is_delayed(net.attribute * 2)
        assert (torch.ones(2) + net.attribute).tolist() == [5.0, 5.0]
    with pytest.raises(SMPUsageError, match="computed from parameters, with gradients enabled"):
        net.scaled.sum()


@pytest.mark.multiprocess
def test_tensors_that_are_left_when_the_model_is_divided() -> None:
    check_ranks(left_over, "2")


def refused(parts: int) -> None:
    """All ranks raise when a parameter cannot come to life, and the job can go on."""
    smp.init({**MANUAL, "partitions": parts})
    table = torch.ones(200, 200)
    with torch.no_grad(), smp.delay_param_initialization():
        net = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
        net[0].weight.copy_(table)
    table += 1
    text = r"shape \(200, 200\) was changed after aten::copy_"
    if parts == 1:
        with pytest.raises(SMPUsageError, match=text):
            smp.DistributedModel(net)
        return
    smp.set_partition((model := smp.DistributedModel(net)).get_module()[1], 1)
    with pytest.raises(SMPMicrobatchError, match=text):
        evaluate(model, torch.ones(2, 200).to(device()))


@pytest.mark.multiprocess
@pytest.mark.parametrize("parts", [1, 2])
def test_all_ranks_raise_if_a_parameter_cannot_come_to_life(parts: int) -> None:
    check_ranks(refused, "2", parts)
