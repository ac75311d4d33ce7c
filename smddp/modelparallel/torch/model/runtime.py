"""The internal part of a DistributedModel: its parts."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from smddp.modelparallel.torch.common.dtypes import convert
from smddp.modelparallel.torch.common.example import Example
from smddp.modelparallel.torch.data_parallel.reducer import DataParallel
from smddp.modelparallel.torch.delayed.life import is_delayed
from smddp.modelparallel.torch.job.groups import timeout_of
from smddp.modelparallel.torch.job.state import State
from smddp.modelparallel.torch.model.activation_checkpoints import ActivationCheckpoints
from smddp.modelparallel.torch.model.division import Division
from smddp.modelparallel.torch.model.gradients import Gradients
from smddp.modelparallel.torch.model.script_hooks import ScriptHooks
from smddp.modelparallel.torch.model.state_dict import ModelState
from smddp.modelparallel.torch.model.step import ModelStep
from smddp.modelparallel.torch.optimizer.half import half_precision
from smddp.modelparallel.torch.optimizer.main_parameters import MainParameters
from smddp.modelparallel.torch.partition.placement import Decision, Placement
from smddp.modelparallel.torch.pipeline.executor import Executor
from smddp.modelparallel.torch.pipeline.model import PipelineModel
from smddp.modelparallel.torch.pipeline.order_group import OrderGroup
from smddp.modelparallel.torch.sharding.sharding import Sharding
from smddp.modelparallel.torch.tensor.module import mark_divided

__all__ = ["ModelRuntime"]


class ModelRuntime:
    """Belongs to one DistributedModel, and ends with it: composes its parts.

    The executor, which lives from the first DistributedModel to `smp.shutdown`, knows `step` only
    while a step runs.

    Attributes:
        module: the model that was wrapped.
        executor: runs the steps.
        model: the calls of modules on this rank.
        placement: which modules live here.
        data_parallel: makes gradients equal on all replicas.
        model_state: makes and loads state dicts.
        checkpoints: which modules have activation checkpointing.
        gradients: takes those of parameters that live here.
        division: decides where modules live.
        step: what the model does in steps.
        hooks: those of the script.
        updates_masters: are the gradients of this step copied to main parameters at its end?
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
        """Makes the parts; with one partition, everything lives here at once.

        Args:
            state: of the process.
            model: the DistributedModel, which is not kept alive.
            module: the model that was wrapped.
            data_parallel: has no parameters yet.
            average: divide gradients by the number of microbatches.
            times: measure the time of modules on real data, in place of counting operations.
        """
        cfg, topology = state.cfg, state.topology
        self._state = state
        self.module = module
        self.data_parallel = data_parallel
        self.delayed = any(map(is_delayed, module.parameters()))
        self.half = half_precision()
        if self.half is not None:
            convert(module, self.half, cfg._fp32_grad_accumulation)
        mark_divided(module)
        executor = self.executor = _executor(state)
        self.model = PipelineModel(executor, executor.caller, module, cfg.direct_forwarding)
        executor.adopt(self.model)
        if cfg.offload_activations:
            horizon = cfg.activation_loading_horizon
            self.model.local.offload(horizon, executor.size == 1, self._owned)
        self.placement = Placement(
            self.model.modules, self.model.homes, topology.rank_in("pp"), topology.pp_size
        )
        warns = topology.rank == 0
        self.checkpoints = ActivationCheckpoints(self.model, not cfg.auto_partition, warns)
        self.sharding = data_parallel.holders.shards = _sharding(
            state, self.model, executor, data_parallel
        )
        self.model_state = ModelState(module, self.placement, self.sharding)
        # How many batches of tensor-parallel ranks a divided parameter is used on.
        batches = 1 if cfg.prescaled_batch else topology.tp_size
        current = executor.baton.current
        self.gradients = Gradients(current, self.placement, data_parallel, self.sharding, batches)
        owner = weakref.ref(model)
        self.hooks = ScriptHooks(lambda: (owner(), state.current_optimizer()))
        self.division = Division(
            state,
            owner,
            executor,
            module,
            placement=self.placement,
            checkpoints=self.checkpoints,
            gradients=self.gradients,
            data_parallel=data_parallel,
            sharding=self.sharding,
            hooks=self.hooks,
            times=times,
        )
        self.step = ModelStep(self, average, cfg.offload_activations)
        self.updates_masters = False
        self.example: Example | None = None
        self.announced: Example | None = None
        self.norms = 0
        self.warned_of_copies = False
        self.model.takeover.install()
        if topology.pp_size == 1:
            self.division.apply(Decision.one_partition(self.model.modules))

    @property
    def divided(self) -> bool:
        """Whether it has been decided where each module lives."""
        return self.division.known

    @property
    def device(self) -> torch.device:
        """That of the parameters and buffers that live here."""
        return self.division.device

    @property
    def main_parameters(self) -> MainParameters | None:
        """What the last optimizer has in place of parameters; None if it has the parameters."""
        optimizer = self._state.current_optimizer()
        return None if optimizer is None else optimizer._smp_state.main

    def optimised(self) -> list[nn.Parameter]:
        """See `Gradients.optimised`."""
        return self.gradients.optimised()

    def _owned(self) -> list[torch.Tensor]:
        """Returns the parameters and buffers that live here."""
        return [*self.placement.parameters(), *self.division.buffers.tensors()]

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
        buffers = self.division.buffers
        found["buffers"] = [*buffers.tensors(), *buffers.copies()]
        found["optimizer"], gradients = [], []
        for optimizer in self._state.current_optimizers():
            kept, some = optimizer._smp_state.tensors()
            found["optimizer"] += kept
            gradients += some
        found["gradients"] = [*gradients, *self.gradients.tensors()]
        return found


def _sharding(
    state: State, model: PipelineModel, executor: Executor, data_parallel: DataParallel
) -> Sharding | None:
    """Returns what divides parameters over replicas; None without sharded data parallelism."""
    groups, cfg = state.groups.sharding, state.cfg
    if groups is None:
        return None
    ordered = executor.baton.order is not None
    sharding = Sharding(
        groups,
        model.modules,
        data_parallel.final,
        data_parallel.holders.of,
        cfg.sdp_param_persistence_threshold,
        cfg.sdp_max_live_parameters,
        cfg.sdp_reduce_bucket_size,
        ordered,
        timeout_of(groups.parameters).total_seconds(),
    )
    model.local.surround(sharding, sharding.gathers if ordered else None)
    return sharding


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
