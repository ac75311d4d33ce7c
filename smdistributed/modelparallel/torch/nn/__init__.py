"""`smp.nn`: modules that replace those of torch. Tensor parallelism divides most of them."""

from smddp.modelparallel.tensor.embedding import DistributedEmbedding
from smddp.modelparallel.tensor.linear import DistributedLinear
from smddp.modelparallel.tensor.module import DistributedModule
from smddp.modelparallel.tensor.transformer.attention import DistributedAttentionLayer
from smddp.modelparallel.tensor.transformer.feed_forward import DistributedTransformerOutputLayer
from smddp.modelparallel.tensor.transformer.flash import FlashAttentionLayer
from smddp.modelparallel.tensor.transformer.layers import (
    DistributedTransformer,
    DistributedTransformerLayer,
)
from smddp.modelparallel.tensor.transformer.lm_head import DistributedTransformerLMHead
from smddp.modelparallel.tensor.transformer.norm import FusedLayerNorm
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
