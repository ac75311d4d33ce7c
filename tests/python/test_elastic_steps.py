"""What a lost step restores, and what a step may contain: smddp.elastic."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not hasattr(dist.ProcessGroup, "reconfigure"),
        reason="this release of torch cannot change members",
    ),
]


def init(**options: Any) -> Any:
    import smddp.elastic as elastic

    return elastic.init(**{"timeout": 20, "wait": 20} | options)


def die_if(condition: bool) -> None:
    if condition:
        os.kill(os.getpid(), signal.SIGKILL)


class Linear:
    """y = x w in DDP, with the gradient rank + 1 on each rank."""

    def __init__(self, *things: Any, **options: Any) -> None:
        self.job = init(**options)
        self.net = nn.Linear(1, 1, bias=False)
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)
        self.job.keep(self.model, self.optimizer, *things)
        with torch.no_grad():
            self.net.weight.zero_()

    def backward(self) -> None:
        self.model(torch.full((1, 1), self.job.rank + 1.0)).sum().backward()


def survivors(function: Callable[..., Any], layout: str, *arguments: Any) -> list[Any]:
    """Returns the results of all ranks but the last, which is killed."""
    outcomes = ranks.run_ranks(function, layout, *arguments)
    assert outcomes[-1].status == -signal.SIGKILL, outcomes[-1]
    for one in outcomes[:-1]:
        assert one.returned, one
    return [one.value for one in outcomes[:-1]]


def weight_after(three: int, two: int) -> float:
    """Returns the weight after steps of three ranks and steps of two."""
    return -(2 * three + 1.5 * two)


# --- where in a step a rank dies ------------------------------------------------------------------

STAGES = ["begin", "forward", "backward", "voted", "stepped", "end"]


def _dies_at(stage: str) -> Any:
    me = Linear()
    dies = me.job.rank == me.job.size - 1

    def reach(where: str) -> None:
        die_if(dies and where == stage and step.index == 2)

    drawn, attempts, schedule = [], 0, 0
    me.optimizer.register_step_post_hook(lambda *_: reach("voted"))
    for step in me.job.steps(5):
        with step:
            reach("begin")
            attempts += 1
            drawn.append(
                (step.index, float(torch.rand(())), random.random(), float(np.random.random()))
            )
            me.optimizer.zero_grad()
            loss = me.model(torch.full((1, 1), me.job.rank + 1.0)).sum()
            reach("forward")
            loss.backward()
            reach("backward")
            me.optimizer.step()
            reach("stepped")
            dist.all_reduce(torch.ones(1))
            schedule += 1
        reach("end")
    return float(me.net.weight.detach()), drawn, attempts, schedule


@pytest.mark.parametrize("layout", ["3", "1+1+1"])
@pytest.mark.parametrize("stage", STAGES)
def test_where_a_rank_dies(stage: str, layout: str) -> None:
    values = survivors(_dies_at, layout, stage)
    assert len({value[0] for value in values}) == 1
    # The mean gradient is 2 with three ranks and 1.5 with two. When those who are left have all
    # gradients, the step counts; otherwise they do it again.
    done = {"begin": [2], "forward": [2], "backward": [2, 3]}.get(stage, [3])
    assert values[0][0] in [weight_after(three, 5 - three) for three in done]
    for _, drawn, attempts, schedule in values:
        # A step that is done again draws the same numbers.
        assert len(set(drawn)) == 5
        assert attempts == len(drawn)
        assert attempts in (5, 6)
        # What follows the optimizer's step is left undone where a collective of the script fails.
        assert schedule == 5 - (stage in ("voted", "stepped"))


# --- what a step may contain ----------------------------------------------------------------------


def _accumulates() -> float:
    me = Linear()
    for step in me.job.steps(4):
        with step:
            me.optimizer.zero_grad()
            with me.model.no_sync():
                me.backward()
                die_if(step.index == 1 and me.job.rank == 2)
                me.backward()
            me.backward()
            me.optimizer.step()
    return float(me.net.weight.detach())


def test_gradient_accumulation() -> None:
    assert survivors(_accumulates, "3") == [-3 * (2 + 3 * 1.5)] * 2


def _optimizers(stage: str) -> list[float]:
    job = init()
    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    models = [DistributedDataParallel(net) for net in nets]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1.0) for net in nets]
    job.keep(*models, *optimizers)
    for net in nets:
        nn.init.zeros_(net.weight)
    for step in job.steps(3):
        with step:
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.full((1, 1), job.rank + 1.0)).sum().backward()
            dies = step.index == 1 and job.rank == 2
            die_if(dies and stage == "before")
            optimizers[0].step()
            die_if(dies and stage == "between")
            optimizers[1].step()
    return [float(net.weight.detach()) for net in nets]


@pytest.mark.parametrize("stage", ["before", "between"])
def test_two_optimizers(stage: str) -> None:
    first, second = survivors(_optimizers, "3", stage)
    assert first == second
    assert first[0] == first[1]
    assert first[0] in [weight_after(2, 1), weight_after(1 if stage == "before" else 2, 2)]


def _once(case: str) -> None:
    me = Linear()
    for step in me.job.steps(1):
        with step:
            me.backward()
            if case == "closure":
                me.optimizer.step(lambda: torch.zeros(()))
            me.optimizer.step()
            me.backward()


@pytest.mark.parametrize(
    ("case", "text"), [("forward", "use a step for each"), ("closure", "without a closure")]
)
def test_what_a_step_may_not_contain(case: str, text: str) -> None:
    for outcome in ranks.run_ranks(_once, "2", case):
        assert "RuntimeError: smddp.elastic: " in outcome.trace
        assert text in outcome.trace


def _no_optimizer() -> tuple[int, float]:
    """As a GradScaler does that has found infinite gradients."""
    me = Linear()
    count = 0
    for step in me.job.steps(6):
        with step:
            me.optimizer.zero_grad()
            me.backward()
            die_if(step.index == 2 and me.job.rank == 2)
            if step.index % 2:
                me.optimizer.step()
        count += step.committed
    return count, float(me.net.weight.detach())


def test_a_step_without_an_optimizer() -> None:
    assert survivors(_no_optimizer, "3") == [(6, -(2 + 2 * 1.5))] * 2


def _scales() -> tuple[float, float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    me = Linear(scaler)
    for step in me.job.steps(4):
        with step:
            me.optimizer.zero_grad()
            out = me.model(torch.full((1, 1), me.job.rank + 1.0)).sum()
            scaler.scale(out).backward()
            scaler.unscale_(me.optimizer)
            die_if(step.index == 1 and me.job.rank == 2)
            scaler.step(me.optimizer)
            scaler.update()
    return float(me.net.weight.detach()), scaler.get_scale()


def test_gradient_scaler() -> None:
    first, second = survivors(_scales, "3")
    assert first == second
    assert first[0] in [weight_after(1, 3), weight_after(2, 2)]
    assert first[1] == 32


def _scripts_error() -> tuple[str, str]:
    me = Linear()
    first = second = ""
    try:
        for step in me.job.steps(3):
            with step:
                if me.job.rank == 2 and step.index == 1:
                    raise LookupError("no such sample")
                me.optimizer.zero_grad()
                me.backward()
                me.optimizer.step()
    except LookupError as error:
        first = str(error)
        with pytest.raises(RuntimeError, match="end the process"):
            list(me.job.steps(3))
        dist.destroy_process_group()
    else:
        second = str(float(me.net.weight.detach()))
    return first, second


def test_an_error_of_the_script_on_one_rank() -> None:
    """It leaves the block there; the others go on when its process has left."""
    values = ranks.check_ranks(_scripts_error, "3")
    assert values == [("", "-5.0"), ("", "-5.0"), ("no such sample", "")]


def _catches_everything(other: str) -> float:
    """A rank without gradients must not say that it has them."""
    me = Linear()
    for step in me.job.steps(4):
        with step:
            me.optimizer.zero_grad()
            try:
                if other == "slow" and step.index == 1 and me.job.rank == 1:
                    time.sleep(0.2)
                die_if(step.index == 1 and me.job.rank == 2)
                me.backward()
            except RuntimeError:
                pass
            me.optimizer.step()
    return float(me.net.weight.detach())


@pytest.mark.parametrize("other", ["", "slow"])
def test_a_script_that_catches_all_errors(other: str) -> None:
    assert survivors(_catches_everything, "3", other) == [weight_after(1, 3)] * 2


def _mismatch() -> None:
    me = Linear()
    for step in me.job.steps(3):
        with step:
            print("attempt")
            dist.all_reduce(torch.ones(3 + me.job.rank))


def test_an_error_that_comes_again_is_raised() -> None:
    for outcome in ranks.run_ranks(_mismatch, "2"):
        assert "SMDDPCollectiveMismatchError: " in outcome.trace
        assert outcome.stdout.split() == ["attempt"] * 2


def _grows(per_rank: int) -> tuple[int, float]:
    """A step of three ranks that counts has their samples, though two go on."""
    import smddp.elastic as elastic

    sampler = elastic.Sampler(1000, per_rank, per_rank=True)
    me = Linear(sampler)
    batches = me.job.batches(DataLoader(range(1000), batch_sampler=sampler))
    me.optimizer.register_step_post_hook(lambda *_: die_if(step.index == 1 and me.job.rank == 2))
    for step in me.job.steps(3):
        with step:
            assert len(next(batches)) == per_rank
            me.optimizer.zero_grad()
            me.backward()
            me.optimizer.step()
    return sampler.position, float(me.net.weight.detach())


def test_a_batch_per_rank() -> None:
    assert survivors(_grows, "3", 4) == [(2 * 3 * 4 + 2 * 4, weight_after(2, 1))] * 2


def _at_the_end() -> float:
    me = Linear(min_ranks=3)
    me.optimizer.register_step_post_hook(lambda *_: die_if(step.index == 1 and me.job.rank == 2))
    for step in me.job.steps(2):
        with step:
            me.optimizer.zero_grad()
            me.backward()
            me.optimizer.step()
    return float(me.net.weight.detach())


def test_a_loss_in_the_last_step() -> None:
    """Also below min_ranks: there is nothing to wait for."""
    assert survivors(_at_the_end, "3") == [weight_after(2, 0)] * 2


def _too_few() -> None:
    me = Linear(min_ranks=2, wait=3)
    for step in me.job.steps(3):
        with step:
            die_if(me.job.rank == 1)
            me.backward()
            me.optimizer.step()


def test_too_few_ranks_wait_and_end() -> None:
    first, _ = ranks.run_ranks(_too_few, "2")
    assert first.status == 75, first
    assert "fewer than min_ranks=2" in first.stderr


def _workers(persistent: bool) -> list[tuple[int, list[int]]]:
    import smddp.elastic as elastic

    sampler = elastic.Sampler(50, 6, seed=3)
    me = Linear(sampler)
    loader = DataLoader(
        list(range(50)), batch_sampler=sampler, num_workers=2, persistent_workers=persistent
    )
    batches = me.job.batches(loader)
    taken = []
    for step in me.job.steps(20):
        with step:
            numbers = next(batches)
            marks = torch.zeros(50, dtype=torch.int64)
            marks[numbers] += 1
            dist.all_reduce(marks)
            die_if(step.index == 7 and me.job.rank == 2)
            me.optimizer.zero_grad()
            me.backward()
            me.optimizer.step()
        if step.committed:
            taken.append((step.index, marks))
    total = sum(marks for _, marks in taken)
    assert [index for index, _ in taken] == list(range(20))
    # 120 samples: two epochs and 20 samples.
    assert int(total.sum()) == 120
    assert sorted(total.tolist()) == [2] * 30 + [3] * 20
    assert sampler.position == 120
    assert sampler.epoch == 2
    return total.tolist()


@pytest.mark.costly
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_read_ahead(persistent: bool) -> None:
    first, second = survivors(_workers, "3", persistent)
    assert first == second


# --- what is restored, in one process ------------------------------------------------------------


def test_restore() -> None:
    from smddp.elastic.kept import Kept

    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(1.0))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler, generator = torch.amp.GradScaler("cpu"), torch.Generator()
    kept = Kept((net, optimizer, schedule, scaler, generator))
    norm: Any = net[1]

    def attempt() -> list[float]:
        out = net(torch.randn(4, 2)).sum()
        scaler.scale(out).backward()
        scaler.unscale_(optimizer)  # an error the second time, unless it is undone
        norm.num_batches_tracked = norm.num_batches_tracked + 1  # a tensor of its own
        schedule.step()
        numbers = [float(out.detach()), random.random(), float(np.random.random())]
        return [*numbers, float(torch.rand((), generator=generator))]

    kept.save()
    first = attempt()
    mean = norm.running_mean.clone()
    for _ in range(2):
        kept.restore()
        assert net[0].weight.grad is None
        assert int(norm.num_batches_tracked) == 0
        assert float(optimizer.param_groups[0]["lr"]) == 1
        assert attempt() == first
        assert schedule.last_epoch == 1
        assert float(optimizer.param_groups[0]["lr"]) == 0.5
        torch.testing.assert_close(norm.running_mean, mean)


# --- the sampler alone ----------------------------------------------------------------------------


def test_sampler() -> None:
    from smddp.elastic import Sampler

    layout = [0, 3]
    sampler = Sampler(10, 7)
    sampler.bind(lambda: (layout[0], layout[1]))

    def shares(count: int) -> list[list[list[int]]]:
        found = []
        for rank in range(layout[1]):
            layout[0] = rank
            batches = iter(sampler)
            found.append([next(batches) for _ in range(count)])
        return found

    by_rank = shares(10)
    assert [len(share[0]) for share in by_rank] == [3, 2, 2]
    taken = [index for step in range(10) for share in by_rank for index in share[step]]
    for epoch in range(7):
        assert sorted(taken[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert taken[:10] != taken[10:20]
    layout[0] = 0
    assert sampler.weight() == pytest.approx(9 / 7)
    sampler.drawn = 14
    sampler.commit()
    assert sampler.position == 14
    layout[1] = 2  # the sequence is that of before
    rest = [index for step in range(8) for share in shares(8) for index in share[step]]
    assert rest == taken[14:]
    sampler.load_state_dict({"position": 3})
    assert sampler.position == 3


def test_sampler_with_a_batch_per_rank() -> None:
    from smddp.elastic import Sampler

    sampler = Sampler(range(10), 2, per_rank=True, shuffle=False)
    with pytest.raises(RuntimeError, match="it says who the members are"):
        next(iter(sampler))
    sampler.bind(lambda: (1, 3))
    batches = iter(sampler)
    assert [next(batches) for _ in range(3)] == [[2, 3], [8, 9], [4, 5]]
    assert sampler.weight() == 1
    with pytest.raises(ValueError, match="0 samples"):
        Sampler(0, 2)


# --- wrong use ------------------------------------------------------------------------------------


def _refused(case: str) -> str:
    import smddp.elastic as elastic

    if case == "min_ranks":
        init(min_ranks=3)
    elif case == "every":
        init(every=0)
    elif case == "variable":
        del os.environ["WORLD_SIZE"]
        init()
    elif case == "group":
        dist.init_process_group("gloo")
        init()
    elif case == "release":
        del dist.ProcessGroup.reconfigure
        init()
    elif case == "debug":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        init()
    elif case == "gpu":
        torch.cuda.device_count = lambda: 1
        init()
    job = init()
    net = nn.Linear(1, 1)
    if case == "state":
        job.keep(net, 5)
    elif case == "static_graph":
        job.keep(DistributedDataParallel(net, static_graph=True))
    elif case == "batch":
        job.keep(net, elastic.Sampler(9, 1))
    elif case == "groups":
        dist.new_group()
        job.keep(net)
    elif case == "steps":
        list(job.steps(1))
    elif case == "loader":
        job.batches(DataLoader([1]))
    job.keep(net)
    if case == "again":
        job.keep(net)
    elif case == "with":
        list(job.steps(3))
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("min_ranks", "ValueError", "the job has 2 ranks"),
        ("every", "ValueError", "a number of steps"),
        ("variable", "RuntimeError", "WORLD_SIZE is not set"),
        ("group", "RuntimeError", 'there is one of "gloo" already'),
        ("release", "RuntimeError", "needs torch 2.15 or newer"),
        ("debug", "RuntimeError", "use INFO"),
        ("gpu", "ValueError", "hide the GPUs"),
        ("state", "TypeError", "but got int"),
        ("static_graph", "ValueError", "leave static_graph out"),
        ("batch", "ValueError", "less than one per rank"),
        ("groups", "ValueError", "other groups than the default one"),
        ("steps", "RuntimeError", "call job.keep"),
        ("loader", "TypeError", "batch_sampler"),
        ("again", "RuntimeError", "everything in one call"),
        ("with", "RuntimeError", "write `with step:`"),
    ],
)
def test_wrong_use(case: str, kind: str, text: str) -> None:
    for outcome in ranks.run_ranks(_refused, "2", case):
        assert f"{kind}: " in outcome.trace, outcome
        assert text in outcome.trace, outcome


def test_status_of_a_lost_job() -> None:
    from smddp.elastic import JobLostError

    with pytest.raises(SystemExit) as error:
        raise JobLostError("why")
    assert error.value.code == 75
    assert str(error.value) == "why"
