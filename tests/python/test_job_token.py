"""The job token: a rank with another token, or none, cannot join, and all errors name it."""

from __future__ import annotations

import os
import re
import socket
import struct
from datetime import timedelta
from pathlib import Path

import programs
import pytest
import ranks
import torch
import torch.distributed as dist

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["3", "2+1"])
SECRET, GUESS = "0123456789abcdef", "fedcba9876543210"


def _join(tokens: list[str]) -> str:
    os.environ["SMDDP_JOB_TOKEN"] = tokens[int(os.environ["RANK"])]
    try:
        dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    except dist.DistBackendError as error:
        return f"{type(error).__name__}: {error}"
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return f"{tensor.sum():.0f}"


@layouts
def test_ranks_with_the_token_meet(layout: str) -> None:
    assert ranks.check_ranks(_join, layout, [SECRET] * 3) == ["3000"] * 3


@layouts
@pytest.mark.parametrize(("token", "seen"), [(GUESS, "another token"), ("", "no token")])
def test_whoever_has_another_is_named(layout: str, token: str, seen: str) -> None:
    first, second, third = ranks.check_ranks(_join, layout, [SECRET, SECRET, token])
    for text in (first, second):
        assert text.startswith("SMDDPCollectiveMismatchError"), text
        assert f"rank 2 has {seen}" in text
    assert "ranks 0-1 have a" in third
    assert not any(SECRET in text or GUESS in text for text in (first, second, third))


def test_the_token_is_never_printed() -> None:
    done = programs.run("-m", "smddp.tools.env", SMDDP_JOB_TOKEN=SECRET)
    assert done.returncode == 0, done.stderr
    assert "SMDDP_JOB_TOKEN=(hidden)  (secret, from the environment)" in done.stdout
    assert SECRET not in done.stdout + done.stderr


def test_a_short_token_is_refused() -> None:
    done = programs.run("-m", "smddp.tools.env", SMDDP_JOB_TOKEN=SECRET[1:])
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "SMDDP_JOB_TOKEN has 15 characters, and needs at least 16" in said
    assert SECRET[1:] not in said


def _listening() -> list[str]:
    """Returns the addresses on which this process listens."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    mine = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != "0A" or fields[9] not in mine:
                continue
            packed = b"".join(
                struct.pack("=I", int(fields[1][at : at + 8], 16))
                for at in range(0, len(fields[1].split(":")[0]), 8)
            )
            family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
            addresses.append(socket.inet_ntop(family, packed))
    return addresses


def _listen() -> tuple[list[str], list[str]]:
    before = _listening()
    dist.init_process_group("smddp", timeout=timedelta(seconds=30))
    dist.barrier()
    found = _listening()
    dist.destroy_process_group()
    return before, found


def test_listeners_are_bound_to_the_chosen_interface() -> None:
    for before, found in ranks.check_ranks(_listen, "1+1"):
        assert before == []
        # One for the network, one for the lifelines.
        assert found == ["127.0.0.1"] * len(found)
        assert len(found) >= 2


def test_a_single_node_listens_nowhere() -> None:
    for _, found in ranks.check_ranks(_listen, "2"):
        assert found == []
