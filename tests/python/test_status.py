"""`smddp status` tells what ranks are doing, and who keeps others waiting."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import freezer
import pytest
import ranks
import torch
import torch.distributed as dist

from smddp.tools import status
from smddp.tools._spans import spans

pytestmark = pytest.mark.multiprocess


def _look(seconds: float = 5) -> list[status.Member]:
    """Returns the members of this job's first group, when two of them wait."""
    mine = {member.id for member in status.look([os.getpid()])}
    end = time.monotonic() + seconds
    while True:
        members = [member for member in status.look() if member.id in mine]
        if sum(member.state == "waits" for member in members) >= 2 or time.monotonic() > end:
            return members
        time.sleep(0.05)


def _late(call: str) -> list[status.Member]:
    """Rank 1 looks, while the others wait for it."""
    members: list[status.Member] = []
    with ranks.job():
        dist.barrier()
        if dist.get_rank() == 1:
            members = _look()
        tensor = torch.ones(1000)
        if call == "all_reduce":
            dist.all_reduce(tensor)
        elif dist.get_rank() == 1:
            dist.send(tensor, 0)
            dist.send(tensor, 2)
        else:
            dist.recv(tensor, 1)
        dist.barrier()
    return members


def test_rank_that_is_late() -> None:
    members = ranks.check_ranks(_late, "3", "all_reduce")[1]
    assert [(m.rank, m.size, m.state, m.calls) for m in members] == [
        (0, 3, "waits", 2),
        (1, 3, "computes", 1),
        (2, 3, "waits", 2),
    ]
    for member in (members[0], members[2]):
        (wait,) = member.waits
        assert wait.call == 2
        assert wait.seconds is not None
        assert 0.1 < wait.seconds < 6
        assert wait.what == "allreduce of 1000 float32 (4000 B) with SUM"
        assert wait.where == "at the arrival for rank 1"
        assert "rank 1 (pid" in wait.culprit
        assert "has not made this call yet (its last was #1)" in wait.culprit
    text = status.text_of(members)
    assert f"→ 1 rank has not made call #2 yet: 1 (pid {members[1].pid})" in text
    assert "rank 0 " in text
    # The same from another node, which sees only its own ranks.
    text = status.text_of([member for member in members if member.rank != 1])
    assert "not among the processes looked at: rank 1" in text


def test_messages_that_do_not_come() -> None:
    members = ranks.check_ranks(_late, "3", "recv")[1]
    assert [member.state for member in members] == ["waits", "computes", "waits"]
    for member in (members[0], members[2]):
        (wait,) = member.waits
        assert (wait.call, wait.what) == (0, "message")
        assert "rank 1" in wait.where


def _stopped(how: str) -> list[status.Member]:
    members: list[status.Member] = []
    with ranks.job():
        pids = torch.tensor([os.getpid()])
        all_pids = [torch.zeros_like(pids) for _ in range(3)]
        dist.all_gather(all_pids, pids)
        dist.barrier()
        if dist.get_rank() == 0:
            other = int(all_pids[2])
            with contextlib.ExitStack() as stack:
                if how == "signal":
                    os.kill(other, signal.SIGSTOP)
                    stack.callback(os.kill, other, signal.SIGCONT)
                else:
                    stack.enter_context(freezer.frozen(other, how))
                while not status._is_stopped(other):  # until all its threads have stopped
                    time.sleep(0.01)
                members = status.look([int(pid) for pid in all_pids])
        dist.barrier()
    return members


@pytest.mark.parametrize("how", ["signal", "v1", "v2"])
def test_rank_that_is_stopped(how: str) -> None:
    if how != "signal" and not freezer.can_freeze(how):
        pytest.skip("needs root, and cgroups of that version")
    members = ranks.check_ranks(_stopped, "3", how)[0]
    assert members[2].state == "stopped"
    assert "stopped by a signal, a debugger or a freezer, after call #" in status.text_of(members)


def _children_and_groups() -> tuple[list[str], list[str]]:
    """Returns the names of this process's groups, with a child, and after they have ended."""
    with ranks.job():
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        names = [member.group for member in status.look([os.getpid(), child])]
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        dist.barrier()
    return names, [member.group for member in status.look([os.getpid()])]


def test_children_and_groups_that_ended_are_not_shown() -> None:
    for during, after in ranks.check_ranks(_children_and_groups, "2"):
        assert len(during) == 2
        assert after == []


def _board(version: int, text: bytes, magic: bytes = b"smddpst1", pid: int = 7) -> Any:
    data = bytearray(4096 + 3 * 1024)
    struct.pack_into("<8siIQ", data, 4096, magic, pid, 2, 0)
    struct.pack_into("<QQQqQ", data, 4096 + 1024, version, 5, 6, 0, len(text))
    data[4096 + 1024 + 40 : 4096 + 1024 + 40 + len(text)] = text
    return data


@pytest.mark.parametrize(
    ("board", "expected"),
    [
        (_board(2, b"group\ta\t0\t2\t0\n"), [(5, 6, 0, "group\ta\t0\t2\t0\n")]),
        (_board(0, b"group\ta\t0\t2\t0\n"), []),
        (_board(3, b"group\ta\t0\t2\t0\n"), []),  # its writer has died meanwhile
        (_board(2, b""), []),
        (_board(2, b"x", magic=b"smddpst0"), []),
        (_board(2, b"x", pid=8), []),  # that of the parent
        (_board(2, b"\xff"), [(5, 6, 0, "�")]),
        (_board(2, b"\x1b[2J\tb\r\n"), [(5, 6, 0, "�[2J\tb�\n")]),
        (_board(2, b"group")[: 4096 + 1024 + 42], [(5, 6, 0, "gr")]),  # it has shrunk
        (_board(2, b"group")[: 4096 + 1024 + 16], []),
    ],
)
def test_boards(board: Any, expected: list[Any], tmp_path: Path) -> None:
    (tmp_path / "board").write_bytes(board)
    with (tmp_path / "board").open("rb") as file:
        assert list(status._contents(7, status._Board(file.fileno()))) == expected


def _process(folder: Path, pid: int, number: int, board: bytes) -> None:
    """Makes up what /proc has of a process with a board."""
    descriptors = folder / str(pid) / "fd"
    descriptors.mkdir(parents=True)
    # The kernel cuts long names of programs, also in the middle of a character.
    (folder / str(pid) / "stat").write_bytes(b"%d (trainer-gr\xc3) T 1 1" % pid)
    numbers = f"{pid}" if pid == number else f"{pid}\t{number}"
    (folder / str(pid) / "status").write_text(
        f"Name:\tNSpid:\nPid:\t{pid}\nNSpid:\t{numbers}\nx:\ty\n"
    )
    file = Path(status._NAME)
    file.write_bytes(board)
    (descriptors / "5").symlink_to(file)


@pytest.mark.parametrize(("own", "found"), [(7, [(4711, "stopped")]), (8, [])])
def test_processes_in_containers(
    own: int, found: list[tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a process has another number, which its board has. A child has that of its parent."""
    monkeypatch.setattr(status, "_PROC", tmp_path)
    monkeypatch.setattr(status, "_NAME", f"{tmp_path}{status._NAME}")
    _process(tmp_path, 4711, own, _board(2, b"group\ta\t0\t1\t0\n"))
    assert [(member.pid, member.state) for member in status.look()] == found
    assert status._has_board(4711) == bool(found)
    if found:
        assert 'group "a" of 1 rank\n' in status.text_of(status.look())


@pytest.mark.parametrize("text", ["group\ta\tx\t2\t0\n", "group\ta\t0\t2\t0\nwait\t1\t\ta\tb\tc\n"])
def test_texts_of_damaged_boards_are_left_out(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_boards", lambda _: [None])
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    monkeypatch.setattr(status, "_contents", lambda *_: [(5, 6, now, text)])
    assert status.look([os.getpid()]) == []


def test_wrong_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--all", "1"], ["x"], ["-5"], ["0"]):
        with pytest.raises(SystemExit) as error:
            status.main(arguments)
        assert error.value.code == 2
    capsys.readouterr()
    assert status.main(["999999999"]) == 1
    assert "there is no process 999999999" in capsys.readouterr().err
    assert status.main(["999999999", "999999998"]) == 1
    assert capsys.readouterr().err.count("there is no process") == 2


def _before_a_group() -> tuple[int, str]:
    """Rank 0 waits for rank 1 in init_process_group; rank 1 looks at it, and at its parent."""
    if os.environ["RANK"] == "0":
        with ranks.job():
            dist.barrier()
        return 0, ""
    out = io.StringIO()
    end = time.monotonic() + 20
    code = 1
    while code and time.monotonic() < end:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            code = status.main([str(os.getppid())])
        time.sleep(0.05)
    with ranks.job():
        dist.barrier()
    return code, out.getvalue()


def test_rank_that_waits_for_others_to_come() -> None:
    """It is found among the children of the process that started it."""
    code, text = ranks.check_ranks(_before_a_group, "2")[1]
    assert code == 0
    assert "has no group: it may wait in init_process_group()" in text


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wait = status.Wait(3, 1.5, "barrier", "at the arrival for rank 1", "")
    member = status.Member("g", "0" * 16, 0, 0, 2, 7, "waits", 3, [wait])
    monkeypatch.setattr(status, "_members", lambda pid: [member])
    assert status.main(["7", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["waits"][0]["where"] == "at the arrival for rank 1"


def test_processes_that_are_named_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Process 1 is the launcher of 7, which has a group, and of 8, which has none."""
    member = status.Member("g", "0" * 16, 0, 0, 2, 7, "runs", 3, [])
    monkeypatch.setattr(status, "_members", lambda pid: [member] if pid == 7 else [])
    monkeypatch.setattr(status, "_has_board", lambda pid: pid == 8)
    monkeypatch.setattr(status, "_descendants", lambda pid: [7, 8])
    assert status.main(["1", "7", "8", "7", "1", "8"]) == 0
    text = capsys.readouterr().out
    assert text.count("pid 7") == 1, text
    assert text.count("process 8 has no group") == 1, text


def test_ranges() -> None:
    assert ", ".join(spans([0, 1, 2, 5, 7, 8])) == "0-2, 5, 7-8"


def test_other_users(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    assert status.main(["1"]) == 1
    assert "may not read process 1: run this as its user" in capsys.readouterr().err


def test_no_free_descriptor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> list[str]:
        raise OSError(24, "Too many open files", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    for arguments, what in ((["1"], "process 1"), (["--all"], "the processes of this host")):
        assert status.main(arguments) == 1
        text = capsys.readouterr().err
        assert text.startswith(f"smddp status: cannot read {what}: [Errno 24] Too many open files")
