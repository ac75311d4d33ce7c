"""The internal part of a DistributedModel: how it is divided, and what it does in every step."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.failure import OrderMattersError, PlanChangedError
from smddp.modelparallel.core.step_machine import Verdict
from smddp.modelparallel.torch.common import device
from smddp.modelparallel.torch.common.buffers import Buffers
from smddp.modelparallel.torch.common.dtypes import convert
from smddp.modelparallel.torch.common.example import Example
from smddp.modelparallel.torch.common.lost import smp_errors
from smddp.modelparallel.torch.data_parallel.gradient_sum import GradientSum
from smddp.modelparallel.torch.data_parallel.reducer import DataParallel
from smddp.modelparallel.torch.data_parallel.replicas import abstain, agree
from smddp.modelparallel.torch.delayed.life import is_delayed
from smddp.modelparallel.torch.job.groups import timeout_of
from smddp.modelparallel.torch.job.state import State
from smddp.modelparallel.torch.model.activation_checkpoints import ActivationCheckpoints
from smddp.modelparallel.torch.model.same_batch import compare_settings
from smddp.modelparallel.torch.model.state_dict import ModelState
from smddp.modelparallel.torch.optimizer.half import half_precision
from smddp.modelparallel.torch.optimizer.stand_ins import StandIns
from smddp.modelparallel.torch.partition.decide import decide_and_report
from smddp.modelparallel.torch.partition.placement import Decision, Placement
from smddp.modelparallel.torch.pipeline.executor import Executor
from smddp.modelparallel.torch.pipeline.model import PipelineModel
from smddp.modelparallel.torch.pipeline.modules import difference
from smddp.modelparallel.torch.pipeline.order_group import OrderGroup
from smddp.modelparallel.torch.pipeline.protocol import Kind
from smddp.modelparallel.torch.pipeline.step import Schedule, StepBegin, StepReport
from smddp.modelparallel.torch.sharding.sharding import Sharding
from smddp.modelparallel.torch.tensor.division import division_of
from smddp.modelparallel.torch.tensor.module import mark_divided

__all__ = ["ModelRuntime"]

log = logging.getLogger("smddp.modelparallel")


class ModelRuntime:
    """Belongs to one DistributedModel, and ends with it; see `StepModel` in pipeline/step.py.

    The executor, which lives from the first DistributedModel to `smp.shutdown`, knows it only while
    a step runs.

    Attributes:
        module: the model that was wrapped.
        executor: runs the steps.
        model: the calls of modules on this rank.
        placement: which modules live here.
        data_parallel: makes gradients equal on all replicas.
        model_state: makes and loads state dicts.
        checkpoints: which modules have activation checkpointing.
        steps: how many have begun; a step that is run again counts twice.
        knew_counts: had a step with gradients been made before the last one? See `GradientSum`.
        order_mattered: has the order of the microbatches mattered in this step, on this replica?
            None if that is not known.
        updates_masters: are the gradients of this step copied to master weights at its end?
        device: of the parameters and buffers that live here.
        buffers: those that live here; none before the model is divided.
        half: the half-precision dtype in which the model computes; None for full precision.
        sharding: divides parameters over replicas; None without sharded data parallelism.
        delayed: were parameters created without memory?
        example: the shapes of the arguments of the model's first call with gradients; None before.
        announced: those that the script has given to `smp.memory`; None if it has not.
        norms: how many norms of gradients this rank has been asked for since the last step.
        warned_of_copies: has a warning said that a norm is that of one rank?
    """

    def __init__(
        self,
        state: State,
        model: nn.Module,
        module: nn.Module,
        data_parallel: DataParallel,
        average: bool,
        times: bool,
    ) -> None:
        """Begins; with one partition, everything lives here at once.

        Args:
            state: of the process.
            model: the DistributedModel, which is not kept alive.
            module: the model that was wrapped.
            data_parallel: has no parameters yet.
            average: divide gradients by the number of microbatches.
            times: measure the time of modules on real data, in place of counting operations.
        """
        self._state = state
        self._model = weakref.ref(model)
        self.module = module
        self.data_parallel = data_parallel
        self._average = average
        self._times = times
        self.delayed = any(map(is_delayed, module.parameters()))
        self.half = half_precision()
        if self.half is not None:
            convert(module, self.half, state.cfg._fp32_grad_accumulation)
        mark_divided(module)
        self.executor = _executor(state)
        executor = self.executor
        self.model = PipelineModel(executor, executor.caller, module, state.cfg.direct_forwarding)
        modules = self.model.modules
        executor.adopt(self.model)
        self._offloads = state.cfg.offload_activations
        if self._offloads:
            horizon = state.cfg.activation_loading_horizon
            self.model.local.offload(horizon, executor.size == 1, self._memory)
        topology = state.topology
        self.placement = Placement(
            modules, self.model.homes, topology.rank_in("pp"), topology.pp_size
        )
        manual = not state.cfg.auto_partition
        self.checkpoints = ActivationCheckpoints(self.model, manual, topology.rank == 0)
        self.sharding: Sharding | None = None
        self._sum = GradientSum(data_parallel.final)
        cfg = state.cfg
        if state.groups.sharding is not None:
            self.sharding = data_parallel.shards = Sharding(
                state.groups.sharding,
                modules,
                data_parallel.final,
                data_parallel.holders,
                cfg.sdp_param_persistence_threshold,
                cfg.sdp_max_live_parameters,
                cfg.sdp_reduce_bucket_size,
                executor.baton.order is not None,
                timeout_of(state.groups.sharding.parameters).total_seconds(),
            )
            self._sum = self.sharding.sums
            ordered = executor.baton.order is not None
            self.model.local.surround(self.sharding, self.sharding.gathers if ordered else None)
        self.model_state = ModelState(module, self.placement, self.sharding)
        # Not plain dicts: the handles keep weak references to them.
        self._hooks: dict[str, OrderedDict[int, Callable[..., Any]]] = {
            "partition": OrderedDict(),
            "step": OrderedDict(),
        }
        # How many batches of tensor-parallel ranks a divided parameter is used on.
        self._batches = 1 if state.cfg.prescaled_batch else topology.tp_size
        # Parameters that live here and have been frozen so far.
        self._frozen: list[nn.Parameter] = []
        self.steps = 0
        self.knew_counts = False
        self.updates_masters = False
        # Before the model is divided, no buffer counts as living here, so none is saved.
        self.buffers = Buffers(module, lambda _: False)
        # In a first step on rank 0: all buffers, before the body has run.
        self._unplaced: Buffers | None = None
        # In a first step on rank 0: the hooks that refuse gradients before the model's first call.
        self._refusals: list[RemovableHandle] = []
        # By step function: does the order of the microbatches matter? Not known before its first
        # step.
        self._order_matters: dict[str, bool] = {}
        self._step_name = ""
        self._runs: collections.Counter[str] = collections.Counter()  # of each step function
        self.order_mattered: bool | None = None
        self.device = device.current()
        self.example: Example | None = None
        self.announced: Example | None = None
        self.norms = 0
        self.warned_of_copies = False
        self.model.taken.install()
        if topology.pp_size == 1:
            self.apply(Decision.one_partition(modules))

    def _memory(self) -> list[torch.Tensor]:
        """Returns the parameters and buffers that live here."""
        return [*self.placement.parameters(), *self.buffers.tensors()]

    def memory(self) -> dict[str, list[torch.Tensor]]:
        """Returns the tensors of this rank by what they are for, besides activations.

        Returns:
            For each kind of `smp.memory` its tensors; some are in several, and count for the first.
        """
        found: dict[str, list[torch.Tensor]] = {}
        # Before the division, each rank has all of them, but for those that have no memory yet.
        local = self.placement.parameters()
        if not self.divided:
            local = [p for p in self.module.parameters() if not is_delayed(p)]
        found["gathered"] = []
        if self.sharding is not None:
            local = [self.sharding.local(parameter) for parameter in local]
            found["gathered"] = self.sharding.gathers.tensors()
        found["parameters"] = list(local)
        found["buffers"] = [*self.buffers.tensors(), *self.buffers.copies()]
        found["optimizer"], gradients = [], []
        for optimizer in self._state.current_optimizers():
            kept, some = optimizer._smp_state.tensors()
            found["optimizer"] += kept
            gradients += some
        found["gradients"] = [*gradients, *self.data_parallel.tensors(), *self._sum.tensors()]
        return found

    @property
    def divided(self) -> bool:
        """Whether it has been decided where each module lives."""
        return self.executor.ending.state.divided

    # --- the division -----------------------------------------------------------------------------

    def divide(self, args: Any, kwargs: Any) -> None:
        """Decides where modules live, tells the other ranks, and applies the decision.

        Rank 0 of the pipeline calls it in its first call of the model.

        Args:
            args: of the model's first call.
            kwargs: of the model's first call.

        Raises:
            SMPUsageError: the other replicas have ended this step already, or have another
                model.
            SMPPartitionError: the model cannot be divided as asked.
            SMPPeerError: the step failed on another replica.
        """
        executor = self.executor

        def make() -> Decision:
            decision = decide_and_report(
                self._state.cfg,
                self.module,
                self.model.modules,
                self.placement,
                args,
                kwargs,
                self._times,
            )
            self.checkpoints.check(decision.owners)
            return decision

        if self.data_parallel.size > 1 and not executor.ending.state.undecided:
            raise SMPUsageError(
                "the model was called again in a first step that has failed: other replicas have "
                "ended it. Let the error end the step"
            )
        self._allow_gradients()
        self._refuse_new_modules()
        self._refuse_early_changes()
        with executor.ending.deciding():
            decision = agree(self.data_parallel.group, self.model.modules.names, make)
            for peer in executor.mail.peers:
                executor.mail.send(peer, Kind.PARTITION, decision)
        self.apply(decision)

    def _refuse_new_modules(self) -> None:
        """Raises if the script has put modules into the model since it was wrapped."""
        for name, module in self.module.named_modules():
            if self.model.modules.number_of(module) is None:
                raise SMPUsageError(
                    f"module {name!r} was put into the model after smp.DistributedModel, so it is "
                    "not known on which rank it lives: change the model before"
                )

    def _refuse_early_changes(self) -> None:
        """Raises if the body has changed buffers here that may come to live on another rank."""
        if self._unplaced is None:
            return
        changed = self._unplaced.touched()
        if changed:
            self._unplaced.restore()
            raise SMPUsageError(
                f"buffer {changed[0]!r} was changed in the body before the first call of the model "
                "in the first step, when it is not decided yet on which rank it lives: call the "
                "model first"
            )

    def _refuse_gradients(self) -> None:
        """Lets gradients of parameters raise an error until the body calls the model.

        Without a division every parameter is used on this rank, and nothing divides the sums over
        the microbatches.
        """
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                refuse = functools.partial(_refuse_gradient, name)
                self._refusals.append(parameter.register_hook(refuse))  # type: ignore[no-untyped-call]

    def _allow_gradients(self) -> None:
        for handle in self._refusals:
            handle.remove()
        self._refusals.clear()

    def apply(self, decision: Decision) -> None:
        """Applies a decision on this rank."""
        # A later step may train, so what is made now must be able to have gradients.
        with self._as_outside_a_step(), torch.inference_mode(False):
            self._apply(decision)

    @contextlib.contextmanager
    def _as_outside_a_step(self) -> Iterator[None]:
        """In this context the running task, if any, has no frame, so remote tensors are not read.

        Reading would wait, and other microbatches would begin before the hooks have ended.
        """
        task = self.executor.baton.task
        if task is None:
            yield
            return
        frame, task.frame = task.frame, None
        try:
            yield
        finally:
            task.frame = frame

    def _apply(self, decision: Decision) -> None:
        divides = None if self.sharding is None else self.sharding.divides
        self.placement.apply(decision, self.device, divides)
        self.model.taken.take_forward()
        self.checkpoints.apply()
        local = self._frozen = self.placement.parameters()
        self._take_gradients()
        self.buffers = Buffers(self.module, self.placement.owns_buffer)
        if self.executor.size > 1:
            self.buffers.save()
            self.model.values.look_for_replaced(self.buffers.was_replaced)
        self._unplaced = None
        self.data_parallel.adopt(local, self.buffers, self.device)
        for optimizer in self._state.current_optimizers():
            # Before hooks put other parameters into it. If it does not fit, its `step` says so.
            with contextlib.suppress(SMPUsageError):
                optimizer._smp_state.check(self._model(), self.placement)
            optimizer._smp_state.adopt(self.placement, self.sharding)
        # Hooks ask what lives here, so this comes before them. The messages that were kept until
        # now make tasks, which run only when the hooks have ended: this task has the baton.
        self.executor.set_divided()
        self._run_hooks("partition")

    def _take_gradients(self) -> list[nn.Parameter]:
        """Takes the gradients of parameters that are no longer frozen; returns these."""
        trained = [parameter for parameter in self._frozen if parameter.requires_grad]
        for parameter in trained:
            hook = _weakly(self._on_gradient)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            if self._batches > 1 and division_of(parameter) is not None:
                parameter.register_hook(_weakly(self._mean_over_batches))  # type: ignore[no-untyped-call]
        if trained:
            self._frozen = [p for p in self._frozen if not p.requires_grad]
        return trained

    def note_trained(self) -> None:
        """Notices parameters that the script has stopped freezing; not during a step."""
        trained = self._take_gradients()
        if trained:
            if self.sharding is not None:
                self.sharding.note_trained(trained)
            self.data_parallel.note_trained()

    def pin(self, module: nn.Module, partition: int) -> None:
        """Assigns a module, and everything inside it, to a partition.

        Raises:
            SMPUsageError: the first step has begun.
            SMPPartitionError: the module or the partition does not exist.
        """
        if self.divided and self.executor.size > 1:
            raise SMPUsageError("set_partition has to be called before the first step")
        self.placement.pin(module, partition)

    # --- the life of a step; api/step.py calls begin_step, the executor the others ----------------

    def begin_step(
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
        self.steps += 1
        self.norms = 0
        self.updates_masters = False
        self.knew_counts = self._sum.knows_counts
        self.note_trained()
        self._step_name, self.order_mattered = name, None
        several = self.executor.size > 1
        if not again:
            self._runs[name] += 1
        runs = self._runs[name]
        # Code may begin late to change what microbatches share. To look costs the overlap.
        watched = not again and runs & (runs - 1) == 0
        in_order = several and (again or watched or self._order_matters.get(name, True))
        if several:
            self.placement.begin_step()
        microbatches = schedule.microbatches
        # Almost all parameters contribute once. If whole gradients of sharded ones waited for the
        # end of the first backward pass, it would need memory for those of the whole model.
        self._sum.begin(microbatches, 1 if self.sharding is not None and not again else 0)
        divisor = microbatches if self._average else 1
        self.data_parallel.begin_step(self._sum, divisor, again)
        if self.sharding is not None:
            self.sharding.gathers.begin_step((name, torch.is_grad_enabled()), again)
        alone = microbatches == 1 and self.data_parallel.size == 1 and not several
        if in_order:
            schedule = schedule._replace(active=1)
        self.model.begin_step(
            schedule, body if several else None, watched and not alone, in_order, again
        )
        # A Redo restores these values. With one partition there is one only with sharded
        # parameters; there is none in a second attempt.
        if (several or self.sharding is not None) and not again:
            self.buffers.save()
        if several and not self.divided and self.executor.rank == 0:
            self._unplaced = Buffers(self.module)
            self._unplaced.save()
            self._refuse_gradients()
        return schedule

    def report(self) -> StepReport:
        """Returns what to tell the other ranks; see `StepModel`.

        Raises:
            OrderMattersError: the step has to be run again, with one microbatch after the other.
            PlanChangedError: likewise, and the code of a module has caught what said so.
            SMPUsageError: the body has changed a buffer, and has not called the model.
        """
        self._refuse_early_changes()
        if self.sharding is not None and self.sharding.gathers.left_plan:
            raise PlanChangedError("parameters were not needed in the order of the last step")
        if self.executor.size == 1 or not self.divided:
            return StepReport(False, {}, self.updates_masters)
        model = self.model
        places = set(model.values.read)
        for number in model.local.out_of_order:
            places.update((number, name) for name in model.modules.by_number[number]._buffers)
        changed = any(self.buffers.changed(model.modules.full_name(*place)) for place in places)
        changed |= not model.changes.keepers.isdisjoint(model.local.out_of_order)
        changed |= model.changes.order_matters
        forms, form_changed = self.placement.changed_forms()
        if not model.homes.in_order and (changed or form_changed):
            raise OrderMattersError("what modules keep in the step depends on the order of calls")
        return StepReport(changed, forms, self.updates_masters)

    @property
    def undecided(self) -> bool:
        """Does this rank have to call `agree` or `abstain` in the step that begins?"""
        leads = self.executor.rank == 0 and self.data_parallel.size > 1
        return leads and not self.divided

    def close(self, failed: bool) -> tuple[Exception | None, bool]:
        """Ends gathers and sums of sharded parameters; see `StepModel`."""
        if self.sharding is None:
            return None, False
        if not failed:
            self._sum.end()
        try:
            with smp_errors():
                return None, self.sharding.end_step(failed)
        except Exception as error:
            return error, False

    def accept_reports(self, reports: dict[int, StepReport], order_matters: bool) -> None:
        """Applies what the ranks say; see `StepModel`."""
        self.updates_masters = any(report.updates_masters for report in reports.values())
        for rank, report in reports.items():
            self.placement.accept_forms(rank, report.forms)
        order_matters |= any(report.changed for report in reports.values())
        # With some reports missing (the step failed), "no change" is not known.
        if order_matters or len(reports) == self.executor.size:
            self.order_mattered = order_matters

    def abstain(self, failure: str) -> None:
        """Tells the other replicas that this one has made no decision; see `StepModel`."""
        abstain(self.data_parallel.group, failure)

    def reduce(self, failure: str, verdict: Verdict, alone: bool) -> Exception | None:
        """Sets `Parameter.grad` to the sums; see `StepModel`."""
        redo = verdict.redo and not failure
        if failure and verdict.gradients:
            self.data_parallel.expect_gradients()
        order_matters = verdict.order_matters
        if failure and not order_matters:
            order_matters = None  # not all calls were made
        if order_matters is not None:
            before = self._order_matters.get(self._step_name, False)
            self._order_matters[self._step_name] = before or order_matters
        succeeded = not (failure or redo)
        if succeeded:
            self._sum.end()
        try:
            self.data_parallel.end_step(failure, redo, alone)
        except Exception as error:
            # If a hook has failed on the only partition, all ranks know. For other partitions the
            # step has succeeded, and they cannot undo it.
            if self.executor.size > 1 or error is not self.data_parallel.hook_failure:
                raise
            return error
        # If other calls wait from now on, tasks will be divided at other places.
        if self.sharding is not None and succeeded and self.model.learned.settled:
            self.sharding.gathers.accept()
        return None

    def restore(self) -> None:
        """Sets buffers to what they were before the step, which is run again."""
        self.buffers.restore()

    def note_success(self) -> None:
        """Uses the new gradients."""
        if self.stand_ins is not None:
            self.stand_ins.note_new_gradients()
            if self.updates_masters:
                self.stand_ins.update()
        self._warn_of_nothing_offloaded()
        self._run_hooks("step")

    def release_step(self) -> None:
        """Frees what is left of a step; if it has not ended, gradients are as before it."""
        self._allow_gradients()
        self.data_parallel.put_back()
        self._sum.release()
        if self.sharding is not None:
            self.sharding.gathers.leave_step()

    def _warn_of_nothing_offloaded(self) -> None:
        """Warns once if activations are to be offloaded, and none can be."""
        offloads, self._offloads = self._offloads, False
        asked = self.checkpoints.any or self.model.routing.recomputes
        if offloads and not asked and self._state.topology.rank == 0:
            log.warning(
                "smp: offload_activations has no effect: it moves the arguments of modules with "
                "activation checkpointing, and there is none. Call smp.set_activation_checkpointing"
            )

    def begin(self, name: str, names: list[str] | None) -> StepBegin:
        """Returns what rank 0 tells the others at the beginning of a step; see `StepModel`."""
        changed = self.model.routing.training_for_others()
        return StepBegin(self.steps, name, changed, names, self.checkpoints.digest)

    def compare(self) -> None:
        """Compares settings in the tensor-parallel group; see `StepModel`."""
        compare_settings()

    def accept_begin(self, begin: StepBegin) -> None:
        """Applies what rank 0 of the pipeline says at the beginning of a step.

        Raises:
            SMPUsageError: rank 0 is in another step than this rank, or has another model.
        """
        if begin.number != self.steps:
            raise SMPUsageError(
                f"rank 0 of the pipeline is in step {begin.number} ({begin.name}), this rank in "
                f"step {self.steps}: every rank has to make the same calls"
            )
        rank, names = self.executor.rank, self.model.modules.names
        if begin.modules is not None and begin.modules != names:
            raise SMPUsageError(
                f"the models of ranks 0 and {rank} of the pipeline differ: "
                f"{difference(begin.modules, names, 'rank 0', f'rank {rank}')}. All ranks have to "
                "create the same model"
            )
        if begin.checkpoints != self.checkpoints.digest:
            raise SMPUsageError(
                f"ranks 0 and {rank} of the pipeline have set activation checkpointing for "
                "different modules, or with different arguments: all ranks have to make the same "
                "calls of smp.set_activation_checkpointing"
            )
        if begin.training_flags is not None:
            self.model.routing.set_training(begin.training_flags)

    def end_microbatch(self, microbatch: int) -> None:
        """Notes that a microbatch gives no more gradients here."""
        self._sum.end_microbatch(microbatch)
        self.model.changes.end_microbatch(microbatch)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Takes the gradient that autograd has left in `Parameter.grad`.

        Autograd calls hooks also if there is none: the parameter has been used, but what was made
        of it gets no gradient, for instance because a module on another rank has detached it.
        """
        task = self.executor.baton.task
        entry = None if self.sharding is None else self.sharding.entry(parameter)
        if task is None:
            if entry is not None:
                _refuse_backward()
            self.data_parallel.outside_step(parameter)
            return
        gradient: torch.Tensor | None
        if entry is not None and self.sharding is not None:
            gradient = self.sharding.take_gradient(entry)
        else:
            gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            frame = task.frame
            if gradient.requires_grad:  # made with create_graph=True; sums are changed in place
                gradient = gradient.detach().clone()
            self._sum.add(parameter, frame.microbatch, gradient, frame.path)
            if self.data_parallel.hook_failure is not None:
                raise self.data_parallel.hook_failure  # fails the step on all ranks of the pipeline

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
        if self.sharding is not None and result.grad_fn is not None:
            result.register_hook(_refuse_backward)  # type: ignore[no-untyped-call]
        return result

    # --- hooks ------------------------------------------------------------------------------------

    def register(self, kind: str, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a hook that is called once: after the "partition", or the next "step"."""
        handle = RemovableHandle(self._hooks[kind])
        self._hooks[kind][handle.id] = hook
        if kind == "partition" and self.divided:
            self._run_hooks("partition")
        return handle

    def _run_hooks(self, kind: str) -> None:
        hooks = dict(self._hooks[kind])
        self._hooks[kind].clear()
        for hook in hooks.values():
            hook(self._model(), self._state.current_optimizer())

    def optimised(self) -> list[nn.Parameter]:
        """Returns what gets gradients on this rank: the parameters here, or their shards."""
        local = self.placement.parameters()
        return local if self.sharding is None else [self.sharding.local(p) for p in local]

    @property
    def stand_ins(self) -> StandIns | None:
        """What the last optimizer has in place of parameters; None if it has the parameters."""
        optimizer = self._state.current_optimizer()
        return None if optimizer is None else optimizer._smp_state.stand_ins


def _executor(state: State) -> Executor:
    """Returns the executor, which lives from the first DistributedModel to `smp.shutdown`."""
    executor = state.kept(Executor)
    if executor is None:
        topology = state.topology
        executor = Executor(
            state.groups.pipeline,
            topology.rank_in("pp"),
            topology.pp_size,
            state.cfg.stall_warning_seconds,
            state.groups.abort,
            _order_group(state),
            state.groups.exchange if topology.tp_size > 1 else None,
        )
        state.keep(executor)
    return executor


def _order_group(state: State) -> OrderGroup | None:
    """Returns this rank's order group; None if it decides alone what it runs next."""
    group = state.groups.order
    return OrderGroup(group, timeout_of(group)) if group is not None else None


def _refuse_backward(_: Any = None) -> None:
    raise SMPUsageError(
        "with sharded data parallelism, call the model and model.backward inside a function "
        "decorated with smp.step"
    )


def _refuse_gradient(name: str, _: torch.Tensor) -> None:
    raise SMPUsageError(
        f"in the first step, a gradient was computed for parameter {name!r} before the first call "
        "of the model, which decides on which rank each module lives: call the model itself first, "
        "as in model(x). If the body calls parts of it one by one, do that in the forward method "
        "of the model that smp.DistributedModel gets"
    )


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a method, and does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args)

    return call
