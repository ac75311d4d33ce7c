"""Rank 0's part of a step: divides the arguments and runs the body for every microbatch."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from smddp.modelparallel.core.baton import Priority, Task
from smddp.modelparallel.core.order import TaskName
from smddp.modelparallel.core.progress import Progress
from smddp.modelparallel.torch.common.placeholder import force
from smddp.modelparallel.torch.common.random_state import RandomState
from smddp.modelparallel.torch.common.structure import flatten, map_tensors
from smddp.modelparallel.torch.pipeline.executor import Executor
from smddp.modelparallel.torch.pipeline.frame import Frame
from smddp.modelparallel.torch.pipeline.microbatch import (
    collect,
    divided_arguments,
    split_arguments,
    unequal_lengths,
)
from smddp.modelparallel.torch.pipeline.protocol import ambient
from smddp.modelparallel.torch.pipeline.randomness import draw_seed, mix, seed_all
from smddp.modelparallel.torch.pipeline.step import Schedule, StepResult

__all__ = ["Body", "Driver"]

log = logging.getLogger("smddp.modelparallel")


@dataclasses.dataclass
class Body:
    """A script's function under `smp.step`, how to divide its arguments, and facts of past steps.

    Attributes:
        function: runs once per microbatch.
        name: of the function; the same on all ranks.
        whole: names of the arguments that are not divided (`non_split_inputs`).
        axes: along which dimension to divide, by name of the argument; 0 for the others.
        detach: drop the autograd graphs of the tensors that it returns.
        trains: an earlier step has called `model.backward`.
        compared: the lengths of the arguments have been compared, which is done once.
    """

    function: Callable[..., Any]
    name: str
    whole: tuple[str, ...]
    axes: Mapping[str, int]
    detach: bool
    trains: bool = False
    compared: bool = False


class Driver:
    """Runs one step; see `StepDriver`.

    Each microbatch has a task of its own; `Progress` says when it may begin, and when it waits
    before its backward pass.

    Attributes:
        called_backward: has a microbatch of this step called `model.backward`?
        random_state: of the script's generators, after the step has drawn its seed; None before.
    """

    def __init__(
        self,
        executor: Executor,
        body: Body,
        schedule: Schedule,
        args: Any,
        kwargs: Any,
        agree: Callable[[int, Callable[[], Iterable[Any]]], int] = lambda seed, _: seed,
    ) -> None:
        """Begins nothing yet.

        Args:
            executor: that of rank 0.
            body: runs once per microbatch.
            schedule: how many microbatches there are, and how many run at a time.
            args: positional arguments of the whole batch.
            kwargs: named arguments of the whole batch.
            agree: gets the seed that this rank has drawn for the step, and a function that returns
                what `divided_arguments` yields; returns the seed to use.
        """
        self._executor = executor
        self._agree = agree
        self._body = body
        self._schedule = schedule
        self._args, self._kwargs = args, kwargs
        self._progress = Progress(
            executor.baton, schedule.microbatches, schedule.active, schedule.simple
        )
        self._results: list[Any] = [None] * schedule.microbatches
        self.called_backward = False
        self.random_state: RandomState | None = None

    def drive(self) -> StepResult:
        """Runs all microbatches, and returns what they have returned.

        Raises:
            SMPUsageError: the arguments cannot be divided, the results differ in structure, or the
                body has set modules of other ranks to train or eval.
            Aborted: the step has failed.
        """
        body = self._body
        self._parts = split_arguments(
            body.function,
            self._args,
            self._kwargs,
            self._schedule.microbatches,
            body.whole,
            body.axes,
        )
        self._compare_lengths()
        # One number per step comes from the script's random generator. The others are made from it.
        self._seed = self._agree(draw_seed(), self._batch)
        self.random_state = RandomState()
        self._ambient = ambient()
        self._start_more()
        self._executor.wait_for_finish()
        self._executor.model.routing.check_training()
        tensors: list[torch.Tensor] = []
        objects: list[Any] = []
        structures = [flatten(result, tensors, objects) for result in self._results]
        # Raises if the results do not match; the other ranks must not get them then.
        collect(self._results, detach=False)
        return StepResult((structures, objects), tensors)

    def _run_body(self, frame: Frame) -> None:
        """Runs the script's function for a microbatch, and keeps what it returns."""
        number = frame.microbatch
        args, kwargs = self._parts[number]
        seed_all(mix(self._seed, number))
        with self._executor.model.local.around_task(), self._ambient.entered():
            try:
                result = self._body.function(*args, **kwargs)
            except Exception as error:
                self._annotate(error)
                raise
            # A tensor with an autograd graph would keep all of the graph until the step ends.
            take = _detached if self._body.detach else force
            self._results[number] = map_tensors(take, result)
            self._executor.caller.settle(frame)

    def _batch(self) -> Iterable[Any]:
        body = self._body
        return divided_arguments(body.function, self._args, self._kwargs, body.whole)

    def _unequal_lengths(self) -> str:
        body = self._body
        return unequal_lengths(body.function, self._args, self._kwargs, body.whole, body.axes)

    def _compare_lengths(self) -> None:
        """Warns once: torch may broadcast rows that do not belong together, without an error."""
        if self._body.compared:
            return
        self._body.compared = True
        if note := self._unequal_lengths():
            log.warning(
                "smp: step %r: %s. Each microbatch gets its share of every one of them",
                *(self._body.name, note),
            )

    def _annotate(self, error: Exception) -> None:
        """Adds the lengths of the arguments of the whole batch to an error, if they differ."""
        if note := self._unequal_lengths():
            # As `add_note`, which Python 3.10 does not have.
            error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]

    def reach_backward(self, frame: Frame) -> None:
        """Counts a forward pass as done; in the simple pipeline, waits for the others.

        Args:
            frame: of the microbatch; its own thread calls this, before each backward pass.

        Raises:
            Aborted: the step has failed meanwhile.
        """
        self.called_backward = True
        ticket = self._progress.reach_backward(frame.microbatch)
        if ticket is None:
            return
        # The last microbatch to come here lets the older ones go first: gradients are added in the
        # order of microbatches, and those that come too early need memory.
        self._executor.wait(ticket, frame, forward=False, yields=True)

    def _start_more(self) -> None:
        """Begins microbatches as long as there are any and the schedule allows more."""
        for number in self._progress.start_more():
            frame = Frame(
                microbatch=number,
                forward=True,
                path=(),
                name="",
                depth=0,
                grad=self._ambient.grad,
            )
            task = Task(Priority(True, number), functools.partial(self._microbatch, frame))
            task.frame, task.name = frame, TaskName("body", number)
            self._executor.baton.submit(task)

    def _microbatch(self, frame: Frame) -> None:
        """The task of one microbatch."""
        number = frame.microbatch
        try:
            self._executor.enter(frame, True)
            self._run_body(frame)
        finally:
            self._executor.timeline.leave()
        self._executor.caller.drop(frame.sent)
        reached_backward = self._progress.has_reached_backward(number)
        # In a training step the backward pass itself frees what other ranks keep of the microbatch.
        # Other ranks need DONE if this microbatch has not called model.backward. They need it also
        # until a step of this function that called it has succeeded: while a rank does not know how
        # many gradients to expect, it adds those of a microbatch only at its end (GradientSum).
        step = self._executor.step
        assert step is not None
        step.end_body(number, not (reached_backward and self._body.trains))
        if self._progress.end(number):
            self._executor.finish()
        else:
            self._start_more()
            self._progress.release()


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = force(tensor)
    return value.detach()
