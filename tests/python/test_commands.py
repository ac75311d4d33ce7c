"""What all commands have in common: where their output goes, Ctrl-C, and the files they write."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from smddp.tools import _command, _files


def ended(
    monkeypatch: pytest.MonkeyPatch, main: Callable[[], int], stdout: io.TextIOWrapper | None
) -> object:
    """Runs a command with an output; returns the status with which it ends."""
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SystemExit) as raised:
        _command.run(main)
    return raised.value.code


def say(text: str) -> Callable[[], int]:
    def main() -> int:
        print(text)
        return 0

    return main


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("ascii", b"ok a -> b: FAULT ? \xff\n"),
        ("latin-1", b"ok a -> b: FAULT \xe4 \xff\n"),
        ("utf-8", "✓ a → b: ✗ ä ".encode() + b"\xff\n"),
    ],
)
def test_terminals_that_know_few_characters(
    encoding: str, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is a byte of a name of a host."""
    output = io.BytesIO()
    stream = io.TextIOWrapper(output, encoding=encoding)
    assert ended(monkeypatch, say("✓ a → b: ✗ ä \udcff"), stream) == 0
    assert output.getvalue() == written


def test_what_a_user_has_chosen_for_characters_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    stream = io.TextIOWrapper(output, encoding="ascii", errors="backslashreplace")
    assert ended(monkeypatch, say("→"), stream) == 0
    assert output.getvalue() == b"\\u2192\n"


def test_output_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:  # the disk of this device is full
        assert ended(monkeypatch, say("text"), full) == 1
        said = capsys.readouterr().err
        full.flush()  # as Python does at the end
    assert said == "smddp: the output cannot be written: No space left on device\n"
    assert ended(monkeypatch, say("text"), None) == 0


def test_other_errors_of_the_system_are_shown_whole() -> None:
    def main() -> int:
        raise FileNotFoundError(errno.ENOENT, "No such file", "x")

    with pytest.raises(FileNotFoundError):
        _command.run(main)


def test_ctrl_c_leaves_no_stack_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(KeyboardInterrupt) as raised:
        _command.run(main)
    sys.excepthook(raised.type, raised.value, raised.tb)
    assert capsys.readouterr().err == ""


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    _files.write(file, "old")
    file.chmod(0o640)
    link.symlink_to(file)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(OSError, match=f"No space left on device: '{link}'"):
            _files.write(link, "new")
    assert file.read_text() == "old"
    _files.write(link, "→ \udcff")
    assert file.read_bytes() == "→ ?".encode()
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [file, link]
    assert link.is_symlink()


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    _files.write(pipe, b"content")
    reader.join(60)
    assert read == [b"content"]
    assert pipe.is_fifo()


def test_the_output_of_this_process_is_written_to(tmp_path: Path) -> None:
    """What comes later goes to the same file."""
    with (tmp_path / "output").open("w+") as output:
        _files.write(Path(f"/proc/self/fd/{output.fileno()}"), "content")
        output.seek(0)
        assert output.read() == "content"


def test_a_file_that_is_protected_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write to any
    with pytest.raises(PermissionError, match=r"Permission denied: '.*/file'"):
        _files.write(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"


def test_files_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _files.unwritable(tmp_path / "new") is None
    assert _files.unwritable(tmp_path) == f"{tmp_path} is a folder, not a file"
    assert "there is no such folder" in str(_files.unwritable(tmp_path / "no" / "x"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "may not be written by this user" in str(_files.unwritable(tmp_path / "new"))
