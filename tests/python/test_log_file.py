"""SMDDP_LOG_FILE: where the log goes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist

pytestmark = pytest.mark.multiprocess

HOST = socket.gethostname()


def _train() -> None:
    with ranks.job():
        dist.all_reduce(torch.ones(10))


def test_each_rank_has_its_file(tmp_path: Path) -> None:
    env = {"SMDDP_LOG": "info", "SMDDP_LOG_FILE": f"{tmp_path}/%h.%p.%r.log"}
    outcomes = ranks.run_ranks(_train, "2", env=env)
    for outcome in outcomes:
        assert outcome.returned, outcome
        assert "smddp[" not in outcome.stderr
        text = (tmp_path / f"{HOST}.{outcome.pid}.{outcome.rank}.log").read_text()
        assert f'group "0": rank {outcome.rank} of 2' in text
        assert all(line.startswith(f"smddp[rank {outcome.rank}][") for line in text.splitlines())
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_for_all_gets_whole_lines_of_all(tmp_path: Path) -> None:
    path = tmp_path / "all.log"
    path.write_text("before\n")
    ranks.check_ranks(_train, "3", env={"SMDDP_LOG": "info", "SMDDP_LOG_FILE": str(path)})
    first, *lines = path.read_text().splitlines()
    assert first == "before", "lines are appended"
    for rank in range(3):
        assert sum(line.startswith(f"smddp[rank {rank}][") for line in lines) >= 1
    assert all(line.startswith("smddp[rank ") for line in lines)


def test_a_file_that_cannot_be_opened_costs_a_sentence(tmp_path: Path) -> None:
    pattern = f"{tmp_path}/none/%r.log"
    for outcome in ranks.run_ranks(
        _train, "2", env={"SMDDP_LOG": "info", "SMDDP_LOG_FILE": pattern}
    ):
        assert outcome.returned, outcome
        said = [line for line in outcome.stderr.splitlines() if "SMDDP_LOG_FILE" in line]
        assert said == [
            f"smddp: cannot write to {tmp_path}/none/{outcome.rank}.log (No such file or "
            f"directory), which SMDDP_LOG_FILE={pattern} names: the log goes to the standard error"
        ]
        assert f'group "0": rank {outcome.rank} of 2' in outcome.stderr


def _init() -> str:
    try:
        dist.init_process_group("smddp")
    except ValueError as error:
        return str(error)
    return ""


def test_a_pattern_with_another_letter_is_an_error() -> None:
    (text,) = ranks.check_ranks(_init, "1", env={"SMDDP_LOG_FILE": "/tmp/%d.log"})
    assert "SMDDP_LOG_FILE=/tmp/%d.log: expects a path in which %h (host)" in text
