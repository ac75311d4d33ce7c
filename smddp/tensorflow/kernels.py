"""Compiles the operations of kernels.cc for the installed TensorFlow, once, and loads them.

The interface between TensorFlow and operations of others changes with each of its versions, so the
library is made on this machine. Without a compiler, operations run through `tf.py_function`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

__all__ = ["Kernels", "load"]

_SOURCE = Path(__file__).parent / "kernels.cc"
_PACKAGE = Path(__file__).parents[1]
_KEPT = 8  # libraries: of several environments, or hosts that share a home
_DAY = 86400.0


class Kernels(NamedTuple):
    """What was compiled.

    Attributes:
        operations: functions of TensorFlow, by name.
        library: functions in C.
    """

    operations: Any
    library: ctypes.CDLL


def _headers(folder: Path) -> Path:
    """Returns the folder of smddp.h: in an installed package, or in the sources."""
    for place in (folder / "include", folder.parent / "csrc" / "c_interface"):
        if (place / "smddp.h").exists():
            return place
    raise RuntimeError(f"there is no smddp.h in {folder / 'include'}; install smddp again")


def _is_ours(place: Path) -> bool:
    found = place.lstat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _cache() -> Path:
    """Returns a folder that this user can write to, and nobody else."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smddp"
    with contextlib.suppress(OSError):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.access(place, os.W_OK) and _is_ours(place.resolve()):
        return place
    place = Path(tempfile.gettempdir()) / f"smddp-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(place):
        raise PermissionError(f"others can write to {place}; XDG_CACHE_HOME can name a folder")
    return place


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process of the machine at a time change the folder."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_old(folder: Path) -> None:
    """Removes libraries but those that were opened last.

    A process of this host that has opened one keeps it. One on another host, with which this one
    shares a home, may not; so what was opened within a day stays.
    """
    opened = {}
    for place in folder.glob("tensorflow_*.so"):
        with contextlib.suppress(FileNotFoundError):
            opened[place] = place.stat().st_mtime
    for place in sorted(opened, key=lambda one: -opened[one])[_KEPT:]:
        if opened[place] < time.time() - _DAY:
            place.unlink(missing_ok=True)


def _compile(compiler: str, target: Path) -> None:
    command = [compiler, "-O2", "-fPIC", "-shared", str(_SOURCE), "-I", str(_headers(_PACKAGE))]
    command += [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    command += [str(_PACKAGE / "lib" / "libsmddp.so"), f"-Wl,-rpath,{_PACKAGE / 'lib'}"]
    if not any(flag.startswith("--std") or flag.startswith("-std") for flag in command):
        command.append("-std=c++17")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        result = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise RuntimeError(result.stderr[-2000:])
        made.replace(target)


def _opened(target: Path) -> Kernels:
    with contextlib.suppress(OSError):
        os.utime(target)  # for _remove_old
    return Kernels(tf.load_op_library(str(target)), ctypes.CDLL(str(target)))


def _identity(target: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return target.stat().st_ino
    return None


def _compiled() -> Kernels:
    made_from = hashlib.sha256(_SOURCE.read_bytes())
    made_from.update((_headers(_PACKAGE) / "smddp.h").read_bytes())
    made_from.update(f"{tf.version.VERSION} {tf.sysconfig.get_compile_flags()}".encode())
    # Hosts may share a home.
    made_from.update(f"{_PACKAGE} {platform.machine()}".encode())
    target = _cache() / f"tensorflow_{tf.version.VERSION}_{made_from.hexdigest()[:16]}.so"
    first = _identity(target)
    with contextlib.suppress(OSError, tf.errors.NotFoundError):
        return _opened(target)
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler; CXX can name one")
    with _alone(target.parent):
        # As before, or removed as an old one; else another process has made it meanwhile.
        if _identity(target) in (first, None):
            _compile(compiler, target)
            _remove_old(target.parent)
    return _opened(target)


@functools.cache
def load() -> Kernels | None:
    """Returns the operations; None if they cannot be compiled, which is said once."""
    try:
        found = _compiled()
    except (OSError, RuntimeError, tf.errors.NotFoundError) as error:
        warnings.warn(
            "smddp has no operations for this TensorFlow, so collectives run one after the other "
            f"in Python, which is slower: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    found.library.smddp_kernels_add.argtypes = [ctypes.c_void_p]
    found.library.smddp_kernels_leave.argtypes = [ctypes.c_int64]
    found.library.smddp_kernels_abort.argtypes = [ctypes.c_int64, ctypes.c_char_p]
    for name in ("add", "begun", "ended"):
        getattr(found.library, f"smddp_kernels_{name}").restype = ctypes.c_int64
    # In a function every run of it counts, but its place in the program does not.
    auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS |= {"SmddpAllreduce"}
    return found
