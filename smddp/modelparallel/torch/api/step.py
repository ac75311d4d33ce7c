"""`@smp.step`: a training or evaluation step that is divided into microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from smddp.modelparallel.core.errors import SMPInitializationError, SMPUsageError
from smddp.modelparallel.core.failure import Redo
from smddp.modelparallel.torch.common.lost import smp_errors
from smddp.modelparallel.torch.common.random_state import RandomState
from smddp.modelparallel.torch.common.structure import rebuild
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.model.runtime import ModelRuntime
from smddp.modelparallel.torch.model.same_batch import seed_of_batch
from smddp.modelparallel.torch.pipeline.driver import Body, Driver
from smddp.modelparallel.torch.pipeline.microbatch import StepOutput, collect
from smddp.modelparallel.torch.pipeline.step import Schedule, StepResult

__all__ = ["StepFunction", "StepOutput", "step"]


@overload
def step(function: Callable[..., Any]) -> StepFunction: ...
@overload
def step(
    *,
    non_split_inputs: Sequence[str] | None = None,
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

    The function runs once per microbatch, on rank 0 of the pipeline. Each tensor among its
    arguments is divided into equal parts, one for each microbatch; any other argument is passed to
    all of them. An argument with a method `smp_slice(microbatches, number, axis)` divides itself:
    what the method returns is the part of microbatch `number`. The other ranks run the modules that
    live on them. Every rank of the pipeline has to call the decorated function, and gets its
    result.

    **Gradients in the function.** `torch.autograd.grad(loss, x)` works, also with `retain_graph`;
    parameters get no gradients from it, on any rank. With `create_graph=True` the gradients can be
    differentiated again, as often as wanted, also by `jvp`, `vjp`, `hvp`, `jacobian` and `hessian`
    of `torch.autograd.functional`. The owner of a module then keeps its graph until the microbatch
    ends, and calls of modules that have been differentiated twice are sent one by one.
    `torch.autograd.grad(loss, parameters)` returns the gradients of all ranks. It finds modules
    that have a parameter, contain a module that does, or refer to one by an attribute (also in a
    list, a dict, a bound method or a closure). What code contributes that uses a parameter by a
    global variable is missing. `loss.backward(inputs=...)` takes parameters of this rank only. An
    autograd.Function may call modules in its backward (adjoint methods, equilibrium models,
    reversible nets), and ask there for gradients of parameters of other ranks. Refused are
    transforms of `torch.func`, tensors with tangents, and batches of gradients
    (`is_grads_batched`, `vectorize=True`) through modules of other ranks. Modules with exchanges of
    tensor parallelism are differentiated once only. In the first step, gradients of parameters
    before the first call of the model are refused.

    **What runs twice.** A step is run again, from the same gradients, buffers and random numbers,
    if a module returns another structure than before (a tensor in one step, a pair in the next), or
    if a buffer that other ranks read changes or gets another shape for the first time; but not
    steps 1, 2, 4, 8 and so on of a function, whose microbatches do not overlap. So is the first
    step of a sharded model if a microbatch calls `model.backward` several times, and a step in
    which gradients are differentiated again for the first time. Other state of modules, and
    arguments that the function changes in place, are not put back.

    **What lets microbatches wait.** If a list or another object that attributes of modules, hooks
    or a context variable refer to has changed when a call leaves a rank, or if other ranks read a
    buffer that changes, the microbatches of this function run one after the other. So they do if a
    module with buffers, or with tensors that it keeps in attributes, was called several times in a
    microbatch, and not in the order of one process.

    `loss.backward()` in place of `model.backward(loss)` gives the same gradients. But fp16 does not
    scale that loss, although it divides gradients by the scale; a simple pipeline does not wait for
    all forward passes; and the timeline shows some backward work of rank 0 as forward work.

    Args:
        function: the function to decorate, if `smp.step` is used without parentheses.
        non_split_inputs: names of arguments that are not divided.
        input_split_axes: along which dimension to divide, by name of the argument; 0 for those that
            are not named.
        detach_outputs: drop the autograd graph of the tensors that the function returns.

    Returns:
        A `StepFunction`; with arguments in parentheses, a decorator that makes one.

    Raises:
        SMPUsageError: non_split_inputs is a string.

    Example:
        >>> @smp.step
        ... def train_step(model, data):
        ...     loss = model(data).square().mean()
        ...     model.backward(loss)
        ...     return loss
        >>> model = smp.DistributedModel(torch.nn.Linear(2, 1))
        >>> losses = train_step(model, torch.ones(4, 2))
        >>> len(losses.outputs)  # one for each microbatch
        2
    """
    if function is None:
        return lambda f: StepFunction(f, non_split_inputs, input_split_axes, detach_outputs)
    return StepFunction(function, non_split_inputs, input_split_axes, detach_outputs)


class StepFunction:
    """A function decorated with `smp.step`. See `step` for its arguments."""

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
        whole, axes = tuple(non_split_inputs or ()), dict(input_split_axes or {})
        # A functools.partial has no name, nor has an object that can be called.
        named: Any = getattr(function, "func", function)
        name = getattr(named, "__name__", type(named).__name__)
        self._body = Body(function, name, whole, axes, detach_outputs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Makes a decorated method work as a method."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Returns:
            The structure that the function returns: each tensor becomes a `StepOutput`, any other
            value a list with one entry per microbatch. None if every microbatch returns None.

        Raises:
            SMPInitializationError: `smp.init` has not been called.
            SMPMicrobatchError: the code of a microbatch failed, on any rank.
            SMPPartitionError: it is the first step, and the model cannot be divided as asked.
            SMPPeerError: a rank is gone, or the step failed on another replica.
            SMPUsageError: the arguments cannot be divided, the ranks are in different steps, there
                is no model, or the call is inside another step.
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
            # This happens at most once: the second time, every call waits for its result, and every
            # microbatch for the one before it.
            before.restore()
            return self._attempt(runtime, args, kwargs, again=True)

    def _attempt(self, runtime: ModelRuntime, args: Any, kwargs: Any, again: bool) -> Any:
        executor, body, cfg = runtime.executor, self._body, state.cfg
        schedule = Schedule.of(
            cfg.pipeline, cfg.microbatches, cfg.active_microbatches, cfg.partitions
        )
        executor.departure.check()
        driver = None
        try:
            with smp_errors():
                schedule = runtime.step.prepare(body.name, body.function, schedule, again)
            if executor.rank == 0:
                driver = Driver(executor, body, schedule, args, kwargs, seed_of_batch)
        except BaseException as error:
            executor.ending.leave(error)  # the others may be in the step already
            runtime.step.release_step()
            raise
        result = executor.run(body.name, schedule, runtime.step, driver)
        if driver is not None:
            body.trains = body.trains or driver.called_backward
        return self._collected(result)

    def _collected(self, result: StepResult) -> Any:
        """Returns what the script gets from the step function."""
        structures, objects = result.header
        results = [rebuild(structure, result.tensors, objects) for structure in structures]
        return collect(results, self._body.detach)
