"""Ranks that are stuck or late are named while others wait for them."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
import torch._dynamo
from ranks import arrive, await_ranks, check_ranks, listen
from smp.failing_models import MANUAL, train
from torch import nn

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess


class Stuck(nn.Module):
    """Works until a warning has come, and then for longer than a warning needs."""

    def __init__(self, said: Any, stall_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.said, self.stall_seconds = said, stall_seconds
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        while not self.said:
            time.sleep(0.01)
        if self.calls == 2:
            time.sleep(2 * self.stall_seconds)
        return x * self.weight


def ask_when_noted(executor: Any, count: int) -> None:
    """Lets a rank look for missing ranks only when `count` ranks have noted their step.

    Otherwise one that the machine has delayed would be named, too.
    """
    watch = executor._watch
    note, ask = watch._attendance.note, watch._ask

    def note_and_tell(step: int) -> None:
        note(step)
        arrive(f"noted in step {step}")

    def wait_and_ask(name: str, step: int) -> None:
        await_ranks(f"noted in step {step}", count)
        ask(name, step)

    watch._attendance.note, watch._ask = note_and_tell, wait_and_ask


def stuck(where: int, stall_seconds: float) -> list[str]:
    said = listen()
    smp.init({"partitions": 2, **MANUAL, "stall_warning_seconds": stall_seconds})
    parts: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    parts[where] = Stuck(said if stall_seconds else ["nothing to wait for"], stall_seconds)
    model = smp.DistributedModel(nn.Sequential(*parts))
    smp.set_partition(parts[1], 1)
    executor = model.runtime.executor
    if stall_seconds:
        ask_when_noted(executor, 2)
        # Ignores warnings about other work, which may come on a slow machine.
        age = executor._watch._age
        executor._watch._age = lambda work: age(work) if parts[where].calls else 0.0
    smp.barrier()
    train(model, torch.ones(8, 4), "")
    return said


@pytest.mark.parametrize("where", [0, 1])
def test_a_rank_that_is_stuck_says_where(where: int) -> None:
    said = check_ranks(stuck, "2", where, 1)
    (text,) = said[where]
    assert not said[1 - where], "nobody is missing"
    first, *stack = text.splitlines()
    assert first == (
        f"smp: rank {where} of the pipeline has worked for 1 s on the forward pass of microbatch "
        f"0, in module '{where}'; other ranks wait for it. It is at"
    )
    assert "test_late_ranks.py" in stack[-2]
    assert stack[-2].endswith("in forward")


def stuck_again() -> list[str]:
    """Rank 1 is stuck in each of two steps, until a warning has come."""
    said = listen()
    smp.init({"partitions": 2, **MANUAL, "microbatches": 1, "stall_warning_seconds": 1})
    last = Stuck([], 0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
    smp.set_partition(last, 1)
    executor = model.runtime.executor
    ask_when_noted(executor, 2)
    # Ignores warnings about other work, which may come on a slow machine.
    age = executor._watch._age
    executor._watch._age = lambda work: age(work) if last.calls else 0.0
    for number in (1, 2):
        smp.barrier()
        last.said = Warnings(said, number)
        train(model, torch.ones(8, 4), "")
    return [text for text in said if "has worked" in text]


class Warnings:
    """Is true when at least so many warnings of work that does not end have come."""

    def __init__(self, said: list[str], least: int) -> None:
        self.said, self.least = said, least

    def __bool__(self) -> bool:
        return sum("has worked" in text for text in self.said) >= self.least


def test_a_rank_that_is_stuck_again_says_so_again() -> None:
    said = check_ranks(stuck_again, "2")[1]
    assert len(said) == 2
    assert all("in module '1'" in text for text in said)


def test_nobody_says_so_if_not_asked() -> None:
    assert check_ranks(stuck, "2", 1, 0) == [[], []]


def late(missing: int, size: int) -> list[str]:
    """A rank calls the step only when all others have warned that they wait for it."""
    said = listen()
    smp.init({"partitions": size, **MANUAL, "stall_warning_seconds": 1})
    model = smp.DistributedModel(nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)]))
    for number, part in enumerate(model.get_module()):
        smp.set_partition(part, number)
    told = Told()
    logging.getLogger("smddp.modelparallel").addHandler(told)
    ask_when_noted(model.runtime.executor, size - 1)
    for number in range(2):  # in later steps, too
        smp.barrier()
        told.place = f"said in step {number}"
        if smp.pp_rank() == missing:
            await_ranks(told.place, size - 1)
        train(model, torch.ones(8, 4), "")
    return said


class Told(logging.Handler):
    """Tells the other ranks that this one has warned which ranks are missing."""

    place = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "has waited" in record.getMessage():
            arrive(self.place)


@pytest.mark.parametrize(("missing", "size"), [(0, 2), (1, 2), (2, 3)])
def test_who_waits_names_the_rank_that_has_not_called_the_step(missing: int, size: int) -> None:
    for rank, said in enumerate(check_ranks(late, str(size), missing, size)):
        text = (
            f"smp: rank {rank} of the pipeline has waited for 1 s in the step train, which rank "
            f"{missing} of the pipeline has not called. All of them have to call the same steps"
        )
        assert [one for one in said if "waited" in one] == [text] * (0 if rank == missing else 2)
