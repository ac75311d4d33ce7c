"""Sums of gradients have the same bits whatever the order in which contributions come."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from smddp.modelparallel.core.failure import PlanChangedError
from smddp.modelparallel.torch.data_parallel.gradient_sum import GradientSum

# Float32: (BIG + 1) - BIG is 0, (BIG - BIG) + 1 is 1.
BIG = 1e8
SHARES = [BIG, 1.0, -BIG]


def total(sums: GradientSum, order: list[tuple[int, int]], parameter: nn.Parameter) -> float:
    """Runs a step of two microbatches with contributions in a given order; returns the sum."""
    sums.begin(2)
    left = {0: len(SHARES), 1: len(SHARES)}
    for microbatch, place in order:
        gradient = torch.tensor([SHARES[place] * (microbatch + 1)])
        # Paths are ordered by their place in the program, not by their length.
        sums.add(parameter, microbatch, gradient, (place, 7) if place % 2 else (place,))
        left[microbatch] -= 1
        if left[microbatch] == 0:
            sums.end_microbatch(microbatch)
    sums.end()
    found = sums.total(parameter)
    assert found is not None
    return float(found)


def test_several_uses_in_a_microbatch_are_added_in_the_order_of_the_program() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    sums = GradientSum()
    # In the order of microbatches, BIG + 1 loses the 1. In other orders it stays.
    expected = 0.0
    contributions = list(itertools.product((0, 1), range(len(SHARES))))
    # The first step finds how often the parameter is used; later steps know it.
    for order in itertools.permutations(contributions):
        assert total(sums, list(order), parameter) == expected, order


def test_two_uses_are_added_at_once_and_in_any_order() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    sums = GradientSum()
    for first, second in ((0, 1), (1, 0), (0, 1)):
        sums.begin(1)
        held = torch.tensor([float(first + 1)])
        sums.add(parameter, 0, held, (first,))
        sums.add(parameter, 0, torch.tensor([float(second + 1)]), (second,))
        sums.end()
        assert sums.total(parameter) == 3.0
    # Two contributions were expected, so the second was added to the first in place.
    assert float(held) == 3.0


def test_a_step_without_gradients_says_nothing_about_the_next() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    final: list[nn.Parameter] = []
    sums = GradientSum(final.append)
    for contributions in (1, 0, 1):
        final.clear()
        sums.begin(2)
        for microbatch in range(2 * contributions):
            sums.add(parameter, microbatch, torch.ones(1))
        learned = list(final)
        sums.end()
    # The sum is final with the last contribution, before the step ends.
    assert learned == [parameter]


def test_more_contributions_than_in_the_last_step_come_late() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    sums = GradientSum()
    for contributions in (1, 3):
        sums.begin(1)
        for _ in range(contributions):
            sums.add(parameter, 0, torch.ones(1))
        sums.end()
    assert sums.any_late
    assert sums.total(parameter) == 1
    assert sums.late(parameter) == 2


def test_a_guess_can_be_wrong() -> None:
    sums = GradientSum()
    one, two = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    sums.begin(1, guess=1)
    for parameter in (one, two):
        sums.add(parameter, 0, torch.ones(1))
    with pytest.raises(PlanChangedError):  # the step is run again, without a guess
        sums.add(two, 0, torch.ones(1))
    sums.release()
    for guess in (0, 1):
        sums.begin(1, guess)
        for parameter in (one, two, two):
            sums.add(parameter, 0, torch.ones(1))
        sums.end()
    assert [sums.total(parameter) for parameter in (one, two)] == [1, 2]
