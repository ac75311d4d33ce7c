"""Trains a small network on handwritten digits with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/train_digits.py --backend smddp

Only the name of the backend differs from a script for another backend. The statistics at the end
are not necessary.
"""

from __future__ import annotations

import argparse
import gc
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

HELD_OUT = 297  # of 1797 images


def digits(dtype: torch.dtype = torch.float32) -> tuple[TensorDataset, TensorDataset]:
    """Returns data sets of images and digits for training and for testing.

    Images have the shape [n, 1, 8, 8] and values from 0 to 1; digits are int64.
    """
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=dtype)[order].reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, dtype=torch.long)[order]
    return TensorDataset(x[HELD_OUT:], y[HELD_OUT:]), TensorDataset(x[:HELD_OUT], y[:HELD_OUT])


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Returns the same initial network on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    ).to(dtype)


def batches(dataset: Dataset[Any], batch_size: int, shuffle: bool) -> DataLoader[Any]:
    """Returns a loader of this rank's share of a data set."""
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=shuffle, seed=0)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def train(model: nn.Module, data: DataLoader[Any], epochs: int, rate: float) -> list[float]:
    """Trains the model; returns the loss of every step, averaged over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    history: list[float] = []
    progress = Progress(transient=True) if dist.get_rank() == 0 else nullcontext()
    with progress as bar:
        task = bar.add_task("training", total=epochs) if bar else None
        for epoch in range(epochs):
            assert isinstance(data.sampler, DistributedSampler)
            data.sampler.set_epoch(epoch)
            losses = []
            for images, labels in data:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            mean = torch.stack(losses)
            dist.all_reduce(mean)
            history += (mean / dist.get_world_size()).tolist()
            if bar and task is not None:
                bar.update(task, advance=1, description=f"loss {history[-1]:.4f}")
    return history


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Returns the share of digits that are recognised; every rank tests a part of them."""
    images, labels = data.tensors
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    dist.all_reduce(right)
    return float(right) / len(labels)


def where_bytes_went() -> dict[str, Any]:
    """Returns the statistics of smddp, summed over the ranks."""
    import smddp

    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, smddp.statistics())
    total: dict[str, dict[str, int]] = {}
    for statistics in everywhere:
        for algorithm, use in statistics.items():
            sums = total.setdefault(algorithm, dict.fromkeys(use, 0))
            for name, value in use.items():
                sums[name] += value
    return {"description": smddp.describe(), "statistics": total}


def main() -> None:
    """Trains, evaluates, and writes the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["smddp", "gloo"], default="smddp")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--out", type=Path, help="file for parameters and loss history")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)

    if arguments.backend == "smddp":
        import smddp  # noqa: F401  not needed where smddp is installed
    dist.init_process_group(backend=arguments.backend, timeout=timedelta(seconds=60))
    learn, held_out = digits(dtype)
    model = DistributedDataParallel(network(dtype))

    start = time.perf_counter()
    data = batches(learn, arguments.batch_size, shuffle=True)
    losses = train(model, data, arguments.epochs, arguments.rate)
    seconds = time.perf_counter() - start
    share = accuracy(model, held_out)

    extra = where_bytes_went() if arguments.backend == "smddp" else {}
    if dist.get_rank() == 0:
        print(f"{arguments.backend}: accuracy {share:.3f} on held-out digits")
        if arguments.out is not None:
            parameters = {name: value.detach() for name, value in model.module.named_parameters()}
            result = {"parameters": parameters, "losses": losses, "accuracy": share}
            torch.save({**result, "seconds": seconds, **extra}, arguments.out)
    # Free DDP, which holds a reference to the group. Otherwise gloo's threads would end while
    # Python shuts down, and gloo would sometimes abort.
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
