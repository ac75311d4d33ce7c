"""`smp.nn`: modules that replace those of torch.

Those of transformers can be imported, registered, and used with isinstance, because scripts do that
without tensor parallelism, too. Their constructors raise.
"""

from typing import Any

from torch import nn

from smddp.modelparallel.common.errors import SMPUsageError
from smddp.modelparallel.tensor.embedding import DistributedEmbedding
from smddp.modelparallel.tensor.linear import DistributedLinear
from smddp.modelparallel.tensor.module import DistributedModule
from smdistributed.modelparallel.torch.nn import huggingface

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "huggingface",
]


class FusedLayerNorm(nn.LayerNorm):
    """nn.LayerNorm of torch, which has fused kernels."""


class _Absent(DistributedModule):
    """The base of classes that this version does not have.

    Raises:
        SMPUsageError: always.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise SMPUsageError(f"smp.nn.{type(self).__name__}: this version does not have it")


class DistributedTransformerLMHead(_Absent):
    """A transformer with the head of a language model, split over tensor-parallel ranks."""


class DistributedTransformer(_Absent):
    """A stack of transformer layers, split over tensor-parallel ranks."""


class DistributedTransformerLayer(_Absent):
    """A transformer layer, split over tensor-parallel ranks."""


class DistributedAttentionLayer(_Absent):
    """The attention of a transformer layer, split over tensor-parallel ranks."""


class DistributedTransformerOutputLayer(_Absent):
    """The feed-forward part of a transformer layer, split over tensor-parallel ranks."""


class FlashAttentionLayer(nn.Module):
    """Attention that does not store its matrix of weights."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise SMPUsageError(
            "smp.nn.FlashAttentionLayer: this version does not have it; call "
            "torch.nn.functional.scaled_dot_product_attention instead"
        )
