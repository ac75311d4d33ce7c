"""`smp.delay_param_initialization`: modules made inside it have parameters without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from smddp.modelparallel.delayed.recorder import Recorder

__all__ = ["delay_param_initialization", "delayed_parameter_initialization"]

_recorder: Recorder | None = None


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Returns a context that delays the initialization of parameters.

    Parameters and buffers of the modules that are created inside have no memory until
    `smp.DistributedModel` is divided. Each rank then makes those that live on it, with the values
    that they would have had: random numbers are the same, inside the context and after it.

    Args:
        enabled: False delays nothing, inside another such context, either.
    """
    global _recorder
    if _recorder is None or _recorder.settled:
        _recorder = Recorder()
    if not enabled:
        with _recorder.paused():
            yield
        return
    with _recorder, _recorder.paused(False):
        yield


# Some documents of the original library use this name.
delayed_parameter_initialization = delay_param_initialization
