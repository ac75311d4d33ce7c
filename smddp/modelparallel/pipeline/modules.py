"""Sends every call of a module to where the module lives.

`nn.Module._call_impl` is replaced once, for all modules of the process: a call of a module that
belongs to the partitioned model, made by a task of a step, is looked at here; any other call goes
its usual way. Nothing is stored in the modules, so copies of them (for averaging weights, say) are
ordinary modules.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from smddp.modelparallel.common.errors import SMPUsageError
from smddp.modelparallel.common.structure import Shape, flatten, map_tensors
from smddp.modelparallel.pipeline.calls import Caller
from smddp.modelparallel.pipeline.collector import Site, predictable
from smddp.modelparallel.pipeline.host import Host
from smddp.modelparallel.pipeline.lazy import Lazy, force, install
from smddp.modelparallel.pipeline.randomness import draw_seed, may_draw, seed_all, stream

__all__ = ["Modules"]

_original_call = nn.Module._call_impl
# A call whose result has changed so often is not relied upon again: each time costs a step.
_MAX_CHANGES = 2


class Modules:
    """The modules of the model, by number, and who owns them.

    Attributes:
        names: by number; the root's is "model".
        owners: by number; None for modules without state, which run where their input is.
        forwarding: may values go directly from owner to owner?
        relying: may callers go on with results that they only expect?
    """

    def __init__(
        self, host: Host, caller: Caller, root: nn.Module, forwarding: bool = True
    ) -> None:
        self._baton, self._caller = host.baton, caller
        self._rank = host.rank
        self.forwarding = forwarding
        self.relying = True
        self.list = list(root.modules())
        by_id = {id(module): name for name, module in reversed(list(root.named_modules()))}
        self.names = [by_id[id(module)] or "model" for module in self.list]
        self._numbers = {id(module): number for number, module in enumerate(self.list)}
        self._draws = [may_draw(module) for module in self.list]
        self.owners: list[int | None] = [0] * len(self.list)
        # By (module, arguments, mode): the call with what it returned the last time, if that is
        # something to rely on.
        self._sites: dict[Any, Site] = {}
        self._unknown: dict[Any, Site] = {}
        # What this step has learned. It is used from the next step on: then all microbatches of a
        # step make the same calls, and so pass every module in the same order.
        self._learned: dict[Any, Any] = {}
        # How often a call has returned something else than before.
        self._changes: collections.Counter[Any] = collections.Counter()

    def place(self, owners: Sequence[int | None]) -> None:
        """Sets the owners, and makes `module.forward(...)` of remote modules a call, too."""
        self.owners = list(owners)
        for number, owner in enumerate(self.owners):
            if owner is not None and owner != self._rank:
                module = self.list[number]
                object.__setattr__(module, "forward", _RemoteForward(self, number))

    def end_step(self) -> None:
        """Makes what has been learned known."""
        for key, returns in self._learned.items():
            before = self._sites.pop(key, None)
            if before is not None and before.returns != returns:
                self._changes[key] += 1
            if returns is not None and self._changes[key] < _MAX_CHANGES:
                self._sites[key] = Site(key[0], key[1], key[2], returns)
        self._learned.clear()

    def install(self) -> None:
        """Begins to look at calls."""
        _installed.append(weakref.ref(self))
        nn.Module._call_impl = _call  # type: ignore[method-assign,assignment]
        install()

    def number_of(self, module: nn.Module) -> int | None:
        """Returns the number of a module of the model."""
        return self._numbers.get(id(module))

    def enter(self, number: int, method: str, args: Any, kwargs: Any) -> Any:
        """Calls a module where it lives."""
        task = self._baton.task
        frame = task.local if task is not None else None
        owner = self.owners[number]
        if frame is None:
            if owner is not None and owner != self._rank:
                raise SMPUsageError(
                    f"module {self.names[number]!r} lives on rank {owner} of the pipeline, and can "
                    "be called only within a function decorated with smp.step"
                )
            return self._original(number, method, args, kwargs)
        if owner is None:
            owner = self._follow(frame, args, kwargs)
        if owner == self._rank:
            args, kwargs = _forced(args), _forced(kwargs)
            if not self._draws[number]:
                return self._original(number, method, args, kwargs)
            with stream(draw_seed()):
                return self._original(number, method, args, kwargs)
        return self._remote(frame, owner, number, method, args, kwargs)

    def run(self, number: int, method: str, seed: int | None, args: Any, kwargs: Any) -> Any:
        """Runs a call that another rank has asked for."""
        # No stream around it: the task has nothing before it, and whoever waits keeps his own.
        if seed is not None:
            seed_all(seed)
        return self._original(number, method, args, kwargs)

    def _follow(self, frame: Any, args: Any, kwargs: Any) -> int:
        """Returns who should run a module without state: the owner of its input."""
        if frame.open is not None:
            for value in (*args, *kwargs.values()):
                if type(value) is Lazy:
                    owner: int | None = frame.open.owner_of(value)
                    if owner is not None:
                        return owner
        return self._rank

    def _remote(
        self, frame: Any, owner: int, number: int, method: str, args: Any, kwargs: Any
    ) -> Any:
        collector = self._caller.collector(frame)
        tensors: list[torch.Tensor] = []
        objects: list[Any] = []
        shape = _flatten_arguments(args, kwargs, tensors, objects)
        for position, tensor in enumerate(tensors):
            if type(tensor) is Lazy and (tensor.fetch is None or tensor.graph is not collector):
                tensors[position] = force(tensor)
        seed = draw_seed() if self._draws[number] else None
        grad = collector.ambient.grad
        key = (number, method, shape, self.list[number].training, grad)
        site = self._sites.get(key) if self.relying else None
        # Perhaps within an autograd function (such as a checkpoint): autograd would take a
        # stand-in for its output, and gradients would go no further.
        if site is not None and (grad or not frame.grad):
            return collector.add(owner, site, tensors, objects, seed)
        site = self._unknown.setdefault(key, Site(number, method, shape, None))
        collector.add(owner, site, tensors, objects, seed)
        found, value = collector.result_of_last()  # type: ignore[attr-defined]
        known = self.forwarding and predictable(found) and self._learned.get(key, found) == found
        self._learned[key] = found if known else None
        return value

    def _original(self, number: int, method: str, args: Any, kwargs: Any) -> Any:
        module = self.list[number]
        if method:
            return getattr(type(module), method)(module, *args, **kwargs)
        return _original_call(module, *args, **kwargs)  # type: ignore[no-untyped-call]


# Usually one; the last is asked first.
_installed: list[weakref.ref[Modules]] = []


@functools.wraps(_original_call)
def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    for reference in reversed(_installed):
        modules = reference()
        if modules is None:
            _installed.remove(reference)
            continue
        number = modules._numbers.get(id(module))
        if number is not None:
            return modules.enter(number, "", args, kwargs)
    return _original_call(module, *args, **kwargs)  # type: ignore[no-untyped-call]


class _RemoteForward:
    """Takes the place of `forward` on modules that live elsewhere; shared by copies."""

    def __init__(self, modules: Modules, number: int) -> None:
        self._modules = weakref.ref(modules)
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modules = self._modules()
        if modules is None:
            raise SMPUsageError("the model that this module belonged to is gone")
        return modules.enter(self._number, "forward", args, kwargs)

    def __deepcopy__(self, memo: Any) -> _RemoteForward:
        return self

    def __reduce__(self) -> Any:
        raise SMPUsageError("a module that lives on another rank cannot be pickled on this one")


# Of so many tensors and nothing else: most calls.
_TENSORS_ONLY = [flatten((tuple([torch.empty(0)] * count), {}), [], []) for count in range(9)]


def _flatten_arguments(args: Any, kwargs: Any, tensors: list[Any], objects: list[Any]) -> Shape:
    if not kwargs and len(args) < len(_TENSORS_ONLY):
        for value in args:
            if type(value) is not torch.Tensor and type(value) is not Lazy:
                break
        else:
            tensors.extend(args)
            return _TENSORS_ONLY[len(args)]
    return flatten((args, kwargs), tensors, objects)


def _forced(value: Any) -> Any:
    """Returns arguments with every lazy tensor fetched."""
    items: Callable[[], Any] = value.values if isinstance(value, dict) else value.__iter__
    if any(not isinstance(item, torch.nn.Parameter) and _may_hide_lazy(item) for item in items()):
        return map_tensors(force, value)
    return value


def _may_hide_lazy(item: Any) -> bool:
    kind = type(item)
    return kind is Lazy or not (
        kind is torch.Tensor or item is None or kind in (bool, int, float, str)
    )
