"""Runs the model once to learn which module calls which, and at what cost.

A copy of the model runs on fake tensors: they have shapes but no memory, and nothing is computed.
This fails if control flow depends on data. Then the model itself runs on the microbatch, without
gradients, and its buffers and the random generators are restored.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from smddp._torch_internals import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    TorchInternalError,
    forget_compiled,
    mark_as_parameter,
    operation_packet,
)
from smddp.modelparallel.torch.common import device
from smddp.modelparallel.torch.common.buffers import Buffers
from smddp.modelparallel.torch.common.random_state import PythonRandomState, RandomState
from smddp.modelparallel.torch.common.structure import flatten, map_tensors, tensors_in
from smddp.modelparallel.torch.delayed.life import is_delayed
from smddp.modelparallel.torch.delayed.recorder import copies_made_by
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.partition.user_state import UserState
from smddp.modelparallel.torch.pipeline.takeover import forget_owner
from smddp.modelparallel.torch.tensor.module import is_divided

__all__ = ["Trace", "Visit", "fake_copy", "is_tracing", "size_of", "trace_model"]

log = logging.getLogger("smddp.modelparallel")

# The rates of an ordinary processor core: floating-point operations, and bytes of results, per
# second. They convert operations into seconds, so that computation can be compared with traffic
# between ranks.
_FLOPS = 2e10
_MEMORY = 5e9


class Visit:
    """One call of a module.

    Attributes:
        module: its number.
        parent: the number of the calling module, -1 for the root.
        taken, given: bytes of the tensors among its arguments and its results.
        direct: are all its tensors results of the previous call of the same parent?
    """

    def __init__(self, module: int, parent: int, taken: int, direct: bool) -> None:
        self.module, self.parent = module, parent
        self.taken, self.direct = taken, direct
        self.given = 0


class Trace:
    """What a run of the model has shown. Modules are given by number.

    Attributes:
        visits: all calls, in the order of their beginning.
        seconds: per module, for its own code without the modules that it calls.
        activations: per module, bytes of the tensors that its own code has made.
        uses: (module, module that has the parameter) where code uses another module's parameter.
        how: "fake tensors", "real data", or "parameters only".
    """

    def __init__(self, count: int, how: str) -> None:
        self.visits: list[Visit] = []
        self.seconds = [0.0] * count
        self.activations = [0] * count
        self.uses: set[tuple[int, int]] = set()
        self.how = how


def is_tracing() -> bool:
    """Returns whether the model is being traced, to decide about its partition."""
    return state.tracing


def trace_model(root: nn.Module, args: Any, kwargs: Any, times: bool) -> Trace:
    """Returns a trace of `root(*args, **kwargs)`.

    Args:
        root: the model; all of it is on this rank.
        args: of the first microbatch.
        kwargs: of the first microbatch.
        times: measure seconds on real data, in place of counting operations; not if a module is
            divided over tensor-parallel ranks.
    """
    state.tracing = True
    before, python = RandomState(), PythonRandomState()
    objects: list[Any] = []
    flatten((args, kwargs), [], objects)
    # The model, or a hook, may put something into an object, such as a cache, and count calls.
    user_state = UserState(root, objects)
    try:
        return contextvars.copy_context().run(_trace, root, args, kwargs, times)
    finally:
        user_state.restore()
        before.restore()
        python.restore()
        state.tracing = False


def _trace(root: nn.Module, args: Any, kwargs: Any, times: bool) -> Trace:
    with warnings.catch_warnings():
        # These warnings are about the trace only; the step itself warns where there is reason to.
        warnings.simplefilter("ignore")
        # With real data, exchanges of activations would wait for ranks that do not trace.
        divided = is_divided(root)
        if not times or divided:
            try:
                return _on_fake_tensors(root, args, kwargs)
            except TorchInternalError:
                raise
            except Exception as error:
                why = ""
                if any(map(is_delayed, root.parameters())):
                    why = "the parameters have no values yet"
                if divided:
                    why = "a module is divided over tensor-parallel ranks, which do not trace"
                if why:
                    log.warning(
                        "smp: tracing with fake tensors failed (%s), and %s; the model is divided "
                        "by parameters alone",
                        *(error, why),
                    )
                    return Trace(len(list(root.modules())), "parameters only")
                log.info("smp: tracing with fake tensors failed (%s); using real data", error)
        try:
            return _on_real_data(root, args, kwargs)
        except TorchInternalError:
            raise
        except Exception as error:
            # The model's own error, most likely; the step will show it in its place.
            log.warning("smp: the model could not be traced: %s", error)
            return Trace(len(list(root.modules())), "parameters only")


def _on_fake_tensors(root: nn.Module, args: Any, kwargs: Any) -> Trace:
    mode, model = fake_copy(root)
    fake = mode.from_tensor
    args, kwargs = map_tensors(fake, args), map_tensors(fake, kwargs)
    trace = Trace(len(list(model.modules())), "fake tensors")
    with mode, torch.no_grad(), _observed(model, trace, timed=False):
        model(*args, **kwargs)
    return trace


def fake_copy(
    root: nn.Module, by_shape: Callable[[torch.Tensor], bool] = lambda _: False
) -> tuple[FakeTensorMode, nn.Module]:
    """Returns a copy of a model whose parameters and buffers have no memory, and its mode.

    Args:
        root: the model.
        by_shape: says which tensors have a shape and a dtype, but no values here, so that
            contiguous ones stand for them.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # The arguments are where the parts will be, and most parts are not there yet.
    there = device.current()
    copies: dict[int, Any] = {}
    # Not by `buffers()`, which would ask other ranks for the values of theirs.
    for module in root.modules():
        for tensor in (*module._parameters.values(), *dict.values(module._buffers)):
            if tensor is None or id(tensor) in copies:
                continue
            if by_shape(tensor):
                shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                copies[id(tensor)] = _faked(mode, shape, tensor, there)
            elif _is_plain(tensor):
                copies[id(tensor)] = _fake(mode, tensor, there)
    copier = functools.partial(_fake, mode, there=there)
    with FakeCopyMode(mode), copies_made_by(copier):
        model = copy.deepcopy(root, copies)
    for part in model.modules():
        forget_compiled(part)
        forget_owner(part)
    return mode, model


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, there: torch.device) -> FakeTensor:
    """Does what FakeCopyMode does, in a tenth of its time, but without support for views."""
    if is_delayed(tensor):
        size, stride = tensor.size(), tensor.stride()
        shape = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
    else:
        shape = tensor.detach().to("meta")
    return _faked(mode, shape, tensor, there)


def _faked(
    mode: FakeTensorMode, shape: torch.Tensor, tensor: torch.Tensor, there: torch.device
) -> FakeTensor:
    """Makes a fake tensor of an empty one, which stands for a tensor of the model."""
    shape.requires_grad_(tensor.requires_grad)
    fake = FakeTensor(mode, shape, there)
    if isinstance(tensor, nn.Parameter):
        mark_as_parameter(fake)
    return fake


def _on_real_data(root: nn.Module, args: Any, kwargs: Any) -> Trace:
    buffers = Buffers(root)
    buffers.save()
    trace = Trace(len(list(root.modules())), "real data")
    # The whole model may be too large for a device, so it runs where it is.
    home = next((p.device for p in root.parameters()), device.current())

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(home, copy=True)

    try:
        with torch.no_grad(), _observed(root, trace, timed=True):
            root(*map_tensors(copy_of, args), **map_tensors(copy_of, kwargs))
    finally:
        buffers.restore()
    return trace


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the cost of every operation to the module whose code runs."""

    def __init__(self, model: nn.Module, trace: Trace, timed: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace, self._timed = trace, timed
        self._numbers = {id(module): n for n, module in enumerate(model.modules())}
        self._owners: dict[int, list[int]] = {}
        for number, module in enumerate(model.modules()):
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append(number)
        self._stack: list[int] = []
        self._visits: list[Visit] = []
        # Per module on the stack: the results of the last call that it has made.
        self._last: list[list[torch.Tensor]] = [[]]
        self._clock = 0.0

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._charge_time()
        taken = tensors_in((args, kwargs))
        last = {id(tensor) for tensor in self._last[-1]}
        direct = bool(taken) and all(id(tensor) in last for tensor in taken)
        parent = self._stack[-1] if self._stack else -1
        visit = Visit(self._numbers[id(module)], parent, size_of(taken), direct)
        self._trace.visits.append(visit)
        self._visits.append(visit)
        self._stack.append(visit.module)
        self._last.append([])

    def after(self, module: nn.Module, args: Any, result: Any) -> None:
        self._charge_time()
        self._stack.pop()
        self._last.pop()
        given = tensors_in(result)
        self._visits.pop().given = size_of(given)
        self._last[-1] = given

    def _charge_time(self) -> None:
        now = time.perf_counter()
        if self._timed and self._stack:
            self._trace.seconds[self._stack[-1]] += now - self._clock
        self._clock = now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._stack:
            number = self._stack[-1]
            made = size_of(tensors_in(result))
            self._trace.activations[number] += made
            if not self._timed:
                self._trace.seconds[number] += made / _MEMORY
                count = flop_registry.get(operation_packet(func))
                if count is not None:
                    operations = count(*args, **(kwargs or {}), out_val=result)
                    self._trace.seconds[number] += operations / _FLOPS
            for tensor in tensors_in(args):
                owners = self._owners.get(id(tensor))
                if owners is not None and number not in owners:
                    self._trace.uses.add((number, owners[0]))
        return result


@contextlib.contextmanager
def _observed(model: nn.Module, trace: Trace, timed: bool) -> Iterator[None]:
    observer = _Observer(model, trace, timed)
    handles = []
    for module in model.modules():
        handles.append(
            module.register_forward_pre_hook(observer.before, prepend=True, with_kwargs=True)
        )
        handles.append(module.register_forward_hook(observer.after))
    try:
        with observer:
            yield
    finally:
        for handle in handles:
            handle.remove()


def size_of(tensors: list[torch.Tensor]) -> int:
    """Returns the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
