"""The norm of the gradients of the whole model, and clipping by it."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from smddp._torch_internals import CLIP_NORM, CLIP_VALUE, CLIP_WITH_NORM, TOTAL_NORM
from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.logs import warn_user
from smddp.modelparallel.torch.common.lost import smp_errors
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.optimizer import watch
from smddp.modelparallel.torch.sharding.shard import ParameterShard
from smddp.modelparallel.torch.tensor.division import division_of

__all__ = ["clip_grad_norm", "global_norm", "largest", "patch_clipping", "whole_norm"]


@smp_errors()
def largest(value: torch.Tensor) -> torch.Tensor:
    """Returns the maximum of a tensor over the ranks that share one replica of the model."""
    if state.initialized and state.topology.size_of("mp") > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=state.groups.of_steps("mp"))
    if state.initialized and state.groups.sharding is not None:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=state.groups.sharding.gradients)
    return value


@smp_errors()
def whole_norm(tensor: torch.Tensor, like: torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
    """Returns the norm of a tensor; if it belongs to a shard, that of all shards together.

    Args:
        tensor: of this rank, with the shape of a parameter or a shard.
        like: that parameter or shard. All ranks that share it have to call this.
        norm_type: 2, or inf for the largest absolute value.
    """
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, norm_type)
    for group in _groups_of(like):
        norm = _over_group(norm, norm_type, group)
    return norm


def _groups_of(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Returns the groups whose ranks have different parts of a parameter, one after the other."""
    groups = [parameter.group] if isinstance(parameter, ParameterShard) else []
    if division_of(parameter) is not None:
        groups.append(state.groups.of_steps("tp"))
    return tuple(groups)


def _over_group(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the norm of what the ranks of a group have, from the norm of each."""
    if norm_type == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    # With 0, the norm is a number of gradients already.
    power = norm_type or 1.0
    total = norm**power
    dist.all_reduce(total, group=group)
    return total ** (1.0 / power)


def _norm_of_parts(
    gradients: Sequence[torch.Tensor], norm_type: float, groups: Sequence[dist.ProcessGroup]
) -> torch.Tensor:
    """Returns the norm of gradients of which the ranks of groups have parts; see `_groups_of`."""
    if norm_type == 0:
        # A gradient counts once if any rank has an element other than 0.
        counts = torch.stack([gradient.count_nonzero() for gradient in gradients])
        for group in groups:
            dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
        return counts.count_nonzero().float()
    total: torch.Tensor = TOTAL_NORM.original(gradients, norm_type).float()
    for group in groups:
        total = _over_group(total, norm_type, group)
    return total


@smp_errors()
def global_norm(parameters: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Returns the norm of the gradients of the whole model, each counted once.

    All ranks of the model have to call it, those of the tensor-parallel groups included; with
    sharded data parallelism, also those of the sharding group.

    Args:
        parameters: those of this rank, and shards; those without a gradient count as zeros.
        norm_type: the p of the p-norm; inf for the largest absolute value. As in torch, 0 counts
            the gradients that have an element other than 0.

    Returns:
        A tensor without dimensions; in fp32 if several ranks share the model.

    Raises:
        SMPUsageError: norm_type is negative.
        SMPPeerError: a rank is gone, or has not called it in time.
    """
    if not norm_type >= 0:
        raise SMPUsageError(f"norm_type must be at least 0, not {norm_type}")
    with watch.paused():
        return _global_norm(parameters, norm_type)


def _global_norm(parameters: Iterable[Any], norm_type: float) -> torch.Tensor:
    found: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            found.setdefault(_groups_of(parameter), []).append(parameter.grad)
    total: torch.Tensor = TOTAL_NORM.original(found.pop((), []), norm_type)
    model = state.current_model()
    if model is None:
        return total
    for groups, gradients in found.items():
        of_parts = _norm_of_parts(gradients, norm_type, groups)
        total = total.to(of_parts.device, torch.float32)
        if norm_type == 0:
            total = total + of_parts
        else:
            total = torch.linalg.vector_norm(torch.stack([total, of_parts]), norm_type)
    if state.topology.pp_size == 1:
        return total
    total = total.to(model.runtime.device, torch.float32)
    return _over_group(total, norm_type, state.groups.of_steps("pp"))


def clip_grad_norm(max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales the gradients of the whole model so that their norm is at most `max_norm`.

    Unlike `torch.nn.utils.clip_grad_norm_` it uses the parameters of all partitions. All ranks of
    the pipeline have to call it, after the step. With fp16 or bf16 in the configuration it clips
    the gradients of the main parameters.

    While there is a model, `clip_grad_norm_`, `get_total_norm` and `clip_grads_with_norm_` of
    `torch.nn.utils` do so, too, and in half precision `clip_grad_value_`. `get_total_norm` gets the
    gradients themselves; all ranks have to call it, a rank that has none of them with an empty
    list. What is computed from gradients, such as `[p.grad * 2 for p in ...]`, is not known as the
    model's: the norm is that of one rank, and a warning says so once if the shapes are those of all
    its gradients. If gradients are not the model's only, the ranks that have some call it.

    Args:
        max_norm: the largest norm that is allowed.
        norm_type: as for `global_norm`.

    Returns:
        The norm before clipping, a tensor without dimensions. With fp16 or bf16 it is -1 if a
        gradient is infinite; then nothing is clipped, and `optimizer.step()` will do nothing.

    Raises:
        SMPUsageError: there is no model, the call is inside a step, or norm_type is negative.
        SMPPeerError: a rank is gone, or has not called it in time.
    """
    model = state.current_model()
    if model is None:
        raise SMPUsageError("there is no smp.DistributedModel")
    _check_outside_step()
    parameters = model.runtime.optimised()
    main = model.runtime.main_parameters
    if main is not None and main.half:
        main.prepare()
        if main.overflow:
            return torch.tensor(-1.0)
        parameters = main.all()
    total = global_norm(parameters, norm_type)
    CLIP_WITH_NORM.original(parameters, max_norm, total)
    return total


def _check_outside_step() -> None:
    if state.in_step:
        raise SMPUsageError(
            "gradients can be clipped only outside the function decorated with smp.step: there "
            "they are complete"
        )


def patch_clipping() -> None:
    """Lets functions of `torch.nn.utils` use the whole model, and clip what the optimizer uses.

    In `clip_grad_norm_` and `get_total_norm` each rank would take the norm of its own partition,
    shards or parts, which is not that of one process, and parameters that several ranks have would
    not stay the same. In half precision they would use scaled gradients.
    """
    CLIP_NORM.install(lambda _: _clip_grad_norm)
    CLIP_VALUE.install(lambda _: _clip_grad_value)
    TOTAL_NORM.install(lambda _: _get_total_norm)
    CLIP_WITH_NORM.install(lambda _: _clip_grads_with_norm)


def _used(given: Sequence[torch.Tensor], norm: bool = False) -> list[Any] | None:
    """Returns what has the gradients that the optimizer uses, for parameters to be clipped.

    All ranks of the model have to call it.

    Args:
        given: parameters, main parameters or shards.
        norm: their norm over all ranks is to be taken; see `_note_norm`.

    Returns:
        Main parameters, shards or the parameters themselves; None if none of them is of the model.

    Raises:
        SMPUsageError: the call is inside a step, or the ranks are in different calls.
    """
    model = state.current_model()
    own = set() if model is None else {id(parameter) for parameter in model.parameters()}
    main: Any = None if model is None else model.runtime.main_parameters
    if main is not None and main.half:
        own |= set(map(id, main.all()))
    # A rank may have none of the parameters that others have, and still has to take part.
    if given and not any(isinstance(one, ParameterShard) or id(one) in own for one in given):
        if norm:
            _note_norm()
        return None
    _check_outside_step()
    if norm:
        _note_norm()
        _compare_norms(not given)
    sharding = None if model is None else model.runtime.sharding
    if main is not None and main.half:
        # Gradients of parameters are scaled; the optimizer uses those of main parameters. After an
        # overflow the norm is not finite, and it uses none.
        main.prepare()
        found: list[Any] = main.of(given)
        return found
    return list(given) if sharding is None else [sharding.local(one) for one in given]


def _note_norm() -> None:
    """Counts a call for a norm, also one of gradients that are not the model's."""
    model = state.current_model()
    if model is not None:
        model.runtime.norms += 1


@smp_errors()
def _compare_norms(empty: bool) -> None:
    """Checks that the ranks are in the same call, if one of them has given an empty list.

    Such a rank cannot know whether the others have given gradients of the model. If they have not,
    it would take part in their next call.

    Args:
        empty: has this rank given an empty list?

    Raises:
        SMPUsageError: the ranks are in different calls; all of them raise it.
    """
    model = state.current_model()
    if model is None or state.topology.pp_size == 1:
        return
    count = model.runtime.norms
    told = torch.tensor([count, -count, int(empty)], device=model.runtime.device)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=state.groups.of_steps("pp"))
    most, least, any_empty = told.tolist()
    if any_empty and most != -least:
        raise SMPUsageError(
            "the ranks are in different calls for a norm of gradients, and one of them has given "
            f"an empty list: since the last step, one has made {most} of them, another {-least}. "
            "A rank takes part in the norm of the whole model with an empty list, so call it with "
            "gradients that are not the model's only on ranks that have some, after the model's"
        )


def _warn_of_copies(tensors: Sequence[torch.Tensor]) -> None:
    """Warns once if tensors look as if they were computed from the model's gradients."""
    model = state.current_model()
    if model is None or state.in_step or model.runtime.warned_of_copies:
        return
    whole = state.topology.size_of("mp") == 1 and state.groups.sharding is None
    shapes = [one.grad.shape for one in model.runtime.optimised() if one.grad is not None]
    if whole or not shapes or [one.shape for one in tensors] != shapes:
        return
    model.runtime.warned_of_copies = True
    warn_user(
        "torch.nn.utils.get_total_norm has got tensors that have the shapes of the gradients of "
        "the model's parameters on this rank, but are not these gradients: the norm is that of "
        "this rank alone. For the norm of the whole model, give it the gradients themselves, on "
        "all ranks, and scale the norm"
    )


def _clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    given = _listed(parameters)
    used = _used(given, norm=True)
    if used is None:
        gradients = [one.grad for one in given if one.grad is not None]
        found: torch.Tensor = TOTAL_NORM.original(gradients, norm_type, error_if_nonfinite, foreach)
        CLIP_WITH_NORM.original(given, max_norm, found, foreach)
        return found
    total = _finite(global_norm(used, norm_type), norm_type, error_if_nonfinite)
    CLIP_WITH_NORM.original(used, max_norm, total, foreach)
    return total


def _finite(total: torch.Tensor, norm_type: float, check: bool) -> torch.Tensor:
    if check and not total.isfinite():
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {float(total)}")
    return total


def _get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    given = _listed(tensors)
    owners = _owners(given)
    if owners is None:
        _note_norm()
        _warn_of_copies(given)
        found: torch.Tensor = TOTAL_NORM.original(given, norm_type, error_if_nonfinite, foreach)
        return found
    used = _used(owners, norm=True)
    assert used is not None  # the owners are the model's
    known = {id(one.grad) for one in owners}
    others = [types.SimpleNamespace(grad=one) for one in given if id(one) not in known]
    return _finite(global_norm([*used, *others], norm_type), norm_type, error_if_nonfinite)  # type: ignore[list-item]


def _owners(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Returns what has these gradients; None if none of them is one of the model's.

    A rank may have none of the gradients that others have, those of a part of the model, for
    instance; then it takes part without any.
    """
    model = state.current_model()
    if model is None:
        return None
    if not gradients:
        return []
    several = [*model.runtime.optimised(), *model.parameters()]
    with_gradient = {id(one.grad): one for one in reversed(several) if one.grad is not None}
    return [with_gradient[id(one)] for one in gradients if id(one) in with_gradient] or None


def _clip_grads_with_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    given = _listed(parameters)
    used = _used(given) if given else None
    CLIP_WITH_NORM.original(given if used is None else used, max_norm, total_norm, foreach)


def _clip_grad_value(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    given = _listed(parameters)
    used = _used(given)
    found = given if used is None else used
    # A rank may have none that others have; torch's function fails without any.
    if used is None or any(one.grad is not None for one in found):
        CLIP_VALUE.original(found, clip_value, foreach)


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
