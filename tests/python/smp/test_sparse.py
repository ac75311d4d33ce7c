"""Sparse tensors between ranks, as in graph nets, beside one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import check_ranks
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore:Sparse"),
]

NODES, WIDTH = 6, 4


class Attention(nn.Module):
    """Makes a sparse matrix of weights of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, NODES)

    def forward(self, x: Tensor, mask: Tensor, layout: str) -> Tensor:
        """Returns it; values depend on parameters."""
        values = torch.tanh(self.score(x))[mask]
        indices = mask.nonzero().t()
        if layout == "twice":  # each edge twice
            indices, values = torch.cat([indices, indices], 1), torch.cat([values, 2 * values])
        found = torch.sparse_coo_tensor(indices, values, (NODES, NODES))
        if layout == "coo":
            found = found.coalesce()
        return found.to_sparse_csr() if layout == "csr" else found


class Convolution(nn.Module):
    """Multiplies by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        """Returns what neighbours say."""
        return torch.tanh(torch.sparse.mm(adjacency, self.linear(x)))


class Net(nn.Module):
    """Attention and the last layer on rank 1, the rest on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.first, self.second = Attention(), Convolution(), Convolution()

    def forward(self, x: Tensor, mask: Tensor, layout: str) -> Tensor:
        adjacency = self.attention(x, mask, layout)
        return self.second(adjacency, self.first(adjacency, x)).square().sum()


def loss_of(model: Any, x: Tensor, masks: Tensor, layout: str) -> Tensor:
    return torch.stack([model(*one, layout) for one in zip(x, masks, strict=True)]).sum()


def trained(layout: str, auto: bool) -> float:
    """Returns the largest difference of a gradient from one process."""
    manual = {} if auto else {"auto_partition": False, "default_partition": 0}
    smp.init({"partitions": 2, "microbatches": 2, **manual})
    torch.manual_seed(0)
    net = Net().double()
    alone = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    if not auto:
        smp.set_partition(net.attention, 1)
        smp.set_partition(net.second, 1)

    @smp.step
    def step(model: Any, x: Tensor, masks: Tensor) -> Tensor:
        loss = loss_of(model, x, masks, layout)
        model.backward(loss)
        return loss.detach()

    # Steps draw seeds on the rank of the body.
    source = torch.Generator().manual_seed(1)
    worst = 0.0
    for _ in range(3):
        x = torch.randn(4, NODES, WIDTH, dtype=torch.double, generator=source)
        masks = torch.rand(4, NODES, NODES, generator=source) < 0.4
        for one in (*net.parameters(), *alone.parameters()):
            one.grad = None
        found = step(model, x, masks)
        wanted = loss_of(alone, x, masks, layout)
        (wanted / 2).backward()
        gradients = {name: one.grad for name, one in alone.named_parameters()}
        mean = found.reduce_mean()
        assert torch.allclose(mean, wanted.detach() / 2), (mean, wanted)
        for name, one in model.local_named_parameters():
            assert one.grad is not None, name
            worst = max(worst, float((one.grad - gradients[name]).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("layout", "auto"), [("coo", False), ("twice", False), ("csr", False), ("csr", True)]
)
def test_a_graph_net_trains_as_in_one_process(layout: str, auto: bool) -> None:
    assert max(check_ranks(trained, "2", layout, auto)) < 1e-12
