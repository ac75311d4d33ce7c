"""The scripts of the guide, unchanged, and the examples: digits, a GPT on text, a U-Net."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from ranks import check_ranks
from sklearn.datasets import load_digits
from smp.zoo import device

import smdistributed.modelparallel.torch as smp

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(170)]
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(script: str, arguments: list[str], parameters: str) -> str:
    if parameters:
        os.environ["SM_HP_MP_PARAMETERS"] = parameters
    if torch.cuda.is_available():  # the scripts need a GPU for each rank; here ranks may share them
        choose = torch.cuda.set_device
        torch.cuda.set_device = lambda index: choose(index % torch.cuda.device_count())
    sys.argv = [script, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    torch.distributed.barrier()
    return printed.getvalue()


def output_of(ranks: int, script: str, *arguments: str, parameters: str = "") -> str:
    printed = check_ranks(run, str(ranks), script, list(arguments), parameters, timeout=150)
    assert not any(printed[1:]), "only rank 0 speaks"
    return printed[0]


# --- the scripts of the guide ---------------------------------------------------------------------

REPLICAS, BATCH, BATCHES = 2, 64, 3


class Digits(torch.utils.data.TensorDataset):
    """Replaces MNIST, which would have to be downloaded; has the same arguments."""

    def __init__(self, root: str, train: bool, download: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        count = BATCH * BATCHES * REPLICAS
        x = torch.tensor(images[:count], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        super().__init__(x, torch.tensor(labels[:count]))


class LargeDigits(Digits):
    """Images as large as those of MNIST, for which a script has its layers."""

    def __init__(self, root: str, train: bool, download: bool) -> None:
        super().__init__(root, train, download)
        x, y = self.tensors
        self.tensors = torch.nn.functional.interpolate(x, 28).double(), y


class SplitDataset(torch.utils.data.Dataset[Any]):
    """Replaces the class of torchnet: consecutive parts, whose shares are given by name."""

    def __init__(self, dataset: Any, partitions: dict[str, float]) -> None:
        self.dataset, self.partitions = dataset, partitions
        self.indices = range(len(dataset))

    def select(self, name: str) -> None:
        ends = [round(len(self.dataset) * share) for share in itertools.accumulate(
            self.partitions.values())]  # fmt: skip
        place = list(self.partitions).index(name)
        self.indices = range(ends[place - 1] if place else 0, ends[place])

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


def guide(
    script: str, parameters: str, data: type[Digits] = Digits
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Runs a script as a launcher does; returns the state dict, and the names that live here."""
    for name, content in (
        ("torchvision", {"datasets": types.SimpleNamespace(MNIST=data)}),
        ("torchnet", {}),
        ("torchnet.dataset", {"SplitDataset": SplitDataset}),
    ):
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
    os.environ["SM_HP_MP_PARAMETERS"] = parameters
    sys.argv = [script, "--mp_parameters", "microbatches=4,partitions=2"]
    torch.manual_seed(0)
    names = runpy.run_path(str(Path(__file__).parent / "guide" / script), run_name="__main__")
    model = names["model"]
    return dict(model.state_dict()), [name for name, _ in model.local_named_parameters()]


def plainly(
    net: torch.nn.Module, replicas: int, data: type[Digits] = Digits
) -> dict[str, torch.Tensor]:
    """The oracle: the same training in one process, without smp."""
    optimizer = torch.optim.Adadelta(net.parameters(), lr=4.0)
    x, y = (tensor.to(device()) for tensor in data("", train=True, download=False).tensors)
    share = len(x) // replicas
    for begin in range(0, share, BATCH):
        batch = min(BATCH, share - begin)
        optimizer.zero_grad()
        for first in range(begin, len(x), share):
            for part in range(first, first + batch, 16):
                rows = slice(part, part + 16)
                loss = torch.nn.functional.nll_loss(net(x[rows]), y[rows])
                (loss * 16 / (batch * replicas)).backward()
        optimizer.step()
    return net.state_dict()


class Layers(torch.nn.Module):
    """The layers of the scripts."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.net1 = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU())
        self.net2 = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.log_softmax(self.net2(self.net1(x)), dim=1)


@pytest.mark.parametrize("script", ["automated.py", "manual.py"])
def test_scripts_of_the_guide_train_what_one_process_would(script: str) -> None:
    parameters = {"partitions": 2, "microbatches": 4, "ddp": True, "pipeline": "interleaved"}
    if script == "manual.py":
        parameters |= {"auto_partition": False, "default_partition": 0}
    results = check_ranks(guide, str(2 * REPLICAS), script, json.dumps(parameters))
    torch.manual_seed(0)
    expected = plainly(Layers().to(device()), REPLICAS)
    for state, _ in results:
        torch.testing.assert_close(state, dict(expected), rtol=1e-4, atol=1e-5)
    for pipeline in (results[:2], results[2:]):
        (_, first), (_, second) = pipeline
        assert first
        assert second
        assert sorted(first + second) == sorted(expected)
        if script == "manual.py":
            assert all(name.startswith("net1.") for name in first)


def divided(script: str, parameters: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Runs a script with tensor parallelism; returns its state dict, and rank 0 also the oracle's.

    In double precision: Adadelta divides small gradients by their own size, and divided layers add
    in another order.
    """
    torch.set_default_dtype(torch.float64)
    made = smp.DistributedModel
    begun: list[torch.nn.Module] = []

    def known(module: torch.nn.Module) -> torch.nn.Module:
        """Divided layers begin with weights of their own; here all have those of a plain model."""
        torch.manual_seed(0)
        begun.append(type(module)())
        model = made(module)
        model.load_state_dict(begun[0].state_dict())
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smp, "DistributedModel", known)
        state, _ = guide(script, parameters, LargeDigits)
    first = smp.rank() == 0
    return state, plainly(begun[0].to(device()), smp.dp_size(), LargeDigits) if first else None


@pytest.mark.parametrize(
    ("script", "degrees"), [("tensor.py", (1, 4)), ("tensor_and_pipeline.py", (2, 2))]
)
@pytest.mark.costly
def test_scripts_with_tensor_parallelism_train_what_one_process_would(
    script: str, degrees: tuple[int, int]
) -> None:
    parameters = {
        "pipeline_parallel_degree": degrees[0],
        "tensor_parallel_degree": degrees[1],
        "placement_strategy": "cluster",
        "ddp": True,
    } | ({"microbatches": 4} if degrees[0] > 1 else {})
    results = check_ranks(divided, "4", script, json.dumps(parameters))
    expected = results[0][1]
    for state, _ in results:
        torch.testing.assert_close(state, dict(expected), rtol=1e-9, atol=1e-9)


# --- the examples ---------------------------------------------------------------------------------


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.costly
def test_digits_are_learned(manual: bool) -> None:
    config = {"partitions": 2, "microbatches": 4, "ddp": True, "pipeline": "interleaved"}
    if manual:
        config.update(auto_partition=False, default_partition=0)
    arguments = ["--mp_parameters", "partitions=2,microbatches=4", "--epochs=2"]
    text = output_of(
        4, "smp_digits.py", *arguments, *["--manual"] * manual, parameters=json.dumps(config)
    )
    found = re.search(r"accuracy (\d\.\d+) on held-out digits", text)
    assert found, text
    assert float(found[1]) > 0.5, text


@pytest.mark.costly
def test_gpt_learns_the_same_text_divided_or_whole(tmp_path: Path) -> None:
    options = ["--steps=12", "--layers=4"]
    whole = output_of(1, "smp_gpt.py", *options)
    divided = output_of(3, "smp_gpt.py", "--partitions=3", *options, "--report", str(tmp_path))
    losses = re.findall(r"loss (\d\.\d+)", whole)
    assert losses == re.findall(r"loss (\d\.\d+)", divided)
    assert float(losses[-1]) < float(losses[0]) - 0.5
    table = re.findall(r"^ +(\d) .* ([\d.]+) MiB +([\d.]+) ms +(\d+) %", divided, re.MULTILINE)
    assert [row[0] for row in table] == ["0", "1", "2"], divided
    assert sum(int(row[3]) for row in table) == pytest.approx(100, abs=2), divided
    for name in ("partition.svg", "step.svg"):
        assert (tmp_path / name).read_text().startswith("<svg")
    assert "busy" in divided


@pytest.mark.costly
def test_gpt_learns_the_same_sharded_or_whole() -> None:
    options = ["--steps=11", "--layers=2"]
    plain = output_of(4, "smp_gpt.py", "--partitions=2", *options)
    sharded = output_of(
        4, "smp_gpt.py", "--partitions=2", "--sharding=2", "--checkpointing", *options
    )
    losses = re.findall(r"loss (\d\.\d+)", plain)
    assert len(losses) == 2
    assert losses == re.findall(r"loss (\d\.\d+)", sharded)


@pytest.mark.costly
def test_unet_removes_noise() -> None:
    text = output_of(2, "smp_unet.py", "--partitions=2", "--steps=30")
    left = [float(share) for share in re.findall(r"(\d\.\d+) of the noise", text)]
    assert left[-1] < 0.6 * left[0], text
