"""Writes files whole."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

__all__ = ["unwritable", "write"]


def write(path: Path, content: str | bytes) -> None:
    """Makes a file, or replaces it as a whole; a text is written in UTF-8, whatever the locale is.

    Whoever reads it meanwhile, or after the disk was full or Ctrl-C was pressed, finds the old one.

    Raises:
        OSError: it cannot be written; the error names it.
    """
    # Not all characters of a name of a host or of a file can be written.
    data = content.encode(errors="replace") if isinstance(content, str) else content
    try:
        _write(path, data)
    except OSError as error:  # may name the file beside it, or none
        raise OSError(error.errno, error.strerror, str(path)) from None


def _write(path: Path, data: bytes) -> None:
    # /dev/stdout may be a file that has been open for long.
    is_device = path.absolute().parts[1:2] in (("dev",), ("proc",))
    if is_device or (path.exists() and not path.is_file()):
        path.write_bytes(data)
        return
    target = Path(os.path.realpath(path))  # a link stays one
    if target.exists() and not os.access(target, os.W_OK):  # replacing it would be possible
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    temporary = target.with_name(f".smddp-{os.getpid()}.tmp")
    try:
        file = temporary.open("wb")
    except PermissionError:  # of the folder
        if not target.exists():
            raise
        target.write_bytes(data)
        return
    try:
        with file:
            file.write(data)
        with contextlib.suppress(OSError):  # of a new file there are none
            found = target.stat()
            os.chmod(temporary, found.st_mode)
            os.chown(temporary, found.st_uid, found.st_gid)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def unwritable(path: Path) -> str | None:
    """Returns why a file could not be written, in a sentence; None if it could, as far as known."""
    folder = path.absolute().parent
    if path.is_dir():
        return f"{path} is a folder, not a file"
    if not folder.is_dir():
        return f"{path}: there is no such folder"
    if not os.access(path if path.exists() else folder, os.W_OK):
        return f"{path}: it may not be written by this user"
    return None
