"""Writes files so that none is ever half written; reads files, without running code if possible."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["hash_of", "read", "write"]

log = logging.getLogger("smddp.modelparallel")


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
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.part")
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


def hash_of(file: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read(file: Path, map_location: Any, pickle_module: Any = pickle, **options: Any) -> Any:
    """Loads a file of torch.save; unpickles arbitrary objects only if the file holds such.

    Args:
        file: its path.
        map_location: as for torch.load.
        pickle_module: as for torch.load; used for arbitrary objects only.
        options: of torch.load; `weights_only` decides about arbitrary objects.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged.
    """
    try:
        return _read(file, map_location, pickle_module, **options)
    except (EOFError, RuntimeError) as error:
        raise ValueError(f"{file} is damaged, or was not written by torch: {error}") from error


def _read(file: Path, map_location: Any, pickle_module: Any, **options: Any) -> Any:
    if options.get("mmap"):
        return torch.load(file, map_location, **options)
    # A stream, because torch takes files with some name endings for other formats.
    with open(file, "rb") as stream:
        if "weights_only" in options:
            return torch.load(stream, map_location, **options)
        try:
            return torch.load(stream, map_location, weights_only=True, **options)
        except pickle.UnpicklingError:
            log.debug("%s holds more than tensors and plain containers", file)
            stream.seek(0)
            return torch.load(stream, map_location, pickle_module, weights_only=False, **options)
