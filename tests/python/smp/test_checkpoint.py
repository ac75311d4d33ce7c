"""Checkpoints at any degrees, whole or in parts; damaged ones."""

from __future__ import annotations

import copy
import functools
import gc
import io
import json
import logging
import os
import pickle
import shutil
import signal
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from ranks import check_ranks, run_ranks
from smp.zoo import ZOO, batch_of, make, train_step
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError, SMPPeerError, SMPUsageError
from smddp.modelparallel.torch.checkpoint import checkpoint, safetensors
from smddp.modelparallel.torch.checkpoint.checkpoint import _whole, full_state_dict
from smddp.modelparallel.torch.common.files import write
from smddp.tools.merge import main as merge
from smdistributed.modelparallel.test.torch.utils import dump_model, verify

pytestmark = pytest.mark.multiprocess

NAME = "tied gpt"


def begin(pp: int, seed: int = 0, name: str = NAME, **config: Any) -> tuple[Any, Any]:
    smp.init({"partitions": pp, "ddp": True, "microbatches": 2, **config})
    module = make(name)
    if seed:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    model = smp.DistributedModel(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, smp.DistributedOptimizer(optimizer)


def train(model: Any, optimizer: Any, steps: range, name: str = NAME) -> None:
    for step in steps:
        optimizer.zero_grad()
        train_step(model, name, *batch_of(name, step, 0))
        optimizer.step()


def state_of(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(model.state_dict()), optimizer.state_dict()


class Traces:
    """Notes that unpickling has run its code."""

    run = False

    def __setstate__(self, state: Any) -> None:
        Traces.run = True

    def __getstate__(self) -> Any:
        return "anything"


def saving(pp: int, path: str) -> Any:
    model, optimizer = begin(pp)
    train(model, optimizer, range(2))
    content = {"epoch": 3, "anything": {1, 2}}
    smp.save_checkpoint(path, "old", model=model, optimizer=optimizer, user_content=content)
    if smp.rank() == 0:  # as if the clock had been set back since
        os.utime(Path(path, "old_partial", "manifest.json"), (2.0**32, 2.0**32))
    smp.save_checkpoint(
        path,
        "two",
        model=model,
        optimizer=optimizer,
        user_content=content,
        num_kept_partial_checkpoints=1,
    )
    with pytest.raises(SMPUsageError, match="num_kept_partial_checkpoints must be at least 1"):
        smp.save_checkpoint(path, "three", model=model, num_kept_partial_checkpoints=0)
    dump_model(model, f"{path}/two.whole")
    smp.barrier()
    verify(model, f"{path}/two.whole")
    names = smp.state.param_index_to_name_tp_group[0]
    assert names == dict(enumerate(name for name, _ in model.get_module().named_parameters()))
    assert smp.state.param_name_to_index_tp_group[0]["norm.weight"] in names
    smp.save_checkpoint(path, "full", partial=False, model=model)
    assert smp.resume_from_checkpoint(path, partial=False) == {}
    smp.save({"rank": smp.pp_rank(), "sets": {1}}, f"{path}/mine.pt")
    assert smp.load(f"{path}/mine.pt") == {"rank": smp.pp_rank(), "sets": {1}}
    smp.save(Traces(), f"{path}/object.pt")
    Traces.run = False
    for options in ({}, {"pickle_module": pickle}, {"weights_only": True}, {"weights_only": None}):
        with pytest.raises(pickle.UnpicklingError, match=r"smp.load: .*object.pt_.*weights_only=F"):
            smp.load(f"{path}/object.pt", **options)  # type: ignore[arg-type]
    assert not Traces.run
    assert isinstance(smp.load(f"{path}/object.pt", weights_only=False), Traces)
    assert Traces.run
    smp.save({"rank": -1}, f"{path}/one.pt", partial=False)
    assert smp.load(f"{path}/one.pt", partial=False) == {"rank": -1}
    if smp.rank() == 0:
        Path(path, "cut.pt").write_bytes(Path(path, "one.pt").read_bytes()[:-100])
    smp.barrier()
    with pytest.raises(ValueError, match=r"cut.pt is damaged"):
        smp.load(f"{path}/cut.pt", partial=False)
    smp.save([1], f"{path}/v3.pt", v3=True)
    assert smp.load(f"{path}/v3.pt") == [1]
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*absent.pt_"):
        smp.load(f"{path}/absent.pt")
    with pytest.raises(SMPUsageError, match="f must be a str"):
        smp.save(1, Path(path))  # type: ignore[arg-type]
    names = sorted(optimizer.local_state_dict()["state"])
    parts = smp.allgather(names, smp.PP_GROUP)
    assert sorted(n for part in parts for n in part) == list(range(len(list(model.parameters()))))
    assert model.local_state_dict()["_smp_is_partial"] is True
    only_first = model.state_dict(gather_to_rank0=True)
    assert (len(only_first) > 0) == (smp.rank() == 0)
    train(model, optimizer, range(2, 4))
    return state_of(model, optimizer)


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


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


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


def begin_shared() -> Any:
    torch.manual_seed(smp.rank())
    return smp.DistributedModel(ZOO["shared layer"].make())


@smp.step
def forward(model: Any, x: torch.Tensor) -> Any:
    return model(x)


SHARDS = ("shards.safetensors.index.json", "shards.bin.index.json")


def files_of_others(path: str, weights: dict[str, torch.Tensor]) -> None:
    """Loads whole models from files of model libraries, before and after the partition."""
    gc.freeze()  # so that collecting a model does not visit all objects of torch
    smp.init({"partitions": 2, "ddp": True, "microbatches": 2})
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    whole = ZOO["shared layer"].make()
    whole.load_state_dict(weights)
    for name in ("pytorch_model.bin", "model.safetensors", "pytorch_model.bin.index.json"):
        for later in (False, True):
            model = begin_shared()
            if later:
                forward(model, x)
            assert smp.resume_from_checkpoint(path, name, partial=False) == {}, name
            with torch.no_grad():
                result = forward(model, x).concat()
            # The same rows, in two halves.
            same(result, torch.cat([whole(x[:2]), whole(x[2:])]).detach())
            same(dict(model.state_dict()), weights)
            for tag in ("ours.safetensors", "ours.bin", *SHARDS):
                smp.save_checkpoint(path, tag, partial=False, model=model, user_content={"e": 1})
                assert smp.resume_from_checkpoint(path, tag, partial=False) == {"e": 1}
            same(dict(model.state_dict()), weights)
            # Other names than the model's; with strict=False, missing entries keep values.
            others = {f"other.{key}": value + 1 for key, value in weights.items()}
            torch.save({**others, "other.more": torch.zeros(1)}, f"{path}/other.{smp.rank()}")
            smp.resume_from_checkpoint(
                *(path, f"other.{smp.rank()}"),
                partial=False,
                strict=False,
                translate_function=lambda entries: {
                    key.removeprefix("other."): value for key, value in entries.items()
                },
            )
            found = dict(model.state_dict())
            same(found, {key: value + 1 for key, value in weights.items()})
            with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
                smp.resume_from_checkpoint(path, "absent.bin", partial=False)
            with pytest.raises(FileNotFoundError, match=r"lacks its part gone.safetensors"):
                smp.resume_from_checkpoint(path, "broken.index.json", partial=False)
            with pytest.raises(RuntimeError, match=r"4 entries \('2.weight', '2.bias'"):
                smp.resume_from_checkpoint(path, "part.bin", partial=False)
            del model
            gc.collect()


def test_whole_models_in_files_of_other_libraries(tmp_path: Path) -> None:
    torch.manual_seed(7)
    plain = ZOO["shared layer"].make()
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    assert torch.equal(weights["0.weight"], weights["4.weight"])
    # Such libraries store a shared parameter under one name, and a large model in several files.
    kept = {name: value for name, value in weights.items() if not name.startswith("4.")}
    halves = [dict(list(kept.items())[:2]), dict(list(kept.items())[2:])]
    torch.save(kept, tmp_path / "pytorch_model.bin")
    torch.save(halves[0], tmp_path / "part.bin")
    torch.save(halves[0], tmp_path / "pytorch_model-1.bin")
    with open(tmp_path / "pytorch_model-2.safetensors", "wb") as stream:
        safetensors.write(stream, halves[1])
    with open(tmp_path / "model.safetensors", "wb") as stream:
        safetensors.write(stream, weights)
    names = ("pytorch_model-1.bin", "pytorch_model-2.safetensors")
    index = {key: name for half, name in zip(halves, names, strict=True) for key in half}
    for file, content in (
        ("pytorch_model.bin.index.json", index),
        ("broken.index.json", {"a": "gone.safetensors"}),
    ):
        (tmp_path / file).write_text(json.dumps({"weight_map": content}))
    (tmp_path / "user_content_pytorch_model.bin").touch()  # some tools leave an empty file
    check_ranks(files_of_others, "2", str(tmp_path), weights)
    again = ZOO["shared layer"].make()
    again.load_state_dict(torch.load(tmp_path / "ours.bin", weights_only=True))
    for index in SHARDS:
        content = json.loads((tmp_path / index).read_text())
        files = set(content["weight_map"].values())
        ending = index.removesuffix(".index.json").removeprefix("shards")
        assert files == {f"shards-0000{n}-of-00002{ending}" for n in (1, 2)}
        assert content["weight_map"].keys() == weights.keys()
        assert content["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    same(dict(again.state_dict()), weights)
    same(safetensors.read(tmp_path / "ours.safetensors"), weights)


def test_safetensors_by_the_letter(tmp_path: Path) -> None:
    """Checks the bytes against the description of the format, and refuses damaged files."""
    file = tmp_path / "x.safetensors"
    entries = {
        "a": torch.tensor([[1, 2]], dtype=torch.int16),
        "b": torch.tensor([True, False, True]),
        "c": torch.tensor(1.5, dtype=torch.bfloat16),
        "d": torch.zeros(0, 3),
    }
    with open(file, "wb") as stream:
        safetensors.write(stream, entries)
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header["a"] == {"dtype": "I16", "shape": [1, 2], "data_offsets": [0, 4]}
    assert header["__metadata__"] == {"format": "pt"}
    assert data[8 + length :] == b"\x01\0\x02\0\x01\0\x01\xc0\x3f"
    same(safetensors.read(file), entries)
    for wrong in (b"", data[:7], data[:40], data[:-1], b"\xff" * 8 + data[8:]):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match="not a safetensors file, or is damaged"):
            safetensors.read(file)
    with pytest.raises(SMPUsageError, match="'s' cannot be saved as safetensors"):
        safetensors.write(io.BytesIO(), {"s": "text"})


class Choice:
    """Is no plain value."""


def numbers_of_numpy(path: str) -> None:
    model, optimizer = begin(1)
    group = optimizer.param_groups[0]
    numbers = [np.float64(0.1), np.float32(0.1), np.float16(0.1), np.int64(3), np.bool_(True)]
    group["numbers"] = numbers
    smp.save_checkpoint(path, "numbers", model=model, optimizer=optimizer)
    group["numbers"] = []
    smp.resume_from_checkpoint(path)
    assert optimizer.param_groups[0]["numbers"] == numbers
    smp.save(numbers, f"{path}/numbers.pt")
    assert smp.load(f"{path}/numbers.pt") == numbers
    optimizer.param_groups[0]["numbers"] = Choice()
    smp.save_checkpoint(path, "object", model=model, optimizer=optimizer)
    with pytest.raises(pickle.UnpicklingError, match=r"optimizer_0.pt .*group of the optimizer"):
        smp.resume_from_checkpoint(path)
    with torch.serialization.safe_globals([Choice]):
        smp.resume_from_checkpoint(path)
    assert isinstance(optimizer.param_groups[0]["numbers"], Choice)


def test_numbers_of_numpy_are_loaded(tmp_path: Path) -> None:
    check_ranks(numbers_of_numpy, "1", str(tmp_path))


def without_optimizers(path: str) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smddp.modelparallel").addHandler(handler)

    def resume(tag: str, text: str, **options: Any) -> None:
        said.clear()
        smp.resume_from_checkpoint(path, tag, **options)
        assert [text in one for one in said] == [True] * (smp.rank() == 0 and text != "")

    model, optimizer = begin(2)
    smp.save_checkpoint(path, "both", model=model, optimizer=optimizer)
    smp.save_checkpoint(path, "model", model=model)
    resume("both", "")
    resume("model", "save_checkpoint was called without optimizer")
    resume("model", "", load_optimizer=False)
    del optimizer
    gc.collect()
    resume("both", "no smp.DistributedOptimizer yet")
    resume("both", "", load_optimizer=False)
    resume("model", "")


def test_a_warning_says_that_the_optimizer_begins_anew(tmp_path: Path) -> None:
    check_ranks(without_optimizers, "2", str(tmp_path))


def damaged(path: str, text: str, kind: str) -> None:
    model, _optimizer = begin(2)
    before = copy.deepcopy(model.state_dict())
    errors = {"missing": FileNotFoundError, "value": ValueError, "usage": SMPUsageError}
    error = errors[kind]
    with pytest.raises(error, match=text):
        smp.resume_from_checkpoint(path, "two")
    same(model.state_dict(), before)


def test_damage_is_noticed(tmp_path: Path) -> None:
    check_ranks(saving, "2", 2, str(tmp_path))
    for name in ("user_content.pt", "optimizer_0.pt", "model_1.pt"):
        part = tmp_path / "two_partial" / name
        data = part.read_bytes()
        for wrong in (b"", data[:-100] + bytes(100)):
            part.write_bytes(wrong)
            check_ranks(damaged, "2", str(tmp_path), f"{name} is damaged", "value")
        part.unlink()
        check_ranks(damaged, "2", str(tmp_path), f"lacks its part {name}", "missing")
        part.write_bytes(data)
    (tmp_path / "two_partial" / "manifest.json").write_text("{")
    check_ranks(damaged, "2", str(tmp_path), "manifest.json is damaged", "value")
    (tmp_path / "two_partial" / "unfinished").touch()
    check_ranks(damaged, "2", str(tmp_path), "job that saved it did not finish", "missing")
    shutil.rmtree(tmp_path / "two_partial")
    (tmp_path / "one_partial").mkdir()
    check_ranks(damaged, "2", str(tmp_path), r"has those of the tags \['one'\]", "missing")
    (tmp_path / "two_partial").mkdir()
    check_ranks(damaged, "2", str(tmp_path), "neither manifest.json nor parts named", "missing")
    (tmp_path / "two_partial" / "model_0_0_1.pt").touch()
    check_ranks(damaged, "2", str(tmp_path), "save a full checkpoint there", "usage")


def dying_among_shards(path: str) -> None:
    model, optimizer = begin(2)
    index = "w.safetensors.index.json"
    train(model, optimizer, range(1))
    smp.save_checkpoint(path, index, partial=False, model=model, user_content={"epoch": 1})
    assert smp.resume_from_checkpoint(path, partial=False) == {"epoch": 1}
    if smp.rank() == 1:
        checkpoint.write_whole = lambda *_: os._exit(7)
    with pytest.raises(Exception, match="is gone"):
        smp.save_checkpoint(path, index, partial=False, model=model, user_content={"epoch": 2})
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        smp.resume_from_checkpoint(path, partial=False)


def test_files_of_two_models_are_no_checkpoint(tmp_path: Path) -> None:
    survivor, dead = run_ranks(dying_among_shards, "2", str(tmp_path))
    assert survivor.returned, survivor
    assert dead.status == 7, dead


def interrupted(path: str, where: int, degree: int) -> float:
    """After a signal in one rank, all save: every call ends at once, on all ranks alike."""
    config = {"sharded_data_parallel_degree": degree, "sdp_param_persistence_threshold": 1}
    model, optimizer = begin(2, **(config if degree > 1 else {}))
    train(model, optimizer, range(1))
    if smp.rank() == where:

        def interrupt(*_: Any) -> None:
            if not interrupted:
                interrupted.append(True)
                os.kill(os.getpid(), signal.SIGINT)  # raises in the main thread
                end = time.monotonic() + 20
                while not model.runtime.executor.ending.left and time.monotonic() < end:
                    time.sleep(0.01)

        interrupted: list[bool] = []
        for layer in model.get_module().modules():
            layer.register_forward_pre_hook(interrupt)
    with pytest.raises((KeyboardInterrupt, SMPMicrobatchError, SMPPeerError)):
        train(model, optimizer, range(1, 2))
    begun = time.monotonic()
    if degree > 1:  # whole parameters need the groups of steps
        with pytest.raises(SMPPeerError):
            smp.save_checkpoint(path, "whole", partial=False, model=model)
    else:
        smp.save_checkpoint(path, "whole", partial=False, model=model)
    smp.save_checkpoint(path, "parts", model=model, optimizer=optimizer)
    return time.monotonic() - begun


@pytest.mark.parametrize(("where", "degree"), [(0, 1), (3, 1), (0, 2), (3, 2)])
def test_all_ranks_save_after_one_was_interrupted(tmp_path: Path, where: int, degree: int) -> None:
    for seconds in check_ranks(interrupted, "4", str(tmp_path), where, degree):
        assert seconds < 30  # they would wait for ten minutes
    assert (tmp_path / "whole").exists() == (degree == 1)
    assert (tmp_path / "parts_partial" / "manifest.json").exists()


def with_a_full_disk(path: str) -> None:
    model, optimizer = begin(2)
    train(model, optimizer, range(1))
    refused = ""

    def full(real: Any, file: Path, *arguments: Any, **options: Any) -> Any:
        if file.name == refused:
            raise OSError(28, "No space left on device")
        return real(file, *arguments, **options)

    checkpoint.write = functools.partial(full, checkpoint.write)
    Path.mkdir = functools.partialmethod(functools.partial(full, Path.mkdir))
    for name, where, tag in [
        *[("model_1.pt", 1, "one"), ("unfinished", 0, "one"), ("manifest.json", 0, "one")],
        *[("one_partial", 1, "one"), ("new", 0, "whole"), ("new", 1, "whole.bin.index.json")],
    ]:
        refused = name if smp.rank() == where else ""
        kind: Any = OSError if refused else SMPPeerError
        folder = f"{path}/new" if name == "new" else path
        with pytest.raises(kind, match="No space left on device"):
            smp.save_checkpoint(folder, tag, tag == "one", model, optimizer)
    refused = ""
    smp.save_checkpoint(path, "one", model=model, optimizer=optimizer)
    smp.resume_from_checkpoint(path, "one")


def test_a_rank_that_cannot_write_is_named_on_all(tmp_path: Path) -> None:
    check_ranks(with_a_full_disk, "2", str(tmp_path))


def test_a_job_may_be_killed_while_it_deletes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is no checkpoint, does not count as one, and goes with the next."""
    check_ranks(saving, "2", 2, str(tmp_path))
    files = len(list((tmp_path / "two_partial").iterdir()))
    for allowed in range(files + 2):
        folder = tmp_path / str(allowed)
        shutil.copytree(tmp_path / "two_partial", folder / "two_partial")
        shutil.copytree(tmp_path / "two_partial", folder / "new_partial")
        (folder / "two_partial" / ".model_0.pt.17.part").touch()
        left = [allowed]

        def killed(real: Any, *arguments: Any, left: list[int] = left, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise InterruptedError
            return real(*arguments, **options)

        with monkeypatch.context() as patched:
            for name in ("unlink", "rmdir"):
                patched.setattr(os, name, functools.partial(killed, getattr(os, name)))
            with pytest.raises(InterruptedError):
                checkpoint._delete_old(folder / "new_partial", 1)
        with pytest.raises(FileNotFoundError, match=r"there is no (complete )?checkpoint"):
            full_state_dict(str(folder), "two")
        shutil.copytree(tmp_path / "two_partial", folder / "newer_partial")
        checkpoint._delete_old(folder / "newer_partial", 2)
        assert sorted(os.listdir(folder)) == ["new_partial", "newer_partial"], allowed


def test_checkpoints_that_cannot_be_loaded_are_not_kept(tmp_path: Path) -> None:
    for time_of_end, name in enumerate("abcdef"):
        part = tmp_path / f"{name}_partial"
        part.mkdir()
        for file in {
            "c": ["unfinished"],
            "d": ["manifest.json", "unfinished"],
            "f": [".unfinished.4711.part"],
        }.get(name, ["manifest.json"]):
            (part / file).touch()
            os.utime(part / file, (time_of_end, time_of_end))
    (tmp_path / "original_partial").mkdir()
    (tmp_path / "original_partial" / "model_0.pt").touch()
    (tmp_path / "whole_partial").touch()  # a whole model with this tag
    checkpoint._delete_old(tmp_path / "e_partial", 2)
    kept = ["b_partial", "e_partial", "original_partial", "whole_partial"]
    assert sorted(part.name for part in tmp_path.iterdir()) == kept


def tags_of_all_kinds(path: str) -> None:
    model, optimizer = begin(2)
    train(model, optimizer, range(1))
    for wrong in ("", 5, None):
        with pytest.raises(SMPUsageError, match=f"the tag has to be a text, not {wrong!r}"):
            smp.save_checkpoint(path, wrong, model=model)  # type: ignore[arg-type]
    for tag in ("newest", "newest_in_parts", "newest_in_one_file", "run/user_content_a"):
        with pytest.raises(SMPUsageError, match=f"a file of its own in place of {tag!r}"):
            smp.save_checkpoint(path, tag, partial=False, model=model)
    # Of the model itself a rank has only its own part.
    for partial in (True, False):
        with pytest.raises(SMPUsageError, match=r"what smp.DistributedModel has returned"):
            smp.save_checkpoint(path, "a", partial, model.get_module())
        sgd = torch.optim.SGD(model.parameters())
        with pytest.raises(SMPUsageError, match=r"what smp.DistributedOptimizer .* not a SGD"):
            smp.save_checkpoint(path, "a", partial, model, sgd)
    assert not Path(path).exists()
    with pytest.raises(
        SMPUsageError, match=r"rank 0 of the job has \('t0', True\), rank 1 has \('t1', True\)"
    ):
        smp.save_checkpoint(path, f"t{smp.rank()}", model=model)
    kind: Any = SMPUsageError if smp.rank() == 1 else SMPPeerError
    with pytest.raises(kind, match="num_kept_partial_checkpoints must be at least 1"):
        smp.save_checkpoint(
            path, "t", model=model, num_kept_partial_checkpoints=0 if smp.rank() == 1 else None
        )
    for partial in (True, False):
        for tag in ("run/1", "run/2", "run/3"):
            smp.save_checkpoint(path, tag, partial, model, None, tag, True, 2 if partial else None)
        assert smp.resume_from_checkpoint(path, partial=partial) == "run/3"
        assert smp.resume_from_checkpoint(path, "run/2", partial=partial) == "run/2"
    smp.save_checkpoint(path, "newest", model=model, user_content="in parts")
    assert smp.resume_from_checkpoint(path) == "in parts"
    assert sorted(one.name for one in Path(path, "run").glob("*_partial")) == [
        "2_partial",
        "3_partial",
    ]


def test_tags(tmp_path: Path) -> None:
    check_ranks(tags_of_all_kinds, "2", str(tmp_path / "new"))


def test_two_processes_with_one_id_may_write_the_same_file(tmp_path: Path) -> None:
    """As replicas do in smp.save, which may be in containers with process ids of their own."""

    def slowly(stream: Any) -> None:
        write(tmp_path / "file", lambda other: other.write(b"value"))
        stream.write(b"value")

    write(tmp_path / "file", slowly)
    assert (tmp_path / "file").read_bytes() == b"value"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_job_leaves_is_deleted(tmp_path: Path) -> None:
    parts = tmp_path / "two_partial"
    parts.mkdir()
    left = parts / ".model_0.pt.4711.part"
    left.touch()
    check_ranks(saving, "2", 2, str(tmp_path))
    assert not left.exists()


def test_a_wrong_folder_comes_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "newest").touch()
    with pytest.raises(FileNotFoundError, match="its file newest is empty; pass a tag"):
        checkpoint.full_state_dict(str(tmp_path))
    (tmp_path / "whole").touch()
    (tmp_path / "newest").write_text("whole")
    with pytest.raises(FileNotFoundError, match=f"the whole model, {tmp_path}/whole, which"):
        checkpoint.full_state_dict(str(tmp_path))
    (tmp_path / "two_partial").mkdir()
    with pytest.raises(FileNotFoundError, match=f"pass {tmp_path}, and the tag two"):
        checkpoint.full_state_dict(str(tmp_path / "two_partial"))


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
