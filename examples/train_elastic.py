"""Trains on, whichever rank is killed: smddprun --elastic -n 3 examples/train_elastic.py.

The log names the processes: kill one of them (`kill -9 PID`), and see the others go on, and its
successor come. docs/elastic.md explains the lines.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import smddp.elastic as elastic


def main(steps: int, seconds: float) -> None:
    """Trains for some steps, each of which takes some seconds."""
    job = elastic.init(min_ranks=2)
    torch.manual_seed(0)
    x = torch.randn(4096, 16)
    data = TensorDataset(x, x[:, :4].sin())
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = elastic.Sampler(data, batch=64)
    batches = job.batches(DataLoader(data, batch_sampler=sampler))
    job.keep(model, optimizer, sampler)
    for step in job.steps(steps):
        with step:
            x, y = next(batches)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            time.sleep(seconds)
            optimizer.step()
        if step.committed and step.index % 10 == 9:
            place = f"rank {job.rank} of {job.size} (pid {os.getpid()})"
            print(f"{place}: step {step.index + 1}, loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, 0.1)
