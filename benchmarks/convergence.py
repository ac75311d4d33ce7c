"""Trains four small models with each wire format between nodes, and compares their losses.

    torchrun --nproc-per-node 4 benchmarks/convergence.py --json FILE --plot docs/wire-curves.svg

Each rank plays a node, so every gradient is encoded as often as it can be. A model, a seed and the
data are the same for all formats. The loss is that of data which the model was not trained on. A
format passes if its mean final loss lies between the best and the worst seed of fp32, or below.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import smddp

WIRES = ("fp32", "bf16", "int8", "int8+feedback")
POINTS = 20  # of a curve
CONTEXT = 64  # characters that the GPT sees

Data = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Training:
    """A model, and how it is trained."""

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Data, Data]]  # for training, for testing: inputs [n, ...], targets
    loss: Loss
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int
    batch: int = 16  # of each rank


class Gpt(nn.Module):
    """Predicts the next of 128 characters from those before it."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(128, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Returns logits, float32 [n, CONTEXT, 128], for characters, int64 [n, CONTEXT]."""
        hidden = self.token(text) + self.position
        result: torch.Tensor = self.head(self.blocks(hidden, mask=self.mask, is_causal=True))
        return result


def _mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 256), nn.ReLU()),
        *(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
    )


def _convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


def _autoencoder() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 12)),
        *(nn.Linear(12, 128), nn.Tanh(), nn.Linear(128, 64)),
    )


def _digits() -> tuple[Data, Data]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order].reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)[order]
    return (x[400:], y[400:]), (x[:400], y[:400])


def _images() -> tuple[Data, Data]:
    (train, _), (test, _) = _digits()
    return (train, train.flatten(1)), (test, test.flatten(1))


def _text() -> tuple[Data, Data]:
    """Returns pieces of Python's help texts, and the same pieces one character later."""
    from pydoc_data.topics import topics

    text = "".join(topics.values()).encode("ascii", "ignore")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    pieces = data[: (len(data) - 1) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
    following = data[1 : pieces.numel() + 1].reshape(-1, CONTEXT)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    pieces, following = pieces[order], following[order]
    return (pieces[200:], following[200:]), (pieces[:200], following[:200])


def _classification(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def _reconstruction(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(x), y)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


TRAININGS = {
    "MLP on digits": Training(_mlp, _digits, _classification, _sgd, 300),
    "convolutional net on digits": Training(_convolutional, _digits, _classification, _sgd, 200),
    "GPT on English text": Training(Gpt, _text, _classification, _adam, 400, batch=8),
    "autoencoder of digits": Training(_autoencoder, _images, _reconstruction, _adam, 400),
}


def train(training: Training, seed: int, group: dist.ProcessGroup) -> list[float]:
    """Trains once; returns the loss on the test data at POINTS times, the last at the end."""
    torch.manual_seed(seed)
    model = training.model()
    parallel = DistributedDataParallel(model, process_group=group)
    optimizer = training.optimizer(parallel.parameters())
    (x, y), test = training.data()
    order = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    curve = []
    for step in range(1, training.steps + 1):
        some = torch.randint(len(x), (training.batch,), generator=order)
        optimizer.zero_grad()
        training.loss(parallel, x[some], y[some]).backward()
        optimizer.step()
        if step % (training.steps // POINTS) == 0:
            model.eval()
            with torch.no_grad():
                curve.append(training.loss(model, *test).item())
            model.train()
    return curve


def _verdict(losses: list[float], reference: list[float]) -> bool:
    return statistics.mean(losses) <= max(reference)


def _plot(curves: dict[str, dict[str, list[list[float]]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "smddp"  # the same file from the same figures
    figure, plots = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained")
    for axes, (name, by_wire) in zip(plots.flat, curves.items(), strict=True):
        steps = [TRAININGS[name].steps // POINTS * (i + 1) for i in range(POINTS)]
        for wire, of_seeds in by_wire.items():
            at_steps = list(zip(*of_seeds, strict=True))
            (line,) = axes.plot(steps, [statistics.mean(each) for each in at_steps], label=wire)
            if wire == WIRES[0]:
                low, high = [min(each) for each in at_steps], [max(each) for each in at_steps]
                axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
        axes.set(title=name, xlabel="step", ylabel="loss on test data", yscale="log")
    plots.flat[0].legend()
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    """Runs all trainings as one rank; returns 1 if a format is outside of fp32's seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="of each training (%(default)s)")
    parser.add_argument("--json", type=Path, help="write all curves to this file")
    parser.add_argument("--plot", type=Path, help="draw the curves to this file (.svg, .png)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 4 benchmarks/convergence.py")
    os.environ["SMDDP_NODE_ID"] = f"node{os.environ['RANK']}"
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    groups = {
        wire: dist.new_group(backend="smddp", pg_options=smddp.GroupOptions(wire=wire))
        for wire in WIRES
    }
    speaks = dist.get_rank() == 0
    curves: dict[str, dict[str, list[list[float]]]] = {}
    all_pass = True
    for name, training in TRAININGS.items():
        began = time.monotonic()
        curves[name] = {wire: [] for wire in WIRES}
        for seed in range(options.seeds):
            for wire, group in groups.items():
                assert isinstance(group, dist.ProcessGroup)
                curves[name][wire].append(train(training, seed, group))
        final = {wire: [each[-1] for each in of_seeds] for wire, of_seeds in curves[name].items()}
        if speaks:
            print(f"# {name}: {time.monotonic() - began:.0f} s")
        for wire, losses in final.items():
            passes = _verdict(losses, final[WIRES[0]])
            all_pass &= passes
            if speaks:
                print(
                    f"{wire:>15}  mean {statistics.mean(losses):.5f}  "
                    f"seeds {min(losses):.5f} to {max(losses):.5f}  {'ok' if passes else 'WORSE'}",
                    flush=True,
                )
    if speaks and options.json:
        from smddp.bench.about import write_json

        rows = [
            {"training": name, "wire": wire, "seed": seed, "losses": losses}
            for name, by_wire in curves.items()
            for wire, of_seeds in by_wire.items()
            for seed, losses in enumerate(of_seeds)
        ]
        write_json(options.json, {"ranks": dist.get_world_size(), "rows": rows})
    if speaks and options.plot:
        _plot(curves, options.plot)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if all_pass else 1


if __name__ == "__main__":
    sys.exit(main())
