"""Compiles the operations of kernels.cc for the installed TensorFlow, once, and loads them.

The interface between TensorFlow and operations of others changes with each of its versions, so the
library is made on this machine. Without a compiler, operations run through `tf.numpy_function`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import tensorflow as tf

import smddp_numpy

__all__ = ["load"]

_SOURCE = Path(__file__).parent / "kernels.cc"


def _headers(folder: Path) -> Path:
    """Returns the folder of smddp.h: in an installed package, or in the sources."""
    return next(
        place
        for place in (folder / "include", folder.parent / "csrc" / "c_interface")
        if (place / "smddp.h").exists()
    )


def _cache() -> Path:
    place = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(place) / "smddp"


def _compile(compiler: str, target: Path) -> None:
    folder = smddp_numpy.package_folder()
    command = [compiler, "-O2", "-fPIC", "-shared", str(_SOURCE), "-I", str(_headers(folder))]
    command += [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    command += [str(folder / "lib" / "libsmddp.so"), f"-Wl,-rpath,{folder / 'lib'}"]
    if not any(flag.startswith("--std") or flag.startswith("-std") for flag in command):
        command.append("-std=c++17")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        result = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise RuntimeError(result.stderr[-2000:])
        # Ranks of a machine may do this at once; each of them makes the same.
        made.replace(target)


@functools.cache
def load() -> Any:
    """Returns the module of the operations; None if they cannot be compiled, which is said once."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    made_from = hashlib.sha256(_SOURCE.read_bytes())
    made_from.update((_headers(smddp_numpy.package_folder()) / "smddp.h").read_bytes())
    made_from.update(f"{tf.version.VERSION} {tf.sysconfig.get_compile_flags()}".encode())
    made_from.update(str(smddp_numpy.package_folder()).encode())
    try:
        folder = _cache()
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"tensorflow_{tf.version.VERSION}_{made_from.hexdigest()[:16]}.so"
        if not target.exists():
            if compiler is None:
                raise RuntimeError("there is no C++ compiler; CXX can name one")
            _compile(compiler, target)
        return tf.load_op_library(str(target))
    except (OSError, RuntimeError, tf.errors.NotFoundError) as error:
        warnings.warn(
            "smddp has no operations for this TensorFlow, so collectives run one after the other "
            f"in Python, which is slower: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
