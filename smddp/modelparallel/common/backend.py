"""What torch has beneath a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["backend_of"]


def backend_of(group: dist.ProcessGroup, kind: str) -> Any:
    """Returns the backend of a group for a kind of device, such as "cpu".

    With `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch wraps each backend; this is the one inside.

    Raises:
        RuntimeError: the group has none for that kind.
    """
    backend = group._get_backend(torch.device(kind))
    return getattr(backend, "wrapped_pg", backend)
