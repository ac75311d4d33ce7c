"""What `smp.init` says on all ranks if the configuration of one is wrong, or another one."""

from __future__ import annotations

import os
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import arrive, await_ranks, check_ranks, listen, run_ranks
from smp.common import squares
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.config import ENVIRONMENT_VARIABLE, port_of
from smddp.modelparallel.core.errors import SMPConfigurationError, SMPInitializationError
from smddp.modelparallel.torch.job import meeting

pytestmark = pytest.mark.multiprocess

RIGHT = {"ddp": True}

# Rank 1 has another configuration than the others. All ranks raise an error of one class.
# In this order: the configuration of the others; that of rank 1; the class; the text on rank 1; the
# beginning of the text on the others.
ON_ONE_RANK: list[tuple[Any, Any, type[Exception], str, str]] = [
    (
        RIGHT,
        {**RIGHT, "microbatches": 0},
        SMPConfigurationError,
        "The number of microbatches must be a positive integer. The configuration (smp.init) has "
        "'microbatches': 0",
        "rank 1: ",
    ),
    (RIGHT, "{", SMPConfigurationError, "SM_HP_MP_PARAMETERS is not JSON: ", "rank 1: "),
    (
        RIGHT,
        {**RIGHT, "partitions": 5},
        SMPInitializationError,
        "3 ranks cannot be divided into pipelines of 5",
        "rank 1: ",
    ),
    (
        {"ddp": True, "microbatches": 2},
        {"ddp": True, "microbatches": 4},
        SMPInitializationError,
        "the ranks have different configurations: microbatches is 2 on rank 0, 4 on rank 1",
        "",
    ),
    # Ranks with these could not even make a process group.
    (
        {"ddp": True, "ddp_dist_backend": "gloo"},
        {"ddp": True},
        SMPInitializationError,
        "the ranks have different configurations: ddp_dist_backend is 'gloo' on rank 0, 'auto' on "
        "rank 1",
        "",
    ),
]


def wrong_on_one_rank(cases: list[int], group_of_script: bool) -> list[tuple[str, str]]:
    if group_of_script:
        dist.init_process_group("gloo")
    found = []
    for number in cases:
        others, mine, *_ = ON_ONE_RANK[number]
        config = mine if os.environ["RANK"] == "1" else others
        if isinstance(config, str):
            os.environ[ENVIRONMENT_VARIABLE] = config
        with pytest.raises((SMPConfigurationError, SMPInitializationError)) as caught:
            smp.init(config if isinstance(config, dict) else None)
        os.environ.pop(ENVIRONMENT_VARIABLE, None)
        assert not smp.is_initialized()
        assert dist.is_initialized() == group_of_script
        found.append((type(caught.value).__name__, str(caught.value)))
    # The right one may follow.
    smp.init({"ddp": True})
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == dist.get_world_size()
    return found


@pytest.mark.parametrize("how", ["launcher serves", "rank 0 serves", "group of the script"])
def test_a_configuration_that_is_wrong_on_one_rank(how: str) -> None:
    cases = list(range(len(ON_ONE_RANK)))
    found = check_ranks(
        wrong_on_one_rank,
        "3",
        cases,
        how == "group of the script",
        rank_0_serves=how == "rank 0 serves",
    )
    for rank, of_rank in enumerate(found):
        for (_, _, kind, text, prefix), (name, said) in zip(ON_ONE_RANK, of_rank, strict=True):
            assert name == kind.__name__
            assert said.startswith(text if rank == 1 else f"{prefix}{text}")


def ends_with_its_error() -> None:
    smp.init({**RIGHT, "microbatches": 0 if os.environ["RANK"] == "1" else 1})


def test_all_ranks_hear_of_it_before_the_store_ends() -> None:
    for outcome in run_ranks(ends_with_its_error, "4", rank_0_serves=True):
        where = "" if outcome.rank == 1 else "rank 1: "
        assert f"SMPConfigurationError: {where}The number of microbatches must" in outcome.trace


def a_warning_is_an_error() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((UserWarning, SMPInitializationError)) as caught:
            smp.init({"ddp": True, "microbatch": 4})  # only rank 0 warns
    return str(caught.value)


def test_an_error_that_is_not_of_smp() -> None:
    own, other = check_ranks(a_warning_is_an_error, "2")
    assert own.startswith("smp ignores the unknown configuration key 'microbatch'")
    assert other == f"rank 0: UserWarning: {own}"


def comes_late() -> list[str]:
    meeting._LOG_AFTER = timedelta(seconds=1)
    said = listen()
    if os.environ["RANK"] == "1":
        await_ranks("warned", 1)
    else:
        threading.Thread(target=_arrive_when_warned, args=(said,)).start()
    smp.init({"partitions": 2})
    return said


def _arrive_when_warned(said: list[str]) -> None:
    while not said:
        time.sleep(0.01)
    arrive("warned")


def test_a_rank_that_does_not_come_is_named() -> None:
    assert check_ranks(comes_late, "2")[0] == [
        "smp: smp.init on rank 0 waits for rank 1 of the job. Ranks 0-1 have to call it, at the "
        "same point of the script"
    ]


def test_the_port_does_not_depend_on_other_keys() -> None:
    """Otherwise a rank with a wrong key would wait for the others at another port."""
    assert port_of({"microbatches": 0, "ddp_port": 7}, {}) == 7
    assert port_of({"ddp_port": 7}, {ENVIRONMENT_VARIABLE: '{"ddp_port": 8}'}) == 8
    assert port_of(None, {}) is None
    with pytest.raises(SMPConfigurationError, match="Invalid port number x"):
        port_of({"ddp_port": "x"}, {})


def group_calls(before: str) -> tuple[int, list[list[int]]]:
    """Returns the calls of new_group in smp.init, and the members of this rank's groups.

    Args:
        before: groups that the script makes before: "none", "all" (each rank makes them), or
            "some" (only their members do).
    """
    if before != "none":
        dist.init_process_group("smddp")
        if before == "all" or dist.get_rank() < 2:
            dist.new_group([0, 1], use_local_synchronization=before == "some")
    calls, real = [0], dist.new_group

    def counted(*args: Any, **given: Any) -> Any:
        calls[0] += 1
        return real(*args, **given)

    dist.new_group = counted
    try:
        smp.init({"partitions": 2, "microbatches": 2, "ddp": True})
    finally:
        dist.new_group = real
    groups = [smp.get_pp_process_group(), smp.get_dp_process_group(), smp.get_tp_process_group()]
    for group in groups:  # each works, and has the ranks that it says
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        assert int(one) == group.size()
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    smp.step(lambda model, x: model.backward(model(x).sum()))(model, torch.ones(2, 2))
    return calls[0], [dist.get_process_group_ranks(group) for group in groups]


def check_group_calls(before: str, own_only: bool) -> None:
    for rank, (calls, members) in enumerate(check_ranks(group_calls, "4", before)):
        assert members == [[rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2], [rank]]
        # Else each rank makes the groups of all, as c10d wants it.
        assert (calls == 7) == own_only


def test_ranks_make_their_own_groups_only() -> None:
    check_group_calls("none", own_only=True)


def test_groups_that_not_all_ranks_are_in_before() -> None:
    check_group_calls("all", own_only=torch.__version__ >= (2, 15))


def groups_of_some() -> str:
    with pytest.raises(SMPInitializationError) as caught:
        group_calls("some")
    return str(caught.value)


def test_groups_that_some_ranks_have_made_before() -> None:
    if torch.__version__ < (2, 15):
        check_group_calls("some", own_only=False)
        return
    for text in check_ranks(groups_of_some, "4"):
        assert "some ranks have made more process groups than others" in text


def several_jobs(backend: str) -> list[float]:
    """Returns the losses of three jobs of one process; their models live on."""
    kept: list[Any] = []
    found: list[float] = []
    for _ in range(3):
        smp.init({"partitions": 2, "microbatches": 2, "ddp": True, "ddp_dist_backend": backend})
        torch.manual_seed(0)
        model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        kept.append(model)
        losses = squares(model, torch.ones(4, 2))
        found.append(float(losses.reduce_mean()))
        smp.shutdown()
    return found


@pytest.mark.parametrize("backend", ["gloo", "smddp"])
def test_several_jobs_after_each_other(backend: str) -> None:
    for losses in check_ranks(several_jobs, "2", backend):
        assert losses == [losses[0]] * 3
