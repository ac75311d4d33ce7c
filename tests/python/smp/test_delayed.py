"""Delayed initialization gives the values of ordinary creation, and memory only where they live."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from smp.zoo import ZOO
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.delayed.life import come_to_life, is_delayed, with_values


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
