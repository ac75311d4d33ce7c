"""Checkpoints: `save` and `load` for any object of a rank, and checkpoints of a training job.

A file is written under another name, synchronised and renamed. So a job that dies while it saves
leaves the previous checkpoint whole, if it has another tag. A checkpoint in parts has a manifest
with the hash of each file. The manifest is written last, and only files that it names are loaded.
Parts are merged when they are loaded, so the numbers of partitions and replicas may have changed
since. Folders of the original library have no manifest; their parts are known by their names.

`save`, `load`, `save_checkpoint` and `resume_from_checkpoint` have the arguments and file names of
the SageMaker Python SDK's documentation.
"""

from __future__ import annotations

import collections
import functools
import glob
import json
import logging
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.checkpoint import safetensors
from smddp.modelparallel.torch.checkpoint.by_shape import forms_of_model, forms_of_optimizer
from smddp.modelparallel.torch.common.files import hash_of, read, remove_unfinished, write
from smddp.modelparallel.torch.common.lost import smp_errors
from smddp.modelparallel.torch.common.versions import versions_of, with_versions
from smddp.modelparallel.torch.delayed.life import come_to_life, delayed
from smddp.modelparallel.torch.job.meeting import done_on_all, together
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.optimizer.distributed_optimizer import FP16_STATES, merged
from smddp.modelparallel.torch.optimizer.half import half_precision
from smddp.modelparallel.torch.optimizer.shards import SHARD
from smddp.modelparallel.torch.partition.placement import MARKER, Decision
from smddp.modelparallel.torch.sharding.joined import SHARDS, united

__all__ = [
    "full_state_dict",
    "load",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "write_whole",
]

log = logging.getLogger("smddp.modelparallel")

_MANIFEST = "manifest.json"
_PARTIAL = "_partial"  # the end of the name of a folder with parts
_USER_CONTENT = "user_content.pt"
_CONTENT_OF = "user_content_"  # begins the name of that of a whole model
# Is in the folder of a checkpoint from before the first part is written until the manifest is.
_UNFINISHED = "unfinished"
# Key of the manifest of a checkpoint of the original library: the tp rank of each file.
_TP_RANKS = "tp_ranks"
# Files that hold the newest tag: of all checkpoints; of those in parts (True), in one file (False).
_NEWEST = "newest"
_NEWEST_OF_KIND = {True: "newest_in_parts", False: "newest_in_one_file"}


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
    **ignored: Any,
) -> None:
    """Saves an object; with `partial`, each rank of a replica under a name of its own.

    Args:
        obj: anything that torch.save can save.
        f: the file; if partial, numbers of the rank are appended to the name.
        partial: every rank calls it; all replicas write the same files, unless `v3`. Otherwise the
            calling rank writes exactly the file `f`.
        pickle_module: as for torch.save.
        pickle_protocol: as for torch.save.
        v3: the name also has the number of the replica.
        ignored: accepted for compatibility.

    Raises:
        SMPUsageError: f is not a string.
        SMPInitializationError: partial, and `smp.init` has not been called.
    """
    if not isinstance(f, str):
        raise SMPUsageError(f"smp.save: f must be a str, not {type(f).__name__}")
    name = f + _suffix(v3) if partial else f
    write(Path(name), lambda file: torch.save(obj, file, pickle_module, pickle_protocol))


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = pickle,
    partial: bool = True,
    back_compat: bool = False,
    weights_only: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Loads what `save` has written; with `partial`, the object of this rank.

    Args:
        f: as for `save`.
        map_location: as for torch.load.
        pickle_module: as for torch.load; used only if `weights_only` is False.
        partial: as for `save`.
        back_compat: try the names of the original's versions before 1.10 first, which end in the
            rank within the model. They are tried in any case.
        weights_only: as for torch.load: load only tensors and plain containers. False loads any
            object, and lets the file run any code: only for files that you trust. None means True,
            unless the environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set.
        pickle_load_args: as for torch.load.

    Raises:
        SMPInitializationError: partial, and `smp.init` has not been called.
        ValueError: the file is damaged.
        UnpicklingError: with `weights_only`, the file holds other objects.
        FileNotFoundError: there is no such file; the text lists the names that were tried.
    """
    names = [f]
    if partial:
        topology = state.topology
        pp, tp, rdp = (topology.rank_in(kind) for kind in ("pp", "tp", "rdp"))
        old = f"{f}_{topology.rank_in('mp')}"
        names = [f + _suffix(False), old, f"{f}_{pp}_{tp}", f"{f}_{pp}_{tp}_{rdp}"]
        names = list(dict.fromkeys([old, *names] if back_compat else names))
    for name in names:
        if os.path.exists(name):
            try:
                return read(
                    Path(name), map_location, pickle_module, weights_only, **pickle_load_args
                )
            except pickle.UnpicklingError as error:
                if weights_only is False:
                    raise
                raise pickle.UnpicklingError(
                    f"smp.load: {name} holds more than tensors and plain containers. To load "
                    "other objects means to run code from the file. If you trust the file, call "
                    "smp.load with weights_only=False, or name the classes that you trust with "
                    f"torch.serialization.add_safe_globals. torch says: {error}"
                ) from None
    raise FileNotFoundError(
        f"smp.load: there is no checkpoint {' or '.join(names)}"
        + ("; was it saved with partial=True, and with as many partitions?" if partial else "")
    )


@smp_errors()
def save_checkpoint(
    path: str,
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Saves a checkpoint; all ranks have to call it, with the same arguments.

    Args:
        path: a folder that all ranks see.
        tag: names the checkpoint.
        partial: each partition saves its parts of model and optimizer into the folder
            `{tag}_partial`. Otherwise the whole model, without the optimizer, is saved as the file
            `tag`: as safetensors if the tag ends in `.safetensors`, else as torch.save does it. If
            the tag ends in `.index.json`, as in `model.safetensors.index.json`, each partition
            writes a file of its own. Parameters that are sharded or divided are gathered one by
            one then, and of files of torch.save, the rank that writes one keeps what it writes. But
            if names are translated, every rank gathers the whole model.
        model: a smp.DistributedModel; None saves none.
        optimizer: a smp.DistributedOptimizer; None saves none. It is saved only with `partial`.
        user_content: anything that pickles; that of rank 0 is saved.
        translate_if_full: if not partial, use the names of Hugging Face for modules that smp has
            put in place of its modules.
        num_kept_partial_checkpoints: keep so many checkpoints in parts, this one included, and
            delete older ones, and what jobs have left that ended while they saved one; None keeps
            all. If the tag has a "/", only those in the same folder count.

    Raises:
        SMPInitializationError: `smp.init` has not been called.
        SMPUsageError: there is nothing to save, num_kept_partial_checkpoints is less than 1, ranks
            have different tags, the tag is the name of a file of smp, model or optimizer is not one
            of smp, an entry cannot be saved as safetensors, or the body of a step calls it.
        SMPPeerError: it has failed on another rank, or a rank is gone, or has not called it within
            the timeout of the process group.
        OSError: a file cannot be written.
    """
    first = state.topology.rank == 0
    state.refuse_in_step("smp.save_checkpoint()")

    def check() -> tuple[str, bool]:
        if not isinstance(tag, str) or not tag:
            raise SMPUsageError(f"save_checkpoint: the tag has to be a text, not {tag!r}")
        if num_kept_partial_checkpoints is not None and num_kept_partial_checkpoints < 1:
            raise SMPUsageError("save_checkpoint: num_kept_partial_checkpoints must be at least 1")
        if model is None and optimizer is None and user_content is None:
            raise SMPUsageError(
                "save_checkpoint: pass what to save: model, optimizer or user_content"
            )
        if not partial and _is_own_name(Path(tag).name):
            raise SMPUsageError(
                f"save_checkpoint: smp writes a file of its own in place of {tag!r}: use another "
                "tag, such as 'model.pt'"
            )
        for given, kind in ((model, "DistributedModel"), (optimizer, "DistributedOptimizer")):
            if given is not None and not hasattr(given, "local_state_dict"):
                raise SMPUsageError(
                    f"save_checkpoint: pass what smp.{kind} has returned, which knows what other "
                    f"ranks have, not a {type(given).__name__}"
                )
        return tag, bool(partial)

    # Nothing is written before all ranks are here: one may still read a checkpoint of this name.
    with together("smp.save_checkpoint", state.groups.of("world")):
        given = _on_all(check)
    for rank, other in enumerate(given):
        if other != given[0]:
            raise SMPUsageError(
                "save_checkpoint: all ranks have to pass the same tag and partial: rank 0 of the "
                f"job has {given[0]}, rank {rank} has {other}"
            )
    folder = Path(path)

    def write_all() -> None:
        if partial:
            _save_parts(folder / f"{tag}{_PARTIAL}", model, optimizer, user_content)
        else:
            _save_whole(folder / tag, model, user_content, translate_if_full)
        if first:
            for name in (_NEWEST, _NEWEST_OF_KIND[partial]):
                write(folder / name, lambda file: file.write(tag.encode()))
            if partial and num_kept_partial_checkpoints is not None:
                _delete_old(folder / f"{tag}{_PARTIAL}", num_kept_partial_checkpoints)

    _on_all(write_all)


def _on_all(work: Callable[[], Any]) -> list[Any]:
    """Does a part of `save_checkpoint` between two exchanges; if it fails, it does on all ranks."""
    return done_on_all("smp.save_checkpoint", work, state.groups.of("world"))


def _save_whole(file: Path, model: Any, user_content: Any, translate_if_full: bool) -> None:
    """Writes the whole model, and user_content."""
    first = state.topology.rank == 0
    content = _content_of(file)

    def prepare() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if first:  # otherwise that of an earlier model could stay with this one
            content.unlink(missing_ok=True)
            remove_unfinished(file.parent, glob.escape(file.name))

    _on_all(prepare)
    if file.name.endswith(_INDEX):
        _save_shards(file, model, translate_if_full)
    else:
        entries = model.state_dict() if model is not None else {}
        if first:
            write_whole(file, _translated(entries) if translate_if_full else entries)
    if first:
        write(content, lambda stream: torch.save(user_content, stream))


def _content_of(file: Path) -> Path:
    """Returns the file of the user_content that belongs to a whole model."""
    return file.with_name(f"{_CONTENT_OF}{file.name}")


def _is_own_name(name: str) -> bool:
    """Says whether a file with this name would be overwritten by one that belongs to another."""
    return name in (_NEWEST, *_NEWEST_OF_KIND.values()) or name.startswith(_CONTENT_OF)


def resume_from_checkpoint(
    path: str,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Any], Any] | None = None,
) -> Any:
    """Loads a checkpoint into the model, which must exist, and into the optimizer.

    The user_content may be any object, so its file can run any code: load only checkpoints that you
    trust.

    Args:
        path: the folder.
        tag: of the checkpoint; the newest one if None.
        partial: it was saved in parts, by any number of partitions. Otherwise it is one file, of
            torch.save or safetensors, or the index (`.index.json`) of several such files, written
            by any program.
        strict: as for load_state_dict.
        load_optimizer: load the optimizer, too; only from a checkpoint in parts. If there are
            several, it is the last smp.DistributedOptimizer that was made. If there is none, or
            none in the checkpoint, a warning says so. A job in full precision then gets the master
            weights of one in half precision as its parameters.
        load_sharded_optimizer_state: with sharded data parallelism, False loads only the master
            weights and the loss scale of the optimizer; else without effect.
        translate_function: if not partial, applied to the entries of the file before they are
            loaded. Names of Hugging Face are translated without it.

    Returns:
        The user_content; an empty dict if there is none.

    Raises:
        FileNotFoundError: there is no such checkpoint, or a part of it is missing.
        ValueError: a file is damaged.
        UnpicklingError: a file holds more than tensors and plain containers; or not partial, and
            it is damaged.
        RuntimeError: with `strict`, the names of the entries do not fit the model.
        SMPUsageError: there is no smp.DistributedModel yet; or the original library has saved the
            parts, and they are not divided by modules only; or the optimizer's state dict has no
            "state", and other ranks, or another division of the model, have saved it; or the body
            of a step calls it.
        SMPInitializationError: `smp.init` has not been called.
    """
    folder = Path(path)
    _ = state.topology  # raises before smp.init
    state.refuse_in_step("smp.resume_from_checkpoint()")
    model, optimizer = state.current_model(), state.current_optimizer()
    if model is None:
        raise SMPUsageError("create smp.DistributedModel before resume_from_checkpoint")
    if not partial:
        tag = tag or _newest(folder, False)
        file = folder / tag
        if not file.exists():
            parts = folder / f"{tag}{_PARTIAL}"
            hint = f"; there is one in parts, {parts}: load it with partial=True"
            raise FileNotFoundError(
                f"there is no checkpoint {file}{hint if parts.exists() else ''}"
            )
        entries = _whole(file)
        model.load_state_dict(
            translate_function(entries) if translate_function else entries, strict
        )
        return _user_content(_content_of(file))
    parts = _parts(folder, tag)
    manifest = _manifest(parts)
    # All is read before any of it is loaded: a damaged file leaves the model as it is.
    entries = _merged_model(parts, manifest)
    loads = load_optimizer and optimizer is not None and manifest["optimizer"]
    if load_optimizer and (optimizer is None) != (not manifest["optimizer"]):
        _warn_of_optimizer(parts, optimizer is None)
    whole = _merged_optimizer(parts, manifest) if loads else None
    # Checkpoints of older versions have no hash of it.
    if _USER_CONTENT in manifest["hashes"]:
        _verified(parts, _USER_CONTENT, manifest)
    content = _user_content(parts / _USER_CONTENT)
    if entries and whole is not None and half_precision() is None:
        entries.update(_masters(whole, model, optimizer))
    if entries:
        model.load_state_dict(entries, strict)
    del entries
    if whole is not None:
        if state.groups.sharding is not None and not load_sharded_optimizer_state:
            own = optimizer.orig_state_dict()
            whole = {**whole, "state": {}, "param_groups": own["param_groups"]}
        optimizer.load_state_dict(whole)
    if manifest["partition"] is not None and not model.partitioned:
        model.runtime.placement.from_checkpoint = _division(manifest)
    return content


def _warn_of_optimizer(parts: Path, job_has_none: bool) -> None:
    """Says that training goes on without the state of the optimizer."""
    if state.topology.rank == 0:
        log.warning(
            "smp: resume_from_checkpoint loads no state of the optimizer, because %s. Pass "
            "load_optimizer=False if none is needed",
            "there is no smp.DistributedOptimizer yet: make it before"
            if job_has_none
            else f"there is none in {parts}: save_checkpoint was called without optimizer",
        )


def _masters(whole: dict[str, Any], model: Any, optimizer: Any) -> dict[str, Any]:
    """Returns the master weights of a checkpoint by the names of their parameters.

    The entries of the model are these, rounded to half precision. A job in full precision has no
    masters, so these are its parameters.
    """
    masters, numbers = whole.get(FP16_STATES, {}).get("masters", {}), optimizer._param_id_to_index()
    named = model.get_module().named_parameters(remove_duplicate=False)
    found = ((name, masters.get(numbers.get(id(parameter)))) for name, parameter in named)
    return {name: master for name, master in found if master is not None}


def full_state_dict(path: str, tag: str | None = None) -> dict[str, Any]:
    """Returns the state dict of the whole model of a checkpoint in parts.

    It needs neither `smp.init` nor other ranks.

    Args:
        path: the folder.
        tag: of the checkpoint; the newest one if None.

    Returns:
        Tensors of the host by the names that parameters have in the job. They are mapped from the
        files, except for those that had to be joined.

    Raises:
        FileNotFoundError: there is no such checkpoint, or a part of it is missing.
        ValueError: a file is damaged.
        SMPUsageError: as for `resume_from_checkpoint`.
    """
    parts = _parts(Path(path), tag)
    entries = _merged_model(parts, _manifest(parts))
    for value in entries.values():
        come_to_life(value, shares=False)
    return entries


def _parts(folder: Path, tag: str | None) -> Path:
    """Returns the folder of a checkpoint in parts, the newest one without a tag."""
    tag = tag or _newest(folder, True)
    parts = folder / f"{tag}{_PARTIAL}"
    if parts.exists():
        return parts
    if (folder / tag).exists():
        raise FileNotFoundError(
            f"there is no checkpoint {parts}; there is one of the whole model, {folder / tag}, "
            "which resume_from_checkpoint loads with partial=False"
        )
    tags = sorted(one.name.removesuffix(_PARTIAL) for one in folder.glob(f"*{_PARTIAL}"))
    raise FileNotFoundError(
        f"there is no checkpoint {parts}; {folder} has those of the tags {tags}"
    )


def _newest(folder: Path, partial: bool) -> str:
    # Programs that do not know the files by kind write only `newest`.
    # They, or a full disk, may leave an empty one.
    for file in (folder / _NEWEST_OF_KIND[partial], folder / _NEWEST):
        if file.exists() and (tag := file.read_text().strip()):
            return tag
    inside = folder.name.endswith(_PARTIAL)
    hint = f"; pass {folder.parent}, and the tag {folder.name.removesuffix(_PARTIAL)}"
    why = f"it has no file {_NEWEST}" if folder.exists() else "there is no such folder"
    if (folder / _NEWEST).exists():
        why = f"its file {_NEWEST} is empty; pass a tag"
    raise FileNotFoundError(f"there is no checkpoint in {folder}: {why}{hint if inside else ''}")


# --- one file -------------------------------------------------------------------------------------


_INDEX = ".index.json"


def _is_safetensors(name: str) -> bool:
    return name.endswith(".safetensors")


def write_whole(file: Path, entries: dict[str, Any], values: Iterator[Any] | None = None) -> None:
    """Writes entries in the format that the name of the file asks for.

    Args:
        file: is safetensors if it ends in `.safetensors`, else what torch.save writes.
        entries: by name.
        values: those to write, as for `safetensors.write`; torch.save needs all of them at once.

    Raises:
        SMPUsageError: an entry cannot be saved as safetensors.
    """
    if _is_safetensors(file.name):
        write(file, lambda stream: safetensors.write(stream, entries, values))
    else:
        if values is not None:
            entries = dict(zip(entries, values, strict=True))
        write(file, lambda stream: torch.save(entries, stream))


def _translated(entries: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a whole model by the names that it has elsewhere."""
    for to_others, _ in state.module_manager.translate_functions:
        entries = to_others(entries)
    return entries


def _save_shards(index: Path, model: Any, translate: bool) -> None:
    """Writes a file for each partition, and on rank 0 the index of them, as Hugging Face does.

    The files of `model.safetensors.index.json` are `model-00001-of-00002.safetensors` and so on.
    Source: huggingface.co/docs/transformers, "Sharded checkpoints".
    """
    topology = state.topology
    entries: dict[str, Any] = {}
    values: Iterator[Any] = iter(())
    if model is not None and translate and state.module_manager.translate_functions:
        # Other names, which may have parts of several ranks.
        everything = _translated(model.state_dict())
        names = list(everything)[topology.rank_in("pp") :: topology.pp_size]
        entries = {name: everything[name] for name in names}
        values = iter(entries.values())
    elif model is not None:
        entries = model.runtime.model_state.shapes()
        values = model.runtime.model_state.values()
    whole = Path(index.name.removesuffix(_INDEX))
    part = f"{topology.rank_in('pp') + 1:05}-of-{topology.pp_size:05}"
    file = index.with_name(f"{whole.stem}-{part}{whole.suffix}")

    def prepare() -> None:
        if topology.rank == 0:
            # If a rank dies later, an earlier index must not name files of two models.
            index.unlink(missing_ok=True)
            stem, suffix = map(glob.escape, (whole.stem, whole.suffix))
            remove_unfinished(index.parent, f"{stem}-*-of-*{suffix}")

    _on_all(prepare)

    def write_mine() -> tuple[str, list[str], int]:
        try:
            if topology.rank_in("dp") > 0 or not entries:
                return "", [], 0
            write_whole(file, entries, values)
        finally:
            collections.deque(values, maxlen=0)  # other ranks may need this one to gather theirs
        tensors = [value for value in entries.values() if isinstance(value, torch.Tensor)]
        return file.name, list(entries), sum(t.numel() * t.element_size() for t in tensors)

    everybody = _on_all(write_mine)
    if topology.rank == 0:
        content = {
            "metadata": {"total_size": sum(size for _, _, size in everybody)},
            "weight_map": {name: file for file, names, _ in everybody for name in names},
        }
        write(index, lambda stream: stream.write(json.dumps(content, indent=1).encode()))


def _whole(file: Path) -> dict[str, Any]:
    """Reads a model from one file, or from those that an index names."""
    if file.name.endswith(_INDEX):
        entries: dict[str, Any] = {}
        for name in sorted(set(json.loads(file.read_text())["weight_map"].values())):
            if not (file.parent / name).exists():
                raise FileNotFoundError(f"the checkpoint {file} lacks its part {name}")
            entries.update(_whole(file.parent / name))
        return entries
    if _is_safetensors(file.name):
        return dict(safetensors.read(file))
    return _mapped(file)


# --- parts ----------------------------------------------------------------------------------------


def _save_parts(folder: Path, model: Any, optimizer: Any, user_content: Any) -> None:
    """Writes the parts of this rank, and on rank 0 the manifest of all parts."""
    topology = state.topology

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if topology.rank == 0:
            remove_unfinished(folder)
            write(folder / _UNFINISHED, lambda _: None)

    _on_all(prepare)

    def write_mine() -> dict[str, str]:
        hashes: dict[str, str] = {}
        for name, entries in _pieces(model, optimizer).items():
            file = folder / f"{name}.pt"
            hashes[file.name] = write(file, functools.partial(torch.save, entries))
        if topology.rank == 0:
            save_content = functools.partial(torch.save, user_content)
            hashes[_USER_CONTENT] = write(folder / _USER_CONTENT, save_content)
        return hashes

    everybody = _on_all(write_mine)
    if topology.rank == 0:
        files = {name: value for part in everybody for name, value in part.items()}
        decision = model.runtime.placement.decision if model is not None else None
        manifest = {
            "hashes": files,
            "model": sorted(name for name in files if name.startswith("model_")),
            "optimizer": sorted(name for name in files if name.startswith("optimizer_")),
            FP16_STATES: sorted(name for name in files if name.startswith(FP16_STATES)),
            "partition": decision.as_dict() if decision is not None else None,
            "partitions": topology.pp_size,
            "layout": _layout(),
        }
        write(folder / _MANIFEST, lambda file: file.write(json.dumps(manifest).encode()))
        (folder / _UNFINISHED).unlink()


def _pieces(model: Any, optimizer: Any) -> dict[str, Any]:
    """Returns what this rank saves, by the file's name without its end.

    Replicas have the same parts, unless parameters or the state of the optimizer are divided over
    them. Then only sharding groups have the same.
    """
    saves = state.topology.rank_in("rdp") < state.cfg.sharded_data_parallel_degree
    place = _place()
    pieces = {f"model{place}": model.local_state_dict()} if saves and model is not None else {}
    if optimizer is not None and (saves or state.cfg.shard_optimizer_state):
        entries = optimizer.local_state_dict(gather_if_shard=False)
        if SHARD in entries:
            place = _suffix(True)
        if saves or SHARD in entries:
            if FP16_STATES in entries:
                pieces[FP16_STATES + place] = entries.pop(FP16_STATES)
            pieces[f"optimizer{place}"] = entries
    return pieces


def _place() -> str:
    """Returns the end of the names of this rank's parts."""
    degree = state.cfg.sharded_data_parallel_degree
    number = state.topology.rank_in("rdp") % degree
    return _suffix(False) + (f"_{number}" if degree > 1 else "")


def _layout() -> list[Any]:
    """Returns what decides which rank has which parts, besides the division of the model."""
    topology, cfg = state.topology, state.cfg
    replicas = topology.size_of("rdp") if cfg.shard_optimizer_state else 1
    return [topology.pp_size, topology.tp_size, cfg.sharded_data_parallel_degree, replicas]


def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / _MANIFEST
    if (folder / _UNFINISHED).exists():
        raise FileNotFoundError(
            f"there is no complete checkpoint in {folder}: the job that saved it did not finish, "
            f"and left the file {_UNFINISHED}"
        )
    if not file.exists():
        return _manifest_by_names(folder)
    try:
        manifest: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    return manifest


def _manifest_by_names(folder: Path) -> dict[str, Any]:
    """Returns a manifest without hashes for a folder of the original library.

    Its parts end in the rank within the model, or in the numbers of the pipeline-parallel and the
    tensor-parallel rank, and with sharding in that of the replica.

    Raises:
        FileNotFoundError: there are no parts of a model.
        SMPUsageError: the model or the optimizer was divided over replicas.
    """
    found: dict[str, list[str]] = {"model": [], "optimizer": [], FP16_STATES: []}
    tp_ranks: dict[str, int] = {}
    for file in sorted(folder.glob("*.pt")):
        parts = re.fullmatch(rf"(model|optimizer|{FP16_STATES})((?:_\d+){{1,3}})\.pt", file.name)
        if parts is None:
            continue
        _, tp_rank, replica = (*map(int, parts[2][1:].split("_")), 0, 0)[:3]
        if replica:
            raise SMPUsageError(
                f"{file} is a part of a model with sharded data parallelism or a sharded "
                "optimizer, as the original library saved it, which cannot be loaded: save a full "
                "checkpoint there, with partial=False"
            )
        tp_ranks[file.name] = tp_rank
        found[parts[1]].append(file.name)
    if not found["model"]:
        raise FileNotFoundError(
            f"there is no complete checkpoint in {folder}: it has neither {_MANIFEST} nor parts "
            "named model_0.pt and so on"
        )
    log.warning(
        "smp: %s has no %s, so its %d parts are not checked for damage",
        *(folder, _MANIFEST, sum(map(len, found.values()))),
    )
    # Only with tensor parallelism: parts that are divided by modules have whole parameters.
    more = {_TP_RANKS: tp_ranks} if any(tp_ranks.values()) else {}
    return {**found, **more, "hashes": {}, "partition": None}


def _division(manifest: dict[str, Any]) -> Decision | None:
    """Returns the division of a checkpoint; None if this job has partitions that it does not know.

    These partitions would stay empty, so the model is divided anew.
    """
    decision = Decision.from_dict(manifest["partition"])
    # Checkpoints of older versions do not say how many partitions their job had.
    before = manifest.get("partitions", decision.parts)
    return decision if state.topology.pp_size <= before else None


def _is_divided_alike(manifest: dict[str, Any]) -> bool:
    """Says whether each rank of this job has what one has had that saved the checkpoint."""
    decision, saved = state.current_model().runtime.placement.decision, manifest["partition"]
    if saved is None or manifest.get("layout") != _layout():
        return False
    return decision is None or decision.owners == saved["owners"]


def _verified(folder: Path, name: str, manifest: dict[str, Any]) -> Path:
    file = folder / name
    if not file.exists():
        raise FileNotFoundError(f"the checkpoint in {folder} lacks its part {name}")
    if manifest["hashes"] and hash_of(file) != manifest["hashes"][name]:
        raise ValueError(f"{file} is damaged: its hash is not the one in {_MANIFEST}")
    return file


def _merged_model(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of all partitions, mapped from the files; those of shards are delayed."""
    parts = [_part(folder, name, manifest) for name in manifest["model"]]
    forms = [part.pop(SHARDS, {}) for part in parts]
    if _TP_RANKS in manifest:
        ranks = [manifest[_TP_RANKS][name] for name in manifest["model"]]
        forms = forms_of_model(parts, ranks)
    entries = united(parts, forms, lazily=True)
    entries.pop(MARKER, None)
    return with_versions(entries, versions_of(parts[0]) if parts else None)


def _merged_optimizer(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of all partitions; that of this rank if it has no "state" to merge.

    Its tensors are delayed.
    """
    parts = [_part(folder, name, manifest) for name in manifest["optimizer"]]
    if _is_divided_alike(manifest) and all("state" not in part for part in parts):
        own = manifest["optimizer"].index(f"optimizer{_place()}.pt")
        return dict(delayed(parts[own]))
    # Checkpoints of older versions have no such list.
    halves = [_part(folder, name, manifest) for name in manifest.get(FP16_STATES, [])]
    for part, half in zip(parts, halves, strict=False):
        part[FP16_STATES] = half
    if _TP_RANKS in manifest:
        if halves:
            raise SMPUsageError(
                f"{folder} has master weights of the original library with tensor parallelism, "
                "which cannot be loaded: pass load_optimizer=False"
            )
        ranks = [manifest[_TP_RANKS][name] for name in manifest["optimizer"]]
        for part, forms in zip(parts, forms_of_optimizer(parts, ranks), strict=True):
            part[SHARDS] = forms
    whole = merged(parts, lazily=True)
    whole.pop(MARKER, None)
    return dict(delayed(whole))


def _part(folder: Path, name: str, manifest: dict[str, Any]) -> dict[str, Any]:
    return _mapped(_verified(folder, name, manifest))


def _mapped(file: Path) -> dict[str, Any]:
    # Files of old versions of torch cannot be mapped.
    mmap = zipfile.is_zipfile(file)
    try:
        found: dict[str, Any] = read(file, "cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"{file} is damaged, or holds more than tensors and plain containers, in the "
            "state of a module or in a group of the optimizer. If you trust the file, name the "
            f"classes with torch.serialization.add_safe_globals. torch says: {error}"
        ) from None
    return found


def _delete_old(newest: Path, keep: int) -> None:
    """Deletes the oldest checkpoints in parts beside the newest one, so that `keep` are left.

    Those that a job has begun to write or to replace, and has not finished, are of no use and go.
    """
    all_of_them = {one for one in newest.parent.glob(f"*{_PARTIAL}") if one.is_dir()}
    with_manifest = {one for one in all_of_them if (one / _MANIFEST).exists()}
    # A job that has begun one and left nothing that can be seen was killed at once.
    unfinished = {
        one for one in all_of_them if (one / _UNFINISHED).exists() or not any(one.glob("[!.]*"))
    }
    complete = list(with_manifest - unfinished)
    # Times of files may be equal, or a clock may have been set back; so the newest one is known by
    # its name.
    complete.sort(key=lambda old: (old == newest, (old / _MANIFEST).stat().st_mtime_ns))
    for old in (*unfinished, *complete[: max(0, len(complete) - keep)]):
        # If this ends early, the rest of the folder does not count as a checkpoint, and is deleted
        # the next time.
        write(old / _UNFINISHED, lambda _: None)
        for part in old.iterdir():
            if part.is_dir():
                shutil.rmtree(part)
            elif part.name != _UNFINISHED:
                part.unlink()
        (old / _UNFINISHED).unlink()
        old.rmdir()


def _user_content(file: Path) -> Any:
    # Some tools leave an empty file.
    if not file.exists() or file.stat().st_size == 0:
        return {}
    # It may be any object.
    content = read(file, "cpu", weights_only=False)
    return {} if content is None else content


def _suffix(v3: bool) -> str:
    topology = state.topology
    pp, tp, rdp = (topology.rank_in(kind) for kind in ("pp", "tp", "rdp"))
    if v3:
        return f"_{pp}_{tp}_{rdp}"
    return f"_{pp}_{tp}" if topology.tp_size > 1 else f"_{topology.rank_in('mp')}"
