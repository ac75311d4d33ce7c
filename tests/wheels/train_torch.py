"""Trains on two nodes of two ranks with smddp and with gloo; fails unless the models are equal.

torchrun starts it where nothing but torch and the wheel of smddp is installed.
"""

import copy
import os

# One machine plays two nodes.
os.environ["SMDDP_NODE_ID"] = str(int(os.environ["LOCAL_RANK"]) // 2)

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(backend: str) -> nn.Module:
    """Returns the model after ten steps."""
    dist.init_process_group(backend)
    if backend == "smddp":
        import smddp

        assert "2 nodes (2 + 2 ranks)" in smddp.describe(), smddp.describe()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    torch.manual_seed(2 + dist.get_rank())
    for _ in range(10):
        optimizer.zero_grad()
        inputs = torch.randn(32, 64)
        nn.functional.cross_entropy(parallel(inputs), inputs[:, :8].argmax(1)).backward()
        optimizer.step()
    if backend == "smddp" and torch.__version__ < "2.14":
        split()
    # Else DDP has the last reference to the group. It holds the GIL when it gives that back, and a
    # thread of gloo may need it to end (torch 2.13).
    del parallel
    dist.destroy_process_group()
    return copy.deepcopy(model)


def split() -> None:
    """Splits the group as split_group() of these releases does: with a copy of its options."""
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    first = dist.get_rank() // 2 * 2
    half = dist.group.WORLD.split_group([first, first + 1], opts=copy.deepcopy(options))
    ones = torch.ones(3)
    half.allreduce(ones).wait()
    assert ones.eq(2).all()


if __name__ == "__main__":
    # The entry point of torch has made the backend known; nobody has imported smddp.
    assert hasattr(dist.Backend, "SMDDP")
    ours, theirs = train("smddp"), train("gloo")
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    if os.environ["RANK"] == "0":
        print(f"torch {torch.__version__}: the models are equal")
