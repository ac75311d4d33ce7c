"""Finds out whether the step of an optimizer combines values of several parameters.

Each rank steps the parameters that it has. That is what one process does only if each of them is
stepped by itself: a sum over all gradients is another number on each rank. So the first step is
watched: each tensor that is computed from a parameter, its gradient or its state is marked with
that parameter. What has the marks of two parameters combines them. Numbers that code takes out of
tensors carry marks, too. The watch sees functions of torch, and arithmetic of Python's numbers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from smddp._torch_internals import base_of_view, tree_leaves
from smddp.modelparallel.core.logs import frame_outside

__all__ = ["Watch", "paused", "unwatched"]

_Marks = frozenset[int]
_NOTHING: _Marks = frozenset()

_paused = False


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Makes a context whose code is not watched, because it takes all ranks into account."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def unwatched(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that does the same, and is not watched."""

    @functools.wraps(closure)
    def call() -> Any:
        with paused():
            return closure()

    return call


class _Number(float):
    """A number that was computed from tensors with marks."""

    watch: Watch
    marks: _Marks

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _arithmetic(name: str) -> Any:
    function = getattr(float, name)

    def apply(self: _Number, *others: Any) -> Any:
        result = function(self, *others)
        if type(result) is not float:
            return result
        return self.watch.number(result, (self, *others))

    return apply


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _full in (f"__{_name}__", f"__r{_name}__"):
        setattr(_Number, _full, _arithmetic(_full))
for _full in ("__neg__", "__abs__"):
    setattr(_Number, _full, _arithmetic(_full))


class Watch(TorchFunctionMode):
    """A context for one step of an optimizer.

    Attributes:
        found: which function has combined values of several parameters first, and where; empty if
            none has.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.found = ""
        self._marks: Any = WeakIdKeyDictionary()
        for number, parameter in enumerate(parameters):
            marks = frozenset((number,))
            self._marks[parameter] = marks
            if parameter.grad is not None:
                self._marks[parameter.grad] = marks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch, and marks its results."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.found or _paused:
            return result
        name: str = getattr(func, "__name__", "")
        if name.startswith(("_foreach_", "_fused_")):
            self._mark_each(name, args, kwargs, result)
            return result
        leaves = tree_leaves((args, kwargs))
        if type(result) is float:
            return self.number(result, leaves, name)
        changed = [args[0]] if args and name.endswith("_") and not name.endswith("__") else []
        made = [one for one in (*tree_leaves(result), *changed) if isinstance(one, torch.Tensor)]
        if made:
            marks = self._union(leaves, name)
            for one in made:
                self._mark(one, marks)
        return result

    def number(self, value: float, sources: Sequence[Any], name: str = "a sum of numbers") -> float:
        """Returns a number that was computed from others or from tensors, with their marks."""
        marks = self._union(sources, name)
        if not marks or self.found:
            return value
        number = _Number(value)
        number.watch, number.marks = self, marks
        return number

    def forget(self, optimizer: Any) -> None:
        """Replaces the numbers with marks that an optimizer has kept by ordinary ones."""
        kept = [vars(optimizer), *optimizer.param_groups, *getattr(optimizer, "state", {}).values()]
        for entries in kept:
            if isinstance(entries, dict):
                for key, value in entries.items():
                    if type(value) is _Number:
                        entries[key] = float(value)

    def _of(self, value: Any) -> _Marks:
        if type(value) is _Number:
            return value.marks
        if not isinstance(value, torch.Tensor):
            return _NOTHING
        marks: _Marks = self._marks.get(value, _NOTHING)
        base = base_of_view(value)
        return marks if base is None else marks | self._marks.get(base, _NOTHING)

    def _mark(self, tensor: torch.Tensor, marks: _Marks) -> None:
        if marks:
            self._marks[tensor] = self._of(tensor) | marks
            base = base_of_view(tensor)
            if base is not None:
                self._marks[base] = self._of(tensor)

    def _union(self, values: Sequence[Any], name: str) -> _Marks:
        marks = _NOTHING.union(*map(self._of, values))
        if len(marks) > 1 and not self.found:
            self.found = f"{name}, at {_where()}"
        return marks

    def _mark_each(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Marks what a function makes of lists of tensors, one element after the other."""
        lists = [one for one in (*args, *kwargs.values()) if isinstance(one, list | tuple)]
        others = [one for one in (*args, *kwargs.values()) if not isinstance(one, list | tuple)]
        common = self._union(others, name)
        length = len(lists[0]) if lists else 0
        lists = [one for one in lists if len(one) == length]
        made = [*lists, result] if isinstance(result, list | tuple) else lists
        for elements in zip(*lists, strict=True):
            self._union(elements, name)
        for number in range(length):
            marks = common.union(*[self._of(one[number]) for one in lists])
            for one in made:
                if isinstance(one[number], torch.Tensor):
                    self._mark(one[number], marks)


def _where() -> str:
    """Returns the line of the optimizer's code that runs."""
    frame = frame_outside(sys._getframe(), (__name__, "torch"))
    if frame is not None:
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "a function of torch"
