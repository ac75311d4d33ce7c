"""Adds up the gradients of the microbatches, in the order of the microbatches.

A sum of floating-point numbers depends on its order, and which microbatch finishes its backward
pass first depends on timing. So a hook takes each contribution out of `Parameter.grad` as soon as
autograd has put it there. It is added to the sum after those of all earlier microbatches. If
several segments use one parameter, their contributions are added in the order of the calls in the
program. So the sum is the same for any timing, schedule and division of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from smddp.modelparallel.core.failure import PlanChangedError

__all__ = ["GradientSum"]


class _Account:
    """The gradients of one parameter in this step.

    Attributes:
        parameter: whose they are.
        expected: how many contributions a microbatch makes, as in the last step; 0 if that differs
            between microbatches, None before a step has told it.
        counts: contributions so far, by microbatch.
        waiting: contributions that have not been added yet, by microbatch.
        turn: the microbatch whose contributions are added next.
        used: has anything been added to the sum?
        total: the sum so far; None if there is nothing, or it was taken.
        late: the sum of contributions that came after those of their microbatch had been added,
            because there were more than expected; None if there are none.
    """

    __slots__ = ("counts", "expected", "late", "parameter", "total", "turn", "used", "waiting")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.expected: int | None = None
        self.begin()

    def begin(self) -> None:
        """Begins a step."""
        self.counts: dict[int, int] = {}
        self.waiting: dict[int, list[_Contribution]] = {}
        self.turn = 0
        self.used = False
        self.total: torch.Tensor | None = None
        self.late: torch.Tensor | None = None


class GradientSum:
    """The sums of one step on one rank.

    The previous step tells how often a parameter contributes per microbatch. As long as that is
    unknown, and not guessed, a contribution waits until its microbatch ends. Once it is known, and
    if microbatches come in order, which is usual, a contribution is added at once and needs no
    memory. Three or more contributions of one microbatch wait for each other; two do not, as
    a + b = b + a.
    """

    def __init__(
        self,
        final: Callable[[nn.Parameter], None] | None = None,
        each: Callable[[nn.Parameter, int, torch.Tensor], None] | None = None,
    ) -> None:
        """Begins without gradients.

        Args:
            final: called with each parameter in a step as soon as its sum is final.
            each: called with a parameter, a microbatch and the gradient of that microbatch, in
                place of adding this to the sum; a parameter's microbatches come in their order.
        """
        self._final, self._each = final, each
        # By id, because hashing a tensor runs Python code.
        self._accounts: dict[int, _Account] = {}
        self._microbatches = self._guess = 0
        self._ended: set[int] = set()

    def total(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the sum of a parameter, not divided by anything; None if there is none."""
        return self._account(parameter).total

    def take(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns what `total` returns, and forgets it; the caller may change the tensor."""
        account = self._account(parameter)
        total, account.total = account.total, None
        return total

    def used(self, parameter: nn.Parameter) -> bool:
        """Says whether a parameter has a sum, or had one that was taken."""
        return self._account(parameter).used

    def late(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the sum of the late contributions of a parameter; None if there are none."""
        return self._account(parameter).late

    @property
    def any_late(self) -> bool:
        """Says whether any parameter has late contributions."""
        return any(account.late is not None for account in self._accounts.values())

    @property
    def knows_counts(self) -> bool:
        """Whether an earlier step tells how often parameters contribute."""
        return any(account.expected for account in self._accounts.values())

    def tensors(self) -> list[torch.Tensor]:
        """Returns the gradients that it keeps now."""
        found = []
        for account in self._accounts.values():
            found += [one for one in (account.total, account.late) if one is not None]
            found += [gradient for some in account.waiting.values() for _, gradient in some]
        return found

    def begin(self, microbatches: int, guess: int = 0) -> None:
        """Begins a step.

        Args:
            microbatches: of the step.
            guess: how many contributions to expect of a parameter of which no step has told it; 0
                to wait for the end of the microbatch. If it was too small, `add` raises.
        """
        self._microbatches, self._guess = microbatches, guess
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
            parameter: whose gradient it is.
            microbatch: from which it comes.
            gradient: of the shape of the parameter; the sum may change it in place.
            path: of the frame from which it comes; contributions of a microbatch are added in this
                order.

        Raises:
            PlanChangedError: it comes after the number that `begin` has guessed.
        """
        account = self._account(parameter)
        expected = self._expected(account)
        count = account.counts[microbatch] = account.counts.get(microbatch, 0) + 1
        if account.turn > microbatch:
            if account.expected is None and self._guess:
                raise PlanChangedError("a parameter gives several gradients in a microbatch")
            account.late = _added(account.late, gradient)
            return
        waiting = account.waiting.get(microbatch)
        if waiting is None:
            account.waiting[microbatch] = [(path, gradient)]
        elif expected == 2:
            waiting[:] = [(path, _added(waiting[0][1], gradient))]
        else:
            waiting.append((path, gradient))
        if count == expected:
            self._advance(account)

    def end_microbatch(self, microbatch: int) -> None:
        """Notes that a microbatch contributes no more."""
        self._ended.add(microbatch)
        for account in self._accounts.values():
            if microbatch in account.waiting:
                self._advance(account)

    def release(self) -> None:
        """Frees what is left of a step; what is expected of the next one stays."""
        for account in self._accounts.values():
            account.begin()

    def end(self) -> None:
        """Ends the step: makes all sums final, and expects the same counts in the next step."""
        self._ended = set(range(self._microbatches))
        for account in self._accounts.values():
            self._advance(account)
            counts = {account.counts.get(number, 0) for number in range(self._microbatches)}
            # A step without contributions, such as an evaluation, teaches nothing. If counts
            # differ, control flow depends on data, and the next counts are unknown.
            if counts != {0}:
                account.expected = counts.pop() if len(counts) == 1 else 0

    def _account(self, parameter: nn.Parameter) -> _Account:
        found = self._accounts.get(id(parameter))
        if found is None:
            found = self._accounts[id(parameter)] = _Account(parameter)
        return found

    def _expected(self, account: _Account) -> int:
        return self._guess if account.expected is None else account.expected

    def _advance(self, account: _Account) -> None:
        """Adds the contributions of the next microbatches, as far as these are complete."""
        expected = self._expected(account)
        begun = turn = account.turn
        while turn < self._microbatches:
            complete = expected and account.counts.get(turn, 0) >= expected
            if not complete and turn not in self._ended:
                break
            waiting = account.waiting.pop(turn, None)
            if waiting is not None:
                waiting.sort(key=lambda contribution: contribution[0])
                gradient = functools.reduce(_added, [one for _, one in waiting])
                account.used = True
                if self._each is None:
                    account.total = _added(account.total, gradient)
                else:
                    self._each(account.parameter, turn, gradient)
            turn += 1
        account.turn = turn
        if turn != begun and turn == self._microbatches and self._final is not None:
            self._final(account.parameter)


# The path of the frame from which a gradient comes, and the gradient.
_Contribution = tuple[tuple[int, ...], torch.Tensor]


def _added(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the sum of two gradients. If both are dense, it is the first tensor, changed."""
    if total is None:
        return gradient
    if total.is_sparse or gradient.is_sparse:
        return total + gradient
    return total.add_(gradient)
