"""Replicas agree on gradients after a step: unused parameters, hooks, late contributions."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from ranks import arrive, await_ranks, check_ranks, run_ranks
from smp.common import copies, sums
from smp.test_step import MANUAL, plain
from torch import nn

import smdistributed.modelparallel.torch as smp
from smddp.modelparallel.core.errors import SMPUsageError

pytestmark = pytest.mark.multiprocess


def uneven_use() -> list[Any]:
    """Replicas that use different parameters, several passes, buffers, views, and hooks."""
    gc.freeze()  # so that collecting a model does not visit all objects of torch
    smp.init({"partitions": 1, "ddp": True, "microbatches": 2})
    seen: list[Any] = []

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)])
            for part in self.parts:
                nn.init.ones_(part.weight)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[int(x[0, 0])](x)

    module = Choice()
    module.count.fill_(float(smp.rank()))
    model = smp.DistributedModel(module, backward_passes_per_step=2, gradient_as_bucket_view=True)
    seen.append(float(module.count))
    x = torch.full((4, 2), float(smp.rank()))
    repeated(model, x, 1)
    seen.append([None if p.grad is None else p.grad.tolist() for p in module.parameters()])
    module.count.fill_(float(smp.rank()))
    repeated(model, x, 1)
    seen.append([None if p.grad is None else p.grad.tolist() for p in module.parameters()])
    seen.append(float(module.count))
    # Outside a step, with one partition: plain torch code, reduced every second time, too.
    for p in module.parameters():
        p.grad = None
    for _ in range(2):
        model(x).mean().backward()
    seen.append([None if p.grad is None else p.grad.tolist() for p in module.parameters()])
    del model
    gc.collect()
    hooked = smp.DistributedModel(Choice())
    calls = []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        future: torch.futures.Future[Any] = torch.futures.Future()
        torch.distributed.all_reduce(bucket.buffer(), group=state)
        future.set_result(bucket.buffer() * 10)
        return future

    hooked.register_comm_hook(smp.get_dp_process_group(), hook)
    repeated(hooked, x, 1)
    seen.append([None if p.grad is None else p.grad.tolist() for p in hooked.parameters()])
    assert calls == [(0, True, 3)]
    return seen


def test_replicas_agree_on_what_was_used() -> None:
    zero, one = check_ranks(uneven_use, "2")
    assert zero[0] == one[0] == 0.0, "buffers come from the first replica"
    # After the first of two passes gradients are local.
    assert zero[1] == [[[0.0, 0.0]], None, None]
    assert one[1] == [None, [[1.0, 1.0]], None]
    # Then the mean over replicas of the sum of both; no replica used the third.
    assert zero[2] == one[2] == [[[0.0, 0.0]], [[1.0, 1.0]], None]
    assert zero[3] == one[3] == 0.0
    assert zero[4] == one[4] == [[[0.0, 0.0]], [[1.0, 1.0]], None], "as in a step"
    # The hook has to average over the microbatches itself.
    assert zero[5] == one[5] == [[[0.0, 0.0]], [[20.0, 20.0]], None]


def hooked_passes() -> list[Any]:
    """A hook that averages, in every second step; returns the gradient after each step."""
    smp.init({"partitions": 1, "ddp": True, "microbatches": 2})
    layer = nn.Linear(1, 1, bias=False)
    model = smp.DistributedModel(layer, backward_passes_per_step=2)
    calls = []

    def hook(group: Any, bucket: Any) -> Any:
        calls.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / (2 * dist.get_world_size()))

    model.register_comm_hook(smp.get_dp_process_group(), hook)
    seen = []
    for number in range(4):
        if number == 2:
            layer.weight.grad = None
        sums(model, torch.full((4, 1), float(1 + number + 10 * smp.rank())))
        seen.append((layer.weight.grad.item(), len(calls)))
    return seen


def hook_fails(when: str, fails_in: int, pp: int = 1) -> list[Any]:
    """A hook fails in one step on rank 1 alone; returns what each step has raised and left."""
    smp.init({"partitions": pp, "ddp": True, "auto_partition": False, "default_partition": 0})
    layer = nn.Linear(1, 1, bias=False)
    with smp.partition(pp - 1):
        last = nn.Linear(1, 1, bias=False)
    model = smp.DistributedModel(layer if pp == 1 else nn.Sequential(layer, last))
    if smp.pp_rank() == 1:
        layer = last
    seen: list[Any] = []

    def hook(group: Any, bucket: Any) -> Any:
        fails = len(seen) == fails_in and smp.rank() == 1
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        if fails and when == "after":
            raise ValueError("no reduction")
        if fails and when == "future":
            return work.get_future().then(lambda _: 1 / 0)
        return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())

    model.register_comm_hook(smp.get_dp_process_group(), hook)
    for number in range(4):
        try:
            sums(model, torch.full((1, 1), float(number + 10 * smp.rank())))
            seen.append(layer.weight.grad.item())
            layer.weight.grad = None
        except Exception as error:
            seen.append((type(error).__name__, layer.weight.grad))
    arrive("out")
    await_ranks("out", 2 * pp)
    return seen


def test_a_hook_averages_what_several_steps_have_added() -> None:
    for rank, seen in enumerate(check_ranks(hooked_passes, "2")):
        # A microbatch of two rows x has the gradient 2x.
        own = [2.0 * (1 + number + 10 * rank) for number in range(4)]
        mean = [2.0 * (1 + number + 5) for number in range(4)]
        # Between reductions: the sum over microbatches, because the hook will divide it.
        assert seen == [
            *((2 * own[0], 0), (mean[0] + mean[1], 1)),
            *((2 * own[2], 1), (mean[2] + mean[3], 2)),
        ]


def uneven_batches(pp: int) -> Any:
    """Replica r has r + 1 batches."""
    smp.init({"partitions": pp, **MANUAL, "microbatches": 2})
    torch.manual_seed(0)
    first = nn.Linear(2, 2, bias=False)
    with smp.partition(pp - 1):
        second = nn.Linear(2, 1, bias=False)
    model = smp.DistributedModel(nn.Sequential(first, second))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with model.join():
        for number in range(smp.rdp_rank() + 1):
            optimizer.zero_grad()
            plain(model, torch.full((4, 2), float(number)))
            optimizer.step()
    return copies(model)


def test_replicas_may_have_different_numbers_of_batches() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for number in range(2):
        optimizer.zero_grad()
        loss = whole(torch.full((4, 2), float(number))).square().mean()
        (loss * (2 - number) / 2).backward()
        optimizer.step()
    for pp in (1, 2):
        for state in check_ranks(uneven_batches, str(2 * pp), pp):
            torch.testing.assert_close(state, dict(whole.state_dict()))


def summed(average: bool) -> Any:
    smp.init({"partitions": 1, "ddp": True, "microbatches": 4})
    layer = nn.Linear(2, 1, bias=False)
    model = smp.DistributedModel(layer, average_grads_across_microbatches=average)

    repeated(model, torch.ones(8, 2), 1)
    return layer.weight.grad.tolist()


@pytest.mark.parametrize(("average", "expected"), [(True, 1.0), (False, 4.0)])
def test_gradients_are_averaged_or_summed(average: bool, expected: float) -> None:
    assert check_ranks(summed, "1", average) == [[[expected, expected]]]


@smp.step
def repeated(model: Any, x: torch.Tensor, times: int) -> None:
    for _ in range(times):  # one more than in the last step is a late contribution
        model.backward(model(x).mean())


def backwards(times: list[int], passes: int, hooked: bool, degree: int = 1) -> list[float]:
    """Makes steps with given numbers of backward passes; returns the gradient after each step."""
    sdp = {"sharded_data_parallel_degree": degree, "sdp_param_persistence_threshold": 1}
    smp.init({"partitions": 1, "ddp": True, "microbatches": 2, **sdp})
    layer = nn.Linear(1, 1, bias=False)
    model = smp.DistributedModel(layer, backward_passes_per_step=passes)

    def mean(microbatches: int, bucket: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        dist.all_reduce(bucket.buffer(), group=smp.get_dp_process_group())
        future.set_result(bucket.buffer() / smp.dp_size() / microbatches)
        return future

    if hooked:
        model.register_comm_hook(2, mean)
    found = []
    for number in times:
        repeated(model, torch.ones(4, 1), number)
        found.append(float(layer.weight.grad.sum()))
        if passes == 1:
            layer.weight.grad = None
    return found


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("hooked", [False, True])
def test_late_contributions_are_averaged_once(replicas: int, hooked: bool) -> None:
    found = check_ranks(backwards, str(replicas), [1, 3, 3, 1, 2], 1, hooked)
    assert found == [[1.0, 3.0, 3.0, 1.0, 2.0]] * replicas


def test_late_contributions_of_steps_that_reduce_nothing() -> None:
    assert (
        check_ranks(backwards, "2", [1, 1, 3, 3, 4], 2, False) == [[1.0, 2.0, 5.0, 8.0, 12.0]] * 2
    )


@pytest.mark.parametrize("passes", [1, 2])
def test_late_contributions_of_shards(passes: int) -> None:
    """The parameter has one element, so the second rank of each group has none of it."""
    expected = [1.0, 3.0, 3.0, 1.0, 2.0] if passes == 1 else [1.0, 4.0, 7.0, 8.0, 10.0]
    found = check_ranks(backwards, "4", [1, 3, 3, 1, 2], passes, False, 2)
    assert found == [expected, [0.0] * 5] * 2


def with_later_features(config: dict[str, Any]) -> Any:
    """Asks for features that this version lacks, as scripts do."""
    smp.init({"ddp": True, "microbatches": 2, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
    )

    @smp.step
    def train(model: Any, x: torch.Tensor) -> Any:
        loss = model(x).square().mean() * 100
        model.backward(loss)
        return loss

    train(model, torch.full((4, 2), 1.0 + smp.dp_rank()))
    smp.clip_grad_norm(1.0)
    assert optimizer.local_state_dict().keys() >= {"state", "param_groups"}
    with pytest.raises(SMPUsageError, match="no full state of the optimizer"):
        optimizer.state_dict()
    optimizer.step()
    return smp.dp_size(), copies(model)


def test_tensor_parallel_ranks_of_ordinary_modules_are_replicas() -> None:
    config = {"partitions": 2, "tensor_parallel_degree": 2, "shard_optimizer_state": True}
    outcomes = run_ranks(with_later_features, "4", config)
    assert all(outcome.returned for outcome in outcomes), "\n".join(map(str, outcomes))
    for key in config:
        said = [outcome.stderr.count(f"smp accepts {key}=") for outcome in outcomes]
        assert said == [0] * len(outcomes)
    assert "RESULTS WILL DIFFER" not in outcomes[0].stderr
    assert (
        "smp: 4 ranks = 1 replica(s) x 2 partition(s) x 2 tensor-parallel ranks with a batch each; "
        in outcomes[0].stderr
    )
    assert "\nPartition assignments:" in outcomes[0].stderr
    states = [outcome.value for outcome in outcomes]
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    for replica in range(2):
        (whole(torch.full((4, 2), 1.0 + replica)).square().mean() * 50).backward()
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    for replicas, state in states:
        assert replicas == 2
        torch.testing.assert_close(state, dict(whole.state_dict()))


# In the first step the hook is called when the step ends, later during the backward pass.
@pytest.mark.parametrize("fails_in", [0, 2])
@pytest.mark.parametrize("when", ["after", "future"])
def test_replicas_learn_of_a_hook_that_fails(when: str, fails_in: int) -> None:
    expected: list[Any] = [float(number + 5) for number in range(4)]
    for rank, seen in enumerate(check_ranks(hook_fails, "2", when, fails_in)):
        name, gradient = seen[fails_in]
        assert (name == "SMPPeerError") == (rank == 0), name
        assert gradient is None
        assert [*seen[:fails_in], *seen[fails_in + 1 :]] == [
            *expected[:fails_in],
            *expected[fails_in + 1 :],
        ]


def test_no_partition_goes_on_without_another_whose_hook_has_failed() -> None:
    """The step has succeeded for partition 0, which cannot undo it."""
    zero, one, two, three = check_ranks(hook_fails, "4", "future", 1, 2)
    assert isinstance(zero[1], float)
    assert isinstance(two[1], float)
    assert one[1] == ("RuntimeError", None)  # in which the future wraps the hook's error
    assert three[1] == ("SMPPeerError", None)
    for seen in (zero, one, two, three):
        assert isinstance(seen[0], float)
        assert [name for name, _ in seen[2:]] == ["SMPPeerError", "SMPPeerError"]
