"""`smddp plan`: prints plans, and checks them."""

from __future__ import annotations

import pathlib
import re
import signal
from typing import Any

import pytest

from smddp.tools import plan
from smddp.torch import _load


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("8b", 8),
        ("25MiB", 25 << 20),
        ("1.5 kib", 1536),
        ("2GiB", 2 << 30),
        ("128M", 128 << 20),
        ("1 gb", 10**9),
        ("1.001kb", 1001),
        ("262144GiB", 1 << 48),
    ],
)
def test_bytes(text: str, size: int) -> None:
    assert plan.parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1e3", "1.5", "3 parsecs", "0x10", str((1 << 48) + 1), "9" * 400]
)
def test_no_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="bytes"):
        plan.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("1x2", [[0, 1]]), ("2x2", [[0, 1], [2, 3]]), ("1+2", [[0], [1, 2]]), ("3", [[0, 1, 2]])],
)
def test_nodes(text: str, nodes: list[list[int]]) -> None:
    assert plan.parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "0", "2x0", "0x2", "2x2x2", "1+", "a", "1,2"])
def test_no_nodes(text: str) -> None:
    with pytest.raises(ValueError, match="layout"):
        plan.parse_nodes(text)


def test_list_names_every_collective(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["list"]) == 0
    collectives = {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]}
    assert collectives == {
        "allreduce",
        "broadcast",
        "allgather",
        "reduce_scatter",
        "barrier",
        "reduce",
        "gather",
        "scatter",
        "alltoall",
    }


def test_print_shows_the_rank_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["print", "allreduce", "1MiB", "--nodes", "2x2", "--rank", "3"]
    assert plan.main([*command, "--algorithm", "ring"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ring allreduce, rank 3 of 4 (node 1 of 2, local 1)")
    assert "rank 1" in text  # its rail
    assert "put to rank 0" not in text


def test_shared_buffers_make_another_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["print", "allreduce", "1MiB"]) == 0
    staged = capsys.readouterr().out
    assert plan.main(["print", "allreduce", "1MiB", "--shared"]) == 0
    shared = capsys.readouterr().out
    assert staged.startswith("two-phase ")
    assert shared.startswith("zero-copy ")


@pytest.mark.parametrize(
    "command",
    [
        "allreduce 1000003 --nodes 2+1",
        "allreduce 64KiB --nodes 3x1 --algorithm ring",
        "allreduce 1MiB --nodes 1x3 --shared",
        "broadcast 100KiB --nodes 2x2 --root 3",
        "allgather 4096 --nodes 2x2",
        "reduce_scatter 4096 --nodes 1+2",
        "barrier --nodes 2x2",
        "reduce 100KiB --nodes 1x3 --root 2",
        "gather 4096 --nodes 2+3 --root 4",
        "scatter 4096 --nodes 2+3 --root 1 --shared",
        "alltoall 4096 --nodes 2+1",
    ],
)
def test_check_proves(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["check", *command.split()]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.startswith("right: ")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("print reduction 8", '"reduction" is not a collective'),
        ("print allreduce 8 --algorithm tree", 'has no algorithm "tree"'),
        ("print allreduce 8 --rank 2", "--rank 2 is not one of the ranks 0 to 1"),
        ("check broadcast 8 --root -1", "--root -1 is not one of the ranks 0 to 1"),
    ],
)
def test_errors_are_one_sentence(
    command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(command.split()) == 1
    said = capsys.readouterr().err
    assert said.startswith("smddp plan: ")
    assert text in said


@pytest.mark.parametrize("command", ["print", "check", "draw"])
def test_ctrl_c_ends_long_work(
    command: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code does not run Python's handler: the check of a large layout takes minutes."""
    module, found = plan._load.load(), []

    class Module:
        def __getattr__(self, name: str) -> Any:
            def call(**arguments: Any) -> Any:
                found.append(signal.getsignal(signal.SIGINT))
                return getattr(module, name)(**arguments)

            return call

    monkeypatch.setattr(plan._load, "load", Module)
    given = ["allreduce", "8", *(["--output", str(tmp_path / "x")] if command == "draw" else [])]
    assert plan.main([command, *given]) == 0
    assert set(found) == {signal.SIG_DFL}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_largest_size(capsys: pytest.CaptureFixture[str]) -> None:
    for collective in dict.fromkeys(row[0] for row in _load.load().list_algorithms()):
        assert plan.main(["print", collective, str(1 << 48), "--nodes", "2x2"]) == 0
        assert not capsys.readouterr().err
    with pytest.raises(SystemExit):
        plan.main(["print", "allreduce", str(2**63 - 1)])
    assert "is more than an address space holds" in capsys.readouterr().err


def test_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """The table in docs/architecture.md names every algorithm in the row of its collective.

    Words in capitals are settings.
    """
    assert plan.main(["list"]) == 0
    listed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    text = (pathlib.Path(__file__).parents[2] / "docs/architecture.md").read_text()
    table = text.split("## Which plan")[1].split("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    documented = {
        (collective.strip(), algorithm)
        for row in rows[1:]
        for collective in row[1].split(",")
        for algorithm in re.findall(r"`([a-z_]+)`", row[2] + row[3])
    }
    assert documented == {(collective, algorithm) for collective, algorithm in listed}
