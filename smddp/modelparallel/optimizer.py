"""`smp.DistributedOptimizer`: an optimizer whose state lives where the parameters do."""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.errors import SMPInitializationError, SMPUsageError
from smddp.modelparallel.meeting import meet
from smddp.modelparallel.model_state import MARKER
from smddp.modelparallel.partition.placement import Placement
from smddp.modelparallel.runtime import state

__all__ = ["DistributedOptimizer"]


class _IsPatched(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return hasattr(instance, "_smp_state")


class DistributedOptimizer(metaclass=_IsPatched):
    """Patches an optimizer, which stays the same object, and returns it.

    Parameters that live on other ranks have no gradient here, so the optimizer passes them over;
    what is patched is its state: `state_dict` gathers it from all ranks of the pipeline, and
    `load_state_dict` keeps what belongs here. It may be created from the parameters of the model
    before or after that is wrapped.

    Args:
        optimizer: any object with `param_groups`, `state`, `state_dict` and `load_state_dict`.
        static_loss_scale: for fp16, which this version does not have.
        dynamic_loss_scale: for fp16.
        dynamic_loss_args: for fp16.
    """

    def __new__(
        cls,
        optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: Any,
    ) -> Any:
        """Returns `optimizer` itself."""
        if not state.initialized:
            raise SMPInitializationError("call smp.init() before smp.DistributedOptimizer")
        if hasattr(optimizer, "_smp_state"):
            raise SMPUsageError("the optimizer is a smp.DistributedOptimizer already")
        scales = static_loss_scale != 1.0 or dynamic_loss_scale or dynamic_loss_args
        if scales and state.topology.rank == 0:
            warnings.warn(
                "smp.DistributedOptimizer does not scale losses in this version: use "
                "smp.amp.GradScaler",
                stacklevel=2,
            )
        helper = _State(optimizer)
        optimizer._smp_state = helper
        for name in ("step", "state_dict", "load_state_dict"):
            setattr(optimizer, name, types.MethodType(getattr(_patches, name), optimizer))
        for name in ("local_state_dict", "orig_state_dict", "_param_id_to_index"):
            setattr(optimizer, name, types.MethodType(getattr(_patches, name), optimizer))
        if state.cfg.fp16:
            _add_names_of_fp16(optimizer)
        state.optimizer = weakref.ref(optimizer)
        return optimizer


def _add_names_of_fp16(optimizer: Any) -> None:
    """Adds what scripts for fp16 use; parameters are their own master copies, with scale 1."""
    optimizer.optimizer = optimizer
    optimizer.loss_scale, optimizer.overflow = 1.0, False
    optimizer.clip_master_grads = clip_grad_norm
    optimizer.update_master_grads = lambda: None
    optimizer.backward = lambda loss, **_: _model().backward(loss)


class _patches:  # noqa: N801  a namespace of functions that become methods of the optimizer
    """The methods. Their names and signatures are those of the original library."""

    @staticmethod
    def step(self: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        if state.in_step:
            raise SMPUsageError(
                "optimizer.step() has to be outside the function decorated with smp.step: only "
                "there the gradients of all microbatches are complete"
            )
        if state.cfg.sharded_data_parallel_degree > 1:
            self._global_grad_norm = clip_grad_norm(state.cfg.sdp_gradient_clipping)
        arguments = (closure, *args) if closure is not None or args else ()
        return self._smp_state.step(*arguments, **kwargs)

    @staticmethod
    def state_dict(self: Any) -> Any:
        return self._smp_state.full()

    @staticmethod
    def local_state_dict(self: Any, gather_if_shard: bool = True) -> Any:
        return self._smp_state.local()

    @staticmethod
    def orig_state_dict(self: Any) -> Any:
        return self._smp_state.state_dict()

    @staticmethod
    def load_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
        self._smp_state.load(state_dict)

    @staticmethod
    def _param_id_to_index(self: Any) -> Any:
        return self._smp_state.indices()


class _State:
    """Gathers and loads the state of one optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        # Bound to the class, so that this object does not keep the optimizer alive.
        kind = type(optimizer)
        self._step, self._state_dict, self._load = kind.step, kind.state_dict, kind.load_state_dict
        self._deferred: Mapping[str, Any] | None = None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(self._optimizer(), *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = self._state_dict(self._optimizer())
        return own

    def indices(self) -> dict[int, int]:
        numbers: dict[int, int] = {}
        for group in self._groups():
            for parameter in group["params"]:
                numbers.setdefault(id(parameter), len(numbers))
        return numbers

    def local(self) -> dict[str, Any]:
        own = dict(self.state_dict())
        mine = self._local_indices()
        own["state"] = {i: entry for i, entry in own["state"].items() if i in mine}
        own[MARKER] = True
        return own

    def full(self) -> dict[str, Any]:
        own = self.local()
        del own[MARKER]
        own["state"] = self._merged(
            [part["state"] for part in self._parts({"state": own["state"]})]
        )
        return own

    def load(self, given: Mapping[str, Any]) -> None:
        model = _model()
        entries = {name: value for name, value in given.items() if name != MARKER}
        if given.get(MARKER):
            parts = [part["state"] for part in self._parts({"state": entries["state"]})]
            entries["state"] = self._merged(parts)
        if model is not None and not model.partitioned:
            self._deferred = entries
            return
        self._load_some(entries, self._local_indices())

    def load_deferred(self, placement: Placement) -> None:
        """Loads what was given before the partition."""
        if self._deferred is not None:
            entries, self._deferred = self._deferred, None
            numbers = self.indices()
            parameters = [p for g in self._groups() for p in g["params"] if placement.owns(p)]
            self._load_some(entries, {numbers[id(parameter)] for parameter in parameters})

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        groups: list[dict[str, Any]] = optimizer.param_groups
        return groups

    def _load_some(self, entries: Mapping[str, Any], mine: set[int]) -> None:
        kept = {i: entry for i, entry in entries["state"].items() if i in mine}
        self._load(self._optimizer(), {**entries, "state": kept})

    def _local_indices(self) -> set[int]:
        model = _model()
        numbers = self.indices()
        if model is None or not model.partitioned:
            return set(numbers.values())
        return {numbers[id(p)] for p in model.local_parameters() if id(p) in numbers}

    def _parts(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        size = state.topology.pp_size
        if size == 1:
            return [part]
        parts: list[Any] = [None] * size
        group = state.groups.of("pp")
        meet("state_dict of the optimizer", group)
        dist.all_gather_object(parts, part, group=group)
        return parts

    @staticmethod
    def _merged(parts: list[dict[int, Any]]) -> dict[int, Any]:
        merged: dict[int, Any] = {}
        for part in parts:
            merged.update(part)
        return dict(sorted(merged.items()))


def _model() -> Any:
    return state.model() if state.model is not None else None


def clip_grad_norm(max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales the gradients of the whole model so that their norm is at most `max_norm`.

    Unlike `torch.nn.utils.clip_grad_norm_` it sees the parameters of all partitions. All ranks of
    the pipeline have to call it, after the step.

    Returns:
        The norm before.
    """
    model = _model()
    if model is None:
        raise SMPUsageError("there is no smp.DistributedModel")
    gradients = [p.grad for p in model.local_parameters() if p.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients, norm_type)
    if state.topology.pp_size > 1:
        group = state.groups.of("pp")
        total = total.to(model.runtime.device, torch.float32)
        if norm_type == float("inf"):
            dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        else:
            total = total**norm_type
            dist.all_reduce(total, group=group)
            total = total ** (1.0 / norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return total
