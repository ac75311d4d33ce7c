"""Which modules are divided, checkpoints of them, and what is refused."""

from __future__ import annotations

import copy
import datetime
import gc
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from ranks import check_ranks, listen, run_ranks
from smp.common import close, shards
from smp.zoo import device
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.checkpoint.checkpoint import full_state_dict
from smddp.modelparallel.torch.sharding.joined import SHARDS
from smddp.modelparallel.torch.tensor.registry import tp_register, tp_register_with_module


class Scaled(nn.Module):
    """A module of the script, with arguments of its own."""

    def __init__(self, width: int, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        return self.inner(x) * (self.factor * times)


def test_hooks_need_the_signature_of_the_original() -> None:
    def short(width: int) -> Any:
        return (width,), {}

    def other(width: int, scale: float = 1.0) -> Any:
        return (width, scale), {}

    with pytest.raises(TypeError, match=r"init_hook short.*Scaled.__init__.*takes 1 param.*take 2"):
        tp_register(smp.nn.DistributedLinear, init_hook=short)(Scaled)
    with pytest.raises(TypeError, match=r"parameter 2 is 'scale=1.0' and has to be 'factor=1.0'"):
        tp_register_with_module(Scaled, smp.nn.DistributedLinear, init_hook=other)
    with pytest.raises(
        TypeError, match=r"forward_hook short.*Scaled.forward.*parameter 1 is 'width"
    ):
        tp_register_with_module(Scaled, smp.nn.DistributedLinear, forward_hook=short)
    with pytest.raises(TypeError, match="module_cls must be a class of modules, not 3"):
        tp_register_with_module(3, smp.nn.DistributedLinear)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="return_hook must be a function"):
        tp_register_with_module(Scaled, smp.nn.DistributedLinear, return_hook=3)  # type: ignore
    with pytest.raises(SMPUsageError, match="takes a module, not str"):
        smp.set_tensor_parallelism("x")  # type: ignore[arg-type]


def misspelt() -> list[str]:
    said = listen()
    smp.init({"ddp": True, "tensor_parallel_degree": 2})
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    smp.set_tensor_parallelism(model[0], bias=False, bais=False)
    smp.DistributedModel(model)
    return [text for text in said if "has an option" in text]


def test_an_option_that_no_module_has_is_said() -> None:
    first, second = check_ranks(misspelt, "2")
    assert first == ["smp: tensor parallelism: no module that is divided has an option 'bais'"]
    assert not second


class Tied(nn.Module):
    """Some modules can be divided, others not."""

    def __init__(self) -> None:
        super().__init__()
        with smp.tensor_parallelism():
            self.words = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.free = nn.Embedding(7, 4)
            self.odd = nn.Linear(3, 4)
            with smp.tensor_parallelism(False):
                self.off = nn.Linear(4, 4)
            with smp.partition(0), smp.tensor_parallelism():
                self.on = nn.Linear(4, 4)
            self.scaled = Scaled(4, factor=0.5)
            self.twice = nn.Sequential(self.on, nn.Tanh(), self.on)
        self.later = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head.weight = self.words.weight
        smp.set_tensor_parallelism(self.later)
        smp.set_tensor_parallelism(self.later[1], False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.free(ids)
        x = self.odd(self.off(x)[..., :3]) + self.twice(x)
        return self.head(self.later(self.scaled(x, times=2)))


def model_of(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied()


class FromFactor(smp.nn.DistributedLinear):
    """A distributed module that the script has registered, with names of its own."""

    def match(self, original: Any) -> None:
        self.load_whole(original.inner.state_dict())


def register() -> None:
    factors = []

    def of_init(width: int, factor: float = 1.0) -> Any:
        factors.append(factor)
        return (width, width), {}

    def of_forward(x: Tensor, times: int = 1) -> Any:
        return (x * (factors[-1] * times),), {}

    smp.tp_register_with_module(Scaled, FromFactor, init_hook=of_init, forward_hook=of_forward)


@smp.step
def train(model: Any, ids: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    model.backward(loss)
    return loss


def ids_of(step: int) -> Tensor:
    return torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(step)).to(device())


def marked() -> dict[str, Any]:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "_match_weights": True})
    with_bias_of_zeros = model_of(5)
    with torch.no_grad():
        with_bias_of_zeros.scaled.inner.bias.zero_()
    expected = with_bias_of_zeros(ids_of(0).cpu())
    register()
    module = model_of(5)
    with torch.no_grad():
        module.scaled.inner.bias.zero_()
    model = smp.DistributedModel(module)
    names = [
        name for name, part in module.named_modules() if isinstance(part, smp.nn.DistributedModule)
    ]
    assert list(model.distributed_modules()) == [module.get_submodule(name) for name in names]
    found = model(ids_of(0))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert module.twice[0] is module.twice[2] is module.on
    local = dict(model.local_named_parameters())
    scaled = dict(model.scaled_batch_reducer_named_parameters())
    assert {**scaled, **dict(model.default_reducer_named_parameters())}.keys() == local.keys()
    axes = {name: smp.utils.get_distribution_axis(p) for name, p in local.items()}
    return {"names": names, "scaled": sorted(scaled), "axes": axes}


@pytest.mark.multiprocess
def test_the_outermost_supported_modules_are_divided() -> None:
    outcomes = run_ranks(marked, "2")
    assert all(one.returned for one in outcomes), "\n".join(map(str, outcomes))
    for one in outcomes:
        assert one.value["names"] == ["free", "on", "scaled", "later.0"]
        weights = ["free.weight", "later.0.weight", "on.weight", "scaled.weight"]
        assert one.value["scaled"] == weights
        assert {name for name, axis in one.value["axes"].items() if axis == 1} == set(weights)
    for text in (
        "module 'words' (Embedding) is not divided over tensor-parallel ranks: it shares",
        "module 'odd' (Linear) is not divided over tensor-parallel ranks: DistributedLinear: w",
    ):
        assert [one.stderr.count(text) for one in outcomes] == [1, 0]


def new(configs: list[dict[str, Any]]) -> list[list[Any]]:
    """Returns weights and losses of models whose modules are new, for each configuration."""
    found = []
    for config in configs:
        smp.init({"ddp": True, "prescaled_batch": True, **config})
        module = model_of(5)
        smp.set_tensor_parallelism(module.odd, False)  # as at degree 2
        model = smp.DistributedModel(module)
        assert len([*model.distributed_modules()]) == 4
        result = [{name: value.cpu().clone() for name, value in model.state_dict().items()}]
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            optimizer.zero_grad()
            result.append(train(model, ids_of(step)).reduce_mean().cpu())
            optimizer.step()
        found.append(result)
        del model, optimizer, module
        gc.collect()
        smp.shutdown()
    return found


@pytest.mark.multiprocess
def test_at_degree_1_the_same_modules_are_new() -> None:
    sharded = {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e9}
    jobs = [{"tensor_parallel_degree": 2}, {}, {**sharded, "sdp_param_persistence_threshold": 0}]
    (weights, *losses), *others = check_ranks(new, "2", jobs)[0]
    for own, *found in others:
        torch.testing.assert_close(own, weights, rtol=0, atol=0)
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)


def job(config: dict[str, Any], path: str, resumes: str | None, first: int) -> dict[str, Any]:
    """Trains two steps, after a checkpoint has been loaded; or else saves one."""
    smp.init(
        {"ddp": True, "microbatches": 2, "_match_weights": True, "prescaled_batch": True, **config}
    )
    model = smp.DistributedModel(model_of(7 if resumes else 5))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    if resumes is not None:
        smp.resume_from_checkpoint(path, resumes)

    def trained(steps: Iterable[int]) -> dict[str, Tensor]:
        for step in steps:
            optimizer.zero_grad()
            train(model, ids_of(step))
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    trained((first, first + 1))
    if resumes is None:
        smp.save_checkpoint(path, "parts", model=model, optimizer=optimizer)
        smp.save_checkpoint(path, "whole.safetensors", partial=False, model=model)
        # Partial state dicts load, too.
        parts = copy.deepcopy((model.local_state_dict(), optimizer.local_state_dict()))
        expected = trained([first + 2])
        for same in (False, True):
            model.load_state_dict(parts[0], same_partition_load=same)
            optimizer.load_state_dict(copy.deepcopy(parts[1]))  # torch does not copy it
            torch.testing.assert_close(trained([first + 2]), expected, rtol=0, atol=0)
        model.load_state_dict(parts[0])
    return {name: value.cpu() for name, value in model.state_dict().items()}


DIVIDED = {"tensor_parallel_degree": 2, "partitions": 2}
SHARDED = shards(2, 6)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("config", "places"),
    [
        (DIVIDED, ("0_0", "0_1", "1_0", "1_1")),
        ({"tensor_parallel_degree": 2, **SHARDED}, ("0_0_0", "0_0_1", "0_1_0", "0_1_1")),
    ],
    ids=["2 partitions", "sharded"],
)
@pytest.mark.costly
def test_checkpoints_load_at_other_degrees(
    config: dict[str, Any], places: tuple[str, ...], tmp_path: Path
) -> None:
    saved = check_ranks(job, "4", config, str(tmp_path), None, 0)
    names = {file.name for file in (tmp_path / "parts_partial").glob("*_*.pt")}
    parts = {f"{kind}_{place}.pt" for kind in ("model", "optimizer") for place in places}
    assert names == {*parts, "user_content.pt"}
    whole = full_state_dict(str(tmp_path), "parts")
    close(whole, saved[0])
    results = [
        check_ranks(job, layout, config, str(tmp_path), "parts", 2)
        for layout, config in (
            ("4", config),
            ("2", {"tensor_parallel_degree": 2} if config is DIVIDED else SHARDED),
            ("1", {}),
        )
    ]
    for others in results:
        for other in others:
            close(other, results[-1][0], tolerance=1e-5)


@pytest.mark.multiprocess
@pytest.mark.costly
def test_checkpoints_load_at_more_and_less_ranks(tmp_path: Path) -> None:
    """Those of the original library do not say how they are divided."""
    two = {"tensor_parallel_degree": 2}
    paths = {name: tmp_path / name for name in ("1", "4")}
    check_ranks(job, "1", {}, str(paths["1"]), None, 0)
    check_ranks(job, "4", {"tensor_parallel_degree": 4}, str(paths["4"]), None, 0)
    results = [check_ranks(job, "2", two, str(path), "parts", 2) for path in paths.values()]
    folder = paths["4"] / "parts_partial"
    (folder / "manifest.json").unlink()
    for file in folder.glob("[mo]*.pt"):
        part = torch.load(file)
        del part[SHARDS]
        torch.save(part, file)
    results.append(check_ranks(job, "2", two, str(paths["4"]), "parts", 2))
    for others in results:
        for other in others:
            close(other, results[0][0], tolerance=1e-5)
    with pytest.raises(smp.SMPUsageError, match="resume from it in a job with its model"):
        full_state_dict(str(paths["4"]), "parts")
    part = torch.load(folder / "model_0_0.pt")
    name = next(name for name, value in part.items() if value.dim() == 2)
    torch.save({**part, name: torch.zeros(7, 7)}, folder / "model_0_0.pt")
    for said in check_ranks(unfit, "2", str(paths["4"])):
        assert f"the entry '{name}' of the checkpoint has the shape [7, 7], which is no" in said


def unfit(path: str) -> str:
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    _model = smp.DistributedModel(model_of(5))
    with pytest.raises(smp.SMPUsageError) as caught:
        smp.resume_from_checkpoint(path, "parts")
    return str(caught.value)


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(smp.SMPError) as caught:
        smp.init({"tensor_parallel_degree": 2, **config})
    return str(caught.value)


@pytest.mark.multiprocess
def test_combinations_that_are_refused_on_all_ranks() -> None:
    for config, text in (
        ({}, "needs ddp"),
        ({"ddp": True, "sharded_data_parallel_degree": 2}, "does not divide"),
    ):
        assert all(text in said for said in check_ranks(refused, "2", config))


def absent() -> str:
    dist.init_process_group("smddp", timeout=datetime.timedelta(seconds=4))
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    model = smp.DistributedModel(model_of(5))
    train(model, ids_of(0))
    if smp.rank() == 1:
        time.sleep(6)  # longer than the timeout
        return ""
    with pytest.raises(Exception) as caught:  # noqa: PT011  of the backend
        train(model, ids_of(1))
    return str(caught.value)


@pytest.mark.multiprocess
def test_a_rank_that_does_not_exchange_is_named() -> None:
    said = check_ranks(absent, "2")[0]
    assert "rank 1" in said


class Wide(smp.nn.DistributedLinear):
    """A distributed module whose first argument an option of the mark may replace."""

    def __init__(self, width: int, out: int = 4) -> None:
        super().__init__(width, out)


class Narrow(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4)


@on_ranks("2")
def test_divided_modules_do_what_those_of_torch_do() -> None:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "_match_weights": True})
    torch.manual_seed(3)
    with torch.no_grad():
        # torch has a fast path for a whole layer in evaluation.
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
        ).eval()
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(smp.rank()))
        wanted = encoder(x)
        padded = torch.tensor([[False, False, True], [False, False, False]])
        masked = encoder(x, src_key_padding_mask=padded)
        smp.set_tensor_parallelism(encoder)
        divided = smp.DistributedModel(encoder).eval()
        assert len(list(divided.distributed_modules()))
        torch.testing.assert_close(divided(x), wanted, rtol=1e-5, atol=1e-5)
        found = divided(x, src_key_padding_mask=padded)
        torch.testing.assert_close(found[~padded], masked[~padded], rtol=1e-5, atol=1e-5)
        linear = smp.nn.DistributedLinear(8, 4)
        assert linear(x[:0]).shape == (0, 3, 4)
        with pytest.raises(SMPUsageError, match=r"8 input features, and its input has \[2, 3, 7\]"):
            linear(x[..., :7])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
            layer = smp.nn.DistributedTransformerLayer(
                num_attention_heads=2, attention_head_size=4, hidden_size=8, intermediate_size=16
            )
            layer((x, torch.zeros(2, 1, 1, 3)))
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()
    smp.shutdown()


@on_ranks("2")
def test_options_of_a_mark_replace_arguments_by_position() -> None:
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    smp.tp_register_with_module(Narrow, Wide)
    with smp.tensor_parallelism(width=8):
        narrow = Narrow(4)  # its argument is given by position
    model = smp.DistributedModel(nn.Sequential(narrow))
    (found,) = model.distributed_modules()
    assert found.in_features == 8
    smp.shutdown()
