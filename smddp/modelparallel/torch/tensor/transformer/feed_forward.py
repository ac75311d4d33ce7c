"""The feed-forward part of a transformer layer."""

from __future__ import annotations

from torch import Tensor

from smddp.modelparallel.torch.tensor.arguments import check_arguments
from smddp.modelparallel.torch.tensor.transformer.divided import (
    Contracting,
    Expanding,
    initializer,
)
from smddp.modelparallel.torch.tensor.transformer.options import (
    activation_function,
    at_least_fp32,
)
from smddp.modelparallel.torch.tensor.transformer.sequence import HiddenStatesModule

__all__ = ["DistributedTransformerOutputLayer", "FeedForward", "add_residual"]


def add_residual(residual: Tensor, x: Tensor, in_fp32: bool) -> Tensor:
    """Adds what a layer has computed to its input. The sum stays fp32 if so asked."""
    return at_least_fp32(residual) + at_least_fp32(x) if in_fp32 else residual + x


class FeedForward(HiddenStatesModule):
    """dense2(activation(dense1(x))) and dropout, without norm and residual.

    Args: see `DistributedTransformerOutputLayer`.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        zero_init: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(sequence_parallel)
        owner = "DistributedTransformerOutputLayer with intermediate_size"
        fill = initializer(initializer_range, use_normal_initialization, zero_init)
        self.activation = activation_function(activation)
        self.dense1 = Expanding(owner, hidden_size, intermediate_size, True, fill)
        self.dense2 = Contracting(owner, intermediate_size, hidden_size, True, fill, self.sequence)
        self.dropout = self.new_dropout(hidden_dropout_prob)

    def transformed(self, everything: Tensor) -> Tensor:
        """Maps all examples [T * B, S, H] to this rank's [B, S, H], or part of the sequence."""
        x: Tensor = self.dense2(self.activation(self.dense1(everything)))
        result: Tensor = self.dropout(x)
        return result


class DistributedTransformerOutputLayer(FeedForward):
    """The feed-forward part of a transformer layer, with norm and residual.

    x + f(norm(x)) with pre_layernorm, norm(x + f(x)) with post_layernorm, and both norms with both.

    Args:
        hidden_size: features of input and output.
        intermediate_size: features between the two linear layers; divided over ranks.
        hidden_dropout_prob: probability with which a feature is set to 0 before the residual.
        activation: between the linear layers: "gelu", "relu", or "gelu_new", by tanh (also as
            "gelu_fast" and "gelu_pytorch_tanh").
        layernorm_epsilon: is added to variances.
        initializer_range: standard deviation of weights with use_normal_initialization.
        use_normal_initialization: draw weights from a normal distribution? By default they are
            drawn as by torch.nn.Linear.
        pre_layernorm: normalize what enters the linear layers?
        post_layernorm: normalize the sum?
        fp32_residual_addition: add the residual in fp32? Without post_layernorm the output is fp32
            then, and the next norm brings it back to the dtype of the weights.
        fused_bias_gelu: accepted.
        fused_dropout: accepted.
        zero_init: make weights of 0, which cost no time, because others are loaded later?
        sequence_parallel: see `DistributedAttentionLayer`.

    Raises:
        SMPUsageError: an argument is wrong.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        fused_bias_gelu: bool = False,
        fused_dropout: bool = False,
        zero_init: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        check_arguments("DistributedTransformerOutputLayer", locals())
        super().__init__(
            hidden_size,
            intermediate_size,
            hidden_dropout_prob,
            activation,
            initializer_range,
            use_normal_initialization,
            zero_init,
            sequence_parallel,
        )
        self.fp32_residual_addition = fp32_residual_addition
        self.pre_layernorm = self.new_norm(pre_layernorm, hidden_size, layernorm_epsilon)
        self.layernorm = self.new_norm(post_layernorm, hidden_size, layernorm_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps this rank's [B, S, H] to [B, S, H]."""
        hidden = self.shortened(hidden_states)
        x = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        y = self.transformed(self.sequence.gather(x))
        y = add_residual(hidden, y, self.fp32_residual_addition)
        return self.lengthened(y if self.layernorm is None else self.layernorm(y))
