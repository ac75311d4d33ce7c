"""Adds up the gradients of the microbatches, in the order of the microbatches.

Which microbatch finishes its backward pass first depends on timing, and a sum of floating-point
numbers depends on its order. So contributions are taken from `Parameter.grad` as autograd leaves
them there, and added when all earlier microbatches have had their turn. Those of one microbatch to
one parameter, if it is used in several segments, are added in the order of the calls in the
program. Results are then the same for any timing, schedule and partition.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn

__all__ = ["GradientSum"]


class GradientSum:
    """The sums of one step on one rank.

    How often a parameter contributes per microbatch is learned from the previous step. As long as
    it is unknown, a contribution waits for the end of its microbatch; known, it is added at once in
    the usual case that microbatches come in order, and costs no memory. Only three and more
    contributions have to wait for each other: the order of two is of no consequence.

    Attributes:
        sums: the sum per parameter so far.
        late: parameters that contributed more often than expected: their sums had been called
            final too early.
    """

    def __init__(self, final: Callable[[nn.Parameter], None] | None = None) -> None:
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        self.late: dict[nn.Parameter, torch.Tensor] = {}
        self._final = final
        self._expected: dict[nn.Parameter, int] = {}
        self._microbatches = 0

    def begin(self, microbatches: int) -> None:
        """Begins a step."""
        self.sums = {}
        self.late = {}
        self._microbatches = microbatches
        self._counts: dict[tuple[nn.Parameter, int], int] = collections.Counter()
        self._waiting: dict[tuple[nn.Parameter, int], list[_Contribution]] = {}
        # Per parameter, the microbatch whose turn it is; and the ended microbatches.
        self._turn: dict[nn.Parameter, int] = collections.Counter()
        self._ended: set[int] = set()

    @property
    def learned(self) -> bool:
        """Has a step been seen, so that ends of microbatches need not be announced?"""
        return bool(self._expected)

    def add(
        self,
        parameter: nn.Parameter,
        microbatch: int,
        gradient: torch.Tensor,
        path: tuple[int, ...] = (),
    ) -> None:
        """Takes one contribution.

        Args:
            parameter: whose.
            microbatch: from which.
            gradient: it.
            path: where in the program it comes from; those of a microbatch are added in this order.
        """
        key = (parameter, microbatch)
        self._counts[key] += 1
        if self._turn[parameter] > microbatch:
            self._accumulate(self.late, parameter, gradient)
            return
        expected = self._expected.get(parameter, 0)
        waiting = self._waiting.setdefault(key, [])
        if waiting and expected == 2:
            waiting[:] = [(path, _added(waiting[0][1], gradient))]
        else:
            waiting.append((path, gradient))
        if self._counts[key] == expected:
            self._advance(parameter)

    def end_microbatch(self, microbatch: int) -> None:
        """Says that a microbatch contributes no more."""
        self._ended.add(microbatch)
        for parameter in {key[0] for key in self._waiting if key[1] == microbatch}:
            self._advance(parameter)

    def end(self, parameters: Iterable[nn.Parameter]) -> None:
        """Ends the step: all sums are final, and the counts are what to expect next time."""
        self._ended = set(range(self._microbatches))
        for parameter in parameters:
            self._advance(parameter)
            counts = {self._counts[parameter, number] for number in range(self._microbatches)}
            # Differing counts: control flow depends on data, nothing can be expected.
            self._expected[parameter] = counts.pop() if len(counts) == 1 else 0
        self._waiting = {}

    def _advance(self, parameter: nn.Parameter) -> None:
        """Adds what is complete and whose turn it is."""
        expected = self._expected.get(parameter, 0)
        turn = self._turn[parameter]
        while turn < self._microbatches:
            key = (parameter, turn)
            complete = expected and self._counts[key] >= expected
            if not complete and turn not in self._ended:
                break
            waiting = self._waiting.pop(key, None)
            if waiting is not None:
                waiting.sort(key=lambda contribution: contribution[0])
                gradient = functools.reduce(_added, [one for _, one in waiting])
                self._accumulate(self.sums, parameter, gradient)
            turn += 1
        if turn != self._turn[parameter]:
            self._turn[parameter] = turn
            if turn == self._microbatches and self._final is not None:
                self._final(parameter)

    def _accumulate(
        self,
        where: dict[nn.Parameter, torch.Tensor],
        parameter: nn.Parameter,
        gradient: torch.Tensor,
    ) -> None:
        where[parameter] = _added(where[parameter], gradient) if parameter in where else gradient


_Contribution = tuple[tuple[int, ...], torch.Tensor]


def _added(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the sum, in the place of the first if that is possible."""
    if total.is_sparse or gradient.is_sparse:
        return total + gradient
    return total.add_(gradient)
