"""Reports: the partition in the log, as a table and as a picture; the timeline."""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from ranks import check_ranks, listen
from smp.common import squares
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.api.report import _partition_svg
from smddp.modelparallel.torch.partition.placement import Decision

SVG = "{http://www.w3.org/2000/svg}"


def told(config: dict[str, Any]) -> tuple[str, str, str]:
    """Returns the partition in the log, the table of `explain`, and the whole log."""
    said = listen()
    logging.getLogger("smddp.modelparallel").setLevel(logging.INFO)
    smp.init({"partitions": 2, "microbatches": 2, **config})
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(8, 8)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    smp.set_partition(layers[0], 1)
    squares(model, torch.ones(4, 4))
    (assigned,) = [text for text in said if "Partition assignments" in text] or [""]
    return assigned, smp.explain(), "\n".join(said)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "config",
    [{}, {"partitioner": "tree"}, {"auto_partition": False, "default_partition": 0}],
    ids=["exact", "tree", "manual"],
)
def test_the_log_says_what_explain_says(config: dict[str, Any]) -> None:
    (assigned, table, said), (nothing, elsewhere, _) = check_ranks(told, "2", config)
    assert nothing == ""
    assert table == elsewhere
    shares = re.findall(r"(\d+) %", table)
    assert len(shares) == 2
    assert re.findall(r"(\d+) % of the cost", assigned) == shares
    assert 99 <= sum(map(int, shares)) <= 101
    # The sequence and its layers, except the one without parameters, which is in no partition.
    counts = [int(row) for row in re.findall(r"^ +(?:\d|nowhere) +(\d+) ", table, re.MULTILINE)]
    assert (sum(counts[:2]), counts[2:]) == (5, [1])
    traced = re.findall(r"tracing (\d+) modules, to divide the (\d+) ", said)
    assert traced == ([] if "auto_partition" in config else [("6", "5")])


def labels(costs: list[float]) -> tuple[Any, dict[str, Any]]:
    """Returns the picture of a partition with modules of these costs, and its labels by module."""
    names = [f"layers.{number}" for number in range(len(costs))]
    rows = [{"bytes": 0.0, "seconds": 0.0, "cost": cost} for cost in costs]
    owners: list[int | None] = [number % 2 for number in range(len(costs))]
    picture = ElementTree.fromstring(_partition_svg(Decision(names, owners, rows), 2))
    texts = {text.text: text for text in picture.iter(f"{SVG}text")}
    return picture, {name: texts[name] for name in names}


def test_every_module_has_a_label_in_the_picture() -> None:
    costs = [0.4, 0.3, 0.0, 0.1, 0.001, 0.001, 0.0, 0.0, 0.1, 0.098]
    picture, found = labels(costs)
    width, height = float(picture.get("width")), float(picture.get("height"))
    bars = [bar for bar in picture.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    by_name = {bar.find(f"{SVG}title").text.split(":")[0]: bar for bar in bars}
    for number, (name, label) in enumerate(found.items()):
        x, y = float(label.get("x")), float(label.get("y"))
        left, top = (float(by_name[name].get(key)) for key in ("x", "y"))
        right = left + float(by_name[name].get("width"))
        if costs[number] >= 0.05:
            assert left < x < right, "in its bar"
            assert top < y < top + float(by_name[name].get("height"))
        else:
            assert right < x < width, "beside its bar"
        assert y < height
    places = [(float(label.get("x")), float(label.get("y"))) for label in found.values()]
    for one in places:
        assert all(one == two or one[0] != two[0] or abs(one[1] - two[1]) > 11 for two in places)


def test_a_picture_of_nothing() -> None:
    _, found = labels([0.0])
    assert found.keys() == {"layers.0"}


def work_after_backward() -> tuple[list[list[bool]], list[bool]]:
    """Returns whether the body does forward work after `backward`, and of which spans it is."""
    smp.init({"partitions": 2, "microbatches": 1, "auto_partition": False, "default_partition": 0})
    with smp.partition(1):
        last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), last))
    timeline = model.runtime.executor.timeline

    @smp.step
    def train(model: Any, x: torch.Tensor) -> Any:
        seen = []
        model.backward(model(x).sum())
        seen.append(timeline.work.forward)
        model.backward(model(x).sum())
        seen.append(timeline.work.forward)
        return seen

    seen = train(model, torch.ones(2, 4))
    report = smp.timeline()
    return seen, [span.forward for span in report.spans[0]]


@pytest.mark.multiprocess
def test_what_the_body_does_after_backward_is_forward_work() -> None:
    seen, spans = check_ranks(work_after_backward, "2")[0]
    assert seen == [[True], [True]]
    changes = [kind for kind, _ in itertools.groupby(spans)]
    assert changes == [True, False, True, False, True]


def timelines(pp: int, folder: str) -> None:
    smp.init({"partitions": pp, "microbatches": 2, "ddp": True})
    names = [None, f"{folder}/step.svg", f"{folder}/step.json"]

    def refused() -> None:
        for name in names:
            with pytest.raises(SMPUsageError, match="only after a step"):
                smp.timeline(name)

    refused()
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    refused()
    assert not any(Path(folder).iterdir())
    smp.barrier()
    squares(model, torch.ones(4, 4))
    for name in names:
        smp.timeline(name)


@pytest.mark.multiprocess
@pytest.mark.parametrize("pp", [1, 2])
def test_every_replica_writes_its_own_timeline(pp: int, tmp_path: Path) -> None:
    check_ranks(timelines, str(2 * pp), pp, str(tmp_path))
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found.keys() == {"step.svg", "step-1.svg", "step.json", "step-1.json"}
    assert found["step.json"] != found["step-1.json"]
    for name, text in found.items():
        assert text.count("rank ") == pp or name.endswith(".json")
