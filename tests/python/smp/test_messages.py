"""The messages of a step are those that the design page draws."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import check_ranks
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.pipeline.protocol import Kind

pytestmark = pytest.mark.multiprocess

PAGE = Path(__file__).resolve().parents[3] / "docs" / "model-parallel-design.md"


def drawn() -> dict[int, list[str]]:
    """Returns the messages that each rank sends, as the page has them."""
    diagram = PAGE.read_text().split("<!-- step: ")[1].split("```")[1]
    found: dict[int, list[str]] = {0: [], 1: []}
    for arrow, message in re.findall(r"(---|<--)-? ([A-Z]+(?: \d)?) -", diagram):
        found[0 if arrow == "---" else 1].append(message)
    return found


def messages_of_a_step() -> list[str]:
    """Returns what this rank sends in a step that is not one of the first."""
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    sent: list[str] = []
    first = nn.Linear(4, 4)
    with smp.partition(1):
        second = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(first, second))
    channel = model.runtime.executor.mail.channel
    send = channel.send

    def record(peer: int, kind: int, header: Any, tensors: Any) -> None:
        # Each microbatch makes one call graph, so the graphs' numbers are those of microbatches.
        graph = {Kind.FORWARD: lambda: f" {header[0][1]}", Kind.BACKWARD: lambda: f" {header[1]}"}
        sent.append(Kind(kind).name + graph.get(Kind(kind), str)())
        send(peer, kind, header, tensors)

    channel.send = record

    @smp.step
    def train(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), torch.ones(2, 4))
        model.backward(loss)
        return loss

    for _ in range(4):
        sent.clear()
        train(model, torch.randn(4, 4))
    return sent


def test_messages_are_those_of_the_design_page() -> None:
    found = check_ranks(messages_of_a_step, "2")
    # The order within a stream depends on who is faster; what is sent does not.
    assert {rank: sorted(sent) for rank, sent in enumerate(found)} == {
        rank: sorted(sent) for rank, sent in drawn().items()
    }
