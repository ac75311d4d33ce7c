"""Buffers of modules on another rank: read in a step, changed at home, refused, copied."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import check_ranks
from smp.common import copies, squares
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError, SMPUsageError

pytestmark = pytest.mark.multiprocess

MANUAL = {"microbatches": 4, "auto_partition": False, "default_partition": 0}
WIDTH = 4


class Stats(nn.Module):
    """Changes its buffers in every way that a module can; in all ways if it `grows`."""

    def __init__(self, grows: bool = True) -> None:
        super().__init__()
        self.grows = grows
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("last", None)
        self.register_buffer("seen", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        with torch.no_grad():
            self.count.add_(1)
            self.average = 0.5 * self.average + x.mean(0)
            if self.grows:
                self.last = x[0].clone()
                self.seen = torch.cat([self.seen, x.mean().reshape(1)])
        return x


class Reader(nn.Module):
    """Uses buffers of another module, which may live elsewhere."""

    def __init__(self, stats: Stats, mask: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", mask)
        # Not a part of this module.
        self.others = [stats]

    def forward(self, x: Tensor) -> Tensor:
        """Depends on the mean that the other module has just updated."""
        (stats,) = self.others
        x = self.linear(x) * self.mask + stats.norm.running_mean
        return x / (1 + stats.count) + stats.average.sum() * 0.1


class Net(nn.Module):
    """The statistics live on the last rank, and the readers elsewhere."""

    def __init__(self, pp: int, grows: bool = True) -> None:
        super().__init__()
        mask = torch.ones(WIDTH)
        mask[0] = 0
        with smp.partition(0):
            self.first = nn.Linear(WIDTH, WIDTH)
        with smp.partition(pp - 1):
            self.stats = Stats(grows)
            self.stats.register_buffer("mask", mask)
        with smp.partition(min(1, pp - 1) if pp > 2 else 0):
            self.reader = Reader(self.stats, mask)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        before = self.stats.count.clone()
        x = self.stats(torch.tanh(self.first(x)))
        x = x * (self.stats.count - before)
        x = self.reader(x) + self.stats.mask
        if self.stats.last is not None:
            x = x + self.stats.last * 0.1
        return x + self.stats.seen.shape[0]


def trained(pp: int, pipeline: str, microbatches: int) -> Any:
    """Returns what each step has seen, the state at the end, names, and the replica."""
    options = {"pipeline": pipeline, "microbatches": microbatches, "active_microbatches": 4}
    smp.init({"partitions": pp, **MANUAL, **options, "ddp": True})
    torch.manual_seed(0)
    module = Net(pp)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.randn(16, WIDTH) + smp.dp_rank()
    stats = module.stats

    @smp.step
    def train(model: Any, x: Tensor) -> Any:
        y = model(x)
        penalty = stats.norm.running_mean.pow(2).sum() * stats.norm.weight.sum()
        loss = y.square().mean() + penalty + stats.average.norm()
        model.backward(loss)
        seen = [stats.count + 0, stats.norm.running_var * 1, stats.last.sum(), stats.seen.sum()]
        assert stats.seen.numel() == len(stats.seen) > 0
        assert stats.count.dtype == torch.long
        assert stats.last is not None
        return loss, seen, [b.double().sum() for b in module.buffers()]

    @smp.step
    def evaluate(model: Any, x: Tensor) -> Any:
        """A step of another kind, in which another module is read first."""
        count = stats.count
        return count * 1, model(x), count * 1, {n: b.sum() for n, b in stats.named_buffers()}

    results = []
    for _ in range(4):
        optimizer.zero_grad()
        loss, seen, buffers = train(model, data)
        optimizer.step()
        results.append([loss, *seen, *buffers])
        with torch.no_grad():
            first, y, second, named = evaluate(model, data)
        results.append([first, y, second, *named.values()])
        # Outside the step all ranks change what lives there.
        stats.count.add_(10)
        stats.average = torch.ones(WIDTH)
    found = [[value.stack() for value in row] for row in results]
    names = [name for name, _ in module.named_buffers()]
    return found, model.state_dict(), names, smp.dp_rank()


@pytest.mark.parametrize(
    ("replicas", "pipeline", "microbatches", "partitions"),
    [(1, "interleaved", 4, (2, 3)), (1, "simple", 2, (2, 3)), (2, "interleaved", 2, (2,))],
)
@pytest.mark.costly
def test_they_are_read_as_in_one_process(
    replicas: int, pipeline: str, microbatches: int, partitions: tuple[int, ...]
) -> None:
    expected = check_ranks(trained, str(replicas), 1, pipeline, microbatches)
    for pp in partitions:
        for rank in check_ranks(trained, str(pp * replicas), pp, pipeline, microbatches):
            seen, state, names, replica = rank
            torch.testing.assert_close(seen, expected[replica][0])
            assert list(state) == list(expected[replica][1])
            torch.testing.assert_close(state, expected[replica][1])
            assert names == expected[replica][2]


def pipelined() -> Any:
    """Buffers that do not change cost no order; once one changes, microbatches wait."""
    smp.init({"partitions": 2, **MANUAL})
    torch.manual_seed(0)
    module = Net(2)
    model = smp.DistributedModel(module)
    bodies: list[int] = []

    @smp.step
    def constant(model: Any, x: Tensor) -> Any:
        bodies.append(1)
        return module.stats.mask.sum() + module.first(x).sum()

    @smp.step
    def read(model: Any, x: Tensor) -> Any:
        if read_mean:
            y = module.stats(x)
            return module.stats.norm.running_mean.sum() + y.sum() * 0, module.stats.count * 1
        return x, x

    read_mean = True
    x = torch.randn(16, WIDTH)
    orders = model.runtime.step._order_matters
    model_called = smp.step(lambda model, x: model(x).sum())
    model_called(model, x)
    for _ in range(3):
        constant(model, x)
    quiet = orders["constant"]
    read_mean = False
    read(model, x)
    before = orders["read"]
    read_mean = True
    module.train(False)
    counts = []
    for _ in range(3):
        module.stats.count.zero_()
        _, count = read(model, x)
        counts.append(count.stack().tolist())
    return quiet, before, orders["read"], counts, len(bodies)


def test_microbatches_follow_each_other_only_if_buffers_change() -> None:
    for rank, found in enumerate(check_ranks(pipelined, "2")):
        quiet, before, after, counts, bodies = found
        assert (quiet, before, after) == (False, False, True)
        # Also in the step in which the change was noticed.
        assert counts == [[1, 2, 3, 4]] * 3
        assert bodies == (12 if rank == 0 else 0)


class Changer(nn.Module):
    """Wants to change a buffer of another module, which it gets as an argument or by name."""

    def __init__(self, stats: Stats) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.others = [stats]

    def forward(self, x: Tensor, how: str, buffer: Tensor | None = None) -> Tensor:
        if buffer is not None:
            buffer.add_(1)
        else:
            CHANGES[how](self.others[0])
        return x


CHANGES: dict[str, Any] = {
    "add_": lambda m: m.count.add_(1),
    "+=": lambda m: setattr(m, "count", m.count.__iadd__(1)),
    "=": lambda m: setattr(m, "average", torch.ones(WIDTH)),
    "= None": lambda m: setattr(m, "last", None),
    "register": lambda m: m.register_buffer("fresh", torch.ones(1)),
    "del": lambda m: delattr(m, "average"),
    "item": lambda m: m.average.__setitem__(0, 1.0),
    "data": lambda m: m.average.data.mul_(2),
    "view": lambda m: m.average[:2].zero_(),
    "detach": lambda m: m.average.detach().view(2, 2).t().fill_(1),
    "out": lambda m: torch.add(m.average, 1, out=m.average),
    "foreach": lambda m: torch._foreach_add_([m.average], 1.0),
    "batch_norm": lambda m: F.batch_norm(
        torch.randn(8, WIDTH), m.norm.running_mean, m.norm.running_var, training=True
    ),
    "none": lambda m: m.last.add_(1),
    "set data": lambda m: setattr(m.average, "data", torch.ones(WIDTH)),
}


class WithChanger(nn.Module):
    """Statistics on rank 1, and who changes them on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(1):
            self.stats = Stats()
        with smp.partition(0):
            self.changer = Changer(self.stats)

    def forward(self, x: Tensor) -> Tensor:
        return self.stats(self.changer.linear(x))


def refused() -> Any:
    smp.init({"partitions": 2, **MANUAL})
    module = WithChanger()
    model = smp.DistributedModel(module)
    x = torch.randn(16, WIDTH)

    @smp.step
    def train(model: Any, x: Tensor, how: str, where: str) -> Any:
        y = model(x)
        if where == "body":
            CHANGES[how](module.stats)
        elif where == "module":
            module.changer(y, how)
        elif where == "argument":
            module.changer(y, how, module.stats.average)
        return y

    train(model, x, "", "")
    texts = {}
    for where in ("body", "module"):
        for how in CHANGES:
            with torch.no_grad(), pytest.raises(SMPMicrobatchError) as caught:
                train(model, x, how, where)
            texts[how, where] = str(caught.value)
    with pytest.raises(SMPMicrobatchError) as caught:
        train(model, x, "", "argument")
    texts["argument", ""] = str(caught.value)
    kept = module.stats.average

    @smp.step
    def late(model: Any, x: Tensor, which: str) -> Any:
        if which == "kept":
            return kept * 2
        before = module.stats.average if which == "replaced" else module.stats.count
        if which == "view":
            before = module.stats.norm.running_mean[:2].detach()
        if which == "view of replaced":
            before = module.stats.average[:2].detach()
            copied = before.clone()
            model(x)
            return (before - copied).abs().sum()
        model(x)
        return before * 1

    late_texts = []
    for which in ("replaced", "kept", "view"):
        with pytest.raises(SMPMicrobatchError) as caught:
            late(model, x, which)
        late_texts.append(str(caught.value))
    # In place, a name is still right.
    counts = late(model, x, "count").stack()
    # What was in the place of a buffer before does not change.
    assert late(model, x, "view of replaced").stack().tolist() == [0, 0, 0, 0]
    outside = []
    if smp.rank() == 0:
        for need in (
            lambda b: b.sum().item(),
            lambda b: bool(b.any()),
            lambda b: torch.zeros(WIDTH) + b.cpu(),
            lambda b: b.tolist(),
        ):
            with pytest.raises(SMPUsageError) as usage:
                need(module.stats.norm.running_mean)
            outside.append(str(usage.value))
        assert module.stats.norm.running_mean.is_meta
        assert pickle.loads(pickle.dumps(module.stats.norm.running_mean)).shape == (WIDTH,)
    return texts, late_texts, counts.tolist(), outside


def test_changes_elsewhere_and_reads_outside_a_step_are_refused() -> None:
    for texts, late, counts, outside in check_ranks(refused, "2"):
        for (how, _), text in texts.items():
            assert "SMPUsageError: buffer 'stats." in text, (how, text)
            assert "lives on rank 1 of the pipeline" in text, (how, text)
            assert "would change a copy of it only" in text, (how, text)
        for text in late[:2]:
            assert "buffer 'stats.average' was taken from its module" in text
            assert "take a clone()" in text
        assert "buffer 'stats.norm.running_mean' lives on rank 1" in late[2]
        assert "A view of it was taken before a later call" in late[2]
        assert counts == sorted(counts)
        assert counts[-1] - counts[0] == 3
        for text in outside:
            assert "buffer 'stats.norm.running_mean' lives on rank 1" in text
            assert "smp.step" in text
            assert "model.local_buffers()" in text


def changed_too_early() -> str:
    smp.init({"partitions": 2, **MANUAL})
    module = WithChanger()
    model = smp.DistributedModel(module)

    @smp.step
    def train(model: Any, x: Tensor, early: bool) -> Any:
        if early:
            module.stats.count.add_(1)
        before = module.stats.count + 0
        return before, model(x).sum(), module.stats.count + 0

    with pytest.raises(SMPMicrobatchError) as caught:
        train(model, torch.randn(16, WIDTH), True)
    text = str(caught.value)
    module.stats.count.zero_()
    before, _, after = train(model, torch.randn(16, WIDTH), False)
    assert after.stack().tolist() == [1, 2, 3, 4]
    assert before.stack().tolist() == [0, 1, 2, 3]
    return text


def test_a_change_before_the_first_call_of_the_model_is_refused() -> None:
    for text in check_ranks(changed_too_early, "2"):
        assert "buffer 'stats.count' was changed in the body before the first call" in text


class Sharing(nn.Module):
    """Two modules on different ranks share buffers: one tensor, and a view; one is of a weight."""

    def __init__(self, pp: int) -> None:
        super().__init__()
        shared = torch.zeros(WIDTH)
        with smp.partition(0):
            self.one = nn.Linear(WIDTH, WIDTH)
            self.one.register_buffer("shared", shared)
        with smp.partition(pp - 1):
            self.two = Second()
            self.two.register_buffer("shared", shared)
            self.two.register_buffer("part", shared[:2])
            self.two.register_buffer("weight", self.one.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """The first changes what the second reads."""
        y = self.one(x)
        with torch.no_grad():
            self.one.shared.add_(1)
        return self.two(y)


class Second(nn.Module):
    """Reads its own buffers, which live elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.shared + self.part.sum() + x @ self.weight


def shared(pp: int) -> Any:
    smp.init({"partitions": pp, **MANUAL})
    torch.manual_seed(0)
    module = Sharing(pp)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(squares(model, torch.ones(16, WIDTH)).stack())
        optimizer.step()
    before = copies(model)
    model.load_state_dict({name: value + 1 for name, value in before.items()})
    return losses, before, copies(model)


def test_shared_buffers_have_one_home() -> None:
    (expected,) = check_ranks(shared, "1", 1)
    for rank in check_ranks(shared, "2", 2):
        torch.testing.assert_close(rank, expected)


def kept(pp: int) -> Any:
    """State dicts, conversions, copies and averages, between steps."""
    smp.init({"partitions": pp, **MANUAL})
    torch.manual_seed(0)
    module = Net(pp, grows=False)
    early = AveragedModel(module, use_buffers=True)
    model = smp.DistributedModel(module)
    in_sync = AveragedModel(module)
    x = torch.randn(16, WIDTH)

    @smp.step
    def train(model: Any, x: Tensor) -> Any:
        y = model(x.to(module.first.weight.dtype))
        model.backward(y.sum())
        return y.detach(), module.stats.norm.running_mean * 1, module.stats.average.sum()

    found: dict[str, Any] = {}
    for number in range(2):
        train(model, x)
        early.update_parameters(module)
        in_sync.update_parameters(module)
        if number == 0:
            found["first"] = copies(model)
    owned = [name for name, _ in model.local_named_buffers()]
    for kind, average in {"early": early, "in sync": in_sync}.items():
        named = average.module.named_buffers()
        found[kind] = {name: buffer.clone() for name, buffer in named if name in owned}
    whole = copy.deepcopy(module)
    if pp > 1 and smp.rank() == 0:
        with pytest.raises(SMPUsageError, match=r"copy of buffer 'stats.count', which lives on"):
            whole.stats.count.item()
    model.load_state_dict(found["first"])
    found["loaded"] = copies(model)
    found["after"] = [value.stack() for value in train(model, x)]
    model.double()
    found["double"] = copies(model)
    found["double step"] = [value.stack() for value in train(model, x.double())]
    model.cpu()
    named = module.named_buffers(remove_duplicate=False)
    found["everything"] = {name: buffer.clone() for name, buffer in named}
    found["again"] = [value.stack() for value in train(model, x.double())]
    if pp > 1 and smp.rank() == 0:
        assert module.stats.count.is_meta
    return found


def test_state_copies_and_conversions() -> None:
    (expected,) = check_ranks(kept, "1", 1)
    for rank in check_ranks(kept, "2", 2):
        for key, value in rank.items():
            wanted = expected[key]
            if key in ("early", "in sync"):
                wanted = {name: wanted[name] for name in value}
            torch.testing.assert_close(value, wanted, msg=lambda m, k=key: f"{k}: {m}")


class Sparse(nn.Module):
    """Has a sparse buffer, and one that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("graph", torch.eye(WIDTH).to_sparse())
        self.register_buffer("trace", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the autograd graph of a buffer."""
        y = torch.sparse.mm(self.graph, self.linear(x).t()).t()
        self.trace = y.mean(0)
        return y


def special() -> Any:
    smp.init({"partitions": 2, **MANUAL})
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Sparse())
    smp_model: Any = smp.DistributedModel(module)
    smp.set_partition(module[1], 1)

    @smp.step
    def train(model: Any, x: Tensor, which: str) -> Any:
        y = model(x)
        if which == "sparse":
            y = y + module[1].graph.to_dense()
        if which == "trace":
            y = y + module[1].trace
        model.backward(y.sum())
        return module[1].trace.detach().sum()

    train(smp_model, torch.ones(16, WIDTH), "")
    texts = []
    for which in ("sparse", "trace"):
        with pytest.raises(SMPMicrobatchError) as caught:
            train(smp_model, torch.ones(16, WIDTH), which)
        texts.append(str(caught.value))
    train(smp_model, torch.ones(16, WIDTH), "")
    return texts


def test_sparse_buffers_and_gradients_of_buffers_are_refused() -> None:
    for sparse, trace in check_ranks(special, "2"):
        assert "buffer '1.graph' lives on rank 1 of the pipeline and is sparse" in sparse
        assert "buffer '1.trace' was computed with gradients" in trace
