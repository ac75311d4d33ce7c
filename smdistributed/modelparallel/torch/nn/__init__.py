"""`smp.nn`: modules that replace those of torch.

The classes that are divided over tensor-parallel ranks can be imported, registered, and used with
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
    """torch's nn.LayerNorm, whose kernels are fused."""


class DistributedModule(nn.Module):
    """The base class of modules that are divided over tensor-parallel ranks.

    Raises:
        SMPUsageError: always; this version divides no modules.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse_tensor_parallelism(f"nn.{type(self).__name__}")


class DistributedLinear(DistributedModule):
    """The divided form of nn.Linear."""


class DistributedEmbedding(DistributedModule):
    """The divided form of nn.Embedding."""


class DistributedTransformerLMHead(DistributedModule):
    """The divided form of a transformer with the head of a language model."""


class DistributedTransformer(DistributedModule):
    """The divided form of a stack of transformer layers."""


class DistributedTransformerLayer(DistributedModule):
    """The divided form of one transformer layer."""


class DistributedAttentionLayer(DistributedModule):
    """The divided form of the attention of a transformer layer."""


class DistributedTransformerOutputLayer(DistributedModule):
    """The divided form of the part of a transformer layer behind the attention."""


class FlashAttentionLayer(nn.Module):
    """Attention that does not store its matrix of weights."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise SMPUsageError(
            "smp.nn.FlashAttentionLayer: this version does not have it; call "
            "torch.nn.functional.scaled_dot_product_attention instead"
        )
