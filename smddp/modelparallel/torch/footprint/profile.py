"""Runs the model on fake tensors, forward and backward, and notes when memory is needed.

Nothing is computed or allocated. The result does not depend on how the model is divided, or on what
is computed again: `estimate.py` asks it for any such choice.
"""

from __future__ import annotations

import bisect
import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from smddp._torch_internals import (
    FakeTensor,
    StorageWeakRef,
    TorchDispatchMode,
    current_node,
    next_sequence_number,
    sequence_number,
    storage_address,
    storage_expired,
)
from smddp.modelparallel.torch.common.example import Example
from smddp.modelparallel.torch.common.random_state import RandomState
from smddp.modelparallel.torch.common.structure import map_tensors, tensors_in
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.partition.trace import Trace, Visit, fake_copy, size_of

__all__ = ["Gradient", "Profile", "Storage", "profile_model"]

# The node of autograd that adds a gradient to a parameter has a number beyond all others.
_LAST_NUMBER = 1 << 62


class Storage:
    """Memory that one operation has made.

    Attributes:
        size: in bytes.
        visit: the number of the visit whose code, or its backward pass, has made it.
        begin, end: the first tick at which it lives, and the first one at which it does not.
        saved: the visits for whose backward pass autograd keeps it.
    """

    __slots__ = ("begin", "end", "saved", "size", "visit")

    def __init__(self, size: int, visit: int, begin: int) -> None:
        self.size, self.visit = size, visit
        self.begin, self.end = begin, -1
        self.saved: set[int] = set()


class Gradient(NamedTuple):
    """The gradient of a parameter.

    Attributes:
        tick: when it is complete.
        key: the number of the parameter in `root.parameters()`.
    """

    tick: int
    key: int


class Profile:
    """What a microbatch needs, in the order of time. A tick is one operation of torch.

    Attributes:
        visits: the calls of modules, in the order of their beginning. The first one is the step's
            body: its module is -1, and its code is a loss.
        spans: the ticks of each visit, as (begin, end).
        taken: the numbers of the storages among the arguments of each visit.
        storages: all memory but that of parameters, buffers and arguments of the model.
        gradients: of parameters, in the order in which they come.
        at: by tick, the visit whose code or backward pass runs.
        turn: the tick at which the backward pass begins.
        given: bytes of the model's arguments.
        uses: as in `Trace`.
    """

    def __init__(self, given: int) -> None:
        self.visits: list[Visit] = [Visit(-1, -1, 0, False)]
        self.spans: list[tuple[int, int]] = [(0, 0)]
        self.taken: list[list[int]] = [[]]
        self.storages: list[Storage] = []
        self.gradients: list[Gradient] = []
        self.at: list[int] = []
        self.turn = 0
        self.given = given
        self.uses: set[tuple[int, int]] = set()

    def around(self, visit: int) -> Iterator[int]:
        """Yields a visit and those around it, from the inside."""
        while visit >= 0:
            yield visit
            visit = self.visits[visit].parent

    def trace(self, count: int) -> Trace:
        """Returns what decides about a division of the model.

        Args:
            count: of the modules.
        """
        trace = Trace(count, "fake tensors")
        trace.uses = self.uses
        for visit in self.visits[1:]:
            parent = -1 if visit.parent == 0 else visit.parent
            trace.visits.append(Visit(visit.module, parent, visit.taken, visit.direct))
            trace.visits[-1].given = visit.given
        for storage in self.storages:
            for module in {self.visits[number].module for number in storage.saved} - {-1}:
                trace.activations[module] += storage.size
        return trace


def profile_model(
    root: nn.Module,
    by_shape: Callable[[torch.Tensor], bool],
    example: Example,
    half: torch.dtype | None,
) -> Profile:
    """Returns a profile of one microbatch.

    Args:
        root: the model; modules on other ranks need no values.
        by_shape: as for `fake_copy`.
        example: of the model's arguments, for one microbatch.
        half: the dtype in which the model computes, if its results are converted to fp32.

    Raises:
        Exception: the model cannot run on fake tensors.
    """
    before = RandomState()
    state.tracing = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _profile(root, by_shape, example, half)
    finally:
        state.tracing = False
        before.restore()


def _profile(
    root: nn.Module,
    by_shape: Callable[[torch.Tensor], bool],
    example: Example,
    half: torch.dtype | None,
) -> Profile:
    mode, model = fake_copy(root, by_shape)
    given: list[Any] = [FakeTensor(mode, shape, device) for shape, device in example.shapes]
    args, kwargs = example.arguments(given)
    known = [*model.parameters(), *model.buffers(), *given]
    sizes = {storage_address(t.untyped_storage()): t.untyped_storage().nbytes() for t in given}
    observer = _Observer(model, Profile(sum(sizes.values())), known)
    with (
        torch.autograd.set_multithreading_enabled(False),
        mode,
        torch.enable_grad(),
        observer.observed(),
    ):
        result = model(*args, **kwargs)
        observer.body()
        loss, result = _loss(result, half)
        observer.profile.turn = len(observer.profile.at)
        if loss is not None and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        del result
    observer.finish()
    return observer.profile


def _loss(result: Any, half: torch.dtype | None) -> tuple[torch.Tensor | None, Any]:
    """Returns a loss that needs as much memory as a cross entropy, and the result that it keeps.

    What the step's body really does is not known. As in most scripts, the result lives until the
    body ends.
    """
    if half is not None:
        result = map_tensors(lambda t: t.float() if t.dtype == half else t, result)
    losses = [
        (torch.log_softmax(tensor, -1) if tensor.dim() else tensor).sum()
        for tensor in tensors_in(result)
        if tensor.is_floating_point() and tensor.requires_grad
    ]
    total: torch.Tensor | None = None
    for loss in losses:
        total = loss if total is None else total + loss
    return total, result


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills a profile."""

    def __init__(self, model: nn.Module, profile: Profile, known: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.profile, self._model = profile, model
        self._numbers = {id(module): number for number, module in enumerate(model.modules())}
        self._known = {storage_address(tensor.untyped_storage()) for tensor in known}
        self._keep = known  # so that no other memory gets their addresses
        self._owners: dict[int, list[int]] = {}
        for number, module in enumerate(model.modules()):
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append(number)
        # Per visit that runs: the results of the last call that it has made.
        self._results: list[list[torch.Tensor]] = [[]]
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}
        self._stack = [0]
        # The visit that runs from each number of autograd's nodes on.
        self._from = [next_sequence_number()]
        self._visits = [0]
        self._last = 0

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """In this context everything is noted."""
        handles: list[Any] = []
        for module in self._model.modules():
            handles.append(
                module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            )
            handles.append(module.register_forward_hook(self._after, always_call=True))
        for key, parameter in enumerate(self._model.parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient(key))  # type: ignore[no-untyped-call]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def body(self) -> None:
        """Notes that the model has returned to the body."""
        self._switch()

    def finish(self) -> None:
        """Ends the profile."""
        profile = self.profile
        self._living.clear()
        for storage in profile.storages:
            if storage.end < 0:
                storage.end = len(profile.at)
        profile.spans[0] = (0, profile.turn)

    def _switch(self) -> None:
        number = next_sequence_number()
        if self._from[-1] == number:
            self._visits[-1] = self._stack[-1]
        else:
            self._from.append(number)
            self._visits.append(self._stack[-1])

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        profile = self.profile
        given = tensors_in((args, kwargs))
        last = {id(tensor) for tensor in self._results[-1]}
        direct = bool(given) and all(id(tensor) in last for tensor in given)
        visit = Visit(self._numbers[id(module)], self._stack[-1], size_of(given), direct)
        self._stack.append(len(profile.visits))
        self._results.append([])
        profile.visits.append(visit)
        profile.spans.append((len(profile.at), 0))
        found = (self._number_of(tensor) for tensor in given)
        profile.taken.append(list(dict.fromkeys(n for n in found if n is not None)))
        self._switch()

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        visit = self._stack.pop()
        self.profile.spans[visit] = (self.profile.spans[visit][0], len(self.profile.at))
        self._results.pop()
        self._results[-1] = tensors_in(result)
        self.profile.visits[visit].given = size_of(self._results[-1])
        self._switch()

    def _on_gradient(self, key: int) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            parameter.grad = None
            self.profile.gradients.append(Gradient(len(self.profile.at), key))

        return take

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        number = self._number_of(tensor)
        if number is not None:
            self.profile.storages[number].saved.add(self._stack[-1])
        return tensor.detach()  # else a node that keeps its own output is never freed

    def _number_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the number of a tensor's storage; None for memory that is not counted."""
        found = self._living.get(storage_address(tensor.untyped_storage()))
        return None if found is None else found[1]

    def _running(self) -> int:
        """Returns the visit whose code or backward pass runs."""
        node = current_node()
        if node is None:
            return self._stack[-1]
        number = sequence_number(node)()
        if number < _LAST_NUMBER:
            self._last = self._visits[bisect.bisect_right(self._from, number) - 1]
        return self._last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = tensors_in(result) if not isinstance(result, bool | int | float | str) else []
        if not made:
            return result
        profile, tick, visit = self.profile, len(self.profile.at), self._running()
        profile.at.append(visit)
        module = profile.visits[visit].module
        for tensor in tensors_in(args):
            owners = self._owners.get(id(tensor))
            if owners is not None and module >= 0 and module not in owners:
                profile.uses.add((module, owners[0]))
        for tensor in made:
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage_address(storage)
            if key in self._known or key in self._living:
                continue
            self._living[key] = StorageWeakRef(storage), len(profile.storages)  # type: ignore[no-untyped-call]
            profile.storages.append(Storage(storage.nbytes(), visit, tick))
        self._forget_freed(tick)
        return result

    def _forget_freed(self, tick: int) -> None:
        # With very many tensors, not after each operation.
        if tick % (1 + len(self._living) // 1000):
            return
        living = self._living.items()
        for key in [key for key, (weak, _) in living if storage_expired(weak.cdata)]:
            self.profile.storages[self._living.pop(key)[1]].end = tick
