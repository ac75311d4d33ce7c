"""Checkpoints at any degrees, whole or in parts; damaged ones."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from ranks import check_ranks
from smp.checkpoint_models import NAME, begin, same, saving, state_of, train
from smp.zoo import make
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.torch.checkpoint.checkpoint import _whole, full_state_dict
from smddp.tools.merge import main as merge

pytestmark = pytest.mark.multiprocess


def resuming(pp: int, path: str, loaded_after_step: bool, mode: str) -> Any:
    model, optimizer = begin(pp, seed=5)
    if loaded_after_step:
        train(model, optimizer, range(7, 8))
    if mode == "full":
        assert smp.resume_from_checkpoint(path, "full", partial=False) == {}
        return dict(model.state_dict())
    if mode == "model":
        smp.resume_from_checkpoint(path, "two", load_optimizer=False)
        return dict(model.state_dict()), optimizer.state_dict()["state"]
    # The newest one in parts; a file that was saved later does not count.
    content = smp.resume_from_checkpoint(path, None if pp == 1 else "two")
    assert content == {"epoch": 3, "anything": {1, 2}}
    train(model, optimizer, range(2, 4))
    owners = model.runtime.placement.decision.owners
    if mode == "foreign":
        return state_of(model, optimizer)
    if pp > 1 and mode == "same":
        decision = json.loads(Path(path, "two_partial", "manifest.json").read_text())["partition"]
        assert owners == decision["owners"]
    assert {owner for owner in owners if owner is not None} == set(range(pp))
    return state_of(model, optimizer)


# The job that saves and the job that goes on: ranks, partitions; loaded after a step or before.
MATRIX = [
    pytest.param((2, 2), ((1, 1, False), (2, 2, False), (3, 3, False), (4, 2, True))),
    pytest.param((4, 4), ((2, 1, True), (4, 2, False), (4, 4, False))),
    pytest.param((4, 2), ((1, 1, True), (4, 4, True))),
]


@pytest.mark.parametrize(("saved", "loaded"), MATRIX)
@pytest.mark.costly
def test_training_goes_on_at_any_degree(tmp_path: Path, saved: Any, loaded: Any) -> None:
    path = str(tmp_path)
    whole = check_ranks(saving, str(saved[0]), saved[1], path)
    same(whole[0], whole[1])
    assert not (tmp_path / "old_partial").exists(), "only one was to be kept"
    assert (tmp_path / "newest").read_text() == "full"
    assert not list(tmp_path.glob("**/.*")), "unfinished files"
    # All replicas have the same batch, so the mean of their gradients is that of one process.
    for ranks, pp, later in loaded:
        mode = "same" if pp == saved[1] and not later else "other"
        for result in check_ranks(resuming, str(ranks), pp, path, later, mode):
            same(result[0], whole[0][0])
            same(result[1]["state"], whole[0][1]["state"])
    # With load_optimizer=False the optimizer stays as it is.
    whole_model = torch.load(tmp_path / "two.whole", weights_only=True)
    for found, state in check_ranks(resuming, "2", 2, path, False, "model"):
        same(found, whole_model)
        assert state == {}
    # A single process can merge the parts, too.
    same(full_state_dict(path, "two"), whole_model)
    for name in ("merged.pt", "merged.safetensors"):
        assert merge([path, str(tmp_path / name), "--tag=two"]) == 0
        same(_whole(tmp_path / name), whole_model)
    # Plain torch can read and write the single file.
    plain = make(NAME)
    plain.load_state_dict(torch.load(tmp_path / "full", weights_only=True))
    for later in (False, True):
        for result in check_ranks(resuming, "2", 2, path, later, "full"):
            same(dict(result), dict(plain.state_dict()))


def state_after_resuming(path: str, tag: str, later: bool, config: dict[str, Any]) -> Any:
    """Before the first step, too, the optimizer has what was loaded, and the script may change it.

    Returns the state of the optimizer.
    """
    model, optimizer = begin(2, **config)
    if later:
        train(model, optimizer, range(1))
    (group,) = optimizer.param_groups
    group["lr"] = 0.5
    smp.resume_from_checkpoint(path, tag)
    assert optimizer.param_groups[0]["lr"] == 0.01
    whole = copy.deepcopy(optimizer.state_dict())
    if not later:
        smp.save_checkpoint(path, "again", model=model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer.add_param_group({"params": [frozen]})
    before = copy.deepcopy(dict(model.state_dict()))
    train(model, optimizer, range(1))
    same(dict(model.state_dict()), before)
    return whole["state"], whole.get("fp16_states"), optimizer.state_dict()["state"]


@pytest.mark.parametrize("config", [{}, {"fp16": True}], ids=["full", "half"])
@pytest.mark.costly
def test_an_optimizer_has_what_was_loaded_before_the_first_step(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    path = str(tmp_path)
    check_ranks(saving_parts, "2", path, config)
    expected = check_ranks(state_after_resuming, "2", path, "two", True, config)
    for tag, later in (("two", False), ("again", True)):
        same(check_ranks(state_after_resuming, "2", path, tag, later, config), expected)


def saving_parts(path: str, config: dict[str, Any]) -> None:
    model, optimizer = begin(2, **config)
    train(model, optimizer, range(2))
    smp.save_checkpoint(path, "two", model=model, optimizer=optimizer)


def pinned(path: str, resumes: bool) -> Any:
    """Saves a job, one of whose partitions is empty, or resumes it. Returns the owners."""
    model, optimizer = begin(2)
    if resumes:
        smp.resume_from_checkpoint(path)
    else:
        smp.set_partition(model.get_module(), 0)
    train(model, optimizer, range(1))
    if not resumes:
        smp.save_checkpoint(path, "one", model=model)
    return model.runtime.placement.decision.owners


def test_partitions_that_were_empty_stay_empty(tmp_path: Path) -> None:
    file = tmp_path / "one_partial" / "manifest.json"
    saved = check_ranks(pinned, "2", str(tmp_path), False)
    assert set(saved[0]) <= {0, None}
    assert check_ranks(pinned, "2", str(tmp_path), True) == saved
    # Older versions did not say how many partitions the job had. Then those in use count.
    manifest = json.loads(file.read_text())
    del manifest["partitions"]
    file.write_text(json.dumps(manifest))
    assert 1 in check_ranks(pinned, "2", str(tmp_path), True)[0]


def saving_half(path: str, name: str, config: dict[str, Any]) -> Any:
    model, optimizer = begin(2, name=name, fp16=True, **config)
    train(model, optimizer, range(2), name)
    smp.save_checkpoint(path, "half", model=model, optimizer=optimizer)
    numbers = smp.state.param_name_to_index_tp_group[0]
    masters = optimizer.state_dict()["fp16_states"]["masters"]
    return {name: masters[number] for name, number in numbers.items()}, dict(model.state_dict())


def loading_half(pp: int, path: str, name: str, later: bool) -> Any:
    model, optimizer = begin(pp, seed=5, name=name)
    if later:
        train(model, optimizer, range(1), name)
    found = []
    for load_optimizer in (False, True):
        smp.resume_from_checkpoint(path, "half", load_optimizer=load_optimizer)
        found.append({key: value.clone() for key, value in model.state_dict().items()})
    return found


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("shared layer", {}),  # the parameter has two names
        (NAME, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1}),
    ],
)
def test_a_job_in_full_precision_gets_the_masters(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    masters, half = check_ranks(saving_half, "4", str(tmp_path), name, config)[0]
    if name == "shared layer":
        masters |= {f"4.{key}": masters[f"0.{key}"] for key in ("weight", "bias")}
    rounded = {key: value.float() for key, value in half.items()}
    assert masters.keys() == rounded.keys()
    assert any(not torch.equal(masters[key], rounded[key]) for key in masters)
    for pp, later in ((1, False), (2, True)):
        for found in check_ranks(loading_half, "2", pp, str(tmp_path), name, later):
            same(found, [rounded, masters])


@pytest.mark.costly
def test_folders_of_the_original(tmp_path: Path) -> None:
    """They have no manifest, and other numbers at the end of a file's name."""
    saved = check_ranks(saving, "2", 2, str(tmp_path))
    folder = tmp_path / "two_partial"
    (folder / "manifest.json").unlink()
    assert not (folder / "unfinished").exists()
    loaded = check_ranks(resuming, "2", 2, str(tmp_path), False, "foreign")
    same(loaded, saved)
    for file in folder.glob("*_[01].pt"):
        file.rename(file.with_stem(f"{file.stem}_0"))
    same(check_ranks(resuming, "1", 1, str(tmp_path), False, "foreign")[0], saved[0])


def partial_states() -> Any:
    """Loads local state dicts again, before or after the partition, strict or not."""
    model, optimizer = begin(2)
    train(model, optimizer, range(2))
    local, state = copy.deepcopy((model.local_state_dict(), optimizer.local_state_dict()))
    before = copy.deepcopy(state_of(model, optimizer))
    train(model, optimizer, range(2, 3))
    model.load_state_dict(local, same_partition_load=True)
    model.load_state_dict(local)
    optimizer.load_state_dict(state)
    same(state_of(model, optimizer), before)
    assert optimizer.orig_state_dict()["state"].keys() == state["state"].keys()
    assert len(optimizer._param_id_to_index()) == len(list(model.parameters()))
    full = model.state_dict()
    del full["norm.weight"]
    result = model.load_state_dict(full, strict=False)
    assert result.missing_keys == ["norm.weight"]
    with pytest.raises(RuntimeError, match=r"norm.weight"):
        model.load_state_dict(full)
    with pytest.raises(RuntimeError, match=r"has 1 entry \('extra'\)"):
        model.load_state_dict({**model.state_dict(), "extra": torch.zeros(1)})
    model.cpu()
    return {
        name: parameter.sum().item() for name, parameter in model.get_module().named_parameters()
    }


def test_partial_states() -> None:
    zero, one = check_ranks(partial_states, "2")
    assert zero == one


class Versioned(nn.Module):
    """Has loaded and saved its weight in other ways before, and saves it by the name of another."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_state_dict_post_hook(self.rename)  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result

    @staticmethod
    def rename(_: Any, entries: dict[str, Any], prefix: str, __: Any) -> None:
        entries[f"{prefix}outer.matrix"] = entries.pop(f"{prefix}inner.weight")

    def _load_from_state_dict(
        self, entries: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        if f"{prefix}outer.matrix" in entries:
            factor = 1 if local_metadata.get("version") == 2 else 10
            entries[f"{prefix}inner.weight"] = entries.pop(f"{prefix}outer.matrix") * factor
        super()._load_from_state_dict(entries, prefix, local_metadata, *others)


def versioned_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Versioned(), nn.Linear(4, 4))


def versioned(path: str) -> None:
    plain, module = versioned_net(), versioned_net()
    want = plain.state_dict()
    config = {"auto_partition": False, "default_partition": 0}
    smp.init({"partitions": 2, "ddp": True, **config})
    model = smp.DistributedModel(module)
    smp.set_partition(module[1], 1)
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    evaluate = smp.step(lambda x: model(x))

    def check() -> None:
        found = model.state_dict()
        same(dict(found), dict(want))
        assert found._metadata == want._metadata
        plain.load_state_dict(found)
        same(dict(plain.state_dict()), dict(want))

    around = nn.ModuleDict({"model": model, "other": nn.Linear(1, 1)})
    plain_around = nn.ModuleDict({"model": plain, "other": around["other"]})
    for _ in range(2):  # before and after the division
        check()
        same(dict(around.state_dict()), dict(plain_around.state_dict()))
        assert model.state_dict(prefix="a.").keys() == plain.state_dict(prefix="a.").keys()
        local = copy.deepcopy(model.local_state_dict())
        smp.save_checkpoint(path, "parts", model=model)
        smp.save_checkpoint(path, "whole", partial=False, model=model)
        for load in (
            functools.partial(model.load_state_dict, want),
            functools.partial(model.load_state_dict, local),
            functools.partial(smp.resume_from_checkpoint, path),
            functools.partial(smp.resume_from_checkpoint, path, partial=False),
        ):
            with torch.no_grad():
                for parameter in model.local_parameters() if model.partitioned else ():
                    parameter.zero_()
            load()
            check()
        with torch.no_grad():
            evaluate(torch.zeros(1, 4))
    plain.load_state_dict(full_state_dict(path))
    same(dict(plain.state_dict()), dict(want))


def test_entries_of_versions_and_with_other_names(tmp_path: Path) -> None:
    check_ranks(versioned, "2", str(tmp_path))


def saving_by_hand(path: str) -> Any:
    """Saves as scripts did before there was `save_checkpoint`: four ranks, two partitions."""
    model, optimizer = begin(2)
    train(model, optimizer, range(2))
    own = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(False)}
    smp.save(own, f"{path}/own.pt", partial=True)
    smp.save(own, f"{path}/each.pt", partial=True, v3=True)
    train(model, optimizer, range(2, 4))
    return state_of(model, optimizer)


def loading_by_hand(path: str, when: str, same_partition: bool) -> Any:
    """Loads before the partition, or in a hook after it; the optimizer's state after a step."""
    model, optimizer = begin(2, seed=5)
    own = smp.load(f"{path}/own.pt", partial=True)

    def load(_model: Any, _optimizer: Any) -> None:
        result = model.load_state_dict(own["model"], same_partition_load=same_partition)
        assert not result.missing_keys

    def check(_model: Any, _optimizer: Any) -> None:
        assert model.partitioned
        mine = {name for name, _ in model.local_named_parameters()}
        assert mine
        assert mine <= own["model"].keys()

    model.register_post_partition_hook(check)
    if when == "before":
        load(model, optimizer)
    else:
        model.register_post_partition_hook(load)
    model.register_post_step_hook(lambda _, found: found.load_state_dict(own["optimizer"]))
    train(model, optimizer, range(2, 4))
    return state_of(model, optimizer)


@pytest.mark.costly
def test_parts_that_scripts_save_themselves(tmp_path: Path) -> None:
    expected = check_ranks(saving_by_hand, "4", str(tmp_path))[0]
    assert {file.name for file in tmp_path.iterdir()} == {
        *(f"own.pt_{rank}" for rank in range(2)),
        *(f"each.pt_{pp}_0_{rdp}" for pp in range(2) for rdp in range(2)),
    }
    for when in ("before", "in a hook"):
        for same_partition in (False, True):
            for found in check_ranks(loading_by_hand, "4", str(tmp_path), when, same_partition):
                same(found, expected)


def reused(file: str, load: bool) -> Any:
    more = {"partition_file": file, "load_partition": load, "skip_tracing": load}
    model, optimizer = begin(2, **more)
    train(model, optimizer, range(1))
    return model.runtime.placement.decision.owners


def test_a_decision_is_saved_and_used_again(tmp_path: Path) -> None:
    file = tmp_path / "made" / "partition.json"
    first = check_ranks(reused, "2", str(file), False)
    decision = json.loads(file.read_text())
    assert decision["owners"] == first[0] == first[1]
    # Not the decision that the partitioner would make, so that the test can see which is used.
    swapped = [None if o is None else 1 if "blocks.0" in n else o
               for n, o in zip(decision["names"], decision["owners"], strict=True)]  # fmt: skip
    # As an older version wrote it: with one more entry, and without costs if it had not traced.
    more = {"costs": [], "loads": [0.5, 0.5]}
    file.write_text(json.dumps({**decision, "owners": swapped, **more}))
    assert check_ranks(reused, "2", str(file), True) == [swapped, swapped]
