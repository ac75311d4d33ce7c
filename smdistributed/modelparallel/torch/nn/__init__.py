"""`smp.nn`: modules that are used in place of torch's.

Those that are divided over tensor-parallel ranks can be imported, asked for with isinstance, and
registered, as scripts do without tensor parallelism, too. They cannot be made.
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
    """torch's, whose kernels are fused by now."""


class DistributedModule(nn.Module):
    """The base class of modules that are divided over tensor-parallel ranks."""

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse_tensor_parallelism(f"nn.{type(self).__name__}")


class DistributedLinear(DistributedModule):
    """In place of nn.Linear."""


class DistributedEmbedding(DistributedModule):
    """In place of nn.Embedding."""


class DistributedTransformerLMHead(DistributedModule):
    """In place of a language model."""


class DistributedTransformer(DistributedModule):
    """In place of all its layers."""


class DistributedTransformerLayer(DistributedModule):
    """In place of one."""


class DistributedAttentionLayer(DistributedModule):
    """In place of its attention."""


class DistributedTransformerOutputLayer(DistributedModule):
    """In place of what follows."""


class FlashAttentionLayer(nn.Module):
    """Attention that does not keep its weights."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise SMPUsageError(
            "smp.nn.FlashAttentionLayer: this version does not have it; call "
            "torch.nn.functional.scaled_dot_product_attention instead"
        )
