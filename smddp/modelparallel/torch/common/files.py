"""Writes files that are complete or absent; reads files, by default without running their code."""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["hash_of", "read", "remove_unfinished", "write"]

_MAKE_NUMBER: Any = np.float64(0).__reduce__()[0]
# Pickles of numpy's numbers, such as learning rates, name these. Its releases differ in names.
_OF_NUMBERS: list[Any] = [
    np.dtype,
    *{type(np.dtype(code)) for code in "?efd" + np.typecodes["AllInteger"]},
    *((_MAKE_NUMBER, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


def write(file: Path, fill: Callable[[Any], Any]) -> str:
    """Writes a file under another name, and renames it when it is complete.

    Args:
        file: its path; the folder exists.
        fill: writes to the stream that it gets.

    Returns:
        The SHA-256 of the file, in hexadecimal.

    Raises:
        OSError: the file cannot be written; a former file of that name is unchanged.
    """
    # Replicas may write the same file at once, from containers with the same process ids.
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(8)}.part")
    try:
        with open(unfinished, "wb") as stream:
            fill(stream)
            stream.flush()
            os.fsync(stream.fileno())
        result = hash_of(unfinished)
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return result


def remove_unfinished(folder: Path, pattern: str = "*") -> None:
    """Deletes what `write` has left of files because its process was killed.

    Args:
        folder: see `pattern`.
        pattern: of the names of files, as for `glob`; no process writes such files now.
    """
    for unfinished in folder.glob(f".{pattern}.*.part"):
        unfinished.unlink(missing_ok=True)


def hash_of(file: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read(
    file: Path,
    map_location: Any,
    pickle_module: Any = pickle,
    weights_only: bool | None = True,
    **options: Any,
) -> Any:
    """Loads a file of torch.save.

    Args:
        file: its path.
        map_location: as for torch.load.
        pickle_module: as for torch.load; used only if `weights_only` is False.
        weights_only: as for torch.load; False lets the file run any code. None lets torch decide.
        options: of torch.load.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged.
        UnpicklingError: with `weights_only`, it holds more than tensors, numbers and plain
            containers.
    """
    try:
        return _read(file, map_location, pickle_module, weights_only, **options)
    except (EOFError, RuntimeError) as error:
        raise ValueError(f"{file} is damaged, or was not written by torch: {error}") from error


def _read(
    file: Path, map_location: Any, pickle_module: Any, weights_only: bool | None, **options: Any
) -> Any:
    # torch refuses any module together with weights_only.
    options["pickle_module"] = pickle_module if weights_only is False else None
    options["weights_only"] = weights_only
    with torch.serialization.safe_globals(_OF_NUMBERS):
        if options.get("mmap"):
            return torch.load(file, map_location, **options)
        # A stream, because torch takes files with some name endings for other formats.
        with open(file, "rb") as stream:
            return torch.load(stream, map_location, **options)
