"""What `Executor.run` takes and returns: the limits of a step, protocols, and the result.

What belongs to one step reaches the executor as arguments of `run` only, and the executor forgets
it at the end of the step. `ModelStep` implements `StepModel`, and `Driver` implements
`StepDriver`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch

from smddp.modelparallel.core.step_machine import Verdict
from smddp.modelparallel.torch.common.random_state import RandomState
from smddp.modelparallel.torch.pipeline.frame import Frame

__all__ = [
    "END_TIMEOUT",
    "UNLIMITED",
    "Form",
    "Schedule",
    "StepBegin",
    "StepCollectives",
    "StepDriver",
    "StepModel",
    "StepReport",
    "StepResult",
    "under_way_at",
]

# Seconds that a rank waits for the others' END once it has no task left. A rank that computes
# answers when its task waits or ends. Tests change it, so it is read where it is needed.
END_TIMEOUT = 120.0
# More microbatches than any step has.
UNLIMITED = 1 << 30


def under_way_at(limit: int, depth: int) -> int:
    """Returns how many microbatches may be under way on a rank when a segment begins there.

    Args:
        limit: see `Schedule.under_way_limit`.
        depth: of the segment.
    """
    return max(1, limit - depth)


class Schedule(NamedTuple):
    """How many microbatches a step has, and how many of them may be worked on at a time.

    Attributes:
        microbatches: how many the step has.
        simple: a microbatch begins its backward pass only when all active ones have ended their
            forward pass.
        active: how many microbatches may be active (begun and not ended) on rank 0 at a time.
        under_way_limit: says with `under_way_at` how many microbatches may be under way on a rank
            when it begins a segment; see `Server._admits`. (`depth`
            and *under way*: see the glossary of docs/model-parallel-design.md.)
    """

    microbatches: int
    simple: bool
    active: int
    under_way_limit: int

    @staticmethod
    def of(pipeline: str, microbatches: int, active: int, partitions: int) -> Schedule:
        """Returns the schedule that a configuration asks for.

        Args:
            pipeline: "simple", or anything else for interleaved.
            microbatches: how many a step has.
            active: `active_microbatches` of the configuration.
            partitions: how many the model has.
        """
        simple = pipeline == "simple"
        under_way_limit = UNLIMITED if simple else active
        if partitions == 1:
            # No other rank works meanwhile.
            active = 1
        return Schedule(microbatches, simple, active, under_way_limit)


class StepBegin(NamedTuple):
    """What rank 0 tells the others when a step begins.

    Attributes:
        number: of the step, counted from 1 on every rank; a step that is run again counts twice.
        name: of the step function.
        training_flags: one byte per module, 1 for train and 0 for eval; None if none has changed.
        modules: the names of the modules, as long as the model is not divided; then None.
        checkpoints: a digest of what has activation checkpointing, which is the same on all ranks.
    """

    number: int
    name: str
    training_flags: bytes | None
    modules: list[str] | None
    checkpoints: int


class StepResult(NamedTuple):
    """What the body has returned, for all microbatches; END carries it from rank 0 to the others.

    Attributes:
        header: (structures, objects): the structure of each microbatch's result, see structure.py,
            and the objects of all results.
        tensors: those of all results, of any shape and dtype.
    """

    header: Any
    tensors: list[torch.Tensor]


class Form(NamedTuple):
    """What the owner of a buffer tells the other ranks about it; None stands for "no tensor".

    Attributes:
        shape, dtype: of the tensor.
        persistent: is it part of state dicts?
    """

    shape: torch.Size
    dtype: torch.dtype
    persistent: bool


class StepReport(NamedTuple):
    """What a rank tells the others at the end of a step, mostly about the buffers that live on it.

    Attributes:
        changed: the step has changed a buffer that another rank has read, so the order of the
            microbatches matters.
        forms: the forms that other ranks do not know yet, by number of the module and name.
        updates_masters: gradients are to be copied to master weights when they are complete.
        order: see `StepCollectives.order_after`, after all of them; 0 without collective calls.
    """

    changed: bool
    forms: dict[tuple[int, str], Form | None]
    updates_masters: bool = False
    order: int = 0


class StepModel(Protocol):
    """The model that a step trains.

    The holder of the baton calls `accept_begin`, `apply`, `end_microbatch` and `report`. The
    thread in `Executor.run` calls the others; also `report` on rank 0, and `apply` after a failure,
    when no task is left.

    Attributes:
        undecided: does this rank have to tell other replicas whether there is a decision?
        order_mattered: see `Verdict.order_matters`; known after `accept_reports`.
    """

    order_mattered: bool | None

    @property
    def undecided(self) -> bool:
        """See above."""

    def begin(self, name: str, names: list[str] | None) -> StepBegin:
        """Returns what rank 0 tells the others at the beginning of the step.

        Args:
            name: of the step function.
            names: of the modules, if the others need them; see `StepBegin`.
        """

    def compare(self) -> None:
        """Compares settings with ranks that exchange activations with this one.

        Called before the first task, on ranks other than 0; there the driver does it.

        Raises:
            SMPUsageError: they differ.
            SMPPeerError: the step has failed on another rank.
        """

    def accept_begin(self, begin: StepBegin) -> None:
        """Applies what rank 0 says at the beginning of the step; called on the other ranks.

        Raises:
            SMPUsageError: rank 0 is in another step, or has another model.
        """

    def apply(self, decision: Any) -> None:
        """Applies rank 0's `Decision` on this rank, and calls `Executor.set_divided`."""

    def end_microbatch(self, microbatch: int) -> None:
        """Notes that a microbatch gives no more gradients on this rank."""

    def report(self) -> StepReport:
        """Returns what to tell the other ranks, when all work has ended.

        Raises:
            OrderMattersError: the step has to be run again, with one microbatch after the other.
        """

    def close(self, failed: bool) -> tuple[Exception | None, bool]:
        """Ends what the model exchanges with replicas while tasks run; no task is left.

        Called before this rank waits for the END of its peers, which may wait for this.

        Args:
            failed: has the step failed, as far as this rank knows?

        Returns:
            What has failed; and whether the step has to be run again.
        """

    def accept_reports(self, reports: dict[int, StepReport], order_matters: bool) -> None:
        """Applies what the ranks say, after the step.

        Args:
            reports: by rank of the pipeline, that of this rank included; not those of ranks that
                have heard of a failure.
            order_matters: the step has failed because the order of the microbatches matters.
        """

    def abstain(self, failure: str) -> None:
        """Tells the other replicas that this one has made no decision about the division.

        Args:
            failure: why the step has failed here, in one line; empty if it has not.

        Raises:
            SMPPeerError: it has failed on another replica.
        """

    def reduce(self, failure: str, verdict: Verdict, alone: bool) -> Exception | None:
        """Sets gradients to the sums over replicas; those from before the step if that fails.

        Args:
            failure: see `abstain`.
            verdict: what the order group has found.
            alone: the step has failed because a rank is lost, and nobody waits for this one.

        Returns:
            An error that all ranks know.

        Raises:
            Redo: replicas have to run the step again.
            SMPError: the step failed on another replica.
            Exception: something else has failed on this rank alone.
        """

    def restore(self) -> None:
        """Sets what the step has changed to what it was, because the step is run again."""

    def release_step(self) -> None:
        """Frees what is left of a step; if it has not succeeded, gradients are as before it."""

    def note_success(self) -> None:
        """Uses the new gradients; code of the script may raise here."""


class StepCollectives(Protocol):
    """Collective calls of tasks over some members of an order group; see job/collectives.py.

    Attributes:
        ranks: those that make the calls, as ranks of the job.
        trail: the modules that have made the last calls, or make the next.
    """

    ranks: list[int]
    trail: tuple[str, ...]

    def enter(self, module: str) -> None:
        """Notes which module makes the calls that follow.

        Args:
            module: its name.
        """

    @property
    def begun(self) -> int:
        """How many calls have begun in this step, without those of `complete`."""

    def order_after(self, count: int) -> int:
        """Returns a checksum of the first calls of the step: kinds, modules and their order.

        Args:
            count: of how many calls.
        """

    def begin_step(self) -> None:
        """Begins to note the calls of a step."""

    def stop(self) -> list[Any]:
        """Lets no call begin in this step any more; returns notes of those that have begun."""

    def settle(self) -> None:
        """Waits for the calls that this rank has made; no task is left."""

    def complete(self, others: Iterable[Any]) -> list[Any]:
        """Begins the calls that other ranks have begun, and this one has not.

        Args:
            others: their notes.

        Returns:
            For each call, a tuple whose first element is what to wait for.
        """

    def end_step(self) -> None:
        """Ends the notes."""


class StepDriver(Protocol):
    """Runs the body of a step for every microbatch, on rank 0.

    Attributes:
        random_state: of the script's generators, to be set after the step; None if nothing has
            changed them.
    """

    random_state: RandomState | None

    def drive(self) -> StepResult:
        """Runs all microbatches, on the thread that has called `Executor.run`."""

    def reach_backward(self, frame: Frame) -> None:
        """Notes that a microbatch's forward pass is over; may wait for other microbatches.

        The microbatch's own thread calls it, before each backward pass.

        Raises:
            Aborted: the step has failed meanwhile.
        """
