"""Freezes a process as `docker pause` does, in a cgroup of version 2 or 1."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
# The folder of a hierarchy, the file that freezes and thaws, and what is written to it.
_KINDS = {
    "v2": [(_ROOT, "cgroup.freeze", "1", "0"), (_ROOT / "unified", "cgroup.freeze", "1", "0")],
    "v1": [(_ROOT / "freezer", "freezer.state", "FROZEN", "THAWED")],
}


def _probe(root: Path, file: str) -> bool:
    folder = root / "smddp-probe"
    with contextlib.suppress(OSError):
        folder.mkdir()
        try:
            return (folder / file).exists()
        finally:
            folder.rmdir()
    return False


def can_freeze(kind: str) -> bool:
    """Returns whether this process may make such cgroups: "v1" or "v2"."""
    return any(_probe(root, file) for root, file, _, _ in _KINDS[kind])


@contextlib.contextmanager
def frozen(pid: int, kind: str) -> Iterator[None]:
    """Holds a process still."""
    root, file, freeze, thaw = next(one for one in _KINDS[kind] if _probe(one[0], one[1]))
    folder = root / f"smddp-{pid}"
    folder.mkdir()
    (folder / "cgroup.procs").write_text(str(pid))
    try:
        (folder / file).write_text(freeze)
        yield
    finally:
        (folder / file).write_text(thaw)
        (root / "cgroup.procs").write_text(str(pid))
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.01)
