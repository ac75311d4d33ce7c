"""What the executor needs of those who make a step: two protocols, and the limits of the step.

`Executor.run` gets all of it as arguments and forgets it at the end, so nothing is assigned to an
executor from outside.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from smddp.modelparallel.pipeline.frame import Frame

__all__ = ["Schedule", "StepBegin", "StepDriver", "StepModel", "StepResult"]

# More microbatches than any step has.
_UNLIMITED = 1 << 30


class Schedule(NamedTuple):
    """How many microbatches a step has, and how many of them may be under way at a time.

    Attributes:
        microbatches: of the step.
        simple: all forward passes come before the first backward pass.
        active: how many microbatches rank 0 runs the body for at a time.
        limit: how many microbatches may wait on a rank for their backward pass; each segment that
            comes before the rank's own takes one off (see `Server`).
    """

    microbatches: int
    simple: bool
    active: int
    limit: int

    @staticmethod
    def of(pipeline: str, microbatches: int, active: int, partitions: int) -> Schedule:
        """Returns the schedule that a configuration asks for.

        Args:
            pipeline: "simple" or "interleaved".
            microbatches: of a step.
            active: `active_microbatches`; partitions + 2 stands for "not given".
            partitions: of the model.
        """
        simple = pipeline == "simple"
        limit = _UNLIMITED if simple else active
        if partitions == 1:
            # Nobody else works meanwhile.
            active = 1
        elif simple and active == partitions + 2:
            active = max(microbatches, active)
        return Schedule(microbatches, simple, active, limit)


class StepBegin(NamedTuple):
    """What rank 0 tells the others when a step begins.

    Attributes:
        number: of the step, counted from 1 on every rank.
        name: of the step function.
        modes: one byte per module, 1 for train and 0 for eval; None if none has changed.
    """

    number: int
    name: str
    modes: bytes | None


class StepResult(NamedTuple):
    """What the body has returned, for all microbatches; END carries it from rank 0 to the others.

    Attributes:
        header: anything that pickles and holds no tensors.
        tensors: of any shape and dtype.
    """

    header: Any
    tensors: list[torch.Tensor]


class StepModel(Protocol):
    """The model that a step trains. The holder of the baton calls the last three methods.

    Attributes:
        steps: how many steps have begun, with the present one.
    """

    steps: int

    def changed_modes(self) -> bytes | None:
        """Returns train or eval of every module, as in `StepBegin`; called on rank 0 only."""

    def follow(self, begin: StepBegin) -> None:
        """Takes over what rank 0 says at the beginning of the step; called on the other ranks.

        Raises:
            SMPUsageError: rank 0 is in another step.
        """

    def apply(self, decision: Any) -> None:
        """Makes rank 0's decision about the partition true here, and calls `set_partitioned`."""

    def end_microbatch(self, microbatch: int) -> None:
        """Is told that a microbatch gives no more gradients on this rank."""


class StepDriver(Protocol):
    """Runs the body of a step for every microbatch, on rank 0."""

    def drive(self) -> StepResult:
        """Runs all microbatches, on the thread that has called `Executor.run`."""

    def reach_backward(self, frame: Frame) -> None:
        """Is told, on a microbatch's own thread, that its forward pass is over; may wait."""
