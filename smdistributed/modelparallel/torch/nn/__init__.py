"""`smp.nn`: modules that are used in place of torch's."""

from typing import Any

from torch.nn import LayerNorm

from smddp.modelparallel.errors import SMPUsageError
from smdistributed.modelparallel.torch.nn import huggingface

__all__ = ["FusedLayerNorm", "huggingface"]


class FusedLayerNorm(LayerNorm):
    """torch's, whose kernels are fused by now."""


def __getattr__(name: str) -> Any:
    if name.startswith("Distributed") or name == "FlashAttentionLayer":
        raise SMPUsageError(
            f"smp.nn.{name} belongs to tensor parallelism, which this version of smp does not have"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
