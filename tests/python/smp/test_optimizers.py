"""Optimizers with the names of the original library."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from on_ranks import on_ranks
from ranks import check_ranks
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_  # before smp.init, as scripts do

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPUsageError

pytestmark = pytest.mark.multiprocess

STEPS = 3
MANUAL = {"auto_partition": False, "default_partition": 0, "ddp": True, "microbatches": 2}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda p: smp.optimizers.FusedAdam(p, lr=0.1, weight_decay=0.1),
    "adam l2": lambda p: smp.optimizers.FusedAdam(p, lr=0.1, weight_decay=0.1, adam_w_mode=False),
    "lamb": lambda p: smp.optimizers.FusedLAMB(p, lr=0.1, weight_decay=0.1),
    "lamb l2": lambda p: smp.optimizers.FusedLamb(
        p, lr=0.1, weight_decay=0.1, adam_w_mode=False, max_grad_norm=0.5, use_nvlamb=True
    ),
    "novograd": lambda p: smp.optimizers.FusedNovoGrad(p, lr=0.1, weight_decay=0.1),
    "novograd inside": lambda p: smp.optimizers.FusedNovoGrad(
        p, lr=0.1, weight_decay=0.1, reg_inside_moment=True, norm_type=0, init_zero=True
    ),
}


def undivided() -> nn.Sequential:
    """Returns the model of one process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def layers(last: int) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(4, 8)
    with smp.partition(last):
        second = nn.Linear(8, 1)
    return nn.Sequential(first, nn.Tanh(), second)


@smp.step
def train(model: Any, x: Tensor) -> Any:
    loss = model(x).square().mean() * 20
    model.backward(loss)
    return loss


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def trained(pp: int) -> dict[str, dict[str, Tensor]]:
    gc.freeze()  # so that collecting a model does not visit all objects of torch
    smp.init({"partitions": pp, **MANUAL})
    results = {}
    for name, make in OPTIMIZERS.items():
        model = smp.DistributedModel(layers(pp - 1))
        optimizer = smp.DistributedOptimizer(make(model.parameters()))
        for step in range(STEPS):
            optimizer.zero_grad()
            train(model, batch(step))
            optimizer.step()
            # A saved state can be loaded.
            optimizer.load_state_dict(optimizer.state_dict())
        results[name] = {key: value.clone() for key, value in model.state_dict().items()}
        del model, optimizer
        gc.collect()
    return results


def by_the_formulas(name: str, parameters: list[Tensor], gradients: list[list[Tensor]]) -> None:
    """The oracle: the formulas of the papers over all gradients so far, without stored state."""
    kind, _, variant = name.partition(" ")
    moments = [torch.zeros_like(p) for p in parameters]
    squares = [torch.zeros(()) for _ in parameters]
    for t, grads in enumerate(gradients, 1):
        total = torch.sqrt(sum(g.square().sum() for g in grads))
        for i, (p, g) in enumerate(zip(parameters, grads, strict=True)):
            if kind == "lamb":
                g = g / max(1.0, float(total) / (0.5 if variant else 1.0))
            if variant == "l2":
                g = g + 0.1 * p
            if kind == "novograd":
                new = g.abs().max() if variant else g.square().sum()
                old = squares[i] if t > 1 or variant else new
                squares[i] = 0.999 * old + 0.001 * new
                norm = squares[i] / (1 - 0.999**t)
                g = g / ((norm if variant else norm.sqrt()) + 1e-8)
                g = g + 0.1 * p if variant else g
                moments[i] = 0.9 * moments[i] + 0.1 * g
                update = moments[i] / (1 - 0.9**t) + (0 if variant else 0.1 * p)
            else:
                moments[i] = 0.9 * moments[i] + 0.1 * g
                squares[i] = 0.999 * squares[i] + 0.001 * g * g
                root = (squares[i] / (1 - 0.999**t)).sqrt()
                update = moments[i] / (1 - 0.9**t) / (root + (1e-6 if kind == "lamb" else 1e-8))
                update = update if variant else update + 0.1 * p
                if kind == "lamb":
                    update = update * p.norm() / update.norm()
            p -= 0.1 * update


def test_optimizers_follow_their_formulas_whole_and_divided() -> None:
    whole = check_ranks(trained, "1", 1)[0]
    for rank in check_ranks(trained, "2", 2):
        for name, state in rank.items():
            torch.testing.assert_close(state, whole[name], msg=lambda m, n=name: f"{n}: {m}")
    for name, state in whole.items():
        model = undivided()
        parameters = list(model.parameters())
        gradients: list[list[Tensor]] = []
        start = [p.detach().clone() for p in parameters]
        for step in range(STEPS):
            (model(batch(step)).square().mean() * 20).backward()
            gradients.append([p.grad.clone() for p in parameters])  # type: ignore[union-attr]
            with torch.no_grad():
                for p, value in zip(parameters, start, strict=True):
                    p.copy_(value)
                    p.grad = None
                by_the_formulas(name, [p.data for p in parameters], gradients)
        for (key, value), p in zip(state.items(), parameters, strict=True):
            torch.testing.assert_close(value, p.data, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")


def two_optimizers(pp: int, first: bool) -> tuple[dict[str, Tensor], list[Any]]:
    """Each layer has an optimizer of its own, which gets its state before the first step."""
    smp.init({"partitions": pp, **MANUAL})
    net = layers(pp - 1)
    parts: list[Any] = [torch.optim.SGD(net[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]
    if first:
        parts = [smp.DistributedOptimizer(part) for part in parts]
    model = smp.DistributedModel(net)
    if not first:
        parts = [smp.DistributedOptimizer(part) for part in parts]
    for part, saved in zip(parts, saved_momenta(), strict=True):
        part.load_state_dict(saved)
    for step in range(STEPS):
        for part in parts:
            part.zero_grad()
        train(model, batch(step))
        for part in parts:
            part.step()
    return model.state_dict(), [part.state_dict()["state"] for part in parts]


def saved_momenta() -> list[Any]:
    """Returns the states of the optimizers of two layers after a step with other data."""
    net = undivided()
    parts = [torch.optim.SGD(net[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]
    (net(batch(99)).square().mean() * 20).backward()
    for part in parts:
        part.step()
    return [part.state_dict() for part in parts]


@pytest.mark.parametrize("first", [True, False], ids=["optimizers first", "model first"])
def test_a_model_may_have_several_optimizers(first: bool) -> None:
    net = undivided()
    parts = [torch.optim.SGD(net[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]
    for part, saved in zip(parts, saved_momenta(), strict=True):
        part.load_state_dict(saved)
    for step in range(STEPS):
        net.zero_grad()
        (net(batch(step)).square().mean() * 20).backward()
        for part in parts:
            part.step()
    states = [part.state_dict()["state"] for part in parts]
    for found, momenta in check_ranks(two_optimizers, "2", 2, first):
        torch.testing.assert_close(found, dict(net.state_dict()))
        torch.testing.assert_close(momenta, states)


@on_ranks("2")
def test_parameters_that_are_not_the_models_are_refused() -> None:
    """Optimizers that do not fit the model."""
    gc.freeze()  # so that collecting a model does not visit all objects of torch
    smp.init({"partitions": 2, **MANUAL})
    other = nn.Linear(2, 3)

    def optimizer(*modules: Any) -> Any:
        return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)

    early = smp.DistributedOptimizer(optimizer(other))
    net = layers(1)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    model = smp.DistributedModel(net)
    with pytest.raises(
        SMPUsageError, match=r"a parameter of shape \(3, 2\) that is no parameter of"
    ):
        smp.DistributedOptimizer(optimizer(net, other))
    right = smp.DistributedOptimizer(optimizer(net, frozen))
    train(model, batch(0))
    right.step()
    with pytest.raises(SMPUsageError, match=r"no parameter of the smp.DistributedModel"):
        early.step()
    right.add_param_group({"params": other.parameters()})
    with pytest.raises(SMPUsageError, match=r"no parameter of the smp.DistributedModel"):
        right.step()


NORMS = [0, 0.5, 1, 2.0, 3, float("inf")]


def clipped(config: dict[str, Any], by_torch: bool) -> list[tuple[float, dict[str, Tensor]]]:
    smp.init({**MANUAL, **config})
    model = smp.DistributedModel(layers(smp.pp_size() - 1))
    found = []
    for norm_type in NORMS:
        for parameter in model.parameters():
            parameter.grad = None
        train(model, batch(0))
        if "2.bias" in (local := dict(model.local_named_parameters())):
            local["2.bias"].grad.zero_()  # so not every gradient counts
        if by_torch:
            norm = float(clip_grad_norm_(model.parameters(), 0.25, norm_type))
        else:
            norm = float(smp.clip_grad_norm(0.25, norm_type))
        found.append((norm, {name: p.grad for name, p in model.local_named_parameters()}))
    for wrong in (-1.0, -float("inf"), float("nan")):
        with pytest.raises(SMPUsageError, match="norm_type must be at least 0"):
            smp.clip_grad_norm(0.25, wrong)
    return found


def test_clipping_is_that_of_torch_with_every_norm() -> None:
    model = undivided()
    wanted = []
    for norm_type in NORMS:
        model.zero_grad()
        (model(batch(0)).square().mean() * 20).backward()
        model[2].bias.grad.zero_()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25, norm_type))
        wanted.append((norm, {name: p.grad.clone() for name, p in model.named_parameters()}))
    assert wanted[0][0] == 3
    sharded = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 2}
    for layout, config, by_torch in [
        *[("1", {"partitions": 1}, False), ("2", {"partitions": 2}, False)],
        *[("2", {"partitions": 2}, True), ("2", {"partitions": 1, **sharded}, True)],
    ]:
        for rank, found in enumerate(check_ranks(clipped, layout, config, by_torch)):
            for (norm, grads), (right, whole) in zip(found, wanted, strict=True):
                assert norm == pytest.approx(right, rel=1e-5)
                for name, grad in grads.items():
                    part = whole[name]
                    if grad.shape != part.shape:
                        part = part.flatten().chunk(2)[rank]
                    torch.testing.assert_close(grad, part, rtol=1e-4, atol=1e-7)


def clipped_above() -> list[float]:
    """Clips what has a gradient: one partition has nothing of that."""
    smp.init({**MANUAL, "partitions": 2})
    module = layers(1)
    module[0].requires_grad_(False)
    model = smp.DistributedModel(module)
    train(model, batch(0))
    used = [p for p in model.parameters() if p.requires_grad and p.grad is not None]
    norms = [float(clip_grad_norm_(used, max_norm)) for max_norm in (0.25, 9.0)]
    return [len(used), *norms]


def test_a_rank_may_have_nothing_to_clip() -> None:
    model = undivided()
    (model(batch(0)).square().mean() * 20).backward()
    right = float(torch.nn.utils.get_total_norm([p.grad for p in model[2].parameters()]))
    wanted = [pytest.approx(right, rel=1e-5), pytest.approx(0.25, rel=1e-4)]
    assert check_ranks(clipped_above, "2") == [[0, *wanted], [2, *wanted]]


def by_hand(pp: int, half: bool) -> list[Any]:
    """Clips with the two functions that torch has for it, some parameters frozen."""
    smp.init({"partitions": pp, "fp16": half, **MANUAL})
    found: list[Any] = []
    for frozen in (None, 0, 2):
        module = layers(pp - 1)
        model = smp.DistributedModel(module)
        for parameter in () if frozen is None else module[frozen].parameters():
            parameter.requires_grad_(False)
        trained_here = [p for p in model.parameters() if p.requires_grad]
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(trained_here, lr=0.1))
        other = nn.Linear(2, 2)
        if smp.rank() == 0:
            other(torch.ones(1, 2)).sum().backward()
        train(model, batch(0))
        for order in (2.0, float("inf")):
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(gradients, order)
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.3, norm)
            used = optimizer._smp_state.optimised()
            found.append((float(norm), [p.grad for p in used]))
        # What is not the model's concerns one rank only.
        foreign = [p.grad for p in other.parameters() if p.grad is not None]
        if foreign:
            nn.utils.get_total_norm(foreign)
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        del model, optimizer, used
        gc.collect()
    return found


@pytest.mark.parametrize("half", [False, True])
def test_norms_by_hand_are_those_of_the_whole_model(half: bool) -> None:
    (expected,) = check_ranks(by_hand, "1", 1, half)
    ranks = check_ranks(by_hand, "2", 2, half)
    for number, (norm, gradients) in enumerate(expected):
        found = [one for rank in ranks for one in rank[number][1] if one is not None]
        for rank in ranks:
            assert rank[number][0] == pytest.approx(norm, rel=1e-2 if half else 1e-5)
        wanted = [one for one in gradients if one is not None]
        tolerance = {"rtol": 2e-2, "atol": 1e-2} if half else {}
        torch.testing.assert_close(found, wanted, **tolerance)


def by_parts(pp: int, half: bool) -> list[float]:
    """Clips one part of the model after the other: one rank has no gradient of it."""
    smp.init({"partitions": pp, "fp16": half, **MANUAL})
    model = smp.DistributedModel(layers(pp - 1))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for number in range(4):
        train(model, batch(number))
        for name in ("0", "2"):
            part = list(model.get_module().get_submodule(name).parameters())
            if number % 2:
                found.append(float(clip_grad_norm_(part, 0.1)))
                continue
            norm = nn.utils.get_total_norm([p.grad for p in part if p.grad is not None])
            nn.utils.clip_grads_with_norm_(part, 0.1, norm)
            found.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("half", [False, True])
def test_norms_of_parts_of_the_model(half: bool) -> None:
    (expected,) = check_ranks(by_parts, "1", 1, half)
    assert len(set(expected)) == len(expected)
    for found in check_ranks(by_parts, "2", 2, half):
        assert found == pytest.approx(expected, rel=1e-2 if half else 1e-5)


def in_different_calls() -> str:
    """Rank 0 has a gradient that is not the model's, so rank 1 is one call behind."""
    smp.init({**MANUAL, "partitions": 2})
    model = smp.DistributedModel(layers(1))
    train(model, batch(0))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if smp.rank() == 0:
        nn.utils.get_total_norm([torch.ones(3)])
    with pytest.raises(SMPUsageError) as error:
        nn.utils.get_total_norm(gradients if smp.rank() == 0 else [])
    return str(error.value)


def test_norms_of_different_calls_are_refused() -> None:
    for text in check_ranks(in_different_calls, "2"):
        assert "the ranks are in different calls for a norm" in text


def of_copies(pp: int) -> list[str]:
    smp.init({**MANUAL, "partitions": pp})
    model = smp.DistributedModel(layers(pp - 1))
    train(model, batch(0))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nn.utils.get_total_norm(gradients)
        nn.utils.get_total_norm([torch.ones(3)])
        assert not caught
        for _ in range(2):
            nn.utils.get_total_norm([gradient * 2 for gradient in gradients])
    return [f"{one.filename} {one.message}" for one in caught]


def test_a_norm_of_what_is_computed_from_gradients_warns_once() -> None:
    assert check_ranks(of_copies, "1", 1) == [[]]
    for found in check_ranks(of_copies, "2", 2):
        assert len(found) == 1
        assert __file__ in found[0]
        assert "the norm is that of this rank alone" in found[0]


class Sums(torch.optim.Optimizer):
    """Has one step size for all parameters, from sums over them: numbers or tensors."""

    def __init__(self, parameters: Any, numbers: bool) -> None:
        super().__init__(parameters, {"lr": 0.1, "size": 0.0})
        self.numbers = numbers

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.numbers:
            size = 0.0
            for parameter in used:
                size += parameter.grad.square().sum().item()
        else:
            size = float(torch.stack(torch._foreach_norm([p.grad for p in used])).sum())
        self.param_groups[0]["size"] = size
        for parameter in used:
            parameter.sub_(parameter.grad, alpha=0.1 / size)


class Ratios(torch.optim.Optimizer):
    """Has a step size for each parameter, from numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "last": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm().item() / (1 + parameter.grad.norm().item())
                    group["last"] = ratio
                    parameter.sub_(parameter.grad, alpha=0.1 * ratio)


def warned() -> dict[str, list[str]]:
    smp.init({"partitions": 2, **MANUAL})
    several: dict[str, Callable[[Any], Any]] = {
        **OPTIMIZERS,
        "sums of numbers": lambda p: Sums(p, True),
        "sums of tensors": lambda p: Sums(p, False),
        "ratios": Ratios,
        "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
        "Adafactor": torch.optim.Adafactor,
        "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    }
    found: dict[str, list[str]] = {}
    for name, make in several.items():
        model = smp.DistributedModel(layers(1))
        optimizer = smp.DistributedOptimizer(make(list(model.parameters())))
        train(model, batch(0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step()
        found[name] = [str(one.message) for one in caught if "combines" in str(one.message)]
        for group in optimizer.param_groups:
            assert all(type(value).__name__ != "_Number" for value in group.values())
        del model, optimizer
        gc.collect()
    return found


def test_an_optimizer_that_sums_over_parameters_is_named_once() -> None:
    for rank in check_ranks(warned, "2"):
        for name, texts in rank.items():
            sums = name.startswith("sums")
            assert len(texts) == sums, (name, texts)
        (text,) = rank["sums of numbers"]
        assert text.startswith("the step of Sums combines values of several parameters (a sum of")
        assert "test_optimizers.py:" in text
