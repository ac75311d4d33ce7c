"""The partitioner, compared with all possible divisions and with a solver; and on the zoo."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from smp.common import close
from smp.zoo import ZOO, arguments, batch_of, make
from torch import nn

from smddp.modelparallel.core.solver import Node, bottleneck, divide_exactly, divide_tree
from smddp.modelparallel.torch.partition import trace as partition_trace
from smddp.modelparallel.torch.partition.trace import trace_model
from smddp.modelparallel.torch.partition.units import Units
from smddp.modelparallel.torch.pipeline.modules import Modules


def modules_of(model: nn.Module) -> Modules:
    return Modules(model, 0)


def best_by_trying_all(costs: list[float], cuts: list[float], parts: int) -> float:
    """The oracle: tries all ways to choose the borders."""
    borders = itertools.combinations(range(1, len(costs)), min(parts, len(costs)) - 1)
    return min(bottleneck(costs, cuts, [0, *starts]) for starts in borders)


@pytest.mark.parametrize("seed", range(40))
def test_exact_division_is_the_best(seed: int) -> None:
    source = random.Random(seed)
    count, parts = source.randint(1, 11), source.randint(1, 5)
    costs = [source.choice([0.0, source.random(), 10 * source.random()]) for _ in range(count)]
    cuts = [source.random() * source.choice([0, 0.1, 3]) for _ in range(count)]
    starts = divide_exactly(costs, cuts, parts)
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert len(starts) == min(parts, count)
    # All borders are used: a rank without work would not help.
    assert bottleneck(costs, cuts, starts) == pytest.approx(
        best_by_trying_all(costs, cuts, parts)
    ), f"seed {seed}"


def best_by_solver(costs: list[float], cuts: list[float], parts: int) -> float:
    """The oracle for sizes at which not all divisions can be tried: an integer program.

    Variables: behind[k][i] says that item i is in part k or an earlier one; the last variable is
    the bottleneck, which no part's load exceeds.
    """
    count, last = len(costs), (parts - 1) * len(costs)
    rows: list[np.ndarray] = []
    bounds: list[tuple[float, float]] = []

    def share(part: int, weights: list[float]) -> np.ndarray:
        """Returns the weights of the items in parts up to this one, as a row; see `constant`."""
        row = np.zeros(last + 1)
        if 0 <= part < parts - 1:
            row[part * count : (part + 1) * count] = weights
        return row

    # The cost of a border: cuts[i] if item i - 1 is behind it and item i is not.
    border = [(cuts[i + 1] if i + 1 < count else 0.0) - (cuts[i] if i else 0.0)
              for i in range(count)]  # fmt: skip
    for part in range(parts):
        load = share(part, costs) - share(part - 1, costs)
        load += share(part, border) + share(part - 1, border)
        load[last] = -1.0
        whole = sum(costs) if part == parts - 1 else 0.0
        rows.append(load)
        bounds.append((-np.inf, -whole))
        rows.append(share(part, [1.0] * count) - share(part - 1, [1.0] * count))  # not empty
        bounds.append((1.0 - (count if part == parts - 1 else 0), np.inf))
    for part in range(parts - 1):
        for item in range(count - 1):  # what is behind a border stays behind it
            row = np.zeros(last + 1)
            row[part * count + item], row[part * count + item + 1] = 1.0, -1.0
            rows.append(row)
            bounds.append((0.0, np.inf))
        for item in range(count if part else 0):
            row = np.zeros(last + 1)
            row[part * count + item], row[(part - 1) * count + item] = 1.0, -1.0
            rows.append(row)
            bounds.append((0.0, np.inf))
    goal = np.zeros(last + 1)
    goal[last] = 1.0
    low, high = zip(*bounds, strict=True)
    found = optimize.milp(
        goal,
        integrality=[1] * last + [0],
        bounds=optimize.Bounds(0, [1.0] * last + [np.inf]),
        constraints=optimize.LinearConstraint(np.array(rows), low, high),
    )
    assert found.success, found.message
    return float(found.fun)


@pytest.mark.parametrize("seed", range(8))
def test_exact_division_is_what_a_solver_finds(seed: int) -> None:
    source = random.Random(seed)
    count, parts = source.randint(20, 40), source.randint(2, 6)
    costs = [source.random() ** 3 for _ in range(count)]
    cuts = [source.random() * source.choice([0, 0.3]) for _ in range(count)]
    found = bottleneck(costs, cuts, divide_exactly(costs, cuts, parts))
    assert found == pytest.approx(best_by_solver(costs, cuts, parts), rel=1e-4), f"seed {seed}"


def test_a_thousand_modules_are_divided_evenly() -> None:
    source = random.Random(1)
    costs = [source.random() for _ in range(1000)]
    cuts = [source.random() * 0.01 for _ in range(1000)]
    starts = divide_exactly(costs, cuts, 8)
    assert bottleneck(costs, cuts, starts) < 1.05 * sum(costs) / 8


def test_tree_division_of_equal_layers() -> None:
    layers = [Node(10 + i, 1.0) for i in range(8)]
    found = divide_tree(Node(0, 0.0, [Node(1, 0.0, layers)]), 4)
    assert [found[10 + i] for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found[0] == found[1] == 0


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("name", ZOO)
def test_zoo_is_divided_within_five_percent_of_the_best(name: str, parts: int) -> None:
    model = make(name)
    modules = modules_of(model)
    trace = trace_model(model, arguments(ZOO[name], batch_of(name, 0, 0)), {}, False)
    units = Units(modules, trace, 0.5)
    assert sum(units.costs) == pytest.approx(1.0)
    starts = divide_exactly(units.costs, units.cuts, parts)
    best = best_by_trying_all(units.costs, units.cuts, parts)
    assert bottleneck(units.costs, units.cuts, starts) <= 1.05 * best
    owners = units.owners(starts)
    assert owners[0] == 0
    used: dict[int, int] = {}
    for module, owner in zip(modules.by_number, owners, strict=True):
        for parameter in module._parameters.values():
            if parameter is not None:
                assert used.setdefault(id(parameter), owner) == owner, "shared, but on two ranks"
    # The costs that users see are those by which the model was divided.
    shares = [0.0] * parts
    for cost, owner in zip(units.costs_of_modules(), owners, strict=True):
        assert owner is not None or not cost["cost"]
        shares[owner or 0] += cost["cost"]
    ends = [*starts[1:], len(units.costs)]
    loads = [sum(units.costs[i:j]) for i, j in zip(starts, ends, strict=True)]
    assert shares[: len(loads)] == pytest.approx(loads)
    assert units.bytes_across(owners) == sum(units.cut_bytes[start] for start in starts[1:])
    assert units.bytes_across([0] * len(owners)) == 0


@pytest.mark.parametrize(
    ("name", "how"), [("tied gpt", "fake tensors"), ("mixture of experts", "real data")]
)
def test_trace_computes_nothing_unless_control_flow_needs_data(name: str, how: str) -> None:
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    trace = trace_model(model, arguments(ZOO[name], batch_of(name, 0, 0)), {}, False)
    assert trace.how == how
    assert torch.equal(torch.get_rng_state(), state)
    close(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize("name", ["resnet", "tied gpt", "encoder-decoder", "recurrent", "frozen"])
def test_trace_does_not_depend_on_how_the_copy_is_made(name: str) -> None:
    model, given = make(name), arguments(ZOO[name], batch_of(name, 0, 0))
    found = trace_model(model, given, {}, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_trace, "_is_plain", lambda _: False)
        expected = trace_model(model, given, {}, False)
    assert found.how == expected.how == "fake tensors"
    assert found.activations == expected.activations
    assert found.seconds == expected.seconds
    assert found.uses == expected.uses
    assert list(map(vars, found.visits)) == list(map(vars, expected.visits))


def test_trace_puts_statistics_back() -> None:
    model = make("resnet")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trace = trace_model(model, batch_of("resnet", 0, 0)[:1], {}, True)
    assert trace.how == "real data"
    assert sum(trace.seconds) > 0
    close(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize("real", [False, True])
def test_trace_puts_objects_back(real: bool) -> None:
    class Cache:
        """Keeps tensors of modules."""

        def __init__(self) -> None:
            self.kept: list[torch.Tensor] = []
            self.last: Any = None

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, cache: Cache, more: list[Any]) -> torch.Tensor:
            cache.kept.append(x)
            more.append(x)
            cache.last = self.linear(x)
            return cache.last  # type: ignore[no-any-return]

    cache, more = Cache(), [Cache()]
    trace = trace_model(Caching(), (torch.ones(2, 4), cache, more), {}, real)
    assert trace.how == ("real data" if real else "fake tensors")
    assert cache.kept == []
    assert cache.last is None
    assert len(more) == 1


def test_trace_sees_who_uses_whose_parameters() -> None:
    model = make("tied gpt")
    modules = modules_of(model)
    trace = trace_model(model, batch_of("tied gpt", 0, 0)[:1], {}, False)
    assert (0, modules.names.index("tokens")) in trace.uses
    blocks = [v for v in trace.visits if modules.names[v.module] in ("blocks.1", "blocks.2")]
    assert all(visit.direct is False for visit in blocks), "they also take the mask"


def test_modules_inside_stateless_ones_count_where_they_run() -> None:
    """A gate two levels inside a block counts for the block, not for the first module."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))
            self.gate = nn.Sequential(nn.Sequential(nn.Softmax(-1)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate(x @ self.weight)

    model = nn.Sequential(nn.Linear(64, 64), Block())
    modules = modules_of(model)
    trace = trace_model(model, (torch.ones(512, 64),), {}, False)
    units = Units(modules, trace, 0.5)
    softmax = next(n for n, m in enumerate(modules.by_number) if isinstance(m, nn.Softmax))
    assert trace.activations[softmax] > 0
    assert units.unit_of(softmax) == units.unit_of(modules.names.index("1")) == 1


def test_chains_are_seen() -> None:
    model = make("mlp")
    trace = trace_model(model, batch_of("mlp", 0, 0)[:1], {}, False)
    assert [visit.direct for visit in trace.visits[2:]] == [True] * (len(trace.visits) - 2)
