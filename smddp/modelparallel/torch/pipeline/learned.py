"""What callers have learned about calls: the structures of results, and which results to wait for.

What a step learns is used from the next step on, so that all microbatches of a step make the same
calls, and pass every module in the same order.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from smddp.modelparallel.torch.common.structure import Structure
from smddp.modelparallel.torch.pipeline.collector import KnownCall, predictable

__all__ = ["Findings", "Learned"]

# After so many changes of the structure of a call's result, callers always wait for the result:
# each change lets a step run twice.
_MAX_CHANGES = 2

# Names a call that is made again and again: (module, method, structure of the arguments, train or
# eval, gradients on?, watched). See `Call`.
_Key = tuple[Any, ...]


class Findings(NamedTuple):
    """What a rank has found out in a step about the calls that it makes.

    Attributes:
        structures: of the results, by the key of a call in `Learned`; None for a call whose caller
            has to wait for the result.
        awaited: numbers of the modules for whose results callers have to wait, because arguments
            have been changed.
    """

    structures: dict[Any, Structure | None]
    awaited: frozenset[int]

    def join(self, other: Findings) -> Findings:
        """Returns what ranks that make the same calls may rely on, so that they go on to do so.

        If they have not found the same about a call, callers wait for all results of its module:
        one rank may pass a mask where another passes None, and both must wait, or neither.
        """
        structures = {}
        awaited = self.awaited | other.awaited
        for key in dict.fromkeys((*self.structures, *other.structures)):
            ours, theirs = self.structures.get(key), other.structures.get(key)
            structures[key] = ours if ours == theirs else None
            if ours != theirs:
                awaited |= {key[0]}
        return Findings(structures, awaited)


class Learned:
    """What this rank has learned about the calls that it makes.

    Attributes:
        predicts_structures: may callers go on before a result has come, if they know its structure?
            Not in the second attempt of a step.
        settled: has the last step found nothing that makes calls of this rank wait, or not wait,
            from now on?
        awaited: numbers of the modules whose results callers wait for; others only read it.
    """

    def __init__(self, forwarding: bool) -> None:
        """Begins without calls.

        Args:
            forwarding: may values go directly from owner to owner? (`direct_forwarding`)
        """
        self._forwarding = forwarding
        self.predicts_structures = True
        self.settled = False
        self.awaited: set[int] = set()
        self._awaited_before: frozenset[int] = frozenset()  # at the end of the last step
        # First calls whose result structure callers may rely on; then calls whose callers wait for
        # the result. A key may be in both.
        self._with_structure: dict[_Key, KnownCall] = {}
        self._without_structure: dict[_Key, KnownCall] = {}
        self._found: dict[_Key, Structure | None] = {}  # in this step
        # How often the structure of a call's result has changed.
        self._changes: collections.Counter[_Key] = collections.Counter()

    def begin_step(self, again: bool) -> None:
        """Begins a step.

        Args:
            again: it is run a second time; this time callers wait for all results.
        """
        self.predicts_structures = not again

    def expected(self, key: _Key) -> KnownCall | None:
        """Returns a call whose result the caller need not wait for; None if it has to."""
        return self._with_structure.get(key) if self.predicts_structures else None

    def waited(self, key: _Key) -> KnownCall:
        """Returns a call for whose result the caller waits."""
        call = self._without_structure.get(key)
        if call is None:
            call = KnownCall(key[0], key[1], key[2], None, key[5])
            self._without_structure[key] = call
        return call

    @property
    def compares(self) -> bool:
        """Whether some callers do not wait, so that replicas have to compare which do."""
        return self.predicts_structures and bool(self._with_structure)

    def is_new(self, number: int) -> bool:
        """Says whether replicas may not know that callers of a module wait for its result."""
        return number not in self._awaited_before

    def returned(self, key: _Key, found: Structure, together: bool) -> None:
        """Notes what a call has returned for which its caller has waited.

        Args:
            key: of the call.
            found: the structure of the result.
            together: do replicas have to wait for the same calls?
        """
        may_expect = predictable(found)
        if together and not may_expect:
            self.awaited.add(key[0])  # so that no replica has to tell the others again
        known = self._forwarding and may_expect and self._found.get(key, found) == found
        self._found[key] = found if known else None

    def make_callers_wait(self, numbers: set[int]) -> None:
        """Makes callers wait for the results of these modules from now on.

        Args:
            numbers: of the modules.
        """
        self.awaited |= numbers

    def findings(self) -> Findings:
        """Returns what this step has found out, and what ranks that know the same should know."""
        # Most results whose callers have to wait were not predictable before either.
        structures = {
            key: returns
            for key, returns in self._found.items()
            if returns is not None or key in self._with_structure
        }
        return Findings(structures, frozenset(self.awaited))

    def end_step(self, findings: Findings) -> None:
        """Lets the next steps use what this step has found.

        Args:
            findings: of this rank; with an order group, what its members have in common.
        """
        self.settled = findings.awaited <= self._awaited_before
        self.awaited |= findings.awaited
        self._awaited_before = frozenset(self.awaited)
        for key, returns in findings.structures.items():
            before = self._with_structure.pop(key, None)
            self.settled &= before is not None and before.returns == returns
            if before is not None and before.returns != returns:
                self._changes[key] += 1
            if returns is not None and self._changes[key] < _MAX_CHANGES:
                self._with_structure[key] = KnownCall(key[0], key[1], key[2], returns, key[5])
        self._found.clear()
