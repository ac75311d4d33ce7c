"""What a model does in every step; see `StepModel` in pipeline/step.py."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Any, Protocol

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.failure import OrderMattersError, PlanChangedError
from smddp.modelparallel.core.step_machine import Verdict
from smddp.modelparallel.torch.data_parallel.reducer import DataParallel
from smddp.modelparallel.torch.data_parallel.replicas import abstain
from smddp.modelparallel.torch.model.activation_checkpoints import ActivationCheckpoints
from smddp.modelparallel.torch.model.division import Division
from smddp.modelparallel.torch.model.gradients import Gradients
from smddp.modelparallel.torch.model.same_batch import compare_settings
from smddp.modelparallel.torch.model.script_hooks import ScriptHooks
from smddp.modelparallel.torch.optimizer.main_parameters import MainParameters
from smddp.modelparallel.torch.partition.placement import Placement
from smddp.modelparallel.torch.pipeline.executor import Executor
from smddp.modelparallel.torch.pipeline.model import PipelineModel
from smddp.modelparallel.torch.pipeline.modules import difference
from smddp.modelparallel.torch.pipeline.step import Schedule, StepBegin, StepReport
from smddp.modelparallel.torch.sharding.sharding import Sharding

__all__ = ["ModelStep", "StepParts"]

log = logging.getLogger("smddp.modelparallel")


class StepParts(Protocol):
    """The parts of a model; `ModelRuntime` has them.

    Attributes:
        executor, model, placement, checkpoints, gradients, division, data_parallel, sharding,
            hooks: see there.
        updates_masters, norms: see there; optimizers write them, and steps begin them.
    """

    executor: Executor
    model: PipelineModel
    placement: Placement
    checkpoints: ActivationCheckpoints
    gradients: Gradients
    division: Division
    data_parallel: DataParallel
    sharding: Sharding | None
    hooks: ScriptHooks
    updates_masters: bool
    norms: int

    @property
    def main_parameters(self) -> MainParameters | None:
        """See `ModelRuntime`."""


class ModelStep:
    """The steps of a model. api/step.py calls `prepare`, the executor the other methods.

    Attributes:
        number: how many have begun; a step that is run again counts twice.
        knew_counts: had a step with gradients been made before the last one? See `GradientSum`.
        order_mattered: has the order of the microbatches mattered in this step, on this replica?
            None if that is not known.
    """

    def __init__(self, parts: StepParts, average: bool, offloads: bool) -> None:
        """Begins no step.

        Args:
            parts: of the model.
            average: divide gradients by the number of microbatches.
            offloads: are activations to be offloaded?
        """
        self._parts, self._average = parts, average
        self._offloads = offloads  # until the first step has ended
        self.number = 0
        self.knew_counts = False
        self.order_mattered: bool | None = None
        # By step function: does the order of the microbatches matter? Not known before its first
        # step.
        self._order_matters: dict[str, bool] = {}
        self._name = ""
        self._runs: collections.Counter[str] = collections.Counter()  # of each step function

    def prepare(
        self, name: str, body: Callable[..., Any], schedule: Schedule, again: bool
    ) -> Schedule:
        """Prepares for a step.

        The microbatches run one after the other if their order may matter for what they share, such
        as the buffers that ranks read of each other: in steps 1, 2, 4, 8 and so on of each step
        function, which are watched for that; in all later ones if one has shown it; and when the
        step is run again.

        Args:
            name: of the step function.
            body: that function.
            schedule: as configured.
            again: the step has ended in Redo before. This time every call waits for its result.

        Returns:
            The schedule of the step.
        """
        parts, executor = self._parts, self._parts.executor
        self.number += 1
        parts.norms, parts.updates_masters = 0, False
        self.knew_counts = parts.gradients.sum.knows_counts
        parts.gradients.note_trained()
        self._name, self.order_mattered = name, None
        several = executor.size > 1
        if not again:
            self._runs[name] += 1
        runs = self._runs[name]
        # Code may begin late to change what microbatches share. To look costs the overlap.
        watched = not again and runs & (runs - 1) == 0
        in_order = several and (again or watched or self._order_matters.get(name, True))
        if several:
            parts.placement.begin_step()
        parts.gradients.begin_step(name, schedule.microbatches, self._average, again)
        alone = schedule.microbatches == 1 and parts.data_parallel.size == 1 and not several
        if in_order:
            schedule = schedule._replace(active=1)
        parts.model.begin_step(
            schedule, body if several else None, watched and not alone, in_order, again
        )
        # A Redo restores these values. With one partition there is one only with sharded
        # parameters; there is none in a second attempt.
        if (several or parts.sharding is not None) and not again:
            parts.division.buffers.save()
        if several and not parts.division.known and executor.rank == 0:
            parts.division.await_call()
        return schedule

    @property
    def undecided(self) -> bool:
        """Does this rank have to call `agree` or `abstain` in the step that begins?"""
        parts = self._parts
        leads = parts.executor.rank == 0 and parts.data_parallel.size > 1
        return leads and not parts.division.known

    def begin(self, name: str, names: list[str] | None) -> StepBegin:
        """Returns what rank 0 tells the others at the beginning of a step; see `StepModel`."""
        training = self._parts.model.routing.training_for_others()
        return StepBegin(self.number, name, training, names, self._parts.checkpoints.digest)

    def compare(self) -> None:
        """Compares settings in the tensor-parallel group; see `StepModel`."""
        compare_settings()

    def accept_begin(self, begin: StepBegin) -> None:
        """Applies what rank 0 of the pipeline says at the beginning of a step.

        Raises:
            SMPUsageError: rank 0 is in another step than this rank, or has another model.
        """
        if begin.number != self.number:
            raise SMPUsageError(
                f"rank 0 of the pipeline is in step {begin.number} ({begin.name}), this rank in "
                f"step {self.number}: every rank has to make the same calls"
            )
        model = self._parts.model
        rank, names = model.modules.rank, model.modules.names
        if begin.modules is not None and begin.modules != names:
            raise SMPUsageError(
                f"the models of ranks 0 and {rank} of the pipeline differ: "
                f"{difference(begin.modules, names, 'rank 0', f'rank {rank}')}. All ranks have to "
                "create the same model"
            )
        if begin.checkpoints != self._parts.checkpoints.digest:
            raise SMPUsageError(
                f"ranks 0 and {rank} of the pipeline have set activation checkpointing for "
                "different modules, or with different arguments: all ranks have to make the same "
                "calls of smp.set_activation_checkpointing"
            )
        if begin.training_flags is not None:
            model.routing.set_training(begin.training_flags)

    def apply(self, decision: Any) -> None:
        """Applies where modules live; see `StepModel`."""
        self._parts.division.apply(decision)

    def end_microbatch(self, microbatch: int) -> None:
        """Notes that a microbatch gives no more gradients here."""
        self._parts.gradients.sum.end_microbatch(microbatch)
        self._parts.model.changes.end_microbatch(microbatch)

    def report(self) -> StepReport:
        """Returns what to tell the other ranks; see `StepModel`.

        Raises:
            OrderMattersError: the step has to be run again, with one microbatch after the other.
            PlanChangedError: likewise, and the code of a module has caught what said so.
            SMPUsageError: the body has changed a buffer, and has not called the model.
        """
        parts, model = self._parts, self._parts.model
        parts.division.refuse_early_changes()
        if parts.sharding is not None and parts.sharding.gathers.left_plan:
            raise PlanChangedError("parameters were not needed in the order of the last step")
        if parts.executor.size == 1 or not parts.division.known:
            return StepReport(False, {}, parts.updates_masters)
        buffers = parts.division.buffers
        changed = model.order_matters or any(map(buffers.changed, model.buffers_in_question()))
        forms, form_changed = parts.placement.changed_forms()
        if not model.homes.in_order and (changed or form_changed):
            raise OrderMattersError("what modules keep in the step depends on the order of calls")
        return StepReport(changed, forms, parts.updates_masters)

    def close(self, failed: bool) -> tuple[Exception | None, bool]:
        """Ends gathers and sums of sharded parameters; see `StepModel`."""
        return self._parts.gradients.close(failed)

    def accept_reports(self, reports: dict[int, StepReport], order_matters: bool) -> None:
        """Applies what the ranks say; see `StepModel`."""
        parts = self._parts
        parts.updates_masters = any(report.updates_masters for report in reports.values())
        for rank, report in reports.items():
            parts.placement.accept_forms(rank, report.forms)
        order_matters |= any(report.changed for report in reports.values())
        # With some reports missing (the step failed), "no change" is not known.
        if order_matters or len(reports) == parts.executor.size:
            self.order_mattered = order_matters

    def abstain(self, failure: str) -> None:
        """Tells the other replicas that this one has made no decision; see `StepModel`."""
        abstain(self._parts.data_parallel.group, failure)

    def reduce(self, failure: str, verdict: Verdict, alone: bool) -> Exception | None:
        """Sets `Parameter.grad` to the sums; see `StepModel`."""
        parts = self._parts
        redo = verdict.redo and not failure
        if failure and verdict.gradients:
            parts.data_parallel.expect_gradients()
        order_matters = verdict.order_matters
        if failure and not order_matters:
            order_matters = None  # not all calls were made
        if order_matters is not None:
            before = self._order_matters.get(self._name, False)
            self._order_matters[self._name] = before or order_matters
        try:
            parts.gradients.reduce(failure, redo, alone)
        except Exception as error:
            # If a hook has failed on the only partition, all ranks know. For other partitions the
            # step has succeeded, and they cannot undo it.
            if parts.executor.size > 1 or error is not parts.data_parallel.buckets.hook_failure:
                raise
            return error
        # If other calls wait from now on, tasks will be divided at other places.
        succeeded = not (failure or redo)
        if parts.sharding is not None and succeeded and parts.model.learned.settled:
            parts.sharding.gathers.accept()
        return None

    def restore(self) -> None:
        """Sets buffers to what they were before the step, which is run again."""
        self._parts.division.buffers.restore()

    def note_success(self) -> None:
        """Uses the new gradients."""
        parts = self._parts
        if (main := parts.main_parameters) is not None:
            main.note_new_gradients()
            if parts.updates_masters:
                main.update()
        self._warn_of_nothing_offloaded()
        parts.hooks.run("step")

    def release_step(self) -> None:
        """Frees what is left of a step; if it has not ended, gradients are as before it."""
        self._parts.division.allow_gradients()
        self._parts.gradients.release()

    def _warn_of_nothing_offloaded(self) -> None:
        """Warns once if activations are to be offloaded, and none can be."""
        offloads, self._offloads = self._offloads, False
        if not offloads:
            return
        asked = self._parts.checkpoints.any or self._parts.model.routing.recomputes
        if not asked and self._parts.checkpoints.warns:
            log.warning(
                "smp: offload_activations has no effect: it moves the arguments of modules with "
                "activation checkpointing, and there is none. Call smp.set_activation_checkpointing"
            )
