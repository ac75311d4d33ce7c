"""The mathematics of the transformer family, on plain modules of torch, in one process.

Submodules have the names of the divided ones, so that states can be compared.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_new": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "relu": lambda x: x.clamp(min=0),
}


def norm(wanted: bool, options: dict[str, Any]) -> nn.LayerNorm | None:
    return nn.LayerNorm(options["hidden_size"], options["layernorm_epsilon"]) if wanted else None


def apply(module: nn.Module | None, x: Tensor) -> Tensor:
    return x if module is None else module(x)


class Attention(nn.Module):
    def __init__(self, cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.options, self.cross = options, cross
        hidden = options["hidden_size"]
        inner = options["num_attention_heads"] * options["attention_head_size"]
        bias = options.get("query_key_value_bias", True)
        self.query = nn.Linear(hidden, inner, bias)
        self.key = nn.Linear(hidden, inner, bias)
        self.value = nn.Linear(hidden, inner, bias)
        self.dense = nn.Linear(inner, hidden, options.get("dense_bias", True))
        self.pre_layernorm = norm(options["pre_layernorm"], options)
        self.layernorm = norm(options["post_layernorm"], options)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """[S, d] and [S2, d] of one head to [S, S2]."""
        options = self.options
        scores = query @ key.T
        if options.get("scale_attn_weights", True):
            scores = scores / math.sqrt(options["attention_head_size"])
        if options.get("scale_attn_by_inverse_layer_idx"):
            scores = scores / (options["layer_idx"] + 1)
        return scores

    def rotated(self, x: Tensor) -> Tensor:
        """Multiplies pairs of features, as complex numbers, by exp(i angle); [S, d]."""
        count = self.options.get("rotary_dim")
        if count is None or self.cross:
            return x
        frequency = 10000.0 ** (-torch.arange(0, count, 2) / count)
        angle = torch.arange(len(x))[:, None] * frequency
        pairs = torch.view_as_complex(x[:, :count].reshape(len(x), -1, 2).clone())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle))
        return torch.cat([turned.flatten(1), x[:, count:]], 1)

    def attended(self, x: Tensor, states: Tensor, mask: Tensor | None) -> Tensor:
        heads, size = self.options["num_attention_heads"], self.options["attention_head_size"]
        results = []
        for example in range(len(x)):  # by example and head: no reshaping to get wrong
            query, key = self.query(x[example]), self.key(states[example])
            value = self.value(states[example])
            parts = []
            for head in range(heads):
                of_head = slice(head * size, (head + 1) * size)
                scores = self.scores(self.rotated(query[:, of_head]), self.rotated(key[:, of_head]))
                if mask is not None:
                    scores = scores + mask[example, 0]
                row = torch.arange(scores.shape[0])[:, None]
                column = torch.arange(scores.shape[1])
                if not self.cross and self.options.get("use_alibi"):
                    # heads are a power of two in these tests
                    slope = 2 ** (-self.options.get("alibi_bias_max", 8) * (head + 1) / heads)
                    scores = scores - slope * (row - column).abs()
                if not self.cross and self.options.get("causal_mask_size"):
                    hidden = column > row
                    if (window := self.options.get("window_size")) is not None:
                        hidden = hidden | (row - column >= window)
                    scores = scores.masked_fill(hidden, -math.inf)
                weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
                weights = weights / weights.sum(-1, keepdim=True)
                parts.append(weights @ value[:, of_head])
            results.append(self.dense(torch.cat(parts, -1)))
        return torch.stack(results)

    def forward(self, inputs: tuple[Any, ...]) -> Tensor:
        hidden, states, mask = inputs if self.cross else (inputs[0], None, inputs[1])
        x = apply(self.pre_layernorm, hidden)
        y = hidden + self.attended(x, x if states is None else states, mask)
        return apply(self.layernorm, y)


class Output(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        hidden, inner = options["hidden_size"], options["intermediate_size"]
        self.dense1, self.dense2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.activation = ACTIVATIONS[options["activation"]]
        parallel = options.get("parallel_attn_output", False)
        self.pre_layernorm = norm(options["pre_layernorm"] and not parallel, options)
        self.layernorm = norm(options["post_layernorm"], options)

    def transformed(self, x: Tensor) -> Tensor:
        return self.dense2(self.activation(self.dense1(x)))

    def forward(self, hidden: Tensor) -> Tensor:
        return apply(self.layernorm, hidden + self.transformed(apply(self.pre_layernorm, hidden)))


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention, self.output = Attention(**options), Output(**options)
        self.cross_attention = (
            Attention(cross=True, **options) if options.get("add_cross_attention") else None
        )
        self.parallel = options.get("parallel_attn_output", False)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.cross_attention is not None:
            hidden, states, mask, cross_mask = inputs
            hidden = self.attention((hidden, mask))
            hidden = self.cross_attention((hidden, states, cross_mask))
            return self.output(hidden), states, mask, cross_mask
        hidden, mask = inputs
        if self.parallel:
            x = self.attention.pre_layernorm(hidden)
            attended = self.attention.attended(x, x, mask)
            return hidden + attended + self.output.transformed(x), mask
        return self.output(self.attention((hidden, mask))), mask


class Transformer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layers = []
        for i in range(options["num_layers"]):
            changed = {**options, "layer_idx": i}
            if isinstance(window := options.get("window_size"), list):
                changed["window_size"] = window[i]
            layers.append(Layer(**changed))
        self.seq_layers = nn.Sequential(*layers)
        both = options["pre_layernorm"] and options["post_layernorm"]
        self.input_layernorm, self.output_layernorm = norm(both, options), norm(both, options)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        result = self.seq_layers((apply(self.input_layernorm, inputs[0]), *inputs[1:]))
        return (apply(self.output_layernorm, result[0]), *result[1:])


class LMHead(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, hidden = options, options["hidden_size"]
        self.word_embedding = nn.Embedding(options["vocab_size"], hidden)
        positions = not options.get("use_alibi") and options.get("rotary_dim") is None
        self.position_embedding = (
            nn.Embedding(options["num_positions"], hidden) if positions else None
        )
        types = options.get("num_token_types", 0)
        self.token_type_embedding = nn.Embedding(types, hidden) if types else None
        self.transformer = Transformer(**options)
        self.layernorm = norm(options["pre_layernorm"] != options["post_layernorm"], options)
        self.lm_head = None
        if options.get("add_lm_head", True) and not options.get("tie_word_embeddings", True):
            self.lm_head = nn.Linear(
                hidden, options["vocab_size"], options.get("lm_head_bias", False)
            )

    def forward(self, inputs: tuple[Any, ...]) -> Tensor:
        ids, mask, types, positions, *cross, labels = inputs
        hidden = self.word_embedding(ids)
        if self.position_embedding is not None:
            positions = torch.arange(ids.shape[1])[None] if positions is None else positions
            hidden = hidden + self.position_embedding(positions)
        if self.token_type_embedding is not None:
            types = torch.zeros_like(ids) if types is None else types
            hidden = hidden + self.token_type_embedding(types)
        if not self.options["pre_layernorm"]:
            hidden = apply(self.layernorm, hidden)
        mask = None if mask is None else -1e9 * mask[:, None, None].to(hidden.dtype)
        if cross:
            states, cross_mask = cross
            if cross_mask is not None:
                cross_mask = -1e9 * cross_mask[:, None, None].to(hidden.dtype)
            hidden = self.transformer((hidden, states, mask, cross_mask))[0]
        else:
            hidden = self.transformer((hidden, mask))[0]
        if self.options["pre_layernorm"]:
            hidden = apply(self.layernorm, hidden)
        if not self.options.get("add_lm_head", True):
            return hidden
        if self.lm_head is None:
            logits = hidden @ self.word_embedding.weight.T
        else:
            logits = self.lm_head(hidden)
        return logits if labels is None else self.loss(logits, labels)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.options.get("causal_mask_size"):
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
