"""What scripts for the original library read of parameters: `ds_tensor`, `ds_numel`, `ds_shape`.

`ds_tensor` is what this rank has of a parameter. The ranks of a sharding group together have each
parameter once: one that stays whole on every rank counts as the part of the first rank, and the
parts of the others are empty. So a script that sums something over the group gets the sum over
whole parameters. Until it is decided where a parameter lives, its `ds_tensor` is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smddp.modelparallel.torch.common.device import put

__all__ = ["announce", "part_of_whole", "set_part"]


def announce(parameter: nn.Parameter, count: int) -> None:
    """Sets the attributes of a parameter of which it is not decided yet where it lives.

    Args:
        parameter: of the model; whole.
        count: the elements of this rank's part, if the parameter will live here.
    """
    named: Any = parameter
    named.ds_numel, named.ds_shape = parameter.numel(), torch.Size(parameter.shape)
    nan = float("nan") if parameter.is_floating_point() else 0
    one = torch.full((1,), nan, dtype=parameter.dtype, device=parameter.device)
    set_part(parameter, one.expand(count))


def set_part(parameter: nn.Parameter, part: torch.Tensor) -> None:
    """Sets `ds_tensor`, which stays the same object.

    Args:
        parameter: of the model.
        part: what this rank has of it; `ds_tensor` shares its memory.
    """
    tensor: Any = parameter.__dict__.get("ds_tensor")
    if tensor is None:
        tensor = parameter.ds_tensor = part.detach()  # type: ignore[attr-defined]
    else:
        put(tensor, part.detach())
    tensor.ds_numel = part.numel()


def part_of_whole(parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns this rank's part of what is whole on every rank; it shares the memory.

    Args:
        parameter: of the model, or its main parameter.
        group: the sharding group.
    """
    value = parameter.detach()
    return value if group.rank() == 0 else value.new_empty(0)
