"""Training that goes on when ranks die, and that others join: smddp.elastic."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not hasattr(dist.ProcessGroup, "reconfigure"),
        reason="this release of torch cannot change members",
    ),
]

LAYOUTS = ["3", "1+1+1", "2+1"]
SAMPLES, BATCH = 64, 13  # uneven shares


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator, dtype=torch.float64)
        return x, x[:2].sin(), index


def make_net() -> nn.Module:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))
    return net.double()


class Counted(nn.Module):
    """A net with a buffer that counts forward passes, as that of BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.net(x)


def digest(module: nn.Module) -> str:
    parts = [value.detach().numpy().tobytes() for value in module.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


class Training:
    """A model in DDP with momentum and a schedule, and how a rank trains it."""

    def __init__(self, **options: Any) -> None:
        import smddp.elastic as elastic

        self.job = elastic.init(**{"timeout": 20, "wait": 30} | options)
        self.net = Counted()
        # Small buckets, so that several are in flight.
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.001)
        self.optimizer, self.schedule = optimizer_of(self.net)
        self.sampler = elastic.Sampler(SAMPLES, BATCH)
        self.loader = DataLoader(Samples(), batch_sampler=self.sampler)
        self.log: list[tuple[int, int]] = []

    def keep(self) -> Training:
        self.job.keep(self.model, self.optimizer, self.schedule, self.sampler)
        return self

    def run(self, steps: int, each: Any = lambda step: None) -> dict[str, Any]:
        batches = self.job.batches(self.loader)
        for step in self.job.steps(steps):
            with step:
                each(step)
                x, y, index = next(batches)
                self.optimizer.zero_grad()
                (self.model(x) - y).square().sum(1).mean().backward()
                ids = torch.tensor([int((1 << index).sum())])
                dist.all_reduce(ids)
                self.optimizer.step()
                self.schedule.step()
            if step.committed:
                self.log.append((step.index, int(ids)))
        return {
            "digest": digest(self.net),
            "weights": [one.detach().clone() for one in self.net.parameters()],
            "passes": int(self.net.passes),
            "lr": self.schedule.get_last_lr(),
            "log": self.log,
            "pid": os.getpid(),
            "size": self.job.size,
        }


def optimizer_of(net: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


def samples_of(step: int) -> list[int]:
    """Returns the samples that a step takes, whoever the members are."""
    found = []
    for number in range(step * BATCH, (step + 1) * BATCH):
        epoch, index = divmod(number, SAMPLES)
        generator = torch.Generator().manual_seed(epoch)
        found.append(int(torch.randperm(SAMPLES, generator=generator)[index]))
    return found


def oracle(steps: int) -> list[torch.Tensor]:
    """Returns the weights after the same steps in one process."""
    net = make_net()
    optimizer, schedule = optimizer_of(net)
    data = Samples()
    for step in range(steps):
        x, y, _ = zip(*(data[index] for index in samples_of(step)), strict=True)
        optimizer.zero_grad()
        (net(torch.stack(x)) - torch.stack(y)).square().sum(1).mean().backward()
        optimizer.step()
        schedule.step()
    return [one.detach() for one in net.parameters()]


def check(values: list[dict[str, Any]], steps: int, first: int = 0) -> None:
    """Asserts that all survivors have trained what one process trains."""
    assert len({value["digest"] for value in values}) == 1
    for value in values:
        assert value["passes"] == steps
        expected = [(step, sum(1 << one for one in samples_of(step))) for step in range(steps)]
        signed = [(step, ids - (1 << 64) if ids >= 1 << 63 else ids) for step, ids in expected]
        assert value["log"] == signed[len(signed) - len(value["log"]) :]
        assert value["lr"] == [pytest.approx(0.2 * 0.97**steps)]
        for mine, theirs in zip(value["weights"], oracle(steps), strict=True):
            torch.testing.assert_close(mine, theirs)


def _trains(steps: int) -> dict[str, Any]:
    return Training().keep().run(steps)


@pytest.mark.parametrize("layout", ["1", *LAYOUTS])
def test_without_a_fault(layout: str) -> None:
    check(ranks.check_ranks(_trains, layout, 12), 12)


def kill_later(seconds: float) -> None:
    """Lets a process of its own kill this one, at any moment."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(parent, signal.SIGKILL)
        os._exit(0)


def _dies_at_random(steps: int, seed: int, victims: int) -> dict[str, Any]:
    training = Training().keep()
    rng = random.Random(seed)
    dying = rng.sample(range(training.job.size), victims)
    at = [rng.uniform(0.0, 0.25) for _ in dying]
    if training.job.rank in dying:
        kill_later(at[dying.index(training.job.rank)])
    return training.run(steps)


@pytest.mark.parametrize("seed", ranks.rotating_or_all(list(range(40)), 2))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_deaths_at_random_moments(layout: str, seed: int) -> None:
    steps, victims = 150, 1 + seed % 2
    outcomes = ranks.run_ranks(_dies_at_random, layout, steps, seed, victims)
    survivors = [one for one in outcomes if one.status != -signal.SIGKILL]
    if victims == 2 and "+" in layout and survivors[0].status == 75:
        # One of three cannot go on if it is not sure that the others are dead: a busy machine may
        # have stopped it while their connections ended.
        assert "no member of the job any more" in survivors[0].stderr, str(survivors[0])
        return
    for one in survivors:
        assert one.returned, str(one)
        assert one.value["pid"] == one.pid
    assert len(survivors) >= 3 - victims
    check([one.value for one in survivors], steps)


def _starts_again(steps: int, seed: int, kills: int, min_ranks: int) -> dict[str, Any] | None:
    """A place whose process is killed and started again, as by a launcher.

    This process has the last one's part; its children are those that die.
    """
    rng = random.Random(seed)
    dying = rng.sample(range(int(os.environ["WORLD_SIZE"])), kills)
    at = [rng.uniform(0.0, 0.3) for _ in dying]
    rank = int(os.environ["RANK"])
    if rank in dying:
        if (child := os.fork()) == 0:
            training = Training(min_ranks=min_ranks).keep()
            kill_later(at[dying.index(rank)])
            training.run(steps)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return None  # it was not killed in time
    training = Training(min_ranks=min_ranks)
    try:
        training.keep()
    except SystemExit as error:
        if error.code:
            raise
        return None  # the others were quicker
    return training.run(steps)


@pytest.mark.costly
@pytest.mark.parametrize("seed", ranks.rotating_or_all(list(range(24)), 2))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_newcomers(layout: str, seed: int) -> None:
    steps, kills, min_ranks = 300, 1 + seed % 2, (1, 2, 3)[seed % 3]
    values = ranks.check_ranks(_starts_again, layout, steps, seed, kills, min_ranks)
    check([value for value in values if value], steps)


@pytest.mark.costly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_die_and_begin_at_the_file(layout: str, tmp_path: Path) -> None:
    options = {"checkpoint": str(tmp_path / "file"), "every": 7}
    values = ranks.check_ranks(_all_start_again, layout, 60, options)
    check(values, 60)
    assert len({len(value["log"]) for value in values}) == 1
    assert len(values[0]["log"]) % 7 == 60 % 7
    assert len(values[0]["log"]) < 60


def _all_start_again(steps: int, options: dict[str, Any]) -> dict[str, Any]:
    def die(step: Any) -> None:
        if step.index == 30 + int(os.environ["RANK"]):
            os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        Training(**options).keep().run(steps, die)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    ranks.arrive("dead")
    ranks.await_ranks("dead", 3)
    return Training(**options).keep().run(steps)


def _with_launcher(steps: int, seed: int) -> dict[str, Any]:
    """As smddprun --elastic: starts the process again if it is killed, or has lost the job.

    One process is killed at its begin, while it meets the others or makes its model.
    """
    rng = random.Random(seed)
    victim, at = rng.randrange(3), rng.uniform(0.0, 0.3)
    result = ranks.folder() / f"result.{os.environ['RANK']}"
    for start in range(10):
        if (child := os.fork()) == 0:
            code = 1
            try:
                if start == 0 and int(os.environ["RANK"]) == victim:
                    kill_later(at)
                result.write_bytes(pickle.dumps(Training().keep().run(steps)))
                code = 0
            except SystemExit as error:
                code = int(str(error.code))
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status not in (-signal.SIGKILL, 75):
            break
    assert status == 0
    return pickle.loads(result.read_bytes()) if result.exists() else {}


@pytest.mark.costly
@pytest.mark.parametrize("seed", ranks.rotating_or_all(list(range(20)), 2))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_death_at_the_begin(layout: str, seed: int) -> None:
    values = ranks.check_ranks(_with_launcher, layout, 300, seed)
    check([value for value in values if value], 300)


def _loses_the_store(steps: int) -> dict[str, Any]:
    def die(step: Any) -> None:
        if step.index == 20 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    return Training().keep().run(steps, die)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_members_need_no_store(layout: str) -> None:
    first, *others = ranks.run_ranks(_loses_the_store, layout, 60, rank_0_serves=True)
    assert first.status == -signal.SIGKILL
    for one in others:
        assert one.returned, one
    check([one.value for one in others], 60)
