"""`@smp.step`: one training or evaluation step, divided into microbatches."""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch

from smddp.modelparallel.common.errors import SMPInitializationError, SMPUsageError
from smddp.modelparallel.common.structure import flatten, map_tensors, rebuild
from smddp.modelparallel.job.state import state
from smddp.modelparallel.model.runtime import ModelRuntime
from smddp.modelparallel.pipeline.baton import Priority, Task, Ticket
from smddp.modelparallel.pipeline.executor import Executor, StepBegin
from smddp.modelparallel.pipeline.failure import Redo, summary
from smddp.modelparallel.pipeline.frame import Frame
from smddp.modelparallel.pipeline.lazy import force
from smddp.modelparallel.pipeline.microbatch import (
    StepOutput,
    collect,
    split_arguments,
    unequal_lengths,
)
from smddp.modelparallel.pipeline.protocol import ambient
from smddp.modelparallel.pipeline.randomness import RandomState, draw_seed, mix, seed_all

__all__ = ["StepFunction", "StepOutput", "step"]

log = logging.getLogger("smddp.modelparallel")


@overload
def step(function: Callable[..., Any]) -> StepFunction: ...
@overload
def step(
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[Callable[..., Any]], StepFunction]: ...


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Decorates the function that does the forward and backward pass of a batch.

    Its body runs once per microbatch, on rank 0 of the pipeline, with tensors among the arguments
    divided; the other ranks run the modules that live there. Every rank of the pipeline has to call
    it, and gets the result.

    Args:
        function: for use without parentheses.
        non_split_inputs: names of arguments that are not divided.
        input_split_axes: along which dimension to divide, by name of the argument; 0 else.
        detach_outputs: returned tensors have no autograd graph.
    """
    if function is None:
        return lambda f: StepFunction(f, non_split_inputs, input_split_axes, detach_outputs)
    return StepFunction(function, non_split_inputs, input_split_axes, detach_outputs)


class StepFunction:
    """A function decorated with `smp.step`."""

    def __init__(
        self,
        function: Callable[..., Any],
        non_split_inputs: Sequence[str] | None,
        input_split_axes: Mapping[str, int] | None,
        detach_outputs: bool,
    ) -> None:
        if isinstance(non_split_inputs, str):
            raise SMPUsageError(
                f"smp.step: non_split_inputs is a list of names: [{non_split_inputs!r}]"
            )
        functools.update_wrapper(self, function)
        self._function = function
        self._whole = tuple(non_split_inputs or ())
        self._axes = dict(input_split_axes or {})
        self._detach = detach_outputs
        self._learned = False
        self._compared = False  # the lengths of arguments

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Makes a decorated method work as a method."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
            SMPMicrobatchError: the code of a microbatch failed, on any rank.
            SMPUsageError: the arguments cannot be divided, or the ranks are in different steps.
        """
        if not state.initialized:
            raise SMPInitializationError(
                "call smp.init() before a function decorated with smp.step"
            )
        if state.in_step:
            raise SMPUsageError(
                "a function decorated with smp.step cannot be called inside another"
            )
        model = state.current_model()
        if model is None:
            raise SMPUsageError("create smp.DistributedModel before the first step")
        state.in_step = True
        try:
            return self._run(model, args, kwargs)
        finally:
            state.in_step = False

    def _run(self, model: Any, args: Any, kwargs: Any) -> Any:
        runtime: ModelRuntime = model.runtime
        before = RandomState()
        try:
            return self._attempt(runtime, args, kwargs, again=False)
        except Redo:
            # Once at most: the second time nobody takes the result of a call for granted.
            before.restore()
            return self._attempt(runtime, args, kwargs, again=True)

    def _attempt(self, runtime: ModelRuntime, args: Any, kwargs: Any, again: bool) -> Any:
        executor, name = runtime.executor, self._function.__name__
        count = state.cfg.microbatches
        simple = state.cfg.pipeline == "simple"
        # In the simple pipeline all forward work comes first: nothing to hold back.
        executor.server.limit = 1 << 30 if simple else state.cfg.active_microbatches
        runtime.begin_step(count, again)
        driver = _Driver(self, executor, count, args, kwargs) if executor.rank == 0 else None
        # What is served on other ranks begins streams of its own.
        random_state: RandomState | None = RandomState() if driver is None else None
        failure, redo = "", False
        try:
            if driver is None:
                header, tensors = executor.run(name, None, None)
            else:
                begin = StepBegin(runtime.steps, name, count, runtime.changed_modes())
                header, tensors = executor.run(name, begin, driver.drive)
                self._learned = self._learned or driver.backward
        except Redo:
            redo = True
        except BaseException as error:
            failure = summary(error)
            raise
        finally:
            if driver is not None:
                executor.driver = None
                random_state = driver.random_state
            if random_state is not None:
                random_state.restore()
            runtime.end_step(failure, redo)
        return self._result(header, tensors)

    def _result(self, header: Any, tensors: Sequence[Any]) -> Any:
        parts, objects = header
        results = [rebuild(shape, tensors, objects) for shape in parts]
        return collect(results, self._detach)


class _Driver:
    """Runs the body for every microbatch, on rank 0.

    In the simple pipeline, a microbatch that reaches its backward pass waits until all have.
    """

    def __init__(
        self, step: StepFunction, executor: Executor, count: int, args: Any, kwargs: Any
    ) -> None:
        self._step = step
        self._executor = executor
        self._count = count
        self._args, self._kwargs = args, kwargs
        cfg = state.cfg
        self._simple = cfg.pipeline == "simple"
        self._active = 1 if executor.size == 1 else _active_microbatches(count)
        self._lock = threading.Lock()
        self._started = self._ended = 0
        self._forward = 0  # microbatches under way that have not reached their backward
        self._parked: list[Ticket] = []
        self._passed: set[int] = set()
        self._results: list[Any] = [None] * count
        self.backward = False
        self.random_state: RandomState | None = None

    def drive(self) -> tuple[Any, list[Any]]:
        """Runs all microbatches; returns header and tensors of the result."""
        step = self._step
        self._parts = split_arguments(
            step._function, self._args, self._kwargs, self._count, step._whole, step._axes
        )
        self._compare_lengths()
        # One number of the script's stream per step; the rest comes from seeds.
        self._seed = draw_seed()
        self.random_state = RandomState()
        self._surroundings, self._context = ambient(), contextvars.copy_context()
        self._grad = self._surroundings.grad
        self._executor.driver = self
        self._start_more()
        self._executor.wait_for_finish()
        tensors: list[torch.Tensor] = []
        objects: list[Any] = []
        shapes = [flatten(result, tensors, objects) for result in self._results]
        collect(self._results, detach=False)  # raises, if they do not match, before others get them
        return (shapes, objects), tensors

    def _body(self, number: int) -> None:
        """Runs the script's function for a microbatch."""
        args, kwargs = self._parts[number]
        seed_all(mix(self._seed, number))
        with self._surroundings.entered():
            try:
                result = self._context.copy().run(self._step._function, *args, **kwargs)
            except Exception as error:
                self._annotate(error)
                raise
            # A value with a graph would keep all of it until the step ends.
            take = _detached if self._step._detach else force
            self._results[number] = map_tensors(take, result)

    def _unequal_lengths(self) -> str:
        step = self._step
        return unequal_lengths(step._function, self._args, self._kwargs, step._whole, step._axes)

    def _compare_lengths(self) -> None:
        """Warns once: rows that torch broadcasts against each other would train in silence."""
        step = self._step
        if step._compared:
            return
        step._compared = True
        if note := self._unequal_lengths():
            log.warning(
                "smp: step %r: %s. Each microbatch gets its share of every one of them",
                *(step._function.__name__, note),
            )

    def _annotate(self, error: Exception) -> None:
        """Adds what the user cannot see in an error: how long the arguments were as a whole."""
        if note := self._unequal_lengths():
            # As `add_note`, which Python 3.10 does not have.
            error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]

    def reach_backward(self, frame: Frame) -> None:
        """Called by a microbatch before a backward pass."""
        self.backward = True
        if frame.microbatch in self._passed:
            return
        self._passed.add(frame.microbatch)
        ticket = Ticket()
        with self._lock:
            self._forward -= 1
            if self._simple:
                self._parked.append(ticket)
        self._start_more()
        if not self._simple:
            return
        self._release()
        self._executor.wait(ticket, frame, forward=False)

    def _start_more(self) -> None:
        with self._lock:
            numbers = []
            while self._started < self._count and self._started - self._ended < self._active:
                numbers.append(self._started)
                self._started += 1
                self._forward += 1
        for number in numbers:
            frame = Frame(number, True, (), "", 0, self._grad)
            task = Task(Priority(True, number), functools.partial(self._microbatch, frame))
            task.local = frame
            self._executor.baton.submit(task)

    def _release(self) -> None:
        with self._lock:
            if self._simple and self._forward > 0:
                return
            parked, self._parked = self._parked, []
        for ticket in parked:
            self._executor.baton.complete(ticket)

    def _microbatch(self, frame: Frame) -> None:
        number = frame.microbatch
        timeline = self._executor.timeline
        timeline.enter(frame, True)
        try:
            self._body(number)
        finally:
            timeline.leave()
        self._executor.caller.abandon(frame.sent)
        had_backward = number in self._passed
        idle = torch.is_grad_enabled() and not had_backward
        self._executor.microbatch_done(number, idle or not self._step._learned)
        with self._lock:
            if not had_backward:
                self._forward -= 1
            self._ended += 1
            last = self._ended == self._count
        if last:
            self._executor.finish()
        else:
            self._start_more()
            self._release()


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = force(tensor)
    return value.detach()


def _active_microbatches(count: int) -> int:
    """Returns how many microbatches may be under way.

    By its nature the simple pipeline has all; fewer, only if somebody asks for that.
    """
    cfg = state.cfg
    default: int = cfg.partitions + 2
    active: int = cfg.active_microbatches
    if cfg.pipeline == "simple" and active == default:
        return max(count, default)
    return active
