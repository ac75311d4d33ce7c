"""What tensors without values answer: the table of names, and pickles."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from smp.common import BY_HAND
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.common.placeholder import about

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (torch.Tensor.shape.__get__, {"describes", "form"}),  # type: ignore[attr-defined]
        (torch.Tensor.grad.__get__, {"describes"}),
        (torch.Tensor.is_leaf.__get__, {"describes"}),  # type: ignore[attr-defined]
        (torch.Tensor.data.__get__, set()),
        (torch.Tensor.requires_grad.__set__, {"describes", "of_gradients", "changes"}),  # type: ignore[attr-defined]
        (torch.Tensor.size, {"describes", "form"}),
        (torch.autograd.grad, set()),
        (torch.Tensor.add, set()),
        (torch.Tensor.add_, {"changes"}),
        (torch.Tensor.__setitem__, {"changes"}),
        (torch.Tensor.item, {"reads"}),
        (torch.zeros_like, {"like"}),
        (torch.nn.functional.batch_norm, {"changes_unseen"}),
        (aten.normal_.default, {"changes", "overwrites"}),
        (aten.equal.default, {"reads"}),
        (aten.add.Tensor, set()),
    ],
)
def test_the_table_knows_functions_attributes_and_operators(function: Any, kinds: set[str]) -> None:
    known = about(function)._asdict()
    assert {kind for kind, says in known.items() if says is True} - {"is_attribute"} == kinds


class Net(nn.Module):
    """Its linear layer lives on another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.first(x))  # type: ignore[no-any-return]


@pytest.mark.multiprocess
@on_ranks("2")
def test_pickles_are_ordinary_tensors() -> None:
    smp.init({"partitions": 2, "microbatches": 1, **BY_HAND})
    net = Net()
    expected = net.linear.weight.detach().clone()
    model = smp.DistributedModel(net)
    smp.set_partition(net.linear, 1)

    @smp.step
    def step(x: Tensor) -> Tensor:
        y = model(x)
        for tensor, values in ((net.linear.weight.t(), expected.t()), (net.linear(x), None)):
            copied = pickle.loads(pickle.dumps(tensor.detach()))
            assert type(copied) is Tensor
            assert values is None or torch.equal(copied, values)
        view = pickle.loads(pickle.dumps(net.linear.weight[:2]))
        assert type(view) is Tensor
        assert torch.equal(view, expected[:2])
        return y  # type: ignore[no-any-return]

    step(torch.ones(2, 4))
    if smp.rank() == 0:
        outside = pickle.loads(pickle.dumps(net.linear.weight))
        assert type(outside) is nn.Parameter
        assert outside.is_meta
        assert pickle.loads(pickle.dumps((net.linear.weight * 2).detach())).is_meta
