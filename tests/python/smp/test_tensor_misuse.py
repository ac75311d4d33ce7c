"""Misuse of tensor parallelism: all ranks raise a text that says what is wrong, none waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import check_ranks
from smp.common import evaluate
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

pytestmark = pytest.mark.multiprocess

WIDTH = 4


class Own(nn.Linear):
    """A class of the script."""


class Plain(nn.Linear):
    """Divides nothing."""


class Doubled(smp.nn.DistributedLinear):
    """Divides its weight."""


@smp.step
def train(model: Any, x: Tensor, second: Tensor | None = None) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def marked(kind: type[nn.Module] = nn.Linear, on: bool = True) -> nn.Module:
    torch.manual_seed(3)
    with smp.tensor_parallelism(on):
        return nn.Sequential(kind(WIDTH, WIDTH))


class Square(nn.Module):
    """A class whose arguments are not those of a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width))

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight)


def marked_square() -> nn.Module:
    with smp.tensor_parallelism():
        return nn.Sequential(Square(WIDTH))


# Hooks that do not fit Square, by what is wrong.
HOOKS: dict[str, dict[str, Any]] = {
    "no hook": {},
    "hook returns None": {"init_hook": lambda width: None},
    "hook returns numbers": {"init_hook": lambda width: (width, width)},
    "hook returns arguments alone": {"init_hook": lambda width: ((width, width),)},
    "hook returns pairs": {"init_hook": lambda width: ((width,), (width,))},
    "hook returns too many": {"init_hook": lambda width: ((width,) * 9, {})},
    "hook returns another name": {"init_hook": lambda width: ((width, width), {"colour": 1})},
}


@contextlib.contextmanager
def refused(texts: dict[str, str], name: str) -> Iterator[None]:
    """In this context an error is raised at once, which `texts` gets."""
    begun = time.monotonic()
    with pytest.raises((smp.SMPError, TypeError)) as caught:
        yield
    assert time.monotonic() - begun < 15
    texts[name] = f"{type(caught.value).__name__}: {caught.value}".partition("\n")[0]


def misused() -> dict[str, str]:
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True})
    texts: dict[str, str] = {}
    rank = smp.rank()
    with refused(texts, "size"):
        smp.nn.DistributedLinear(3, WIDTH)
    with refused(texts, "mark of no module"):
        smp.set_tensor_parallelism("linear")
    with refused(texts, "register no module"):
        smp.tp_register(int)(Own)
    early = marked(Own)
    smp.tp_register_with_module(Own, Plain)
    with refused(texts, "register late"):
        smp.DistributedModel(early)
    with refused(texts, "register plain"):
        smp.DistributedModel(marked(Own))
    for name, hook in HOOKS.items():
        smp.tp_register_with_module(Square, smp.nn.DistributedLinear, **hook)
        with refused(texts, name):
            smp.DistributedModel(marked_square())
    with refused(texts, "marks differ"):
        smp.DistributedModel(marked(on=rank == 0))
    with refused(texts, "fails on one rank"):
        smp.DistributedModel(nn.LazyLinear(WIDTH) if rank else marked())
    for name, options in (
        ("heads differ", {"num_attention_heads": 2 + 2 * rank, "attention_head_size": 2 - rank}),
        ("activations differ", {"activation": "gelu_new" if rank else "relu"}),
        ("shapes differ", {"intermediate_size": 8 + 8 * rank}),
    ):
        layer = {"num_attention_heads": 2, "attention_head_size": 2, "hidden_size": WIDTH}
        with refused(texts, name):
            smp.DistributedModel(
                smp.nn.DistributedTransformerLayer(**{**layer, "intermediate_size": 8, **options})
            )
    with refused(texts, "dtypes differ"):
        smp.DistributedModel(marked().double() if rank else marked())
    for name, on in (("frozen on one rank", True), ("whole and frozen on one rank", False)):
        module = marked(on=on)
        module[0].bias.requires_grad_(rank == 0)
        with refused(texts, name):
            smp.DistributedModel(module)
    smp.tp_register_with_module(Own, Doubled)  # the last registration counts
    module = marked(Own)
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    model = smp.DistributedModel(module)
    assert type(model.get_module()[0]) is Doubled
    with refused(texts, "optimizer early"):
        smp.DistributedOptimizer(inner)
    before = model.state_dict()
    for shape in ((WIDTH, WIDTH - 1), (WIDTH, WIDTH // 2), (WIDTH, 1), (WIDTH, 2 * WIDTH)):
        with pytest.raises(RuntimeError, match=r"needs \[4, 4\]") as caught:
            model.load_state_dict(
                {**before, "0.weight": torch.ones(shape), "0.bias": before["0.bias"] + 1}
            )
        texts[f"load {shape}"] = str(caught.value)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    with refused(texts, "mark late"):
        smp.set_tensor_parallelism(model.get_module()[0])
    for kind in (torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS):
        with refused(texts, kind.__name__):
            smp.DistributedOptimizer(kind([p for p in model.parameters() if p.dim() == 2]))
    x = torch.arange(8.0).view(2, WIDTH)
    expected = train(model, x).reduce_mean()
    with refused(texts, "batches"):
        train(model, x + rank)
    with refused(texts, "order of batches"):
        train(model, x.flip(0) if rank else x)
    with refused(texts, "more tensors"):
        train(model, x, x if rank else None)
    assert torch.equal(train(model, x).reduce_mean(), expected)
    return texts


MISUSE = {
    "size": "dimension 1 has to be a multiple of 2",
    "mark of no module": "takes a module, not str",
    "register no module": "dist_module must be a class of modules, not <class 'int'>",
    "register late": "was made before smp.tp_register knew its class",
    "register plain": "Plain, which takes the place of module '0' (Own), has no smp.nn.",
    "no hook": "smp.tp_register: DistributedLinear takes the place of module '0' (Square), and "
    "cannot be made with the arguments (4): missing a required argument: 'out_features'; "
    "let an init_hook return its arguments",
    **{
        f"hook returns {what}": "init_hook <lambda> of what takes the place of module '0' (Square) "
        f"has to return (arguments, dict of named arguments), not {text}"
        for what, text in (
            ("None", "None"),
            ("numbers", "(4, 4)"),
            ("arguments alone", "((4, 4),)"),
            ("pairs", "((4,), (4,))"),
        )
    },
    "hook returns too many": "(4, 4, 4, 4, 4, 4, 4, 4, 4): too many positional arguments; let an",
    "hook returns another name": "(4, 4, colour=1): got an unexpected keyword argument 'colour'",
    "marks differ": "'0' is DistributedLinear(in_features=4, out_features=4, bias=True, "
    "ranks=2) on rank 0 of the job, and not divided on rank 1",
    "fails on one rank": "LazyLinear, whose parameters have no shape yet",
    "heads differ": "'attention.num_attention_heads' is 2 on rank 0 of the job, and 4 on rank 1",
    "activations differ": "'output.activation' is relu on rank 0 of the job, and functools.partial",
    "shapes differ": "'output.dense1.weight' is of shape [4, 4] on rank 0 of the job, and of",
    "dtypes differ": "'0.weight.dtype' is float32 on rank 0 of the job, and float64 on rank 1",
    **{
        f"load {(WIDTH, width)}": f"'0.weight' has shape [4, {width}], and needs [4, 4]"
        for width in (WIDTH - 1, WIDTH // 2, 1, 2 * WIDTH)
    },
    **dict.fromkeys(
        ("frozen on one rank", "whole and frozen on one rank"),
        "'0.bias.requires_grad' is True on rank 0 of the job, and False on rank 1",
    ),
    "optimizer early": "create the optimizer after it",
    **{kind: f"{kind} needs whole parameters" for kind in ("Adafactor", "Muon", "LBFGS")},
    "mark late": "has to be called before smp.DistributedModel",
    "batches": "rank 1 of the job has another one than rank 0: choose it by smp.rdp_rank()",
    "order of batches": "rank 1 of the job has another one than rank 0",
    "more tensors": "rank 1 of the job has another one than rank 0",
}


def test_misuse_raises_on_all_ranks() -> None:
    # Which rank finds a wrong batch first is a matter of time. The other may hear of it before it
    # has compared the batches itself, and then its error names that rank: so the texts may differ.
    for texts in check_ranks(misused, "2"):
        for name, text in MISUSE.items():
            assert text in texts.pop(name), name
        assert not texts


def of_a_forward_hook() -> str:
    smp.init({"ddp": True, "tensor_parallel_degree": 2})
    smp.tp_register_with_module(
        *(Square, smp.nn.DistributedLinear, lambda width: ((width, width), {}), lambda input: input)
    )
    texts: dict[str, str] = {}
    model = smp.DistributedModel(marked_square())
    with refused(texts, "outside a step"):
        model(torch.ones(2, WIDTH))
    return texts["outside a step"]


def test_a_forward_hook_that_returns_no_arguments() -> None:
    for text in check_ranks(of_a_forward_hook, "2"):
        assert text.startswith(
            "SMPUsageError: smp.tp_register: forward_hook <lambda> of what takes the place of "
            "module '0' (Square) has to return (arguments, dict of named arguments), not tensor("
        )


def of_wrong_size() -> str:
    with pytest.raises(smp.SMPInitializationError) as caught:
        smp.init({"ddp": True, "tensor_parallel_degree": 2, "partitions": 2})
    return str(caught.value)


def test_ranks_that_cannot_be_divided() -> None:
    for text in check_ranks(of_wrong_size, "2"):
        assert "2 ranks cannot be divided into pipelines of 2 partitions x 2 tensor" in text


@smp.step
def masked(model: Any, x: Tensor, batch: dict[str, Any]) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def of_two_forms(prescaled: bool) -> list[str]:
    """Returns what is said of batches that are of the same size, and not of one form."""
    config = {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": prescaled}
    smp.init({**config, "microbatches": 2})
    model = smp.DistributedModel(marked())
    rank, x, texts = smp.rank(), torch.arange(32.0).view(4, 2, WIDTH), {}
    expected = train(model, x).reduce_mean()
    x2 = x.view(2, WIDTH, WIDTH) if rank else x
    with refused(texts, "shape"):
        train(model, x2)
    with refused(texts, "dtype"):
        train(model, x.double() if rank else x)
    with refused(texts, "None"):
        masked(model, x, {"mask": None if rank else x, "name": f"of rank {rank}"})
    masked(model, x, {"mask": x, "name": f"of rank {rank}"})
    with refused(texts, "gradient"):
        train(model, x.clone().requires_grad_() if rank else x)
    with refused(texts, "outside a step"):
        model(x2)
    if prescaled:
        with refused(texts, "order of features"):
            train(model, x.flip(-1) if rank else x)
        with refused(texts, "values outside a step"):
            model(x + rank)
    assert torch.equal(train(model, x).reduce_mean(), expected)
    assert model(x).shape == x.shape
    return list(texts.values())


@pytest.mark.parametrize("prescaled", [False, True])
def test_batches_of_two_forms(prescaled: bool) -> None:
    said = [
        "Argument 'x' is float32 [4, 2, 4] on rank 0, and float32 [2, 4, 4] on rank 1",
        "Argument 'x' is float32 [4, 2, 4] on rank 0, and float64 [4, 2, 4] on rank 1",
        "Argument 'batch' is ['mask': float32 [4, 2, 4], 'name': a value] on rank 0, and ['mask': "
        "None, 'name': a value] on rank 1",
        "Argument 'x' is float32 [4, 2, 4] on rank 0, and float32 [4, 2, 4] that needs a gradient "
        "on rank 1",
        "Argument 'input' is float32 [4, 2, 4] on rank 0, and float32 [2, 4, 4] on rank 1",
        *["rank 1 of the job has another one than rank 0"] * 2 * prescaled,
    ]
    for texts in check_ranks(of_two_forms, "2", prescaled):
        for text, expected in zip(texts, said, strict=True):
            assert expected in text


def begin(backend: str, config: dict[str, Any]) -> None:
    """Begins a job with two tensor-parallel ranks, unless the configuration says something else."""
    if backend != "smddp":
        dist.init_process_group(backend)
    smp.init({"ddp": True, "tensor_parallel_degree": 2, **config})
    torch.manual_seed(3)


def of_two_settings(backend: str, config: dict[str, Any]) -> list[str]:
    """Returns what is said if one rank changes a setting between steps."""
    begin(backend, config)
    with smp.tensor_parallelism():
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))
    model = smp.DistributedModel(module)
    x, texts = torch.arange(8.0).view(2, WIDTH), {}
    other = smp.tp_rank() == 1
    expected = train(model, x).reduce_mean()
    with refused(texts, "autocast"), torch.autocast("cpu", torch.bfloat16, enabled=other):
        train(model, x)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not other)
        with refused(texts, name):
            train(model, x)
        parameter.requires_grad_(True)
    module[1].train(not other)
    with refused(texts, "mode"):
        train(model, x)
    module[1].train()
    with refused(texts, "gradients"), torch.set_grad_enabled(not other):
        evaluate(model, x)
    assert torch.equal(train(model, x).reduce_mean(), expected)
    for parameter in module[0].parameters():  # on all ranks
        parameter.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        train(model, x)
    return list(texts.values())


@pytest.mark.parametrize(
    ("backend", "config"),
    [("smddp", {}), ("gloo", {"prescaled_batch": True}), ("smddp", {"partitions": 2})],
)
def test_settings_that_differ(backend: str, config: dict[str, Any]) -> None:
    names = [f"{part}.{kind}" for part in "012" for kind in ("weight", "bias")]
    said = [
        "'torch.autocast' is off on rank {0} of the job, and bfloat16 on cpu on rank {1}",
        *(f"'{n}.requires_grad' is True on rank {{0}} of the job, and False on" for n in names),
        "'1.training' is True on rank {0} of the job, and False on rank {1}",
        "'torch.is_grad_enabled()' is True on rank {0} of the job, and False on rank {1}",
    ]
    size = 2 * config.get("partitions", 1)
    for texts in check_ranks(of_two_settings, str(size), backend, config):
        for text, expected in zip(texts, said, strict=True):
            # The ranks of each partition compare; any of them may be the first.
            pairs = [(rank, rank + 1) for rank in range(0, size, 2)]
            assert any(expected.format(*pair) in text for pair in pairs), text


def of_frozen_on_a_later_partition() -> list[str]:
    """Returns what is said if one rank freezes a parameter that lives on another partition."""
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "partitions": 2})
    with smp.tensor_parallelism():
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    model = smp.DistributedModel(module)
    smp.set_partition(module[1], 1)
    x, texts = torch.arange(8.0).view(2, WIDTH), {}
    expected = train(model, x).reduce_mean()
    module[1].bias.requires_grad_(smp.rank() != 3)
    with refused(texts, "frozen"):
        train(model, x)
    module[1].bias.requires_grad_(True)
    assert torch.equal(train(model, x).reduce_mean(), expected)
    return list(texts.values())


def test_a_parameter_of_a_later_partition_that_one_rank_has_frozen() -> None:
    for (text,) in check_ranks(of_frozen_on_a_later_partition, "4"):
        assert "'1.bias.requires_grad' is True on rank 2 of the job, and False on rank 3" in text


class Twins(nn.Module):
    """Two divided modules of one size, which are called in an order that can be chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.swapped = False

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.other, self.one) if self.swapped else (self.one, self.other)
        return second(first(x).relu())


def of_two_orders(backend: str, config: dict[str, Any]) -> list[str]:
    """Returns what is said if one rank calls two modules of one size in another order."""
    begin(backend, {"_match_weights": True, **config})
    with smp.tensor_parallelism():
        twins = Twins()
    model = smp.DistributedModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), twins))
    if config.get("partitions"):
        smp.set_partition(twins, 1)
    x, texts = torch.arange(8.0).view(2, WIDTH), {}
    expected = train(model, x).reduce_mean()
    before = [one.grad.clone() for one in model.local_parameters() if one.grad is not None]
    twins.swapped = smp.tp_rank() == 1 and smp.rdp_rank() == 0
    with refused(texts, "one rank"):
        train(model, x)
    after = [one.grad for one in model.local_parameters() if one.grad is not None]
    assert all(map(torch.equal, after, before))
    twins.swapped = False
    assert torch.equal(train(model, x).reduce_mean(), expected)
    twins.swapped = True
    assert not torch.equal(train(model, x).reduce_mean(), expected)
    return list(texts.values())


@pytest.mark.parametrize(
    ("backend", "ranks", "config"),
    [
        ("smddp", 2, {}),
        ("gloo", 2, {"prescaled_batch": True}),
        ("smddp", 4, {"partitions": 2, "microbatches": 2}),
        ("smddp", 4, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 100}),
        ("smddp", 4, {}),
    ],
)
def test_orders_that_differ(backend: str, ranks: int, config: dict[str, Any]) -> None:
    texts = check_ranks(of_two_orders, str(ranks), backend, config)
    assert all("have to call the same modules in the same order" in one for (one,) in texts)


class Choice(nn.Module):
    """Divided modules on two partitions; which ones are called, and how, can be chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.names = "abc"
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            if name == "d":
                time.sleep(0.7)  # where others do not call it, they have ended their step by then
            x = torch.tanh(getattr(self, name)(x))
        return x


@smp.step
def train_if(model: nn.Module, x: Tensor, backward: bool) -> Tensor:
    loss = model(x).square().mean()
    if backward:
        model.backward(loss)
    return loss


def of_other_calls(backend: str, config: dict[str, Any], cases: list[str]) -> list[str]:
    """Returns what is said if one rank makes other calls than `Choice` makes on the others."""
    begin(backend, {"_match_weights": True, **config})
    with smp.tensor_parallelism():
        module = Choice()
    model = smp.DistributedModel(module)
    if "partitions" in config:
        for name in "bd":
            smp.set_partition(getattr(module, name), 1)
    x, texts = torch.arange(8.0).view(2, WIDTH), {}
    trains = "partitions" in config
    expected = train_if(model, x, trains).reduce_mean()
    other = smp.tp_rank() == 1 and smp.rdp_rank() == 0
    for case in cases:
        module.names = case if other and case != "no backward" else "abc"
        with refused(texts, case):
            train_if(model, x, trains and not (other and case == "no backward"))
        module.names = "abc"
        assert torch.equal(train_if(model, x, trains).reduce_mean(), expected), case
    return list(texts.values())


@pytest.mark.parametrize(
    ("backend", "ranks", "config", "cases"),
    [
        # A call less, at the end and elsewhere; another module in its place; one more; another
        # order over partitions; and one pass backwards less.
        ("smddp", 4, {"partitions": 2}, ["ab", "ac", "bc", "adc", "abcd", "bac", "no backward"]),
        ("smddp", 4, {"partitions": 2, "microbatches": 2}, ["ac", "abdc", "bac", "no backward"]),
        ("gloo", 4, {"partitions": 2, "prescaled_batch": True}, ["ac", "abcb", "acb"]),
        ("smddp", 8, {"partitions": 2, "microbatches": 2}, ["ac", "no backward"]),
        # Without partitions and backward passes: a rank has ended its step, and the other waits.
        ("gloo", 2, {}, ["ab", "abcd"]),
        ("smddp", 2, {}, ["ab", "abcd"]),
        ("smddp", 4, {"tensor_parallel_degree": 4}, ["ab", "abcd"]),
    ],
)
def test_one_rank_makes_other_calls(
    backend: str, ranks: int, config: dict[str, Any], cases: list[str]
) -> None:
    for texts in check_ranks(of_other_calls, str(ranks), backend, config, cases):
        assert len(texts) == len(cases)
        for text in texts:
            assert "have to call the same modules in the same order" in text


class Layers(nn.Module):
    """A divided module of several parts, which live on several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = smp.nn.DistributedTransformerLayer(
            num_attention_heads=2,
            attention_head_size=2,
            hidden_size=WIDTH,
            intermediate_size=8,
            attention_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x, None))[0]


def spanning(pp: int) -> tuple[float, dict[str, Tensor]]:
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "partitions": pp, "prescaled_batch": True})
    torch.manual_seed(3)
    module = Layers()
    model = smp.DistributedModel(module)
    if pp == 2:
        smp.set_partition(module.layer.attention, 1)
        smp.set_partition(module.layer.output, 0)
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    loss = float(train(model, x).reduce_mean())
    if pp == 2:
        assert {p.device.type for p in module.parameters()} == {"cpu", "meta"}
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.step()
    return loss, dict(model.state_dict())


def test_a_divided_module_may_span_partitions() -> None:
    expected = check_ranks(spanning, "2", 1)[0]
    for found in check_ranks(spanning, "4", 2):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
