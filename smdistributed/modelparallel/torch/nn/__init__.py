"""`smp.nn`: modules that replace those of torch. Tensor parallelism divides most of them."""

from smddp.modelparallel.torch.tensor.embedding import DistributedEmbedding
from smddp.modelparallel.torch.tensor.linear import DistributedLinear
from smddp.modelparallel.torch.tensor.module import DistributedModule
from smddp.modelparallel.torch.tensor.transformer.attention import DistributedAttentionLayer
from smddp.modelparallel.torch.tensor.transformer.feed_forward import (
    DistributedTransformerOutputLayer,
)
from smddp.modelparallel.torch.tensor.transformer.flash import FlashAttentionLayer
from smddp.modelparallel.torch.tensor.transformer.layers import (
    DistributedTransformer,
    DistributedTransformerLayer,
)
from smddp.modelparallel.torch.tensor.transformer.lm_head import DistributedTransformerLMHead
from smddp.modelparallel.torch.tensor.transformer.norm import FusedLayerNorm
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
