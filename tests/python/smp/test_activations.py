"""Activation checkpointing changes memory only: results are equal, bit by bit."""

from __future__ import annotations

import collections
import copy
import gc
import itertools
import pickle
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from ranks import check_ranks, listen
from smp.common import check_state
from smp.test_transparency import MICROBATCHES, STEPS, train_step, whole
from smp.zoo import ZOO, batch_of, device, make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError, SMPPartitionError, SMPUsageError
from smddp.modelparallel.torch.activations.region import Region
from smddp.modelparallel.torch.pipeline.mail import Mail
from smddp.modelparallel.torch.pipeline.protocol import Kind
from smdistributed.modelparallel.torch.patches import checkpoint as patches

pytestmark = pytest.mark.multiprocess

MANUAL = {"auto_partition": False, "default_partition": 0, "ddp": True, "microbatches": 2}

# Model -> modules (all whose name begins so, or the model) and strategy.
MARKS: dict[str, list[tuple[str, str]]] = {
    "mlp": [("", "each")],
    "resnet": [("", "group_2")],
    "shared layer": [("", "contiguous")],
    "unet": [("down.0", "each"), ("up.1", "each"), ("middle", "each")],
    "tied gpt": [(f"blocks.{number}", "each") for number in range(4)],
    "encoder-decoder": [("encoder.1", "each"), ("decoder.0", "each"), ("decoder.1.mlp", "group_2")],
    "mixture of experts": [(f"experts.{number}", "contiguous") for number in range(4)],
    "parametrized": [("normed", "each"), ("hooked", "each")],
    "loose ends": [(f"parts.{number}", "each") for number in range(3)],
    "frozen": [("fixed", "each"), ("last", "each")],
    "checkpointed": [("layers.1", "contiguous"), ("layers.2", "each"), ("layers.4", "group_2")],
    "recurrent": [("", "plain")],
    "recursive": [("", "plain")],
}


def mark(model: Any, name: str) -> None:
    for prefix, strategy in MARKS[name]:
        if strategy == "plain":
            modules = list(model.get_module().children())
        else:
            modules = [model.get_module().get_submodule(prefix)]
        for module in modules:
            if strategy in ("plain", "each"):
                smp.set_activation_checkpointing(module)
            else:
                smp.set_activation_checkpointing(module, strategy=strategy)


def divided(config: dict[str, Any], names: Iterable[str] = MARKS) -> dict[str, Any]:
    """Trains models with marks; returns their state dicts by name."""
    gc.freeze()  # so that collecting a model does not visit all objects of torch
    smp.init({"ddp": True, "microbatches": MICROBATCHES, **config})
    results = {}
    for name in names:
        module = make(name)
        model = smp.DistributedModel(module)
        mark(model, name)
        optimizer = smp.DistributedOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = [tensor.to(device()) for tensor in batch_of(name, step, smp.rdp_rank())]
            train_step(model, name, *batch)
            optimizer.step()
        results[name] = {n: v.clone() for n, v in model.state_dict().items()}
        del model, optimizer, module
        gc.collect()
    return results


NAMES = list(MARKS)


@pytest.mark.parametrize(
    ("pp", "replicas", "more", "names"),
    [
        (1, 1, {}, NAMES),
        (2, 1, {}, NAMES[::2]),
        (2, 1, {"pipeline": "simple", "partitioner": "tree"}, NAMES[1::2]),
        (2, 2, {"active_microbatches": 2, "direct_forwarding": False}, NAMES[::3]),
    ],
    ids=["1", "2", "2-simple", "2x2"],
)
def test_models_with_checkpoints_learn_the_same(
    pp: int, replicas: int, more: Any, names: list[str]
) -> None:
    ranks = check_ranks(divided, str(pp * replicas), {"partitions": pp, **more}, names)
    for name in names:
        _, state = whole(name, replicas)
        for rank, results in enumerate(ranks):
            tolerance = 0.0 if ZOO[name].exact and replicas == 1 else 1e-6
            check_state(results[name], state, tolerance, rank < pp, f"{name} on rank {rank}")


class Part(nn.Module):
    """Draws random numbers, and takes and returns nested values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(
        self, x: Tensor | tuple[Tensor, dict[str, Tensor]], scale: Any = None, *, power: int = 1
    ) -> Any:
        more = None
        if isinstance(x, tuple):
            x, more = x
            scale = more["scale"]
        y = self.dropout(torch.tanh(self.linear(x)))
        if scale is not None:
            y = y * scale**power
        return y if more is None else (y, more)


class Twice(nn.Module):
    """Uses one parameter twice, in two ways, and checkpoints a part of itself in both ways."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25), nn.Tanh())

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        x = F.linear(x, self.weight)
        x = checkpoint(self.inner, x, use_reentrant=reentrant)  # type: ignore[assignment]
        return F.linear(torch.relu_(x), self.weight)


class Average(nn.Module):
    """Changes buffers in all ways, also those that its result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", None)
        self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.last is not None:
            x = x + self.last
        self.calls += 1
        self.last = x.detach().mean(0)
        x = self.norm(x - self.mean / self.calls)
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        y = self.linear(x)
        y += 1
        return y.relu_()


class Everything(nn.Module):
    """Parts that live on two ranks."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        with smp.partition(last):
            self.named = Part()
            self.tuples = nn.Sequential(Part(), Part(), Part())
            self.twice = Twice(nn.Parameter(torch.randn(4, 4)))
            self.average = Average()
            self.in_place = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.1))
        self.sequence = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        with smp.partition(last):
            self.sequence.extend(nn.Sequential(Part(), nn.Tanh(), Part(), Part()))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.named(x, scale=torch.tensor(0.5), power=2)
        x = self.tuples((x, {"scale": x.mean()}))[0]
        x = self.twice(x, True) + self.twice(x, False)
        x = self.average(x)
        x = self.in_place(x)
        return self.last(self.sequence(x))


class Patched(Everything):
    """Does the same with the functions of `patches.checkpoint`."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = patches.checkpoint(self.named, x, scale=torch.tensor(0.5), power=2)
        pair = (x, {"scale": x.mean()})
        x = patches.checkpoint_sequential(self.tuples, pair, "group_2", pack_args_as_tuple=True)[0]
        x = patches.checkpoint(self.twice, x, True) + patches.checkpoint(self.twice, x, False)
        x = patches.checkpoint(self.average, x)
        x = patches.checkpoint_sequential(self.in_place, x)
        return self.last(patches.checkpoint_sequential(self.sequence, x, strategy="contiguous"))


class Layered(Everything):
    """Does the same without calls of an nn.Sequential, which would seed the generators anew."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.named(x, scale=torch.tensor(0.5), power=2)
        pair = (x, {"scale": x.mean()})
        for layer in self.tuples:
            pair = layer(pair)
        x = self.twice(pair[0], True) + self.twice(pair[0], False)
        x = self.average(x)
        for layer in (*self.in_place, *self.sequence, self.last):
            x = layer(x)
        return x


# Messages of the last step, by kind.
sent: collections.Counter[Kind] = collections.Counter()


@smp.step
def train(model: Any, x: Tensor, cast: bool) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        output = model(x)
    loss = output.float().square().mean()
    model.backward(loss)
    return output, loss


def steps(model: Any, cast: bool = False) -> list[Any]:
    """Trains; returns results, gradients and state."""
    torch.manual_seed(1)
    results: list[Any] = []
    for step in range(3):
        sent.clear()
        generator = torch.Generator().manual_seed(step)
        output, loss = train(model, torch.randn(8, 4, generator=generator), cast)
        results.append((output.concat(), loss.stack()))
    results.append({n: p.grad for n, p in model.local_named_parameters()})
    results.append(model.state_dict())
    return results


@pytest.mark.parametrize("pp", [1, 2])
@on_ranks("{pp}")
def test_results_are_those_without_checkpoints(pp: int) -> None:
    """Compares models with and without checkpoints."""
    gc.freeze()  # so that collecting a model does not visit all objects of torch
    smp.init({"partitions": pp, **MANUAL})

    send = Mail.send

    def counted(mail: Mail, peer: int, kind: Kind, *more: Any) -> bool:
        sent[kind] += 1
        return send(mail, peer, kind, *more)

    Mail.send = counted  # type: ignore[method-assign]

    def run(kind: type[nn.Module], cast: bool, set_up: Any = None) -> list[Any]:
        torch.manual_seed(0)
        model = smp.DistributedModel(kind(pp - 1))
        if set_up is not None:
            set_up(model.get_module())
        results = steps(model, cast)
        del model
        gc.collect()
        return results

    def work() -> list[int]:
        return [sent[kind] for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.DROP)]

    def each(module: Any) -> None:
        for part in (module.first, module.named, module.twice, module.average, module.last):
            smp.set_activation_checkpointing(part)
        for part in (module.tuples, module.in_place, module.sequence):
            smp.set_activation_checkpointing(part, pack_args_as_tuple=True)

    def grouped(module: Any) -> None:
        smp.set_activation_checkpointing(module.tuples, strategy="group_2")
        smp.set_activation_checkpointing(module.in_place, strategy="contiguous")
        smp.set_activation_checkpointing(module.sequence, strategy="contiguous")
        smp.set_activation_checkpointing(module.sequence, strategy="group_3")
        smp.set_activation_checkpointing(module.sequence[3])  # inside a group

    for cast in (False, True):
        plain, messages = run(Everything, cast), work()
        assert min(messages[:2]) > 0 or pp == 1
        for set_up in (each, grouped):
            torch.testing.assert_close(run(Everything, cast, set_up), plain, rtol=0, atol=0)
            assert work() == messages  # none to compute anything again
    plain = run(Layered, False)
    torch.testing.assert_close(run(Patched, False), plain, rtol=0, atol=0)
    # Without the same random numbers, gradients do not fit.
    anew = run(Layered, False, lambda m: smp.set_activation_checkpointing(m.named, False))
    if (name := "named.linear.weight") in plain[3]:
        assert not torch.equal(anew[3][name], plain[3][name])


class Letter(nn.Module):
    """A layer that notes its calls."""

    calls: ClassVar[list[str]] = []

    def __init__(self, letter: str) -> None:
        super().__init__()
        self.letter, self.linear = letter, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(self.letter)
        return torch.tanh(self.linear(x))


class Letters(nn.Module):
    """Layers a and b, and on the last rank c, d and e."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(Letter("a"), Letter("b"))
        with smp.partition(last):
            self.layers.extend(nn.Sequential(*map(Letter, "cde")))
        self.strategy = ""  # of the function; empty without it

    def forward(self, x: Tensor) -> Tensor:
        if not self.strategy:
            return self.layers(x)
        return patches.checkpoint_sequential(self.layers, x, self.strategy)


STRATEGIES = {
    "each": (["a", "b", "c", "d", "e"], ["a", "b", "c", "d", "e"]),
    "group_1": (["a", "b", "c", "d", "e"], ["a", "b", "c", "d", "e"]),
    "group_2": (["ab", "cd", "e"], ["ab", "cd", "e"]),
    "group_3": (["abc", "de"], ["ab", "cde"]),
    "group_4": (["abcd", "e"], ["ab", "cde"]),
    "group_7": (["abcde"], ["ab", "cde"]),
    "contiguous": (["abcde"], ["ab", "cde"]),
}


def groups(pp: int, function: bool) -> list[list[str]]:
    """Returns for each strategy the layers that this rank computes again together.

    Groups are computed again from the last to the first, the layers of each in their order.
    """
    smp.init({"partitions": pp, **MANUAL, "microbatches": 1})
    net = Letters(pp - 1)
    model = smp.DistributedModel(net)
    found = []
    for strategy in STRATEGIES:
        if function:
            net.strategy = strategy
        else:
            smp.set_activation_checkpointing(net.layers, strategy=strategy)
        Letter.calls.clear()
        train(model, torch.ones(2, 4), False)
        calls = "".join(Letter.calls)
        again = calls[len(calls) // 2 :]
        ends = [i for i in range(1, len(again)) if again[i] < again[i - 1]]
        found.append([again[i:j] for i, j in itertools.pairwise([0, *ends, len(again)])][::-1])
    return found


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
def test_layers_are_grouped_as_the_strategy_says(pp: int, function: bool) -> None:
    ranks = check_ranks(groups, str(pp), pp, function)
    for number, strategy in enumerate(STRATEGIES):
        found = [group for rank in ranks for group in rank[number]]
        assert found == STRATEGIES[strategy][pp - 1], strategy


class OfTwo(nn.Module):
    """Takes two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)) + y, x


class OfTuple(OfTwo):
    """Takes a tuple."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        assert isinstance(pair, tuple)
        return super().forward(*pair)


class Unpacked(nn.Module):
    """Passes a tuple through layers, by hand or by `checkpoint_sequential` without packing."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(OfTwo(), OfTuple())
        with smp.partition(last):
            self.layers.extend(nn.Sequential(OfTwo(), OfTwo(), OfTuple()))
        self.strategy, self.copies = "", False

    def forward(self, x: Tensor) -> Tensor:
        pair = (x, 2 * x)
        if self.strategy:
            layers = nn.Sequential(*self.layers) if self.copies else self.layers
            pair = patches.checkpoint_sequential(layers, pair, self.strategy)
            return pair[0] * pair[1]
        for layer in self.layers:
            pair = layer(pair) if isinstance(layer, OfTuple) else layer(*pair)
        return pair[0] * pair[1]


@pytest.mark.parametrize("pp", [1, 2])
@on_ranks("{pp}")
def test_layers_get_a_tuple_as_they_take_it(pp: int) -> None:
    smp.init({"partitions": pp, **MANUAL})
    net = Unpacked(pp - 1)
    model = smp.DistributedModel(net)
    plain = steps(model)
    for net.copies in (False, True) if pp == 1 else (False,):  # a copy is not of the model
        for net.strategy in ("each", "group_2", "contiguous"):
            model.zero_grad()
            torch.testing.assert_close(steps(model), plain, rtol=0, atol=0)


class Own(nn.Sequential):
    """Calls its layers itself, also through a checkpoint of all of them."""

    def forward(self, x: Tensor, whole: bool = True) -> Any:
        if whole:
            return patches.checkpoint(self, x, whole=False)
        for layer in self:
            x = layer(x)
        return x


@on_ranks("2")
def test_misuse_is_an_error_on_all_ranks() -> None:
    """The errors are raised on both ranks."""
    smp.init({"partitions": 2, **MANUAL})
    with pytest.raises(SMPUsageError, match=r"create smp.DistributedModel before"):
        smp.set_activation_checkpointing(nn.Linear(4, 4))
    net = Everything(1)
    model = smp.DistributedModel(net)
    mark = smp.set_activation_checkpointing
    with pytest.raises(SMPUsageError, match="the Linear is not part of the model"):
        mark(nn.Linear(4, 4))
    with pytest.raises(SMPUsageError, match=r"takes a module, .* not a Parameter"):
        mark(net.first.weight)
    for strategy in ("group_0", "group_x", "all", 2):
        with pytest.raises(SMPUsageError, match="strategy must be 'each', 'contiguous' or"):
            mark(net.tuples, strategy=strategy)
    with pytest.raises(SMPUsageError, match=r"for an nn.Sequential, and 'named' is a Part"):
        mark(net.named, strategy="contiguous")
    with pytest.raises(SMPUsageError, match=r"for an nn.Sequential, and 'named' is a Part"):
        mark(net.named, pack_args_as_tuple=True)
    with pytest.raises(SMPUsageError, match=r"takes a torch.nn.Sequential, not a Part"):
        patches.checkpoint_sequential(net.named, torch.ones(4))
    with pytest.raises(SMPUsageError, match=r"takes a torch.nn.Module, not a builtin"):
        patches.checkpoint(torch.tanh, torch.ones(4))

    # It spans two ranks: known in the first step, and afterwards at once.
    mark(model)
    with pytest.raises(SMPPartitionError, match=r"rank 0 of .*'model' lives on ranks 0 and 1 of"):
        train(model, torch.ones(8, 4), False)
    assert not model.partitioned
    smp.shutdown()
    smp.init({"partitions": 2, **MANUAL})
    model = smp.DistributedModel(net)
    mark(net.sequence, strategy="contiguous")
    train(model, torch.ones(8, 4), False)
    with pytest.raises(SMPPartitionError, match=r"'model' lives on ranks 0 and 1 of the pipeline"):
        mark(net)
    train(model, torch.ones(8, 4), False)

    @smp.step
    def inside(model: Any, x: Tensor) -> None:
        mark(model.get_module().first)

    with pytest.raises(SMPMicrobatchError, match="cannot be called inside a step"):
        inside(model, torch.ones(8, 4))
    if smp.pp_rank() == 0:
        mark(net.first)
    with pytest.raises(SMPUsageError, match="ranks 0 and 1 of the pipeline have set activation"):
        train(model, torch.ones(8, 4), False)
    if smp.pp_rank() == 1:
        mark(net.first)
    train(model, torch.ones(8, 4), False)

    smp.shutdown()
    smp.init({"partitions": 2, **MANUAL})
    own = Own(nn.Linear(4, 4))
    with smp.partition(1):
        own.append(nn.Linear(4, 4))
    model = smp.DistributedModel(own)
    with pytest.raises(SMPUsageError, match="Own has a forward method of its own"):
        mark(own, strategy="group_2")
    mark(own)
    with pytest.raises(SMPPartitionError, match="module 'model' lives on ranks 0 and 1"):
        train(model, torch.ones(8, 4), False)
    with pytest.raises(SMPPartitionError, match="module 'model' lives on ranks 0 and 1"):
        mark(own, strategy="contiguous")
    own.append(nn.Linear(4, 4))
    with pytest.raises(SMPUsageError, match=r"layer 2 of 'model' was put there after"):
        mark(own)


class PatchedBlocks(nn.Module):
    """Uses the functions of `patches.checkpoint` while it is traced, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Part() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = patches.checkpoint(self.blocks[0], x)
        # Containers that are not of the model.
        x = patches.checkpoint(nn.Sequential(self.blocks[1], self.blocks[2]), x)
        return patches.checkpoint_sequential(nn.Sequential(*self.blocks[3:]), x)


def traced() -> int:
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True})
    said = listen()
    torch.manual_seed(0)
    model = smp.DistributedModel(PatchedBlocks())
    train(model, torch.ones(8, 4), False)
    train(model, torch.ones(8, 4), False)
    assert not any("fake tensors failed" in text for text in said)
    return len(list(model.local_parameters()))


def test_functions_in_the_model_can_be_traced() -> None:
    counts = check_ranks(traced, "2")
    assert sum(counts) == 8
    assert min(counts) > 0


def automatic() -> Any:
    """A module that spans partitions keeps its activations, and a warning says so once."""
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True})
    said = listen()
    outer = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(outer, nn.Linear(4, 4)))
    smp.set_activation_checkpointing(model.get_module(), strategy="group_2")
    results = [train(model, torch.ones(8, 4), False)[1].stack() for _ in range(2)]
    return [text for text in said if "checkpointing" in text], results


def test_a_module_on_several_ranks_is_a_warning_if_the_division_is_automatic() -> None:
    (first, results), (second, _) = check_ranks(automatic, "2")
    assert len(first) == 1
    assert "module '0' lives on ranks 0 and 1 of the pipeline" in first[0]
    assert second == []
    assert len(results) == 2


@on_ranks("1")
def test_one_partition_outside_a_step() -> None:
    """With one partition: outside a step, in evaluations, and copies of the model."""
    smp.init({"partitions": 1, "microbatches": 1})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Average(), nn.Sequential(Part(), Part()))
    whole = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    smp.set_activation_checkpointing(model, strategy="contiguous")
    smp.set_activation_checkpointing(net[2], strategy="group_2")

    def gradients(model: Any) -> list[Any]:
        torch.manual_seed(1)
        x = torch.randn(3, 4, requires_grad=True)
        loss = model(x).square().sum()
        (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        return [of_input, *(parameter.grad for parameter in model.parameters())]

    for _ in range(2):
        for one, other in zip(gradients(model), gradients(whole), strict=True):
            assert torch.equal(one, other)
        for name, value in model.state_dict().items():
            assert torch.equal(value, whole.state_dict()[name]), name

    # A copy is a model of its own.
    for copied in (copy.deepcopy(net)[2], pickle.loads(pickle.dumps(net[2]))):
        assert copied.forward.__self__ is copied
        for parameter in copied.parameters():
            parameter.data.zero_()
        assert not copied(torch.randn(3, 4)).any()
        assert copied(torch.randn(3, 4)).requires_grad

    # Without gradients nothing is kept or computed again.
    calls: list[int] = []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(torch.randn(3, 4))
    assert len(calls) == 1
    model.backward(model(torch.randn(3, 4)).sum())
    assert len(calls) == 3


class Sometimes(nn.Module):
    """Does in later calls what it did not do in the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.change = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x.mul_(2) if self.change else x * self.scale)


def test_what_cannot_be_computed_again_is_an_error() -> None:
    module = Sometimes()
    region = Region("module 'it'", [module])
    leaf = torch.ones(4, requires_grad=True)
    region.call(module, (leaf * 2,), {}, True).sum().backward()
    result = region.call(module, (leaf * 2,), {}, True)
    module.scale.mul_(2)
    with pytest.raises(SMPUsageError, match=r"'it' has .*its buffer 'scale' was changed between"):
        result.sum().backward()
    module.change = True
    with pytest.raises(SMPUsageError, match=r"'it' has .*changed an argument in place"):
        region.call(module, (leaf * 2,), {}, True)


def test_one_tensor_as_two_arguments_stays_one() -> None:
    def double(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(3)
        return torch.exp(x * y)

    leaves = [torch.ones(4, requires_grad=True) for _ in range(2)]
    pairs = [leaf * 0.5 for leaf in leaves]
    Region("it", []).call(double, (pairs[0], pairs[0]), {}, True).sum().backward()
    double(pairs[1], pairs[1]).sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)  # type: ignore[arg-type]


def test_containers_that_a_module_changes_are_those_of_the_caller() -> None:
    def note(x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x.detach())
        return torch.exp(x)

    seen: list[Tensor] = []
    leaf = torch.ones(4, requires_grad=True)
    Region("it", []).call(note, (leaf * 2, seen), {}, True).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(leaf.grad, 2 * torch.exp(torch.full((4,), 2.0)))


class Kept:
    """Keeps what modules have put into it, as the cache of a language model does."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.list: list[Any] = [1]
        self.inner: Any = collections.deque([{"a": {1}}])
        self.ordered = collections.OrderedDict(a=1)
        self.slots = Slots()


class Slots:
    """Has attributes that are not in a dict."""

    __slots__ = ("__count", "unset")

    def __init__(self) -> None:
        self.__count = 0

    def add(self) -> int:
        self.__count += 1
        if self.__count == 2:
            self.unset = [self]
        return self.__count


class Caching(nn.Module):
    """Puts something into an object in each call; its result depends on what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Kept) -> Tensor:
        y = self.linear(x)
        cache.keys = y if cache.keys is None else torch.cat([cache.keys, y])
        cache.list.append(len(cache.list))
        cache.inner[0]["a"].add(len(cache.inner[0]["a"]) + 1)
        cache.inner.append(sum(cache.list))
        cache.ordered["b"] = cache.ordered.pop("a", 5) + 1
        cache.ordered["a"] = cache.slots.add()
        factor = len(cache.inner[0]["a"]) + cache.inner[-1] + cache.slots.add()
        factor += next(iter(cache.ordered.values())) + hasattr(cache.slots, "unset")
        return torch.tanh(cache.keys.sum(0, keepdim=True) * y).exp() * factor


def caching(checkpoints: bool) -> Any:
    """Returns gradients, and what the cache holds in the end."""
    smp.init({"microbatches": 2, "ddp": True})
    torch.manual_seed(0)
    layers = nn.ModuleList(Caching() for _ in range(3))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers
            self.caches: list[Kept] = []

        def forward(self, x: Tensor) -> Tensor:
            cache = Kept()
            for layer in self.layers:
                x = layer(x, cache)
            self.caches.append(cache)
            return x

    net = Net()
    model = smp.DistributedModel(net)
    for layer in layers if checkpoints else []:
        smp.set_activation_checkpointing(layer)

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        loss = model(x).mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        step(model, torch.randn(4, 4))
    held = [
        (c.keys.shape, c.list, c.inner, list(c.ordered.items()), c.slots.add()) for c in net.caches
    ]
    return [parameter.grad for parameter in model.parameters()], held


def test_objects_hold_what_they_did_before_the_first_run() -> None:
    (gradients, held), (expected, expected_held) = (
        check_ranks(caching, "1", checkpoints)[0] for checkpoints in (True, False)
    )
    assert held == expected_held
    for one, other in zip(gradients, expected, strict=True):
        assert torch.equal(one, other)


def test_a_tensor_in_an_object_that_changes_in_place_is_an_error() -> None:
    kept = Kept()
    kept.keys = torch.ones(4)
    leaf = torch.ones(4, requires_grad=True)

    def change(x: Tensor, cache: Any) -> Tensor:
        return torch.exp(x * cache.keys.mul_(2))

    with pytest.raises(SMPUsageError, match=r"^it has .*tensor of shape \(4,\) in an object"):
        Region("it", []).call(change, (leaf * 2, kept), {}, True)
    read = Region("it", []).call(lambda x, cache: torch.exp(x * cache.keys), (leaf, kept), {}, True)
    kept.keys.mul_(2)
    with pytest.raises(SMPUsageError, match=r"^it has .*tensor of shape \(4,\) in an object"):
        read.sum().backward()
