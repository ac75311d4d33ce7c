"""Groups whose calls on a device made of threads go to a stand-in for NCCL, or to the host."""

from __future__ import annotations

import device_cases
import pytest
import ranks
from device_jobs import with_peer

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(device_cases.find_fake() is None, reason="the C++ tests are not built"),
]


@pytest.mark.parametrize("cases", ["reduces", "moves", "overlaps", "follows_streams", "trains"])
def test_peer_serves_ranks_with_gpus_of_their_own(cases: str) -> None:
    for path, served, _ in ranks.check_ranks(with_peer, "2", cases, False, timeout=90):
        assert path == "nccl"
        assert served >= 3


@pytest.mark.parametrize("shared", [False, True])
def test_messages_go_the_way_of_two_ranks(shared: bool) -> None:
    """Messages need no choice of a path for the group."""
    outcomes = ranks.run_ranks(with_peer, "2", "messages", shared)
    for outcome in outcomes:
        assert outcome.value[::2] == ("", 0 if shared else 1), str(outcome)
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines()]
    assert sum("messages between ranks that share" in line for line in said) == int(shared), said


@pytest.mark.parametrize(("layout", "shared"), [("2", True), ("1+1", False)])
def test_host_serves_shared_gpus_and_several_nodes(layout: str, shared: bool) -> None:
    outcomes = ranks.run_ranks(with_peer, layout, "moves", shared)
    for outcome in outcomes:
        assert outcome.value == ("host", 0, 0), str(outcome)
    why = "share GPU one for all" if shared else "several nodes"
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if why in line]
    assert len(said) == 1, said


@pytest.mark.parametrize(
    ("setting", "shared", "expected"), [("host", False, "host"), ("nccl", True, "nccl")]
)
def test_setting_decides(setting: str, shared: bool, expected: str) -> None:
    env = {"SMDDP_GPU_PATH": setting}
    for path, served, _ in ranks.check_ranks(with_peer, "2", "moves", shared, env=env):
        assert path == expected
        assert (served > 0) == (expected == "nccl")
