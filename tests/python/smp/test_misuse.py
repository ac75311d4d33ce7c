"""What scripts must not do is refused on all ranks."""

from __future__ import annotations

import functools
import json
import os
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from on_ranks import on_ranks
from ranks import check_ranks, listen
from smp.common import evaluate
from smp.failing_models import MANUAL, pair, train
from smp.test_config import WRONG, WRONG_TOGETHER
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.config import ENVIRONMENT_VARIABLE
from smddp.modelparallel.core.errors import (
    SMPConfigurationError,
    SMPInitializationError,
    SMPMicrobatchError,
    SMPPartitionError,
    SMPPeerError,
    SMPUsageError,
)
from smddp.modelparallel.torch.job import meeting

pytestmark = pytest.mark.multiprocess


def differing() -> str:
    model = pair()
    executor = model.runtime.executor
    store, take = dist.distributed_c10d._get_default_store(), executor.mail.take
    x = torch.ones(8, 4)
    train(model, x, "")

    def watched(block: bool) -> Any:
        if block and smp.rank() == 0:
            store.set("rank 0 has sent its call graphs", "")
        return take(block)

    executor.mail.take = watched
    if smp.rank() == 1:
        store.wait(["rank 0 has sent its call graphs"])
    with pytest.raises(SMPUsageError) as caught:
        train(model, x, "") if smp.rank() == 0 else evaluate(model, x)
    # The graphs that have come before the failure are known.
    train(model, x, "")
    return str(caught.value)


def test_ranks_in_steps_of_different_names() -> None:
    first, second = check_ranks(differing, "2", timeout=20)
    assert first == second
    for text in (first, second):
        assert "rank 0 of the pipeline is in the step train, rank 1 in evaluate" in text


def other_modules(different: tuple[int, ...]) -> str:
    """Some ranks have another model than the others."""
    smp.init({"partitions": 2, **MANUAL})
    parts = [nn.Linear(4, 4), nn.Linear(4, 4)]
    if smp.rank() in different:
        parts.append(nn.Sequential(*(nn.ReLU() for _ in range(6))))
    model = smp.DistributedModel(nn.Sequential(*parts))
    with pytest.raises((SMPUsageError, SMPMicrobatchError, SMPPeerError)) as caught:
        train(model, torch.ones(8, 4), "")
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "different", "text"),
    [
        (2, (0,), "ranks 0 and 1 of the pipeline differ: only rank 0 has {}. All"),
        (2, (1,), "ranks 0 and 1 of the pipeline differ: only rank 1 has {}. All"),
        (4, (2, 3), "rank 0 and rank 2 of the job differ: only rank 2 has {}. All"),
    ],
)
def test_ranks_with_other_modules(ranks: int, different: tuple[int, ...], text: str) -> None:
    wanted = text.format("'2', '2.0', '2.1', '2.2', '2.3' and 2 more")
    for found in check_ranks(other_modules, str(ranks), different):
        assert wanted in found


@on_ranks("2")
def test_misuse_is_refused_on_all_ranks() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(SMPInitializationError, match=r"call smp.init\(\)"):
        smp.DistributedModel(layer)
    with pytest.raises(SMPInitializationError, match=r"call smp.init\(\)"):
        smp.DistributedOptimizer(torch.optim.SGD(layer.parameters()))
    with pytest.raises(SMPInitializationError, match=r"call smp.init\(\)"):
        train(layer, torch.ones(4, 4), "")
    # Configurations are refused before anything is started, so the right one may follow.
    for wrong, text in (
        *WRONG,
        *((config, advice) for config, _, advice in WRONG_TOGETHER),
        ({}, "2 ranks make 2 replicas of 1 partition(s); data parallelism needs ddp: True"),
        ({"ddp": True, "tensor_parallel_degree": 3}, "x 3 tensor parallel ranks"),
        ({"ddp": True, "tensor_parallel_degree": 2, "partitions": 2}, "x 2 tensor parallel ranks"),
        ({"sharded_data_parallel_degree": 2, "ddp": True, "partitions": 2}, "does not divide"),
        (
            {"sharded_data_parallel_degree": 2, "ddp": True, "tensor_parallel_degree": 2},
            "does not divide smp.rdp_size(), which is 1 (2 ranks / tensor_parallel_degree 2)",
        ),
        (
            {"sharded_data_parallel_degree": 3, "ddp": True},
            "does not divide smp.rdp_size(), which is 2 (2 ranks)",
        ),
        ({"partitions": 3}, "2 ranks cannot be divided into pipelines of 3"),
    ):
        for environment in (False, True):
            os.environ[ENVIRONMENT_VARIABLE] = json.dumps(wrong) if environment else "{}"
            if environment:
                text = text.replace("smp.init", ENVIRONMENT_VARIABLE)
            with pytest.raises((SMPConfigurationError, SMPInitializationError)) as refused:
                smp.init(None if environment else wrong)
            assert text in str(refused.value), wrong
            assert not smp.is_initialized()
            assert not dist.is_initialized()
    del os.environ[ENVIRONMENT_VARIABLE]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smp.init({"partitions": 2, "task_level_activation_checkpointing": 1, **MANUAL})
    with pytest.raises(SMPUsageError, match=r"create smp.DistributedModel"):
        train(layer, torch.ones(4, 4), "")
    with pytest.raises(SMPPartitionError, match="there are 2 partitions"), smp.partition(2):
        pass
    for wrong_model in (None, layer.parameters(), nn.Linear):
        with pytest.raises(SMPUsageError, match=r"takes a torch\.nn\.Module, not "):
            smp.DistributedModel(wrong_model)
    with pytest.raises(SMPUsageError, match="trace_execution_times must be False"):
        smp.DistributedModel(layer, trace_device="cpu", trace_execution_times=True)
    with pytest.raises(SMPUsageError, match="trace_device must be"):
        smp.DistributedModel(layer, trace_device="tpu")
    with pytest.raises(SMPUsageError, match=r"torch.jit"):
        smp.DistributedModel(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
    first = nn.Linear(4, 4)
    with smp.partition(1):
        second = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(first, second))
    with pytest.raises(SMPUsageError, match=r"there is a smp.DistributedModel already"):
        smp.DistributedModel(layer)
    with pytest.raises(SMPUsageError, match=r"is a smp.DistributedModel already"):
        smp.DistributedModel(model)
    with pytest.raises(SMPUsageError, match="only inside a function"):
        model(torch.ones(4, 4))
    with pytest.raises(SMPUsageError, match="only inside a function"):
        model.backward(torch.ones(()))
    with pytest.raises(SMPUsageError, match="known only when the first step has begun"):
        list(model.local_parameters())
    with pytest.raises(SMPPartitionError, match="not part of the model"):
        smp.set_partition(layer, 1)
    with pytest.raises(SMPPartitionError, match="there are 2 partitions"):
        smp.set_partition(first, 2)
    model.runtime.data_parallel.overlap = False
    with pytest.raises(SMPUsageError, match="needs ddp in the configuration and overlapping"):
        model.register_comm_hook(None, print)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SMPUsageError, match="already"):
        smp.DistributedOptimizer(optimizer)
    for no_optimizer in (None, model.parameters()):
        with pytest.raises(SMPUsageError, match=r"takes an optimizer such as torch\.optim\.AdamW"):
            smp.DistributedOptimizer(no_optimizer)

    # All ranks raise errors that rank 0 meets before the first microbatch, too.
    heard: list[str] = []
    for arguments, text in (
        ((torch.ones(6, 4), ""), "cannot be divided into 4"),
        ((torch.ones(()), ""), "a tensor without dimensions"),
        ((torch.ones(8, 4),), "smp.step: train: missing a required argument: 'fault'"),
    ):
        with pytest.raises(SMPUsageError, match=text) as caught:
            train(model, *arguments)
        heard.append(str(caught.value))
        assert heard[-1].startswith("rank 0 of the pipeline: ")

    @smp.step
    def steps_inside(model: Any, x: torch.Tensor) -> Any:
        model.backward(model(x).sum())
        optimizer.step()

    with pytest.raises(SMPMicrobatchError, match="has to be outside"):
        steps_inside(model, torch.ones(8, 4))

    @smp.step
    def clips_inside(model: Any, x: torch.Tensor) -> Any:
        model.backward(model(x).sum())
        smp.clip_grad_norm(1.0)

    with pytest.raises(SMPMicrobatchError, match="gradients can be clipped only outside"):
        clips_inside(model, torch.ones(8, 4))

    @smp.step
    def nested(model: Any, x: torch.Tensor) -> Any:
        train(model, x, "")

    with pytest.raises(SMPMicrobatchError, match="cannot be called inside another"):
        nested(model, torch.ones(8, 4))

    @smp.step
    def unequal(model: Any, x: torch.Tensor) -> Any:
        return x if bool(x[0, 0] == 0) else None

    with pytest.raises(SMPUsageError, match="different structures") as caught:
        unequal(model, torch.arange(8.0).unsqueeze(1))
    heard.append(str(caught.value))
    assert smp.allgather(heard, smp.PP_GROUP) == [heard, heard]

    class Unsliced:
        def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
            raise ZeroDivisionError("by the user")

    with pytest.raises(SMPMicrobatchError, match="rank 0 of the pipeline: ZeroDivisionError: by"):
        train(model, Unsliced(), "")
    train(model, torch.ones(8, 4), "")
    with pytest.raises(SMPUsageError, match="before the first step"):
        smp.set_partition(first, 1)
    remote = second if smp.pp_rank() == 0 else first
    with pytest.raises(SMPUsageError, match="lives on rank"):
        remote(torch.ones(4))
    with pytest.raises(SMPUsageError, match="lives on rank"):
        remote.forward(torch.ones(4))


@on_ranks("2")
def test_what_cannot_be_divided() -> None:
    """A parameter shared across partitions."""
    smp.init({"partitions": 2, **MANUAL})
    with smp.partition(1):
        tied = nn.Linear(4, 4)
    base = nn.Linear(4, 4)
    tied.weight = base.weight
    model = smp.DistributedModel(nn.Sequential(base, tied))
    with pytest.raises(SMPPartitionError, match="modules that share parameters have to be on"):
        train(model, torch.ones(8, 4), "")


@smp.step
def backward_twice(model: Any, x: torch.Tensor) -> Any:
    loss = model(x).sum()
    loss.backward()
    loss.backward()
    return loss


@on_ranks("2")
def test_what_a_remote_call_needs_is_there_once() -> None:
    model = pair()
    with pytest.raises(SMPMicrobatchError, match="a second backward pass"):
        backward_twice(model, torch.ones(8, 4))
    train(model, torch.ones(8, 4), "")


class Kept:
    """A list that is not divided."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []


@smp.step
def keep(model: Any, x: torch.Tensor, kept: Kept) -> None:
    kept.tensors.append(model(x).sum())
    model.backward(torch.stack(kept.tensors).sum())


def kept_for_another() -> str:
    model = pair()
    with pytest.raises(SMPMicrobatchError) as error:
        keep(model, torch.ones(8, 4), Kept())
    return str(error.value)


def test_a_second_backward_pass_for_another_microbatch_is_named() -> None:
    for text in check_ranks(kept_for_another, "2"):
        assert "made in microbatch 0; the first pass was that of microbatch 0" in text
        assert "and this is that of microbatch 1." in text


@smp.step
def call_parts(model: Any, x: torch.Tensor, how: str) -> Any:
    module = model.get_module()
    loss = module[1](module[0](x)).sum()
    if how == "model.backward":
        model.backward(loss)
    elif how == "backward":
        loss.backward()
    elif how == "grad":
        torch.autograd.grad(loss, list(module[0].parameters()))
    return loss


@on_ranks("2")
def test_gradients_before_the_first_call_of_the_model_are_refused() -> None:
    model = pair()
    with torch.no_grad():
        call_parts(model, torch.ones(8, 4), "")
    for how in ("model.backward", "backward", "grad"):
        with pytest.raises(SMPMicrobatchError, match="before the first call of the model"):
            call_parts(model, torch.ones(8, 4), how)
        assert all(parameter.grad is None for parameter in model.parameters())
    train(model, torch.ones(8, 4), "")
    call_parts(model, torch.ones(8, 4), "model.backward")  # now it is known where they live


@smp.step(input_split_axes={"weights": 1})
def compare(model: Any, x: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> Any:
    loss = nn.functional.cross_entropy(model(x), target) * weights.sum()
    model.backward(loss)
    return loss


def of_different_lengths() -> str:
    model = pair()
    with pytest.raises(SMPMicrobatchError, match="batch_size") as caught:
        compare(model, torch.ones(8, 4), torch.ones(12, dtype=torch.int64), torch.ones(3, 8))
    # This may be intended, so it is only a warning, and only once.
    said = listen()
    rows = torch.ones(16, dtype=torch.int64)

    @smp.step
    def pairs(model: Any, x: torch.Tensor, targets: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(model(x).repeat(2, 1), targets)
        model.backward(loss)
        return loss

    for _ in range(2):
        pairs(model, torch.ones(8, 4), rows)
    assert [text for text in said if "pairs" in text] == (
        []
        if smp.pp_rank() > 0
        else [
            "smp: step 'pairs': the arguments that smp.step divides differ in length: 'x' has 8 "
            "(dimension 0), 'targets' has 16 (dimension 0). Each microbatch gets its share of "
            "every one of them"
        ]
    )
    return str(caught.value)


def test_an_error_in_the_body_says_which_argument_has_which_length() -> None:
    for text in check_ranks(of_different_lengths, "2"):
        assert text.splitlines()[1] == (
            "the arguments that smp.step divides differ in length: 'x' has 8 (dimension 0), "
            "'target' has 12 (dimension 0), 'weights' has 8 (dimension 1)"
        )


def out_of_step() -> str:
    model = pair()
    train(model, torch.ones(8, 4), "")
    if smp.pp_rank() == 1:
        model.runtime.step.number += 1  # as if this rank alone had run a step
    with pytest.raises(SMPUsageError) as caught:
        train(model, torch.ones(8, 4), "")
    return str(caught.value)


def test_ranks_in_different_steps() -> None:
    for text in check_ranks(out_of_step, "2"):
        assert "every rank has to make the same calls" in text


@on_ranks("2")
def test_ranks_with_different_configurations() -> None:
    microbatches = 2 + int(os.environ["RANK"])
    with pytest.raises(SMPInitializationError, match="microbatches is 2 on rank 0, 3 on rank 1"):
        smp.init({"partitions": 2, "microbatches": microbatches})


def asked_by_one_rank(what: str) -> tuple[str, list[str]]:
    meeting._LOG_AFTER = timedelta(milliseconds=100)
    said = listen()
    model = pair()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, torch.ones(8, 4), "")
    parts = model.local_state_dict(), optimizer.local_state_dict()
    ask = {
        "state_dict": model.state_dict,
        "state_dict of the optimizer": optimizer.state_dict,
        "model.load_state_dict with a partial state dict": lambda: model.load_state_dict(parts[0]),
        "optimizer.load_state_dict with a partial state dict": lambda: optimizer.load_state_dict(
            parts[1]
        ),
    }[what]
    # Only this group has a short timeout: everything else must work on a slow machine, too.
    alone = dist.new_group(timeout=timedelta(seconds=3))
    smp.state.groups._by_kind.update(pp=alone, mp=alone)
    # The other rank goes on, and waits for a step that rank 0 never begins.
    other = functools.partial(train, model, torch.ones(8, 4), "")
    with pytest.raises(SMPPeerError) as caught:
        (ask if smp.pp_rank() == 0 else other)()
    return str(caught.value), [text for text in said if "state_dict" in text]


@pytest.mark.parametrize(
    "what",
    [
        "state_dict",
        "state_dict of the optimizer",
        "model.load_state_dict with a partial state dict",
        "optimizer.load_state_dict with a partial state dict",
    ],
)
def test_what_one_rank_alone_asks_for(what: str) -> None:
    (asking, warned), (other, silent) = check_ranks(asked_by_one_rank, "2", what)
    assert asking.startswith(f"{what}: rank 1 of the job did not answer; ranks 0-1 have to")
    assert "nothing comes from rank 0 of the pipeline any more" in other
    # Long before the timeout of the group.
    assert len(warned) == 1
    assert f"smp: {what} on rank 0 waits for rank 1 of the job" in warned[0]
    assert not silent
