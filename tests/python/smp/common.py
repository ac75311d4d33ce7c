"""Step functions and small helpers of many tests of smp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import smdistributed.modelparallel.torch as smp

# Modules live where the test says, others on rank 0 of the pipeline.
BY_HAND = {"auto_partition": False, "default_partition": 0}


def shards(degree: int = 2, threshold: int = 1) -> dict[str, Any]:
    """Returns the configuration of sharded data parallelism that does not clip gradients."""
    return {
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": threshold,
        "sdp_gradient_clipping": 1e9,
    }


@smp.step
def squares(model: Any, x: Tensor) -> Any:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@smp.step
def sums(model: Any, x: Tensor) -> Any:
    loss = model(x).sum()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model: Any, x: Tensor) -> Any:
    return model(x)


class Adjoint(torch.autograd.Function):
    """Calls a module again in its backward pass, and returns gradients of its parameters."""

    @staticmethod
    def forward(ctx: Any, f: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        with torch.no_grad():
            y = f(x)
        ctx.f = f
        ctx.save_for_backward(x, *parameters)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.f(x)
        needed = [p for p in parameters if p.requires_grad]
        found = torch.autograd.grad(y, (x, *needed), gradient, allow_unused=True)
        return None, *found


def gradients(model: Any) -> dict[str, Tensor | None]:
    """Returns copies of the gradients of the parameters that live on this rank."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.local_named_parameters()
    }


def copies(model: Any) -> dict[str, Tensor]:
    """Returns copies of all entries of the state dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def close(found: Any, expected: Any, where: str = "", tolerance: float = 0.0) -> None:
    """Compares tensors in any containers; they have to have the same bits without a tolerance."""
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}"
    )


def check_state(found: Any, expected: Any, tolerance: float, first: bool, where: str) -> None:
    """Compares state dicts, of the first replica or of another one.

    Until the next step begins, each replica has its own statistics.
    """
    assert found.keys() == expected.keys(), where
    names = [name for name in expected if first or "running" not in name]
    states = ({name: state[name] for name in names} for state in (found, expected))
    close(*states, where, tolerance)
