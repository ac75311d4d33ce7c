"""What users see of a job: the partition in the log and as a table."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from ranks import check_ranks, listen
from torch import nn

import smdistributed.modelparallel.torch as smp


@smp.step
def train(model: Any, x: torch.Tensor) -> Any:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def told(config: dict[str, Any]) -> tuple[str, str]:
    """Returns what the log and `explain` say about the partition."""
    said = listen()
    logging.getLogger("smddp.modelparallel").setLevel(logging.INFO)
    smp.init({"partitions": 2, "microbatches": 2, **config})
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(8, 8)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    smp.set_partition(layers[0], 1)
    train(model, torch.ones(4, 4))
    (assigned,) = [text for text in said if "Partition assignments" in text] or [""]
    return assigned, smp.explain()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "config",
    [{}, {"partitioner": "tree"}, {"auto_partition": False, "default_partition": 0}],
    ids=["exact", "tree", "manual"],
)
def test_the_log_says_what_explain_says(config: dict[str, Any]) -> None:
    (assigned, table), (nothing, elsewhere) = check_ranks(told, "2", config)
    assert nothing == ""
    assert table == elsewhere
    shares = re.findall(r"(\d+) %", table)
    assert len(shares) == 2
    assert re.findall(r"(\d+) % of the cost", assigned) == shares
    assert 99 <= sum(map(int, shares)) <= 101
