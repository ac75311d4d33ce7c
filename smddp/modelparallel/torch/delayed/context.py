"""`smp.delay_param_initialization`: modules made inside it have parameters without memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smddp._torch_internals import LOADS, NEW_PARAMETERS, NEW_SUBCLASSES, unset_fake_temporarily
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
    global _recorder, _depth
    if not enabled:
        with contextlib.nullcontext() if _recorder is None else _recorder.paused():
            yield
        return
    if _recorder is None or _recorder.settled:
        _recorder = Recorder()
    if not _depth:
        NEW_SUBCLASSES.install(_make_subclass)
        NEW_PARAMETERS.install(_new_parameter)
        LOADS.install(_load)
    _depth += 1
    try:
        with _recorder, _recorder.paused(False):
            yield
    finally:
        _depth -= 1
        if not _depth:
            for patch in (NEW_PARAMETERS, NEW_SUBCLASSES, LOADS):
                patch.undo()


# Some documents of the original library use this name.
delayed_parameter_initialization = delay_param_initialization


def _new_parameter(original: Any) -> Any:
    """Makes parameters of other classes at once, to keep their class."""

    @functools.wraps(original)
    def new(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is not nn.Parameter and is_delayed(data):
            data = _at_once(cls, data)
        return original(cls, data, *args, **kwargs)

    return staticmethod(new)


def _make_subclass(original: Any) -> Any:
    """Makes tensors of other classes at once, to keep their class."""

    @functools.wraps(original)
    def make(cls: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        return original(cls, _at_once(cls, data) if is_delayed(data) else data, *args, **kwargs)

    return staticmethod(make)


def _load(original: Any) -> Any:
    """Loads real tensors. In a fake mode torch.load returns tensors without values."""

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return original(*args, **kwargs)

    return load


def _at_once(cls: type, data: torch.Tensor) -> Any:
    if data.numel():  # not the parameters of lazy modules
        warn_user(
            f"the initialization of a tensor of shape {tuple(data.shape)} is not delayed, because "
            f"its class is {cls.__name__}, and not torch.nn.Parameter"
        )
    return with_values(data)
