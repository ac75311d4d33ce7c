"""`smp.delay_param_initialization`: modules made inside it have parameters without memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from smddp.modelparallel.core.logs import warn_user
from smddp.modelparallel.torch.delayed.life import is_delayed, with_values
from smddp.modelparallel.torch.delayed.recorder import Recorder

__all__ = ["delay_param_initialization", "delayed_parameter_initialization"]

# The recorder of the modules that are made now. It is used until their model is divided.
_recorder: Recorder | None = None
_depth = 0


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Returns a context that delays the initialization of parameters.

    Parameters and buffers of the modules that are created inside have no memory until
    `smp.DistributedModel` is divided. Each rank then makes those that live on it, with the values
    that they would have had, bit for bit. Random numbers are the same, inside the context and after
    it. What the script does to the model before its first step counts, too.

    Each rank draws the random numbers of the whole model, so creating it takes as long as without
    this. Code that needs a value, such as `x.item()`, gets it; that takes the time to compute it. A
    tensor of 64 KiB or more that is copied to a delayed one, such as an entry of a state dict, must
    not change until the first step: an error names it if it has changed in place, but changes
    through numpy are not seen. Sparse, nested and quantized tensors are refused. Parameters of
    other classes than nn.Parameter are made at once, with a warning. If the model's control flow
    depends on data, smp divides it by the sizes of its parameters, and `trace_execution_times`
    raises an error.

    Args:
        enabled: False delays nothing, not even inside a context with True.

    Raises:
        SMPUsageError: code inside does with a tensor what cannot be delayed; the text names the
            line.
    """
    global _recorder, _depth, _load_outside
    if not enabled:
        with contextlib.nullcontext() if _recorder is None else _recorder.paused():
            yield
        return
    if _recorder is None or _recorder.settled:
        _recorder = Recorder()
    if not _depth:
        nn.Parameter.__new__ = staticmethod(_new_parameter)  # type: ignore[method-assign]
        torch.Tensor._make_subclass = staticmethod(_make_subclass)  # type: ignore[method-assign]
        _load_outside = torch.load  # a script may have replaced torch's
        torch.load = functools.wraps(_load_outside)(_load)
    _depth += 1
    try:
        with _recorder, _recorder.paused(False):
            yield
    finally:
        _depth -= 1
        if not _depth:
            nn.Parameter.__new__ = staticmethod(_original_new)  # type: ignore[method-assign]
            del torch.Tensor._make_subclass  # what it inherits is the original
            torch.load = _load_outside


# Some documents of the original library use this name.
delayed_parameter_initialization = delay_param_initialization

_original_new = nn.Parameter.__new__
_original_make: Any = torch.Tensor._make_subclass
_load_outside: Any = torch.load


@functools.wraps(_original_new)
def _new_parameter(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Makes a parameter. Those of other classes are made at once, to keep their class."""
    if cls is not nn.Parameter and is_delayed(data):
        return _original_new(cls, _at_once(cls, data), *args, **kwargs)
    return _original_new(cls, data, *args, **kwargs)


@functools.wraps(_original_make)
def _make_subclass(cls: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes a tensor of another class. It is made at once, to keep its class."""
    return _original_make(cls, _at_once(cls, data) if is_delayed(data) else data, *args, **kwargs)


def _load(*args: Any, **kwargs: Any) -> Any:
    """Loads real tensors. In a fake mode torch.load returns tensors without values."""
    with unset_fake_temporarily():
        return _load_outside(*args, **kwargs)


def _at_once(cls: type, data: torch.Tensor) -> Any:
    if data.numel():  # not the parameters of lazy modules
        warn_user(
            f"the initialization of a tensor of shape {tuple(data.shape)} is not delayed, because "
            f"its class is {cls.__name__}, and not torch.nn.Parameter"
        )
    return with_values(data)
