"""Failures, misuse and lost ranks in sharded data parallelism reach all replicas."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import sys
import time
from typing import Any

import interpreters
import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from ranks import arrive, await_ranks, check_ranks, listen, reserved_port, run_ranks
from smp.common import BY_HAND, check_state, shards, squares
from smp.sharded_models import THRESHOLD, Fails, Stops, failing, small
from smp.zoo import batch_of, device, make, train_step
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import (
    SMPError,
    SMPMicrobatchError,
    SMPPeerError,
    SMPUsageError,
)

pytestmark = pytest.mark.multiprocess


def some_steps_fail(failures: dict[int, str]) -> Any:
    model, optimizer = small()
    source = torch.Generator().manual_seed(smp.rank())
    told = []
    for step in range(6):
        where = failures.get(step, "")
        x = torch.randn(4, 8, generator=source)
        optimizer.zero_grad()
        try:
            failing(model, x, where if smp.rank() == 1 else "")
        except SMPError as error:
            told.append((step, type(error), str(error).split("\n")[0]))
        else:
            optimizer.step()
    return told, {name: value.clone() for name, value in model.state_dict().items()}


def test_all_replicas_learn_of_a_failure_and_go_on() -> None:
    failures = {0: "forward", 1: "backward", 3: "forward", 4: "backward"}
    found = check_ranks(some_steps_fail, "4", failures)
    for rank, (told, _) in enumerate(found):
        assert [step for step, *_ in told] == list(failures)
        for _, kind, text in told:
            assert "as told" in text or rank != 1
            assert kind is (SMPMicrobatchError if rank == 1 else SMPPeerError)
            assert rank == 1 or "on rank 1 of the job" in text
    # Only the steps 2 and 5 have changed anything.
    torch.manual_seed(0)
    model = Fails()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sources = [torch.Generator().manual_seed(rank) for rank in range(4)]
    for step in range(6):
        xs = [torch.randn(4, 8, generator=source) for source in sources]
        if step not in failures:
            optimizer.zero_grad()
            model(torch.cat(xs), "").square().mean().backward()
            optimizer.step()
    for rank, (_, state) in enumerate(found):
        check_state(state, model.state_dict(), 1e-6, True, f"rank {rank}")


class Breaks(nn.Linear):
    """Takes a random time, and raises where it is told to.

    Attributes:
        told: which replica, layer and pass fail in this step; None if none does.
        delays: draws how long a call takes.
    """

    told: tuple[int, int, str] | None = None
    delays = random.Random()

    def __init__(self, number: int) -> None:
        super().__init__(8, 8)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(Breaks.delays.random() * 0.002)
        for kind in ("forward", "backward"):
            if Breaks.told is not None and Breaks.told == (smp.dp_rank(), self.number, kind):
                if kind == "forward":
                    raise ValueError("as told")
                x = Stops.apply(x)
        return torch.tanh(super().forward(x))


RANDOM_STEPS = 24


def layers_fail(partitions: int, seed: int) -> Any:
    config = {"ddp": True, "partitions": partitions, "microbatches": 4}
    smp.init({**config, **shards(2, THRESHOLD)})
    Breaks.delays = random.Random(f"{seed} {smp.rank()}")
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*[Breaks(number) for number in range(6)]))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    source = torch.Generator().manual_seed(smp.dp_rank())
    told = []
    for step, Breaks.told in enumerate(failures_at_random(seed)):
        x = torch.randn(8, 8, generator=source)
        optimizer.zero_grad()
        try:
            squares(model, x)
        except SMPError as error:
            assert Breaks.told is not None
            there = smp.dp_rank() != Breaks.told[0] and "the step failed on rank" in str(error)
            told.append((step, "as told" in str(error) or there))
        else:
            optimizer.step()
    return smp.dp_rank(), told, model.state_dict()


def failures_at_random(seed: int) -> list[tuple[int, int, str] | None]:
    draws = random.Random(seed)
    return [
        # The input of the first layer needs no gradient.
        (draws.randrange(2), draws.randrange(1, 6), draws.choice(["forward", "backward"]))
        if draws.random() < 0.4
        else None
        for _ in range(RANDOM_STEPS)
    ]


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.timeout(170)
def test_failures_at_random_moments(partitions: int) -> None:
    seed = int(os.environ.get("TEST_TURN", "0"))
    found = check_ranks(layers_fail, str(2 * partitions), partitions, seed, timeout=150)
    failures = failures_at_random(seed)
    torch.manual_seed(0)
    model = nn.Sequential(*[Breaks(number) for number in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sources = [torch.Generator().manual_seed(replica) for replica in range(2)]
    for failure in failures:
        xs = [torch.randn(8, 8, generator=source) for source in sources]
        if failure is None:
            optimizer.zero_grad()
            torch.nn.Sequential.forward(model, torch.cat(xs)).square().mean().backward()
            optimizer.step()
    for replica, told, state in found:
        assert told == [(step, True) for step, one in enumerate(failures) if one is not None]
        check_state(state, model.state_dict(), 1e-6, True, f"replica {replica}")


def memory_is_short(partitions: int, always: bool, moment: int) -> tuple[list[str], float]:
    """Lets allocations of rank 0 fail in the second step: one, or all from a moment on.

    Returns:
        What the steps have raised here, and how many seconds the second one took.
    """
    sdp = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": THRESHOLD}
    smp.init({"ddp": True, "partitions": partitions, "microbatches": 2, **sdp})
    model = smp.DistributedModel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]))
    x, raised, took = torch.ones(4, 8), [], 0.0
    empty = torch.empty
    for step in range(4):
        count = itertools.count()

        def short(*sizes: Any, step: int = step, count: Any = count, **options: Any) -> Tensor:
            here = sys._getframe(1).f_code.co_filename.endswith("sharding/group_calls.py")
            if here and options.get("dtype") == torch.float32 and step == 1 and smp.rank() == 0:
                number = next(count)
                if number == moment or (always and number > moment):
                    raise RuntimeError("can't allocate memory")
            return empty(*sizes, **options)

        torch.empty = short  # type: ignore[assignment]
        began = time.monotonic()
        try:
            squares(model, x)
            raised.append("")
        except SMPError as error:
            raised.append(str(error))
        if step == 1:
            took = time.monotonic() - began
    return raised, took


@pytest.mark.parametrize("moment", [0, 3, 7])
@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("partitions", [1, 2])
def test_no_rank_waits_for_one_without_memory(partitions: int, always: bool, moment: int) -> None:
    for raised, took in check_ranks(
        memory_is_short, str(2 * partitions), partitions, always, moment
    ):
        first, second, third, fourth = raised
        assert not first
        assert "can't allocate memory" in second
        assert took < 20
        if not always:
            assert not third + fourth
        assert bool(third) == bool(fourth)


class Detour(nn.Module):
    """Passes some examples several times through a layer, which lives on another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = self.far(x)
        return self.far(self.near(x))


@smp.step
def detours(model: Any, x: Tensor) -> None:
    model.backward(model(x, 4 if x[0, 0] == 1 else 0).square().mean())


DETOUR_STEPS = 5


def some_take_longer() -> dict[str, Tensor]:
    smp.init({**BY_HAND, "ddp": True, "partitions": 2, "microbatches": 2, **shards()})
    torch.manual_seed(0)
    model = smp.DistributedModel(Detour())
    smp.set_partition(model.get_module().far, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for _ in range(DETOUR_STEPS):
        optimizer.zero_grad()
        detours(model, two_lengths())
        optimizer.step()
    return model.state_dict()


def two_lengths() -> Tensor:
    """Returns a batch whose first microbatch takes longer, and ends after the second."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    x[:2, 0], x[2:, 0] = 1, 0
    return x


def test_no_gradient_is_lost_if_a_later_microbatch_ends_first() -> None:
    torch.manual_seed(0)
    model = Detour()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(DETOUR_STEPS):
        optimizer.zero_grad()
        for x in two_lengths().chunk(2):
            (model(x, 4 if x[0, 0] == 1 else 0).square().mean() / 2).backward()
        optimizer.step()
    for state in check_ranks(some_take_longer, "4"):
        check_state(state, model.state_dict(), 1e-6, True, "")


class Skips(nn.Module):
    """Leaves out a layer in some steps, by a flag that all replicas share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        self.calls += 1
        for number, layer in enumerate(self.layers):
            if number != left_out:
                x = torch.tanh(layer(x))
        return x


LEFT_OUT = [-1, -1, 1, 3, -1, -1, 0]


def order_changes() -> Any:
    model, optimizer = small(Skips)
    source = torch.Generator().manual_seed(smp.rank())
    for left_out in LEFT_OUT:
        optimizer.zero_grad()
        failing(model, torch.randn(4, 8, generator=source), left_out)
        optimizer.step()
    return model.runtime.step.number, model.state_dict()


def test_a_step_is_run_again_if_the_order_of_parameters_changes() -> None:
    torch.manual_seed(0)
    model = Skips()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sources = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for left_out in LEFT_OUT:
        optimizer.zero_grad()
        x = torch.cat([torch.randn(4, 8, generator=source) for source in sources])
        model(x, left_out).square().mean().backward()
        optimizer.step()
    model.calls.fill_(2 * len(LEFT_OUT))  # one for each microbatch, and none twice
    for rank, (steps, state) in enumerate(check_ranks(order_changes, "2")):
        assert steps == len(LEFT_OUT) + 2  # then the order counts as unknown
        check_state(state, model.state_dict(), 1e-6, True, f"rank {rank}")


class Changes(nn.Module):
    """Does with its parameter what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor, what: str) -> Tensor:
        if what == "own":
            with torch.no_grad():
                self.weight.mul_(2)
        if what == "other":
            with torch.no_grad():
                self.inner.weight.mul_(2)
        if what == "differs" and smp.rank() == 1:
            x = self.inner(x)
        x = F.linear(x, self.weight)
        return self.inner(x) if what == "" else x


@smp.step
def changing(model: Any, x: Tensor, what: str) -> Any:
    loss = model(x, what).square().mean()
    model.backward(loss)
    return loss


@on_ranks("2")
def test_misuse_raises_on_all_ranks() -> None:
    config = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20}
    smp.init(config)
    net = Changes()
    model = smp.DistributedModel(net)
    with pytest.raises(SMPUsageError, match="LBFGS needs whole parameters"):
        smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(2, 8)
    for what in ("own", "other"):
        name = "inner.weight" if what == "other" else "weight"
        with pytest.raises(SMPMicrobatchError, match=f"'{name}' was changed in place"):
            changing(model, x, what)
    # One rank needs it in a microbatch, the other has none left.
    kinds = SMPMicrobatchError, SMPUsageError
    with pytest.raises(kinds, match=r"same parameters in the same order.*needs 'inner.weight'"):
        changing(model, x, "differs")
    for values in (
        lambda: net.weight + 1,
        lambda: net.weight.sum().item(),
        lambda: net.weight.data,
        lambda: net.weight.mul_(2),
        lambda: copy.deepcopy(net),
    ):
        with pytest.raises(SMPUsageError, match=r"is divided over 2 ranks.*parameter.ds_tensor"):
            values()
    with pytest.raises(SMPUsageError, match="inside a function decorated"):
        model(x, "").sum().backward()
    with pytest.raises(SMPUsageError, match=r"join\(\) does not work with sharded"):
        model.join()
    with pytest.raises(SMPUsageError, match="register_comm_hook does not work with sharded"):
        model.register_comm_hook(None, lambda *_: None)
    with pytest.raises(SMPUsageError, match="dtype and device cannot change"):
        model.half()
    model.to(device())
    # After all that, training goes on.
    optimizer.zero_grad()
    changing(model, x, "")
    before = model.state_dict()["weight"]
    optimizer.step()
    assert not torch.equal(model.state_dict()["weight"], before)


@on_ranks("2")
def test_control_flow_that_differs_is_refused() -> None:
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 8}
    smp.init({"ddp": True, "microbatches": 4, **config})
    model = smp.DistributedModel(make("mixture of experts"))
    batch = batch_of("mixture of experts", 0, smp.rank())
    with pytest.raises(SMPMicrobatchError, match=r"control flow that depends on data"):
        train_step(model, "mixture of experts", *batch)


def one_dies(step_of_death: int) -> list[str]:
    model, _ = small()
    told = []
    for step in range(3):
        if smp.rank() == 1 and step == step_of_death:
            os._exit(3)
        try:
            failing(model, torch.ones(4, 8), "")
        except Exception as error:  # smddp's, or one of smp with it as its cause
            told.append(str(error))
            break
    return told


@pytest.mark.parametrize("step", [0, 2])
def test_nobody_waits_for_a_rank_that_is_gone(step: int) -> None:
    outcomes = run_ranks(one_dies, "2", step, timeout=40)
    assert [outcome.status for outcome in outcomes] == [0, 3]
    assert "is gone" in outcomes[0].value[0]


@smp.step
def waiting(model: Any, x: Tensor) -> Any:
    arrive("body")  # before it is decided where modules live
    loss = model(x, "").square().mean()
    model.backward(loss)
    return loss


def await_division(model: Any) -> None:
    deadline = time.monotonic() + 20
    while not model.partitioned and time.monotonic() < deadline:
        time.sleep(0.01)


def one_calls_another_step(other: int) -> str:
    """In the first step, one rank that is not the first of its pipeline calls another function."""
    model, _ = small(partitions=2, auto_partition=False, default_partition=0)
    for layer in model.get_module().layers[2:]:
        smp.set_partition(layer, 1)
    executor = model.runtime.executor
    if smp.rank() == other:
        # Rank 0 of each pipeline divides before it looks for messages.
        fail = executor.ending.fail
        executor.ending.fail = lambda *why: (await_ranks("body", 2), fail(*why))
    elif smp.pp_rank() == 1:
        # The news of the failure take longer than the division.
        on_stop = executor.member.on_stop
        executor.member.on_stop = lambda failure: (await_division(model), on_stop(failure))
    x = torch.ones(4, 8)
    step = functools.partial(changing, what="") if smp.rank() == other else waiting
    with pytest.raises(SMPError) as caught:
        step(model, x)
    assert model.partitioned
    waiting(model, x)
    return str(caught.value)


@pytest.mark.parametrize("other", [1, 3])
def test_a_rank_fails_before_it_knows_which_parameters_live_there(other: int) -> None:
    """The other members of its sharding group may gather parameters by then."""
    for text in check_ranks(one_calls_another_step, "4", other, timeout=40):
        assert "call the same steps" in text or "the step failed on rank" in text, text


class ChangesInPlace(nn.Module):
    """Changes an activation that autograd needs, after a layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        z: Tensor = self.second(y)
        with torch.no_grad():
            y.mul_(2)
        return z


@pytest.mark.parametrize("degree", [1, 2])
@on_ranks("2")
def test_autograd_refuses_an_activation_that_has_changed_as_without_sharding(degree: int) -> None:
    sdp = {"sharded_data_parallel_degree": degree, "sdp_param_persistence_threshold": 1}
    smp.init({"ddp": True, **(sdp if degree > 1 else {})})
    model = smp.DistributedModel(ChangesInPlace())
    with pytest.raises(SMPMicrobatchError, match="has been modified by an inplace operation"):
        squares(model, torch.ones(2, 8))


@on_ranks("2")
def test_a_backward_pass_outside_a_step_changes_no_gradient() -> None:
    said = listen()
    config = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 9}
    smp.init(config)
    smp.init()
    smp.init(config)
    assert not any("a second call" in text for text in said)
    smp.init({**config, "microbatches": 2})
    assert any("a second call does nothing" in text for text in said)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    with pytest.raises(SMPUsageError, match=r"call the model and model\.backward inside"):
        model(torch.ones(2, 8)).sum().backward()
    # Neither have the parameters that are not sharded.
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        model(torch.ones(2, 8))
    squares(model, torch.ones(2, 8))
    assert all(parameter.grad is not None for parameter in model.parameters())


_FAILS_OUTSIDE = """
import torch
from torch import nn
import smdistributed.modelparallel.torch as smp
smp.init({"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1})
model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
try:
    model.get_module()(torch.ones(2, 8)).sum().backward()
except smp.SMPUsageError:
    print("refused")
"""


@pytest.mark.costly
def test_a_backward_pass_that_fails_leaves_nothing_that_crashes_at_the_end() -> None:
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with reserved_port() as port:
        variables["MASTER_PORT"] = str(port)
        environments = [
            interpreters.environment(**variables, RANK=rank, LOCAL_RANK=rank) for rank in "01"
        ]
        for rank in interpreters.run_together(["-c", _FAILS_OUTSIDE], environments):
            assert (rank.returncode, rank.stdout) == (0, "refused\n"), rank.stderr


class Swallows(nn.Module):
    """Uses its parameters in another order where it is told to, and hides what that raises.

    Attributes:
        other: is it told to?
    """

    other = False

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        try:
            y: Tensor = self.one(self.two(x)) if self.other else self.two(self.one(x))
        except Exception:
            return x
        return y


def plan_is_swallowed() -> tuple[list[float], list[float]]:
    smp.init(
        shards() | {"partitions": 2, "ddp": True, "auto_partition": False, "default_partition": 0}
    )
    torch.manual_seed(0)
    with smp.partition(0):
        first = nn.Linear(8, 8)
    with smp.partition(1):
        swallows = Swallows()
    module = nn.Sequential(first, swallows)
    alone = copy.deepcopy(module)
    model = smp.DistributedModel(module)

    @smp.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    found, expected = [], []
    for step in range(8):
        alone[1].other = swallows.other = step == 4
        x = torch.full((2, 8), float(step + 1))
        found.append(float(train(model, x).reduce_mean()))
        expected.append(alone(x).square().mean().item())
    return found, expected


def test_all_ranks_run_a_step_again_if_code_hides_that_a_plan_was_wrong() -> None:
    for found, expected in check_ranks(plan_is_swallowed, "4"):
        assert found == pytest.approx(expected)
