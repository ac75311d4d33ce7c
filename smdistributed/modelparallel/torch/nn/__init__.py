"""`smp.nn`: modules that replace those of torch.

The classes that are split over tensor-parallel ranks can be imported, registered, and used with
isinstance, because scripts do that without tensor parallelism, too. Their constructors raise.
"""

from typing import Any

from torch import nn

from smddp.modelparallel.common.errors import SMPUsageError
from smddp.modelparallel.compatibility.absent import refuse_tensor_parallelism
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


class DistributedModule(nn.Module):
    """The base class of modules that are split over tensor-parallel ranks.

    Raises:
        SMPUsageError: always, because this version has no tensor parallelism.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse_tensor_parallelism(f"nn.{type(self).__name__}")


class DistributedLinear(DistributedModule):
    """nn.Linear, split over tensor-parallel ranks."""


class DistributedEmbedding(DistributedModule):
    """nn.Embedding, split over tensor-parallel ranks."""


class DistributedTransformerLMHead(DistributedModule):
    """A transformer with the head of a language model, split over tensor-parallel ranks."""


class DistributedTransformer(DistributedModule):
    """A stack of transformer layers, split over tensor-parallel ranks."""


class DistributedTransformerLayer(DistributedModule):
    """A transformer layer, split over tensor-parallel ranks."""


class DistributedAttentionLayer(DistributedModule):
    """The attention of a transformer layer, split over tensor-parallel ranks."""


class DistributedTransformerOutputLayer(DistributedModule):
    """The feed-forward part of a transformer layer, split over tensor-parallel ranks."""


class FlashAttentionLayer(nn.Module):
    """Attention that does not store its matrix of weights."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise SMPUsageError(
            "smp.nn.FlashAttentionLayer: this version does not have it; call "
            "torch.nn.functional.scaled_dot_product_attention instead"
        )
