"""Parameters that live on another rank: read in a step, refused outside, copied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from ranks import check_ranks
from smp.common import copies
from torch import Tensor, nn
from torch.func import functional_call  # before smp.init, as scripts do
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError, SMPUsageError

pytestmark = pytest.mark.multiprocess

MANUAL = {"microbatches": 4, "auto_partition": False, "default_partition": 0}


class Scaled(nn.Module):
    """Takes a weight of somebody else as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, self.bias)


class Tied(nn.Module):
    """A language model whose output layer uses the weight of the embedding by hand."""

    def __init__(self, pp: int) -> None:
        super().__init__()
        with smp.partition(pp - 1):
            self.words = nn.Embedding(6, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.rnn = nn.GRU(4, 4, batch_first=True)
        with smp.partition(0):
            self.body = nn.Linear(4, 4)
            self.head = Scaled()

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.words(words)))
        x = x + torch.zeros(4, dtype=self.words.weight.dtype, device=self.words.weight.device)
        x = self.rnn(self.frozen(x))[0]
        return self.head(x, self.words.weight) + F.linear(x, self.words.weight)


class Net(nn.Module):
    """A part on each rank, the first on rank 0."""

    def __init__(self, pp: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        with smp.partition(pp - 1):
            self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def trained(pp: int) -> Any:
    smp.init({"partitions": pp, **MANUAL})
    torch.manual_seed(0)
    model = smp.DistributedModel(Tied(pp))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    words = torch.randint(6, (8, 5))

    @smp.step
    def train(model: Any, words: Tensor) -> Any:
        logits = model(words)
        loss = F.cross_entropy(logits.flatten(0, 1), words.flatten())
        loss = loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
        with torch.no_grad():
            norms = torch.stack([p.norm() for p in model.parameters()])
        model.backward(loss)
        return loss, norms

    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss, norms = train(model, words)
        losses.append([*loss.stack().tolist(), *norms.reduce_mean().tolist()])
        optimizer.step()
    return torch.tensor(losses), copies(model)


def test_they_are_read_in_a_step_and_get_gradients() -> None:
    (expected,) = check_ranks(trained, "1", 1)
    for pp in (2, 3):
        for found in check_ranks(trained, str(pp), pp):
            torch.testing.assert_close(found, expected)


@pytest.mark.costly
@on_ranks("2")
def test_outside_a_step_an_error_names_them() -> None:
    smp.init({"partitions": 2, **MANUAL})
    module = Net(2)
    model = smp.DistributedModel(module)
    change: Any = None

    @smp.step
    def train(model: Any, x: Tensor) -> Any:
        loss = model(x).sum()
        if change is not None:
            change(module.last.weight)
        model.backward(loss)

    train(model, torch.ones(4, 4))
    remote, local = module.last, module.first
    name = "last"
    if smp.rank() == 1:
        remote, local, name = local, remote, "first"
    # Code that treats all parameters alike runs on every rank, and changes what lives there.
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.mul_(2)
            parameter.data.clamp_(-1, 1)
            parameter.add_(parameter.detach().clone(), alpha=0.1)
    assert remote.weight.is_meta
    assert remote.weight.shape == (4, 4)
    assert str(remote.weight.device) == "meta"
    needs: list[Any] = [
        lambda p: p.norm().item(),
        lambda p: float(p.pow(2).sum()),
        lambda p: bool((p > 0).all()),
        lambda p: p.detach().numpy(),
        lambda p: p.detach().cpu().numpy(),
        lambda p: p.tolist(),
        lambda p: p @ torch.ones(4),
        lambda p: local.weight.data.copy_(p),
        lambda p: torch.cat([local.weight, p]),
        lambda p: torch.equal(p, p),
        lambda p: nn.utils.parameters_to_vector([local.weight, p]),
    ]
    for need in needs:
        with pytest.raises(SMPUsageError) as caught:
            need(remote.weight)
        text = str(caught.value)
        assert f"parameter '{name}.weight' lives on rank {1 - smp.rank()}" in text
        assert "smp.step" in text
        assert "state_dict()" in text
    # An error that has nothing to do with that stays as it is.
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        remote.weight.view(5)
    changes: list[Any] = [
        lambda p: p.mul_(2),
        nn.init.zeros_,
        lambda p: setattr(p, "data", torch.ones(4, 4)),
        lambda p: torch._foreach_mul_([p], 2.0),
        lambda p: p.data.clamp_(-1, 1),
        lambda p: p.detach()[0].view(2, 2).zero_(),
        lambda p: torch.add(p, 1, out=p),
    ]
    for change in changes:  # noqa: B007  the step uses it
        with torch.no_grad(), pytest.raises(SMPMicrobatchError, match="would change a copy of it"):
            train(model, torch.ones(4, 4))
    change = None
    empty = remote.weight * 2

    @smp.step
    def passes(model: Any, x: Tensor) -> Any:
        return module.last(empty)

    with pytest.raises(SMPMicrobatchError, match=r"parameter 'last.weight' lives on rank 1"):
        passes(model, torch.ones(4, 4))

    @smp.step
    def replaces(model: Any, x: Tensor, part: Any) -> Any:
        zeros = {name: torch.zeros(p.shape) for name, p in part.named_parameters()}
        return functional_call(part, zeros, (x,))

    for part in (module, module.last):
        with pytest.raises(SMPMicrobatchError, match=r"functional_call .*'last\.weight' lives on"):
            replaces(model, torch.ones(4, 4), part)
    assert not replaces(model, torch.ones(4, 4), module.first).concat().any()

    # With its gradients a value may be returned, too.
    @smp.step(detach_outputs=False)
    def returns(model: Any, x: Tensor) -> Any:
        return module.last.weight, x

    values, _ = returns(model, torch.ones(4, 4))
    assert values.outputs[0].shape == (4, 4)
    train(model, torch.ones(4, 4))


def used_too_early() -> str:
    smp.init({"partitions": 2, **MANUAL})
    module = Net(2)
    model = smp.DistributedModel(module)

    @smp.step
    def train(model: Any, x: Tensor) -> Any:
        penalty = sum(p.pow(2).sum() for p in module.parameters())
        model.backward(model(x).sum() + penalty)

    with pytest.raises(SMPMicrobatchError) as caught:
        train(model, torch.ones(4, 4))
    train(model, torch.ones(4, 4))
    return str(caught.value)


def test_a_use_before_the_first_call_of_the_model_is_refused() -> None:
    for text in check_ranks(used_too_early, "2"):
        assert "parameter 'last." in text
        assert "which lives on rank 1" in text
        assert "call the model first" in text


def copied(pp: int) -> Any:
    smp.init({"partitions": pp, **MANUAL})
    torch.manual_seed(0)
    module = Net(pp)
    before, after = {}, {}

    def averages() -> dict[str, Any]:
        return {
            "swa": AveragedModel(module),
            "ema": AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
            "own": AveragedModel(module, avg_fn=lambda a, p, n: a + (p - a) / (n + 1)),
            "buffers": AveragedModel(module, use_buffers=True),
        }

    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = averages()
    full = copy.deepcopy(module)

    @smp.step
    def train(model: Any, x: Tensor) -> Any:
        model.backward(model(x).square().sum())

    for number in range(3):
        optimizer.zero_grad()
        train(model, torch.ones(4, 4))
        optimizer.step()
        for average in before.values():
            average.update_parameters(module)
        if number == 0:
            after = averages()
        for average in after.values():
            average.update_parameters(module)
    # A copy from before the first step is an ordinary module.
    assert not any(parameter.is_meta for parameter in full.parameters())
    full(torch.ones(4, 4)).sum().backward()
    partial = copy.deepcopy(module)
    if pp > 1:
        remote, name = (partial.last, "last") if smp.rank() == 0 else (partial.first, "first")
        with pytest.raises(SMPUsageError, match=f"copy of module '{name}', which lives on rank"):
            remote(torch.ones(4))
        with pytest.raises(SMPUsageError, match=f"copy of parameter '{name}.weight', which lives"):
            remote.weight.sum().item()
        with pytest.raises(SMPUsageError, match=r"copy model.get_module\(\)"):
            copy.deepcopy(model)
    # Averages go back into the model as in plain torch.
    found = {}
    for when, models in (("before", before), ("after", after)):
        for kind, average in models.items():
            with torch.no_grad():
                for mine, averaged in zip(
                    module.parameters(), average.module.parameters(), strict=True
                ):
                    mine.copy_(averaged)
            found[when, kind] = copies(model)
    return found


def test_copies_and_averages_have_on_each_rank_what_lives_there() -> None:
    (expected,) = check_ranks(copied, "1", 1)
    for rank in check_ranks(copied, "2", 2):
        torch.testing.assert_close(rank, expected)
