"""The norm of the gradients of all partitions, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from smddp.modelparallel.common.errors import SMPUsageError
from smddp.modelparallel.job.state import state

__all__ = ["clip_grad_norm", "global_norm"]


def global_norm(gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Returns the norm of the gradients of all ranks of the pipeline; all of them have to call it.

    Args:
        gradients: those of this rank, of any shapes and floating-point dtypes.
        norm_type: the p of the p-norm; inf for the largest absolute value. As in torch, 0 counts
            the gradients that have an element other than 0.

    Returns:
        A tensor without dimensions; in fp32 if there are several partitions.

    Raises:
        SMPUsageError: norm_type is negative.
    """
    if not norm_type >= 0:
        raise SMPUsageError(f"norm_type must be at least 0, not {norm_type}")
    total = torch.nn.utils.get_total_norm(gradients, norm_type)
    model = state.current_model()
    if model is None or state.topology.pp_size == 1:
        return total
    group = state.groups.of("pp")
    total = total.to(model.runtime.device, torch.float32)
    if norm_type == float("inf"):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        return total
    # With 0, the total is a number of gradients already.
    power = norm_type or 1.0
    total = total**power
    dist.all_reduce(total, group=group)
    return total ** (1.0 / power)


def clip_grad_norm(max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales the gradients of the whole model so that their norm is at most `max_norm`.

    Unlike `torch.nn.utils.clip_grad_norm_` it uses the parameters of all partitions. All ranks of
    the pipeline have to call it, after the step. With fp16 or bf16 in the configuration it clips
    the gradients of the master weights.

    Args:
        max_norm: the largest norm that is allowed.
        norm_type: as for `global_norm`.

    Returns:
        The norm before clipping, a tensor without dimensions. With fp16 or bf16 it is -1 if a
        gradient is infinite; then nothing is clipped, and `optimizer.step()` will do nothing.

    Raises:
        SMPUsageError: there is no model, the call is inside a step, no step has begun yet, or
            norm_type is negative.
    """
    model = state.current_model()
    if model is None:
        raise SMPUsageError("there is no smp.DistributedModel")
    if state.in_step:
        raise SMPUsageError(
            "gradients can be clipped only outside the function decorated with smp.step: there "
            "they are complete"
        )
    masters = model.runtime.masters
    if masters is None:
        gradients = [p.grad for p in model.local_parameters() if p.grad is not None]
    else:
        gradients = masters.gradients()
        if masters.overflow:
            return torch.tensor(-1.0)
    total = global_norm(gradients, norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return total
