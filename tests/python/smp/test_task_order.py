"""Replicas that run their tasks in one order: collectives in modules, and what breaks the order.

The order by itself, without processes, is tested in test_task_order_simulated.py.
"""

from __future__ import annotations

import copy
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import arrive, await_ranks, check_ranks, run_ranks
from smp.common import evaluate, gradients, squares
from smp.failing_models import MANUAL, called_by_some, numbered, train
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError, SMPPeerError, SMPUsageError
from smddp.modelparallel.torch.model import division as division_module
from smddp.modelparallel.torch.pipeline import step as step_module

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

WIDTH, BATCH, REPLICAS, MICROBATCHES = 4, 8, 2, 4


def start(pp: int, timeout: float = 60, backend: str = "smddp", **config: Any) -> None:
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    smp.init({"partitions": pp, "deterministic_server": True, **MANUAL, **config})


# --- collectives in modules -----------------------------------------------------------------------


class Mean(torch.autograd.Function):
    """The mean over the replicas; so is the gradient. `over` makes it of a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.over = over
        return over(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.over(gradient), None


def reduced(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=smp.get_dp_process_group())
    return x / REPLICAS


class Layer(nn.Module):
    """A layer whose result depends on all replicas; forward and backward take a random time."""

    pause: Callable[[], None] = staticmethod(lambda: None)
    over: Callable[[Tensor], Tensor] = staticmethod(reduced)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.pause()
        y = torch.tanh(self.linear(x))
        if y.requires_grad:
            y.register_hook(lambda _: self.pause())
        result: Tensor = Mean.apply(y, self.over) + y
        return result


class Net(nn.Module):
    """Layers that call each other across ranks: chains, a skip connection, a call inside a call."""

    def __init__(self, pp: int, place: Callable[[int], Any]) -> None:
        super().__init__()
        with place(0):
            self.first = Layer()
        self.chain = nn.ModuleList()
        for index in range(pp + 1):
            with place((index + 1) % pp):
                self.chain.append(Layer())
        with place(pp - 1):
            self.outer = Outer(place)

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.first(x)
        for layer in self.chain:
            x = layer(x)
        # The caller waits here, while the other call may have ended or not.
        return self.outer(x) + float(self.chain[0](skip).detach().sum() > 1e9) + skip


class Outer(nn.Module):
    def __init__(self, place: Callable[[int], Any]) -> None:
        super().__init__()
        self.own = Layer()
        with place(0):
            self.inner = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.inner(x) + x)


def batch(step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(BATCH, WIDTH, generator=generator)


def sharing(
    pp: int, pipeline: str, steps: int, pauses: float, config: dict[str, Any], backend: str
) -> Any:
    """Trains and evaluates with random pauses; returns what every step has given on this rank."""
    start(pp, backend=backend, pipeline=pipeline, **config)
    torch.manual_seed(0)
    model = smp.DistributedModel(Net(pp, smp.partition))
    # Not the same on any two ranks. A pause lets messages of other microbatches come first.
    source = random.Random(smp.rank())
    Layer.pause = staticmethod(
        lambda: time.sleep(pauses * source.random()) if source.random() < 0.3 else None
    )
    found = []
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = None
        x = batch(step, smp.dp_rank())
        if step % 10 == 9:
            with torch.no_grad():
                found.append((evaluate(model, x).concat(), {}))
            continue
        losses = squares(model, x).stack()
        found.append((losses, gradients(model)))
    return smp.dp_rank(), found


class Exchange:
    """The replicas of the oracle: one after the other, each microbatch in lockstep by threads."""

    def __init__(self) -> None:
        self.values: list[Tensor | None] = [None] * REPLICAS
        self.barrier = threading.Barrier(REPLICAS)
        self.me = threading.local()

    def mean(self, x: Tensor) -> Tensor:
        self.values[self.me.replica] = x.clone()
        self.barrier.wait(30)
        first, second = self.values
        assert first is not None
        assert second is not None
        result = (first + second) / REPLICAS
        self.barrier.wait(30)
        return result


def expected(pp: int, steps: int) -> Any:
    """The same in one process: one thread per replica, which runs one microbatch after the other.

    Returns:
        For each replica and step the losses or outputs, and the gradients by name.
    """
    import contextlib

    torch.manual_seed(0)
    exchange = Exchange()
    Layer.over = staticmethod(exchange.mean)
    Layer.pause = staticmethod(lambda: None)
    whole = Net(pp, lambda _: contextlib.nullcontext())
    replicas = [whole, copy.deepcopy(whole)]
    sums: list[list[Any]] = [[None] * steps for _ in range(REPLICAS)]

    def run(replica: int) -> None:
        # As on a rank: autograd runs in the calling thread.
        torch.autograd.set_multithreading_enabled(False)
        exchange.me.replica = replica
        net = replicas[replica]
        for step in range(steps):
            x = batch(step, replica)
            if step % 10 == 9:
                with torch.no_grad():
                    sums[replica][step] = (torch.cat([net(p) for p in x.chunk(MICROBATCHES)]), {})
                continue
            net.zero_grad()
            losses = []
            for part in x.chunk(MICROBATCHES):
                loss = net(part).square().mean()
                loss.backward()
                losses.append(loss.detach())
            gradients = {name: p.grad / MICROBATCHES for name, p in net.named_parameters()}
            sums[replica][step] = (torch.stack(losses), gradients)

    threads = [threading.Thread(target=run, args=(replica,)) for replica in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(*sums, strict=True):
        for name, gradient in one[1].items():
            mean = (gradient + other[1][name]) / REPLICAS
            one[1][name] = other[1][name] = mean
    return sums


@pytest.mark.parametrize(
    ("pp", "pipeline", "steps", "pauses", "config", "backend"),
    [
        (2, "interleaved", 20, 0.002, {"active_microbatches": 3}, "smddp"),
        (2, "simple", 20, 0.002, {}, "smddp"),
        (2, "interleaved", 20, 0.002, {"direct_forwarding": False}, "gloo"),
        (4, "interleaved", 20, 0.005, {}, "smddp"),
        pytest.param(*(2, "interleaved", 1000, 0.002, {}, "smddp"), marks=pytest.mark.exhaustive),
    ],
    ids=["interleaved", "simple", "gloo", "four", "many"],
)
@pytest.mark.timeout(300)
@pytest.mark.costly
def test_modules_may_call_collectives(
    pp: int, pipeline: str, steps: int, pauses: float, config: dict[str, Any], backend: str
) -> None:
    wanted = check_ranks(expected, "1", pp, steps)[0]
    arguments = (pp, pipeline, steps, pauses, config, backend)
    for replica, found in check_ranks(sharing, str(2 * pp), *arguments, timeout=250):
        for step, (result, grads) in enumerate(found):
            assert torch.equal(result, wanted[replica][step][0]), step
            for name, gradient in grads.items():
                assert torch.equal(gradient, wanted[replica][step][1][name]), (step, name)


# --- failures -------------------------------------------------------------------------------------


class Part(nn.Module):
    """Multiplies by a weight; does something else where `fault` says so."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.where = where
        self.fault = ""

    def forward(self, x: Tensor) -> Any:
        second = bool(x.detach().flatten()[0].abs() == 2)
        if second and self.fault == f"forward {self.where}":
            raise ZeroDivisionError("in forward")
        if second and self.fault == f"count {self.where}":
            self.count += 1
        y = x * self.weight
        if second and self.fault == f"backward {self.where}":
            y.register_hook(fail)
        return (y, None) if second and self.fault == f"structure {self.where}" else y


def fail(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError("in backward")


class Parts(nn.Module):
    """Two parts on rank 1, with one on rank 0 between them."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(1):
            self.first = Part("1")
            self.last = Part("1")
        self.middle = Part("0")
        self.fault = ""
        self.reads = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if isinstance(y, tuple):
            y = y[0]
        if self.fault == "argument":
            x.add_(1.0).sub_(1.0)
        if self.reads:
            y = y + 0 * self.first.count
        y = self.last(self.middle(y))
        return y[0] if isinstance(y, tuple) else y


@smp.step
def applied(model: Any, x: Tensor) -> Any:
    return model(x).sum()


FAULTS = ["body", "forward 0", "forward 1", "backward 0", "backward 1"]


def failing(where: int) -> list[list[str]]:
    """The steps fail on one replica; after each, the next one gives what it should."""
    start(2)
    parts = Parts()
    model = smp.DistributedModel(parts)
    with pytest.raises(SMPUsageError, match="same number of batches"):
        model.join()
    x = numbered()

    def check() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        assert float(train(model, x, "").reduce_sum()) == 48
        assert [p.grad.tolist() for p in model.local_parameters()] == [
            [3.0] * WIDTH for _ in model.local_parameters()
        ]

    def attempt(function: Any, *args: Any) -> str:
        try:
            function(model, x, *args)
        except (SMPMicrobatchError, SMPPeerError) as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return "no error"

    check()
    texts = []
    for fault in FAULTS:
        mine = fault if smp.dp_rank() == where else ""
        for part in (parts.first, parts.middle, parts.last):
            part.fault = mine
        texts.append([attempt(train, mine)])
        if fault.startswith("forward"):
            with torch.no_grad():
                texts[-1].append(attempt(applied))
        for part in (parts.first, parts.middle, parts.last):
            part.fault = ""
        check()
    return texts


@pytest.mark.parametrize("where", [0, 1])
def test_a_failure_on_one_replica_ends_the_step_on_all(where: int) -> None:
    for rank, texts in enumerate(check_ranks(failing, "4", where)):
        for fault, (text, *without_gradients) in zip(FAULTS, texts, strict=True):
            owner = 1 if fault.endswith("1") else 0
            said = "KeyError: 'in the body'"
            if fault != "body":
                said = f"ZeroDivisionError: in {fault.split()[0]}"
            of_job = 2 * where + owner
            who = f"rank {owner} of the pipeline" + f" (rank {of_job} of the job)" * where
            wanted = f"SMPMicrobatchError: {who}, microbatch 2: {said}"
            if rank // 2 != where:
                wanted = f"SMPPeerError: the step failed on rank {of_job} of the job: {said}"
            assert text == wanted, (rank, fault)
            assert without_gradients in ([], [wanted])


def running_again(fault: str, where: int, backward: bool) -> tuple[int, list[float]]:
    """One replica finds that the step has to be run again; so all do."""
    start(2)
    parts = Parts()
    model = smp.DistributedModel(parts)
    x = numbered()
    sums = []
    for step in range(6):
        mine = fault if step in (2, 4) and smp.dp_rank() == where else ""
        for part in (parts, parts.first, parts.middle, parts.last):
            part.fault = mine
        parts.reads = fault == "count 1"  # on all replicas, so they make the same calls
        for parameter in model.parameters():
            parameter.grad = None
        if backward:
            sums.append(float(train(model, x, "").reduce_sum()))
            assert all(p.grad.tolist() == [3.0] * WIDTH for p in model.local_parameters())
        else:
            with torch.no_grad():
                sums.append(float(applied(model, x).reduce_sum()))
    return model.runtime.step.number, sums


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("fault", ["structure 1", "argument", "count 1"])
@pytest.mark.costly
def test_a_step_is_run_again_on_all_replicas(fault: str, where: int, backward: bool) -> None:
    steps = set()
    for count, sums in check_ranks(running_again, "4", fault, where, backward):
        assert sums == [48] * 6
        steps.add(count)
    (count,) = steps
    assert count > 6, "no step was run again"


class Branch(nn.Module):
    """Calls a module of rank 1, looks at the result, and calls another module of rank 1 or not."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(1):
            self.first, self.last = Part("1"), Part("1")
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.longer = False
        self.reduces = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) * self.weight
        assert float(y.detach().sum()) >= 0
        if self.reduces:
            dist.all_reduce(y.detach(), group=smp.get_dp_process_group())
        return self.last(y) if self.longer else y


def diverging(where: int, backward: bool) -> tuple[str, float]:
    """One replica makes a call that the other does not make."""
    start(2)
    branch = Branch()
    model = smp.DistributedModel(branch)
    x = numbered()
    step_module.END_TIMEOUT = 1.0

    def step() -> None:
        if backward:
            train(model, x, "")
        else:
            with torch.no_grad():
                applied(model, x)

    step()
    step()
    branch.longer = smp.dp_rank() == where
    begun = time.monotonic()
    with pytest.raises((SMPUsageError, SMPPeerError)) as caught:
        step()
    seconds = time.monotonic() - begun
    branch.longer = False
    step_module.END_TIMEOUT = 120.0
    step()
    return f"{type(caught.value).__name__}: {caught.value}".splitlines()[0], seconds


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("where", [0, 1])
def test_replicas_that_make_different_calls(where: int, backward: bool) -> None:
    found = check_ranks(diverging, "4", where, backward)
    for rank, (text, seconds) in enumerate(found):
        assert seconds < 15
        if rank < 2:
            assert text.startswith("SMPPeerError: the step failed on rank ")
        else:
            assert text.startswith("SMPUsageError: rank ")
        assert "replicas that run their tasks in one order have to make the same calls" in text
        # It names the leader and the follower of one order group, and tasks.
        assert any(
            f"rank {leader} of the job has " in text and f"On rank {leader + 2} could run: " in text
            for leader in (0, 1)
        ), text
        assert "microbatch" in text


def alone_in_a_collective(where: int) -> tuple[str, float]:
    """One replica enters a collective that the other does not enter."""
    start(2, timeout=6)
    branch = Branch()
    model = smp.DistributedModel(branch)
    x = numbered()
    with torch.no_grad():
        applied(model, x)
        branch.reduces = smp.dp_rank() == where
        begun = time.monotonic()
        with pytest.raises((SMPUsageError, SMPPeerError, SMPMicrobatchError)) as caught:
            applied(model, x)
    return f"{type(caught.value).__name__}: {caught.value}".splitlines()[0], (
        time.monotonic() - begun
    )


@pytest.mark.parametrize("where", [0, 1])
def test_a_collective_that_one_replica_does_not_enter(where: int) -> None:
    for rank, (text, seconds) in enumerate(check_ranks(alone_in_a_collective, "4", where)):
        assert seconds < 20
        if where == 1:
            # The leader ends; so the follower waits in vain, and both find that after the timeout.
            assert "it has not ended its step within 6 s" in text or "allreduce" in text, text
            continue
        wanted = "SMPUsageError" if rank >= 2 else "SMPPeerError"
        assert text.startswith(wanted), text
        assert "of the job, which decides the order, has begun nothing for 4.5 s" in text
        # Rank 0 waits inside the collective, and rank 1 for rank 0. Either follower may be first.
        assert re.search(
            "On rank (2 could run: the body of microbatch 1|3 could run: the end of microbatch 0)",
            text,
        ), text


def called_first_by(where: int) -> str:
    """In the first step only one replica calls the model; then no replica does; then both do."""
    start(2)
    model = smp.DistributedModel(Parts())
    x = numbered()
    with pytest.raises(SMPPeerError) as caught:
        called_by_some(model, x, smp.dp_rank() == where)
    called_by_some(model, x, False)
    called_by_some(model, x, True)
    assert float(train(model, x, "").reduce_sum()) == 48
    return str(caught.value)


@pytest.mark.parametrize("where", [0, 1])
def test_a_first_step_in_which_one_replica_calls_the_model(where: int) -> None:
    for text in check_ranks(called_first_by, "4", where):
        assert (
            f"the step has called the model on rank {2 * where} of the job, and not on rank "
            f"{2 - 2 * where}"
        ) in text


def failing_at_the_decision() -> tuple[str, bool]:
    """One replica fails while the other has the decision, and has not told its ranks yet."""
    start(2)
    # Nothing lives on rank 0, so the first replica does not wait for the second to have its values.
    with smp.partition(1):
        part = nn.Linear(WIDTH, WIDTH)
    model = smp.DistributedModel(nn.Sequential(part))
    if smp.rank() == 2:
        agree = division_module.agree

        def slowly(*args: Any) -> Any:
            decision = agree(*args)
            time.sleep(0.5)
            return decision

        division_module.agree = slowly
    apply = model.runtime.division.apply

    def fails(decision: Any) -> None:
        apply(decision)
        raise ValueError("as told")

    if smp.rank() == 0:
        model.runtime.division.apply = fails
    with pytest.raises((SMPPeerError, SMPMicrobatchError)) as caught:
        train(model, numbered(), "")
    partitioned = model.partitioned
    train(model, numbered(), "")
    return str(caught.value), partitioned


def test_all_replicas_have_a_division_or_none() -> None:
    for text, partitioned in check_ranks(failing_at_the_decision, "4"):
        assert "as told" in text
        assert partitioned


def leader_stays_away() -> str:
    start(2, timeout=4)
    model = smp.DistributedModel(Branch())
    with torch.no_grad():
        applied(model, numbered())
        if smp.dp_rank() == 0:
            await_ranks("out", 2)
            return ""
        with pytest.raises(SMPUsageError) as caught:
            applied(model, numbered())
    arrive("out")
    return str(caught.value)


def test_a_leader_that_does_not_call_the_step() -> None:
    _, _, *texts = check_ranks(leader_stays_away, "4")
    for text in texts:
        assert "has begun nothing for 3 s. On rank 2 could run: the body of microbatch 0" in text


def dying(rank: int) -> str:
    """A rank is killed while the others work; it is of the leader's replica or of the other."""
    start(2)
    parts = Parts()
    model = smp.DistributedModel(parts)
    x = numbered()
    train(model, x, "")
    if smp.rank() == rank:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def steps() -> None:
        # Steps with gradients end in reductions, whose errors are those of the process group.
        with torch.no_grad():
            while True:
                applied(model, x)
                time.sleep(0.02)

    with pytest.raises(SMPPeerError) as caught:
        steps()
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_the_death_of_a_rank_ends_the_step_on_all(rank: int) -> None:
    outcomes = run_ranks(dying, "4", rank)
    for outcome in outcomes:
        if outcome.rank == rank:
            assert outcome.status == -signal.SIGKILL
        else:
            assert outcome.returned, str(outcome)
            assert "is gone" in outcome.value or "the step failed on rank" in outcome.value


def interrupted(rank: int) -> str:
    """A rank gets a signal in a step to which a rank of its pipeline does not come."""
    start(2, timeout=8)
    model = smp.DistributedModel(Parts())
    x = numbered()
    train(model, x, "")
    if smp.rank() == rank ^ 1:
        await_ranks("out", 3)
        return ""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if smp.rank() == rank:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises((KeyboardInterrupt, SMPPeerError)) as caught, torch.no_grad():
        applied(model, x)
    arrive("out")
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("rank", [0, 3])
def test_a_signal_ends_the_step_on_all_replicas(rank: int) -> None:
    for other, text in enumerate(check_ranks(interrupted, "4", rank)):
        if other == rank:
            assert text.startswith("KeyboardInterrupt")
        elif other != rank ^ 1:
            assert text.startswith("SMPPeerError"), text
