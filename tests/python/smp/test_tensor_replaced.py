"""What a distributed module keeps of the module whose place it takes, and what stays whole."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from ranks import ROOT, check_ranks, listen
from smp.common import squares
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.delayed.life import is_delayed
from smddp.modelparallel.torch.tensor.replace import replace_marked

pytestmark = pytest.mark.multiprocess


class Block(nn.Module):
    """A module of the script, which `Halves` replaces."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Halves(nn.Module):
    """Has distributed modules inside, and is none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = smp.nn.DistributedLinear(width, width)
        self.second = smp.nn.DistributedLinear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Refused(nn.Module):
    """A module with modules inside; what would take its place refuses its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def refusing() -> Any:
    raise smp.SMPUsageError("not like this")


class Outer(nn.Module):
    """Has a module of another one as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        with smp.tensor_parallelism():
            self.block = Block(4)
        self.again = self.block.first


def replaced(make: Callable[[], nn.Module], change: Callable[[Any], Any]) -> Any:
    """Returns a marked model after `change` and the replacement."""
    torch.manual_seed(3)
    with smp.tensor_parallelism(), smp.partition(0):
        module = make()
    change(module)
    return replace_marked(module)


def needs(module: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def freeze(module: nn.Module) -> None:
    module.requires_grad_(False)


def kept(size: int) -> list[str]:
    """Compares what is replaced with the original; returns what has been said."""
    smp.init({"ddp": True, "tensor_parallel_degree": size, "_match_weights": True})
    said = listen()  # after smp.init, which sets the level
    smp.tp_register_with_module(Block, Halves)
    smp.tp_register_with_module(Refused, smp.nn.DistributedLinear, init_hook=refusing)
    distributed = smp.nn.DistributedLinear
    # Frozen parameters.
    linear = replaced(lambda: nn.Linear(4, 4), lambda m: freeze(m.weight))
    assert type(linear) is distributed
    assert needs(linear) == {"weight": False, "bias": True}
    block = replaced(lambda: Block(4), lambda m: freeze(m.second))
    assert type(block) is Halves
    assert needs(block) == {
        **dict.fromkeys(("first.weight", "first.bias"), True),
        **dict.fromkeys(("second.weight", "second.bias"), False),
    }
    assert not any(needs(replaced(lambda: Block(4), freeze)).values())
    # Weights, and the partition of the context.
    torch.manual_seed(3)
    expected = Block(4).second
    part = expected.weight.chunk(size, 1)[smp.tp_rank()]
    assert torch.equal(block.second.weight, part)
    assert torch.equal(block.second.bias, expected.bias)
    assert {vars(module)["_smp_partition"] for module in block.modules()} == {0}
    # Hooks.
    hooks: list[Callable[[Any], Any]] = [
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.register_forward_pre_hook(lambda *_: None),
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.weight.register_hook(lambda gradient: None),
        lambda m: m.weight.register_post_accumulate_grad_hook(lambda parameter: None),
    ]
    for hook in hooks:
        assert type(replaced(lambda: nn.Linear(4, 4), hook)) is nn.Linear
    # A forward of its own: the result is that of the module.
    shifted = replaced(lambda: nn.Linear(4, 4), shift)
    assert torch.equal(shifted(torch.zeros(1, 4)), shifted.bias[None] + 1)
    # Modules inside one that stays whole.
    outer = replaced(Outer, lambda m: None)
    assert type(outer.block) is Block
    assert outer.again is outer.block.first
    assert type(outer.again) is type(outer.block.second) is distributed
    assert type(replaced(Refused, lambda m: None).inner) is distributed
    # A copy exchanges, too.
    copy = pickle.loads(pickle.dumps(block))
    x = torch.randn(2, 4)
    assert torch.equal(copy(x), block(x))
    replaced(lambda: Block(4), lambda m: setattr(m, "gradient_checkpointing", True))
    return [text for text in said if "is not divided" in text or "is divided without" in text]


def shift(module: nn.Module) -> None:
    """Gives a module another forward method, as libraries do that wrap one."""
    original = module.forward
    module.forward = lambda x: original(x) + 1  # type: ignore[method-assign]


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_kept_and_what_stays_whole(size: int) -> None:
    said = check_ranks(kept, str(size), size)[0]
    stays = "smp: module {} is not divided over tensor-parallel ranks: {}"
    assert said == [
        *[stays.format("'' (Linear)", "it has hooks, which would be lost")] * 3,
        *[stays.format("'' (Linear)", "its parameter 'weight' has hooks, which would be lost")] * 2,
        stays.format("'' (Linear)", "it has a forward method of its own, which would be lost"),
        stays.format("'block' (Block)", "it shares its module 'first' with another module"),
        stays.format("'' (Refused)", "not like this"),
        "smp: module '' (Block) is divided without its gradient checkpointing: call "
        "smp.set_activation_checkpointing for its layers",
    ]


def storage(module: nn.Module) -> int:
    found = (p for p in module.parameters() if not is_delayed(p) and not p.is_meta)
    return sum(p.untyped_storage().nbytes() for p in found)


def delayed(match: bool) -> list[Tensor]:
    """Makes the same model at once and later; compares the values, and counts the memory."""
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "_match_weights": match, "partitions": 2})
    at_once = replaced(lambda: nn.Sequential(Block(4), nn.Linear(4, 4)), lambda m: None)
    after = torch.rand(1)
    torch.manual_seed(3)
    with smp.model_creation(tensor_parallelism=True), smp.delay_param_initialization():
        module = nn.Sequential(Block(4), nn.Linear(4, 4))
    module[1].weight.requires_grad_(False)
    model = smp.DistributedModel(module)
    assert torch.equal(torch.rand(1), after)
    assert storage(module) == 0
    smp.set_partition(module[0], 0)
    smp.set_partition(module[1], 1)
    squares(model, torch.ones(2, 4))
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter, at_once.get_parameter(name)), name
        assert parameter.requires_grad == (name != "1.weight")
    assert storage(module) < storage(at_once)
    return []


@pytest.mark.parametrize("match", [False, True])
def test_delayed_modules_stay_delayed(match: bool) -> None:
    check_ranks(delayed, "4", match)


def example_of_the_page() -> list[str]:
    """A class of the script is replaced, and computes the same."""
    text = (ROOT / "docs/model-parallel-tensor.md").read_text()
    example = re.search(r"```python\n(def of_linear.*?)```", text, re.DOTALL)
    assert example is not None
    smp.init(
        {"ddp": True, "tensor_parallel_degree": 2, "_match_weights": True, "prescaled_batch": True}
    )
    names: dict[str, Any] = {"smp": smp, "torch": torch}
    exec(example[1], names)
    torch.manual_seed(3)
    said = listen()
    with smp.tensor_parallelism(gain=1.0):
        module = nn.Sequential(names["Mixer"](8), nn.Linear(8, 8))
        inputs = torch.randn(2, 8)
        expected = module(inputs)
        model = smp.DistributedModel(module)
    torch.testing.assert_close(model(inputs), expected, rtol=0, atol=1e-5)
    assert len(list(model.distributed_modules())) == 2
    return said


def test_a_class_of_the_script_is_replaced_as_the_page_says() -> None:
    said, nothing = check_ranks(example_of_the_page, "2")
    assert any("no module that is divided has an option 'gain'" in text for text in said), said
    assert not any("gain" in text for text in nothing)


class Listed(nn.Module):
    """Calls its modules by a list of its own, which smp does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Block(4)
        self.order = [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        for module in self.order:
            x = module(x)
        return x


@pytest.mark.parametrize("size", [1, 2])
@on_ranks("{size}")
def test_calls_of_modules_that_were_replaced_are_refused(size: int) -> None:
    smp.init({"ddp": True, "tensor_parallel_degree": size})
    smp.tp_register_with_module(Block, Halves)
    with smp.tensor_parallelism():
        module = Listed()
    original = module.first
    model = smp.DistributedModel(module)
    text = r"module 'first' was divided over tensor-parallel ranks .* torch.nn.ModuleList"
    with pytest.raises(smp.SMPUsageError, match=text):
        model(torch.ones(2, 4))
    # With the other rank's error, if that comes first.
    failures = smp.SMPMicrobatchError, smp.SMPPeerError
    with pytest.raises(failures, match=text):
        squares(model, torch.ones(2, 4))
    module.order[0] = module.first
    with pytest.raises(failures, match=text.replace("first", "second")):
        squares(model, torch.ones(2, 4))
    module.order[1] = module.second
    squares(model, torch.ones(2, 4))
    # A script may compare with the original.
    assert original(torch.ones(2, 4)).shape == (2, 4)
