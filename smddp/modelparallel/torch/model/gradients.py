"""Takes the gradients of the parameters that live here, out of steps' backward passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smddp.modelparallel.core.baton import Current
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common.lost import smp_errors
from smddp.modelparallel.torch.data_parallel.gradient_sum import GradientSum
from smddp.modelparallel.torch.data_parallel.reducer import DataParallel
from smddp.modelparallel.torch.partition.placement import Placement
from smddp.modelparallel.torch.sharding.sharding import Sharding
from smddp.modelparallel.torch.tensor.division import division_of

__all__ = ["Gradients"]


class Gradients:
    """The gradients of a step: taken from autograd, summed, and given to `DataParallel`.

    Attributes:
        sum: over the microbatches of the step; others only read it.
    """

    def __init__(
        self,
        current: Current,
        placement: Placement,
        data_parallel: DataParallel,
        sharding: Sharding | None,
        batches: int,
    ) -> None:
        """Takes nothing yet.

        Args:
            current: the task of each thread.
            placement: which parameters live here.
            data_parallel: makes gradients equal on all replicas.
            sharding: divides parameters over replicas; None without.
            batches: how many batches of tensor-parallel ranks a divided parameter is used on.
        """
        self._current, self._placement = current, placement
        self._data_parallel, self._sharding, self._batches = data_parallel, sharding, batches
        self.sum = GradientSum(data_parallel.final) if sharding is None else sharding.sums
        # Parameters that live here and have been frozen so far.
        self._frozen: list[nn.Parameter] = []

    def adopt(self) -> list[nn.Parameter]:
        """Takes the gradients of what lives here from now on; returns the parameters."""
        self._frozen = local = self._placement.parameters()
        self._take()
        return local

    def _take(self) -> list[nn.Parameter]:
        """Takes the gradients of parameters that are no longer frozen; returns these."""
        trained = [parameter for parameter in self._frozen if parameter.requires_grad]
        for parameter in trained:
            hook = _weakly(self, Gradients._on_gradient)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            if self._batches > 1 and division_of(parameter) is not None:
                parameter.register_hook(_weakly(self, Gradients._mean_over_batches))  # type: ignore[no-untyped-call]
        if trained:
            self._frozen = [p for p in self._frozen if not p.requires_grad]
        return trained

    def note_trained(self) -> None:
        """Notices parameters that the script has stopped freezing; not during a step."""
        trained = self._take()
        if trained:
            if self._sharding is not None:
                self._sharding.note_trained(trained)
            self._data_parallel.note_trained()

    def optimised(self) -> list[nn.Parameter]:
        """Returns what gets gradients on this rank: the parameters here, or their shards."""
        local, sharding = self._placement.parameters(), self._sharding
        return local if sharding is None else [sharding.local(p) for p in local]

    def tensors(self) -> list[torch.Tensor]:
        """Returns those of gradients that are under way."""
        return [*self._data_parallel.tensors(), *self.sum.tensors()]

    # --- the life of a step -----------------------------------------------------------------------

    def begin_step(self, name: str, microbatches: int, average: bool, again: bool) -> None:
        """Begins a step.

        Args:
            name: of the step function.
            microbatches: of the step.
            average: divide gradients by their number.
            again: is the step run a second time?
        """
        # Almost all parameters contribute once. If whole gradients of sharded ones waited for the
        # end of the first backward pass, it would need memory for those of the whole model.
        self.sum.begin(microbatches, 1 if self._sharding is not None and not again else 0)
        self._data_parallel.begin_step(self.sum, microbatches if average else 1, again)
        if self._sharding is not None:
            self._sharding.gathers.begin_step((name, torch.is_grad_enabled()), again)

    def close(self, failed: bool) -> tuple[Exception | None, bool]:
        """Ends gathers and sums of sharded parameters; see `StepModel`."""
        if self._sharding is None:
            return None, False
        if not failed:
            self.sum.end()
        try:
            with smp_errors():
                return None, self._sharding.end_step(failed)
        except Exception as error:
            return error, False

    def reduce(self, failure: str, redo: bool, alone: bool) -> None:
        """Sets `Parameter.grad` to the sums; see `StepModel`.

        Args:
            failure: why the step has failed on this rank; empty if it has not.
            redo: does it have to be run again?
            alone: does nobody wait for this rank?
        """
        if not (failure or redo):
            self.sum.end()
        self._data_parallel.end_step(failure, redo, alone)

    def release(self) -> None:
        """Frees what is left of a step; if it has not ended, gradients are as before it."""
        self._data_parallel.put_back()
        self.sum.release()
        if self._sharding is not None:
            self._sharding.gathers.leave_step()

    # --- what autograd calls ----------------------------------------------------------------------

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Takes the gradient that autograd has left in `Parameter.grad`.

        Autograd calls hooks also if there is none: the parameter has been used, but what was made
        of it gets no gradient, for instance because a module on another rank has detached it.
        """
        task, sharding = self._current.task, self._sharding
        entry = None if sharding is None else sharding.entry(parameter)
        if task is None:
            if entry is not None:
                _refuse_backward()
            self._data_parallel.outside_step(parameter)
            return
        gradient: torch.Tensor | None
        if entry is not None and sharding is not None:
            gradient = sharding.take_gradient(entry)
        else:
            gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            frame = task.frame
            if gradient.requires_grad:  # made with create_graph=True; sums are changed in place
                gradient = gradient.detach().clone()
            self.sum.add(parameter, frame.microbatch, gradient, frame.path)
            failure = self._data_parallel.buckets.hook_failure
            if failure is not None:
                raise failure  # fails the step on all ranks

    def _mean_over_batches(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of a divided parameter for the mean of the tp group's losses.

        Autograd has that of their sum. It is divided before it is added to earlier gradients: these
        may be means over replicas already.
        """
        return gradient / self._batches

    def outside_step(self, result: torch.Tensor) -> torch.Tensor:
        """Returns what the model has computed outside a step, for the script.

        With sharding, a backward pass of it raises at its beginning, before it changes gradients.
        """
        if self._sharding is not None and result.grad_fn is not None:
            result.register_hook(_refuse_backward)  # type: ignore[no-untyped-call]
        return result


def _refuse_backward(_: Any = None) -> None:
    raise SMPUsageError(
        "with sharded data parallelism, call the model and model.backward inside a function "
        "decorated with smp.step"
    )


def _weakly(owner: Gradients, method: Callable[[Gradients, Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that calls a method, and does nothing once its object is gone."""
    reference = weakref.ref(owner)

    def call(argument: Any) -> Any:
        found = reference()
        return None if found is None else method(found, argument)

    return call
