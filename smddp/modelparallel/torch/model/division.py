"""Decides in the first step where modules live, and applies that on a rank."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common import device
from smddp.modelparallel.torch.common.buffers import Buffers
from smddp.modelparallel.torch.data_parallel.reducer import DataParallel
from smddp.modelparallel.torch.data_parallel.replicas import agree
from smddp.modelparallel.torch.job.state import State
from smddp.modelparallel.torch.model.activation_checkpoints import ActivationCheckpoints
from smddp.modelparallel.torch.model.gradients import Gradients
from smddp.modelparallel.torch.model.script_hooks import ScriptHooks
from smddp.modelparallel.torch.partition.decide import decide_and_report
from smddp.modelparallel.torch.partition.placement import Decision, Placement
from smddp.modelparallel.torch.pipeline.executor import Executor
from smddp.modelparallel.torch.pipeline.protocol import Kind
from smddp.modelparallel.torch.sharding.sharding import Sharding

__all__ = ["Division"]


class Division:
    """The division of a model.

    Attributes:
        device: of the parameters and buffers that live here.
        buffers: those that live here; none before the model is divided.
    """

    def __init__(
        self,
        state: State,
        owner: weakref.ref[Any],
        executor: Executor,
        module: nn.Module,
        *,
        placement: Placement,
        checkpoints: ActivationCheckpoints,
        gradients: Gradients,
        data_parallel: DataParallel,
        sharding: Sharding | None,
        hooks: ScriptHooks,
        times: bool,
    ) -> None:
        """Divides nothing yet.

        Args:
            state: of the process.
            owner: the DistributedModel.
            executor: of this rank; it has adopted the model.
            module: the model that was wrapped.
            placement: which modules live here.
            checkpoints: which modules have activation checkpointing.
            gradients: takes those of parameters that live here.
            data_parallel: makes gradients equal on all replicas.
            sharding: divides parameters over replicas; None without.
            hooks: those of the script; "partition" is run here.
            times: measure the time of modules on real data, in place of counting operations.
        """
        self._state, self._owner = state, owner
        self._executor, self._module = executor, module
        self._placement, self._checkpoints, self._gradients = placement, checkpoints, gradients
        self._data_parallel, self._sharding = data_parallel, sharding
        self._hooks, self._times = hooks, times
        # The executor may have another model later.
        self._model, self._modules = executor.model, executor.modules
        self.device = device.current()
        # Before the model is divided, no buffer counts as living here, so none is saved.
        self.buffers = Buffers(module, lambda _: False)
        # In a first step on rank 0: all buffers, before the body has run.
        self._unplaced: Buffers | None = None
        # In a first step on rank 0: the hooks that refuse gradients before the model's first call.
        self._refusals: list[RemovableHandle] = []

    @property
    def known(self) -> bool:
        """Whether it has been decided where each module lives."""
        return self._executor.ending.state.divided

    def pin(self, module: nn.Module, partition: int) -> None:
        """Assigns a module, and everything inside it, to a partition.

        Raises:
            SMPUsageError: the first step has begun.
            SMPPartitionError: the module or the partition does not exist.
        """
        if self.known and self._executor.size > 1:
            raise SMPUsageError("set_partition has to be called before the first step")
        self._placement.pin(module, partition)

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
        executor, modules = self._executor, self._modules

        def make() -> Decision:
            decision = decide_and_report(
                self._state.cfg, self._module, modules, self._placement, args, kwargs, self._times
            )
            self._checkpoints.check(decision.owners)
            return decision

        if self._data_parallel.size > 1 and not executor.ending.state.undecided:
            raise SMPUsageError(
                "the model was called again in a first step that has failed: other replicas have "
                "ended it. Let the error end the step"
            )
        self.allow_gradients()
        self._refuse_new_modules()
        self.refuse_early_changes()
        with executor.ending.deciding():
            decision = agree(self._data_parallel.group, modules.names, make)
            for peer in executor.mail.peers:
                executor.mail.send(peer, Kind.PARTITION, decision)
        self.apply(decision)

    # --- before the first call of the model -------------------------------------------------------

    def await_call(self) -> None:
        """Refuses what the body must not do before it calls the model; on rank 0."""
        self._unplaced = Buffers(self._module)
        self._unplaced.save()
        # Without a division every parameter is used on this rank, and nothing divides the sums over
        # the microbatches.
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                refuse = functools.partial(_refuse_gradient, name)
                self._refusals.append(parameter.register_hook(refuse))  # type: ignore[no-untyped-call]

    def allow_gradients(self) -> None:
        """Lets parameters have gradients from now on."""
        for handle in self._refusals:
            handle.remove()
        self._refusals.clear()

    def _refuse_new_modules(self) -> None:
        """Raises if the script has put modules into the model since it was wrapped."""
        for name, module in self._module.named_modules():
            if self._modules.number_of(module) is None:
                raise SMPUsageError(
                    f"module {name!r} was put into the model after smp.DistributedModel, so it is "
                    "not known on which rank it lives: change the model before"
                )

    def refuse_early_changes(self) -> None:
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

    # --- on all ranks -----------------------------------------------------------------------------

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
        task = self._executor.baton.task
        if task is None:
            yield
            return
        frame, task.frame = task.frame, None
        try:
            yield
        finally:
            task.frame = frame

    def _apply(self, decision: Decision) -> None:
        divides = None if self._sharding is None else self._sharding.divides
        self._placement.apply(decision, self.device, divides)
        self._model.takeover.take_forward()
        self._checkpoints.apply()
        local = self._gradients.adopt()
        self.buffers = Buffers(self._module, self._placement.owns_buffer)
        if self._executor.size > 1:
            self.buffers.save()
            self._model.values.look_for_replaced(self.buffers.was_replaced)
        self._unplaced = None
        self._data_parallel.adopt(local, self.buffers, self.device)
        model = self._owner()
        for optimizer in self._state.current_optimizers():
            # Before hooks put other parameters into it. If it does not fit, its `step` says so.
            with contextlib.suppress(SMPUsageError):
                optimizer._smp_state.check(model, self._placement)
            optimizer._smp_state.adopt(self._placement, self._sharding)
        # Hooks ask what lives here, so this comes before them. The messages that were kept until
        # now make tasks, which run only when the hooks have ended: this task has the baton.
        self._executor.set_divided()
        self._hooks.run("partition")


def _refuse_gradient(name: str, _: torch.Tensor) -> None:
    raise SMPUsageError(
        f"in the first step, a gradient was computed for parameter {name!r} before the first call "
        "of the model, which decides on which rank each module lives: call the model itself first, "
        "as in model(x). If the body calls parts of it one by one, do that in the forward method "
        "of the model that smp.DistributedModel gets"
    )
