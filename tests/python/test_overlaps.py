"""Calls whose tensors share memory.

The rule (docs/operations.md): a call sees all its tensors as they were when it was made, and writes
its results in the order of its arguments. The oracle makes the same call with tensors of their own,
and then copies the results to where they belong, one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from on_ranks import on_ranks

pytestmark = pytest.mark.multiprocess
layouts = pytest.mark.parametrize("layout", ["3", "2x2", "1+1"])

Views = Sequence[torch.Tensor]
Call = Callable[[Views, Views], Any]
# Elements of a tensor: first, number, step.
Spec = tuple[int, int, int]


def _view(memory: torch.Tensor, spec: Spec) -> torch.Tensor:
    first, count, step = spec
    return memory[first : first + count * step : step] if count else memory[:0]


def _follows_the_rule(
    what: str, call: Call, memory: torch.Tensor, outputs: list[Spec], inputs: list[Spec]
) -> None:
    """Makes the call on views of `memory`, and compares all of it with what the rule says."""
    expected = memory.clone()
    into = [_view(expected, spec) for spec in outputs]
    apart = [view.clone() for view in into]
    call(apart, [_view(expected, spec).clone() for spec in inputs])
    for view, result in zip(into, apart, strict=True):
        view.copy_(result)
    call([_view(memory, spec) for spec in outputs], [_view(memory, spec) for spec in inputs])
    text = f"{what}: outputs {outputs}, inputs {inputs}"
    torch.testing.assert_close(memory, expected, rtol=0, atol=0, msg=lambda m: f"{text}: {m}")


def _coalesced(group: Any, call: Callable[[], Any]) -> None:
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        call()
    manager.wait()


def _reduce_each(tensors: Views, _: Views) -> None:
    def call() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)

    _coalesced(dist.group.WORLD, call)


def _gather_each(outputs: Views, inputs: Views) -> None:
    def call() -> None:
        for output, given in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, given, async_op=True)

    _coalesced(dist.group.WORLD, call)


def _scatter_each(outputs: Views, inputs: Views) -> None:
    def call() -> None:
        for output, given in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, given, async_op=True)

    _coalesced(dist.group.WORLD, call)


def _all_gather(outputs: Views, inputs: Views) -> None:
    dist.all_gather(list(outputs), inputs[0])


def _all_gather_tensor(outputs: Views, inputs: Views) -> None:
    dist.all_gather_into_tensor(outputs[0], inputs[0])


def _reduce_scatter(outputs: Views, inputs: Views) -> None:
    dist.reduce_scatter(outputs[0], list(inputs))


def _reduce_scatter_tensor(outputs: Views, inputs: Views) -> None:
    dist.reduce_scatter_tensor(outputs[0], inputs[0])


def _gather(outputs: Views, inputs: Views) -> None:
    dist.gather(inputs[0], list(outputs) if dist.get_rank() == 1 else None, dst=1)


def _scatter(outputs: Views, inputs: Views) -> None:
    dist.scatter(outputs[0], list(inputs) if dist.get_rank() == 1 else None, src=1)


def _all_to_all(outputs: Views, inputs: Views) -> None:
    dist.all_to_all(list(outputs), list(inputs))


def _all_to_all_single(outputs: Views, inputs: Views) -> None:
    dist.all_to_all_single(outputs[0], inputs[0])


def _all_to_all_splits(outputs: Views, inputs: Views) -> None:
    splits = [outputs[0].numel()] + [0] * (dist.get_world_size() - 1)
    mine = [0] * dist.get_world_size()
    if dist.get_rank() == 0:
        mine = [inputs[0].numel() // dist.get_world_size()] * dist.get_world_size()
        given = inputs[0]
    else:
        given = inputs[0][:0]
    dist.all_to_all_single(outputs[0], given, splits, mine)


# Per call: the numbers of elements of the outputs and of the inputs, for a number of ranks and the
# number of elements of a block.
Shapes = Callable[[int, int], tuple[list[int], list[int]]]
CALLS: dict[str, tuple[Call, Shapes]] = {
    "all_gather": (_all_gather, lambda n, c: ([c] * n, [c])),
    "all_gather_into_tensor": (_all_gather_tensor, lambda n, c: ([n * c], [c])),
    "reduce_scatter": (_reduce_scatter, lambda n, c: ([c], [c] * n)),
    "reduce_scatter_tensor": (_reduce_scatter_tensor, lambda n, c: ([c], [n * c])),
    "gather": (_gather, lambda n, c: ([c] * n, [c])),
    "scatter": (_scatter, lambda n, c: ([c], [c] * n)),
    "all_to_all": (_all_to_all, lambda n, c: ([c] * n, [c] * n)),
    "all_to_all_single": (_all_to_all_single, lambda n, c: ([n * c], [n * c])),
    "all_to_all_single with splits": (_all_to_all_splits, lambda n, c: ([c], [n * c])),
    "coalesced all_reduce": (_reduce_each, lambda n, c: ([c, c, 2 * c], [])),
    "coalesced all_gather": (_gather_each, lambda n, c: ([n * c, n * c], [c, c])),
    "coalesced reduce_scatter": (_scatter_each, lambda n, c: ([c, c], [n * c, n * c])),
}


@layouts
@on_ranks("{layout}")
def test_one_tensor_several_times_is_as_with_gloo(layout: str) -> None:
    with ranks.job(oracle=True) as gloo:
        size = dist.get_world_size()
        for count in (1, 5, 100_003):
            given = ranks.whole_numbers((count,), torch.float32, count)
            mine, theirs = torch.zeros(count), torch.zeros(count)
            dist.all_gather([mine] * size, given)
            dist.all_gather([theirs] * size, given, group=gloo)
            assert torch.equal(mine, theirs)
            mine, theirs = given.clone(), given.clone()
            _reduce_each([mine, mine], [])
            dist.all_reduce_coalesced([theirs, theirs], group=gloo)
            assert torch.equal(mine, theirs)


def _place(choices: random.Random, span: int, count: int, length: int) -> Spec:
    step = choices.choice([1, 1, 1, 2])
    # Often at the same place, or at a multiple of a block.
    first = choices.choice([0, 0, count, choices.randrange(span)])
    return (min(first, span - length * step), length, step)


def _at_random(seed: int, rounds: int, shared: bool) -> None:
    """Each rank has its own random places: whether memory is shared is nobody else's business."""
    import smddp

    with ranks.job():
        size, me = dist.get_world_size(), dist.get_rank()
        ours = random.Random(seed)
        for number in range(rounds):
            name = ours.choice(list(CALLS))
            call, shapes = CALLS[name]
            count = ours.choice([1, 3, 40, 3000, 70_000])
            mine = random.Random(f"{seed} {number} {me}")
            outputs, inputs = shapes(size, count)
            span = max(mine.choice([1, 2, 4]) * max(outputs + inputs), 2 * max(outputs + inputs))
            memory = (smddp.empty if shared else torch.empty)(span, dtype=torch.float32)
            memory.copy_(torch.arange(span) % 97 + me)
            specs = [_place(mine, span, count, n) for n in outputs + inputs]
            _follows_the_rule(
                f"seed {seed}, call {number}, {name}",
                call, memory, specs[: len(outputs)], specs[len(outputs) :],
            )  # fmt: skip


@layouts
@pytest.mark.parametrize("shared", [False, True])
def test_memory_at_random(layout: str, shared: bool) -> None:
    for seed in ranks.rotating(list(range(20)), 2):
        ranks.check_ranks(_at_random, layout, seed, 80, shared)


@layouts
@on_ranks("{layout}")
def test_own_block_in_place(layout: str) -> None:
    with ranks.job():
        size, me = dist.get_world_size(), dist.get_rank()
        whole = torch.zeros(size * 4)
        own = whole[me * 4 : me * 4 + 4]
        own.fill_(me)
        dist.all_gather_into_tensor(whole, own)
        assert whole.tolist() == [float(r) for r in range(size) for _ in range(4)]
        blocks = list(whole.chunk(size))
        own.fill_(me + 10)
        dist.all_gather(blocks, blocks[me])
        assert whole.tolist() == [float(r + 10) for r in range(size) for _ in range(4)]
        # Blocks of different sizes. Torch says of one element that it overlaps itself partly if its
        # strides differ, and refuses to copy it.
        memory = torch.full((2 * size,), float(me))
        uneven = [memory[r : 2 * r + 1] for r in range(size)]
        given = memory[:2:2] if me == 0 else uneven[me].clone()
        dist.all_gather(uneven, given)
        assert uneven[-1].tolist() == [float(size - 1)] * size


def _elements_that_share_memory() -> list[str]:
    with ranks.job():
        said = []
        for tensor in (
            torch.zeros(3).expand(2, 3),
            torch.zeros(10).as_strided((4, 4), (2, 1)),
            torch.zeros(20).as_strided((3, 3), (2, 4)),
        ):
            with pytest.raises(ValueError, match="share memory") as raised:
                dist.all_reduce(tensor)
            said.append(str(raised.value))
        # Their places are all different, although the strides do not show it.
        apart = torch.zeros(8).as_strided((2, 3), (3, 2))
        apart.fill_(1)
        dist.all_reduce(apart)
        assert (apart == dist.get_world_size()).all()
        return said


def test_elements_that_share_memory_are_refused() -> None:
    for said in ranks.check_ranks(_elements_that_share_memory, "2"):
        assert "strides [2, 1]" in said[1]


@layouts
@on_ranks("{layout}")
def test_calls_in_flight_on_the_same_memory_run_in_order(layout: str) -> None:
    with ranks.job():
        me, size = dist.get_rank(), dist.get_world_size()
        for count in (4, 5000, 200_000):
            # The first call takes its time, so that the others wait behind it.
            works = [dist.all_reduce(torch.ones(1 << 20), async_op=True)]
            memory = torch.full((count,), me + 1, dtype=torch.int64)
            works += [dist.all_reduce(memory, async_op=True) for _ in range(3)]
            works.append(dist.broadcast(memory[1:], 0, async_op=True))
            works.append(dist.all_reduce(memory[1:], async_op=True))
            for work in works:
                work.wait()
            expected = torch.full_like(memory, size * (size + 1) // 2 * size**2)
            expected[1:] *= size
            torch.testing.assert_close(memory, expected, rtol=0, atol=0)
