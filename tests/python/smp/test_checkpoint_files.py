"""Files of checkpoints: those of other libraries, damaged ones, and what interruptions leave."""

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
from smp.checkpoint_models import begin, same, saving, train
from smp.common import evaluate
from smp.zoo import ZOO

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPMicrobatchError, SMPPeerError, SMPUsageError
from smddp.modelparallel.torch.checkpoint import checkpoint, safetensors
from smddp.modelparallel.torch.checkpoint.checkpoint import full_state_dict
from smddp.modelparallel.torch.common.files import write

pytestmark = pytest.mark.multiprocess


def begin_shared() -> Any:
    torch.manual_seed(smp.rank())
    return smp.DistributedModel(ZOO["shared layer"].make())


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
                evaluate(model, x)
            assert smp.resume_from_checkpoint(path, name, partial=False) == {}, name
            with torch.no_grad():
                result = evaluate(model, x).concat()
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
                while not model.runtime.executor.departure.reason and time.monotonic() < end:
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
