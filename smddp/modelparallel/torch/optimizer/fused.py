"""The optimizers of `smp.optimizers`; norms are those of the whole model.

Names and arguments are those of NVIDIA Apex, but FusedAdam needs bias_correction=True. It is one
kernel of torch for all parameters; the others are made of ordinary torch operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from smddp.modelparallel.torch.optimizer.clipping import global_norm, whole_norm

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]


class FusedAdam(torch.optim.Adam):
    """Adam, with decoupled weight decay (AdamW) by default.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: must be True.
        betas: decay of the moments.
        eps: added to the denominator.
        adam_w_mode: subtract the weight decay from the parameter, not add it to the gradient.
        weight_decay: factor of the decay.
        amsgrad: as for torch.optim.Adam.
        set_grad_none: accepted; zero_grad does that in any case.

    Raises:
        ValueError: bias_correction is False.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ValueError("FusedAdam: bias_correction=False is not supported; leave it out")
        super().__init__(
            *(params, lr, betas, eps, weight_decay, amsgrad),
            fused=True,
            decoupled_weight_decay=adam_w_mode,
        )


class _Optimizer(torch.optim.Optimizer):
    """What LAMB and NovoGrad share: `step`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that live on this rank.

        Args:
            closure: computes the loss again, and its gradients.

        Returns:
            What `closure` returns; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, self.state[parameter])
        return loss

    def _begin(self) -> None:
        """Called before the updates of a step."""

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], own: Any) -> None:
        raise NotImplementedError


def _unbiased(group: dict[str, Any]) -> tuple[float, float]:
    """Returns the divisors of the two moments, which correct for their beginning at zero."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]


class FusedLAMB(_Optimizer):
    """LAMB: Adam, with the step of each parameter scaled to the norm of the parameter.

    Gradients are first clipped by their norm over the whole model, so all ranks of the pipeline
    have to call `step`. Source: You et al., "Large Batch Optimization for Deep Learning".

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: correct the moments for their beginning at zero.
        betas: decay of the moments.
        eps: added to the denominator.
        weight_decay: factor of the decay.
        amsgrad: must be False.
        adam_w_mode: subtract the weight decay from the parameter, not add it to the gradient.
        grad_averaging: multiply a new gradient by 1 - beta1 before it is added to the first moment.
        set_grad_none: accepted.
        max_grad_norm: the norm to which gradients are clipped; 0 for no clipping.
        use_nvlamb: scale the step of parameters without weight decay, too.

    Raises:
        ValueError: amsgrad is True.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise ValueError("FusedLAMB: amsgrad is not supported")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults)
        self._norm = torch.zeros(())

    def _begin(self) -> None:
        helper = getattr(self, "_smp_state", None)
        if helper is None:
            parameters = [p for group in self.param_groups for p in group["params"]]
        else:
            parameters = helper.optimised()
        self._norm = global_norm(parameters)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], own: Any) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if group["max_grad_norm"] > 0:
            clip = (self._norm / group["max_grad_norm"]).clamp(min=1.0)
            gradient = gradient / clip.to(gradient.device, gradient.dtype)
        decay = group["weight_decay"]
        if decay and not group["adam_w_mode"]:
            gradient = gradient + decay * parameter
        if not own:
            own["exp_avg"] = torch.zeros_like(parameter)
            own["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        own["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1)
        own["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first, second = _unbiased(group)
        update = (own["exp_avg"] / first) / ((own["exp_avg_sq"] / second).sqrt() + group["eps"])
        if decay and group["adam_w_mode"]:
            update += decay * parameter
        if decay or group["use_nvlamb"]:
            length, step = whole_norm(parameter, parameter), whole_norm(update, parameter)
            update *= torch.where((length > 0) & (step > 0), length / step, torch.ones_like(step))
        parameter.add_(update, alpha=-group["lr"])


# `FusedLamb` is the spelling of the original library's documentation.
FusedLamb = FusedLAMB


class FusedNovoGrad(_Optimizer):
    """NovoGrad: each parameter's gradient is divided by a moving average of its norm.

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments".

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: correct the moments for their beginning at zero.
        betas: decay of the moments.
        eps: added to the denominator.
        weight_decay: factor of the decay.
        amsgrad: must be False.
        reg_inside_moment: add the weight decay before the first moment is updated.
        grad_averaging: multiply a new gradient by 1 - beta1 before it is added to the first moment.
        norm_type: 2, or 0 for the largest absolute value.
        init_zero: begin the moving average at zero, not at the first norm.
        set_grad_none: accepted.

    Raises:
        ValueError: amsgrad is True, or norm_type is neither 2 nor 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad or norm_type not in (0, 2):
            raise ValueError("FusedNovoGrad: amsgrad must be False, norm_type 2 or 0")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "reg_inside_moment": reg_inside_moment,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], own: Any) -> None:
        gradient = parameter.grad
        assert gradient is not None
        beta1, beta2 = group["betas"]
        order = 2.0 if group["norm_type"] == 2 else float("inf")
        norm = whole_norm(gradient, parameter, order)
        if not own:
            own["exp_avg"] = torch.zeros_like(parameter)
            own["norm"] = torch.zeros_like(norm) if group["init_zero"] else norm.clone()
        if group["norm_type"] == 2:
            own["norm"] = (beta2 * own["norm"] ** 2 + (1 - beta2) * norm**2).sqrt()
        else:
            own["norm"] = beta2 * own["norm"] + (1 - beta2) * norm
        first, second = _unbiased(group)
        average = own["norm"] / (second**0.5 if group["norm_type"] == 2 else second)
        update = gradient / (average + group["eps"])
        decay = group["weight_decay"]
        if decay and group["reg_inside_moment"]:
            update = update + decay * parameter
        own["exp_avg"].mul_(beta1).add_(update, alpha=1 - beta1 if group["grad_averaging"] else 1)
        update = own["exp_avg"] / first
        if decay and not group["reg_inside_moment"]:
            update = update + decay * parameter
        parameter.add_(update, alpha=-group["lr"])
