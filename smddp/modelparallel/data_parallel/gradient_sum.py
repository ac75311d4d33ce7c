"""Adds up the gradients of the microbatches, in the order of the microbatches.

Which microbatch finishes its backward pass first depends on timing, and a sum of floating-point
numbers depends on its order. So contributions are taken from `Parameter.grad` as autograd leaves
them there, and added when all earlier microbatches have had their turn. Those of one microbatch to
one parameter, if it is used in several segments, are added in the order of the calls in the
program. Results are then the same for any timing, schedule and partition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

__all__ = ["GradientSum"]


class _Account:
    """What one parameter has got in this step.

    Attributes:
        parameter: whose.
        expected: contributions per microbatch, as in the last step; 0 if nothing can be expected.
        counts: contributions so far, by microbatch.
        waiting: those that are not added yet, by microbatch.
        turn: the microbatch that is added next.
        total: the sum so far.
        late: what came after its microbatch had been added: more than expected.
    """

    __slots__ = ("counts", "expected", "late", "parameter", "total", "turn", "waiting")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.expected = 0
        self.begin()

    def begin(self) -> None:
        """Begins a step."""
        self.counts: dict[int, int] = {}
        self.waiting: dict[int, list[_Contribution]] = {}
        self.turn = 0
        self.total: torch.Tensor | None = None
        self.late: torch.Tensor | None = None


class GradientSum:
    """The sums of one step on one rank.

    How often a parameter contributes per microbatch is learned from the previous step. As long as
    it is unknown, a contribution waits for the end of its microbatch; known, it is added at once in
    the usual case that microbatches come in order, and costs no memory. Only three and more
    contributions have to wait for each other: the order of two is of no consequence.
    """

    def __init__(self, final: Callable[[nn.Parameter], None] | None = None) -> None:
        self._final = final
        # By id: to hash a tensor is a call of Python code.
        self._accounts: dict[int, _Account] = {}
        self._microbatches = 0
        self._ended: set[int] = set()

    def total(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the sum of a parameter, if it had contributions."""
        return self._account(parameter).total

    def late(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns what came after the sum of a parameter had been called final."""
        return self._account(parameter).late

    @property
    def any_late(self) -> bool:
        """Did anything come too late?"""
        return any(account.late is not None for account in self._accounts.values())

    def begin(self, microbatches: int) -> None:
        """Begins a step."""
        self._microbatches = microbatches
        self._ended = set()
        for account in self._accounts.values():
            account.begin()

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
        account = self._account(parameter)
        count = account.counts[microbatch] = account.counts.get(microbatch, 0) + 1
        if account.turn > microbatch:
            account.late = _added(account.late, gradient)
            return
        waiting = account.waiting.get(microbatch)
        if waiting is None:
            account.waiting[microbatch] = [(path, gradient)]
        elif account.expected == 2:
            waiting[:] = [(path, _added(waiting[0][1], gradient))]
        else:
            waiting.append((path, gradient))
        if count == account.expected:
            self._advance(account)

    def end_microbatch(self, microbatch: int) -> None:
        """Says that a microbatch contributes no more."""
        self._ended.add(microbatch)
        for account in self._accounts.values():
            if microbatch in account.waiting:
                self._advance(account)

    def end(self) -> None:
        """Ends the step: all sums are final, and the counts are what to expect next time."""
        self._ended = set(range(self._microbatches))
        for account in self._accounts.values():
            self._advance(account)
            counts = {account.counts.get(number, 0) for number in range(self._microbatches)}
            # Without any contribution (an evaluation, say) nothing is learned. Differing counts:
            # control flow depends on data, nothing can be expected.
            if counts != {0}:
                account.expected = counts.pop() if len(counts) == 1 else 0

    def _account(self, parameter: nn.Parameter) -> _Account:
        found = self._accounts.get(id(parameter))
        if found is None:
            found = self._accounts[id(parameter)] = _Account(parameter)
        return found

    def _advance(self, account: _Account) -> None:
        """Adds what is complete and whose turn it is."""
        begun = turn = account.turn
        while turn < self._microbatches:
            complete = account.expected and account.counts.get(turn, 0) >= account.expected
            if not complete and turn not in self._ended:
                break
            waiting = account.waiting.pop(turn, None)
            if waiting is not None:
                waiting.sort(key=lambda contribution: contribution[0])
                gradient = functools.reduce(_added, [one for _, one in waiting])
                account.total = _added(account.total, gradient)
            turn += 1
        account.turn = turn
        if turn != begun and turn == self._microbatches and self._final is not None:
            self._final(account.parameter)


_Contribution = tuple[tuple[int, ...], torch.Tensor]


def _added(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the sum, in the place of the first if that is possible."""
    if total is None:
        return gradient
    if total.is_sparse or gradient.is_sparse:
        return total + gradient
    return total.add_(gradient)
